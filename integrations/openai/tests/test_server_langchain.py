"""LangChain's own OpenAI components, unchanged, against the server."""

from functools import reduce
from operator import add

import pytest
from engine_texts import TEXTS
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from openai import BadRequestError
from serving import serving

import ragcache as rc
from ragcache_demo.bag_of_words import BagOfWords

QUESTION = "Where does the cat sit?"


async def test_a_chat_and_its_stream(shared, shared_kb):
    chat = ChatOpenAI(
        model="tiny", base_url=shared.base_url, api_key="none", max_retries=0, max_tokens=12, stream_usage=True
    )
    asked = [SystemMessage("Be short."), HumanMessage(QUESTION)]
    told = [{"role": "system", "content": "Be short."}, {"role": "user", "content": QUESTION}]
    right = shared_kb.chat(told, k=5, sampling=rc.Sampling(12)).text
    answer = chat.invoke(asked)
    assert (answer.content, answer.response_metadata["model_name"]) == (right, "tiny")
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
    chunks = [chunk async for chunk in chat.astream(asked)]
    whole = sum(chunks[1:], chunks[0])
    assert (whole.content, whole.usage_metadata["output_tokens"]) == (right, 12)

    def weather(place: str) -> str:
        """The weather."""
        return place

    with pytest.raises(BadRequestError, match="the model's chat template shows no tools"):
        chat.bind_tools([weather]).invoke(QUESTION)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chain_over_a_vector_store_of_its_own_reuses_what_is_stored(lm, tmp_path, stream):
    """The store holds KV and no documents; retrieval is on, and the chain is as it was."""
    config = rc.StoreConfig(load="always")  # on a busy machine "auto" would rather compute passages this short
    with rc.RagCache.open(tmp_path / "kb", model=lm, embedder=BagOfWords(), method="reposition", store=config) as kb:
        kb.precompute(TEXTS.values())
        with serving(kb) as served:
            llm = ChatOpenAI(
                base_url=served.base_url,
                api_key="none",
                model=served.service.chat_model,
                max_tokens=4,
                include_response_headers=True,
                stream_usage=True,
            )
            asked = "\n".join([*TEXTS.values(), "Who meets on Monday?"])
            message = reduce(add, llm.stream(asked)) if stream else llm.invoke(asked)
    usage = message.usage_metadata
    assert usage["input_token_details"]["cache_read"] > usage["input_tokens"] / 2
    assert message.response_metadata["headers"]["x-ragcache-method"] == "reposition"
