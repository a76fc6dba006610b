"""A slow embedder, and the store of LangChain's own test suites."""

import time

import pytest

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
