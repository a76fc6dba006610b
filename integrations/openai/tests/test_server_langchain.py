"""LangChain's own OpenAI components, unchanged, against the server."""

import numpy as np
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import BadRequestError

import ragcache as rc

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


def test_embeddings(shared, shared_kb):
    # Without the check LangChain sends text; with it, ids of OpenAI's tokenizer, which mean nothing here.
    embeddings = OpenAIEmbeddings(
        model="bag-of-words", base_url=shared.base_url, api_key="none", check_embedding_ctx_length=False
    )
    found = embeddings.embed_documents(["Cats sit.", "Dogs bark."])
    np.testing.assert_array_equal(np.array(found, np.float32), shared_kb.embedder.embed(["Cats sit.", "Dogs bark."]))
