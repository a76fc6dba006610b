"""A slow embedder, a handler of callbacks, and the store of LangChain's own test suites."""

import time

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage

import ragcache as rc
from ragcache_demo.bag_of_words import BagOfWords


class SlowEmbedder(BagOfWords):
    """An embedder whose calls take long enough for an event loop to be seen going on."""

    def embed(self, texts, *, batch_size=32):
        time.sleep(0.05)
        return super().embed(texts, batch_size=batch_size)

    def embed_query(self, text):
        time.sleep(0.05)
        return super().embed_query(text)


class Seen(BaseCallbackHandler):
    """Keeps what LangChain says of a model's or a retriever's call."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    @property
    def message(self) -> AIMessage:
        return self.response.generations[0][0].message

    def on_chat_model_start(self, serialized, messages, *, metadata, invocation_params, **kwargs):
        self.messages, self.metadata, self.parameters = messages[0], metadata, invocation_params

    def on_llm_new_token(self, token, *, chunk=None, **kwargs):
        self.pieces.append(token)

    def on_llm_end(self, response, **kwargs):
        self.response = response

    def on_retriever_start(self, serialized, query, *, metadata, tags, **kwargs):
        self.metadata, self.tags = metadata, tags

    def on_retriever_end(self, documents, **kwargs):
        self.documents = documents


class OverAStore:
    """Parts common to all components under LangChain's own suites: components are made with an open store."""

    kb: rc.RagCache

    @pytest.fixture(autouse=True)
    def _kb(self, registry) -> None:
        self.kb = registry

    @property
    def parameters(self) -> dict[str, object]:
        return {"kb": self.kb}

    chat_model_params = embedding_model_params = retriever_constructor_params = parameters
