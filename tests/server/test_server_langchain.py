"""LangChain's own OpenAI components, unchanged, against the server."""

from __future__ import annotations

import numpy as np
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import BadRequestError
from serving import Served

import ragcache as rc

QUESTION = "Where does the cat sit?"


@pytest.fixture
def chat(served: Served) -> ChatOpenAI:
    return ChatOpenAI(
        model="tiny", base_url=served.base_url, api_key="none", max_retries=0, max_tokens=12, stream_usage=True
    )


def expected(kb: rc.RagCache, *messages: dict) -> str:
    return kb.chat(list(messages), k=5, sampling=rc.Sampling(12)).text


def test_invoke(chat, kb):
    answer = chat.invoke([SystemMessage("Be short."), HumanMessage(QUESTION)])
    system, user = {"role": "system", "content": "Be short."}, {"role": "user", "content": QUESTION}
    assert answer.content == expected(kb, system, user)
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
    assert answer.response_metadata["model_name"] == "tiny"


def test_stream(chat, kb):
    chunks = list(chat.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == expected(kb, {"role": "user", "content": QUESTION})
    whole = sum(chunks[1:], chunks[0])
    assert whole.usage_metadata["output_tokens"] == 12


async def test_async(chat, kb):
    right = expected(kb, {"role": "user", "content": QUESTION})
    assert (await chat.ainvoke(QUESTION)).content == right
    assert "".join([chunk.content async for chunk in chat.astream(QUESTION)]) == right


def test_batch_and_extension(chat, kb):
    bound = chat.bind(extra_body={"ragcache": {"retrieve": False}})
    right = kb.chat([{"role": "user", "content": QUESTION}], sampling=rc.Sampling(12)).text
    assert [answer.content for answer in bound.batch([QUESTION] * 4)] == [right] * 4


def test_embeddings(served: Served, kb):
    # Without the check LangChain sends text; with it, ids of OpenAI's tokenizer, which mean nothing here.
    embeddings = OpenAIEmbeddings(
        model="bag-of-words", base_url=served.base_url, api_key="none", check_embedding_ctx_length=False
    )
    found = embeddings.embed_documents(["Cats sit.", "Dogs bark."])
    np.testing.assert_array_equal(np.array(found, np.float32), kb.embedder.embed(["Cats sit.", "Dogs bark."]))


def test_a_template_that_shows_no_tools_is_named(chat):
    def weather(place: str) -> str:
        """The weather."""
        return place

    with pytest.raises(BadRequestError, match="the model's chat template shows no tools"):
        chat.bind_tools([weather]).invoke(QUESTION)
