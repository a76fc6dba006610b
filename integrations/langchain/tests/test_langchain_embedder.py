"""Embeddings between LangChain and a store, both ways."""

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_doubles import SlowEmbedder
from langchain_registry import QUESTION, REGISTRY
from waiting import ticking

from langchain_ragcache import LangChainEmbedder, RagCacheEmbeddings
from ragcache.errors import EmbedderError


class Given(Embeddings):
    """Embeddings that return the vectors they were made with."""

    def __init__(self, *vectors: list[float], model: str = "") -> None:
        self.vectors = list(vectors)
        self.model = model

    def embed_documents(self, texts):
        return self.vectors

    def embed_query(self, text):
        return self.vectors[0]


def test_vectors_are_those_of_langchain_at_length_1():
    embeddings = DeterministicFakeEmbedding(size=6)
    embedder = LangChainEmbedder(embeddings)
    texts = [*REGISTRY.values()] * 12
    expected = np.array(embeddings.embed_documents(texts))
    expected /= np.sqrt((expected**2).sum(axis=1))[:, None]
    assert embedder.dimension == 6
    vectors = embedder.embed(texts, batch_size=5)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    np.testing.assert_allclose(embedder.embed_query(texts[3]), expected[3], atol=1e-6)
    assert embedder.embed([]).shape == (0, 6)


def test_vectors_may_be_left_as_they_are():
    embedder = LangChainEmbedder(Given([3.0, 4.0]), normalize=False)
    np.testing.assert_array_equal(embedder.embed_query("x"), [3, 4])
    np.testing.assert_array_equal(LangChainEmbedder(Given([0.0, 0.0])).embed_query("x"), [0, 0])


def test_a_name_says_kind_and_model():
    def name(*arguments, **options):
        return LangChainEmbedder(*arguments, **options).name

    assert name(Given([1.0])) == name(Given([2.0]))
    assert name(Given([1.0], model="small")) == name(Given([1.0], model="small"))
    different = {
        name(Given([1.0])),
        name(Given([1.0], model="small")),
        name(Given([1.0], model="large")),
        name(Given([1.0]), normalize=False),
        name(DeterministicFakeEmbedding(size=6)),
        name(Given([1.0]), name="mine"),
    }
    assert len(different) == 6
    assert "0x" not in "".join(different), "an address is another one in the next process"


@pytest.mark.parametrize(
    ("vectors", "texts"),
    [
        ([[1.0, 2.0]], ["one", "two"]),
        ([[1.0, 2.0], [1.0]], ["one", "two"]),
        ([[1.0, float("nan")]], ["one"]),
        ([[1.0, float("inf")]], ["one"]),
    ],
)
def test_vectors_that_cannot_be_are_refused(vectors, texts):
    with pytest.raises(EmbedderError, match="Given"):
        LangChainEmbedder(Given(*vectors), dimension=2).embed(texts)


async def test_a_store_shares_its_embedder(registry, minilm):
    embeddings = RagCacheEmbeddings(registry)
    assert embeddings.embedder is minilm
    assert embeddings.model == "minilm"
    assert embeddings.embed_query(QUESTION) == minilm.embed_query(QUESTION).tolist()
    texts = [*REGISTRY.values()]
    assert embeddings.embed_documents(texts) == minilm.embed(texts).tolist()
    assert await embeddings.aembed_query(QUESTION) == embeddings.embed_query(QUESTION)
    assert await embeddings.aembed_documents(texts) == embeddings.embed_documents(texts)


async def test_embedding_leaves_the_event_loop_alone():
    embeddings = RagCacheEmbeddings(embedder=SlowEmbedder())
    assert embeddings.model == "bag-of-words"
    for call in (embeddings.aembed_query("one"), embeddings.aembed_documents(["two"])):
        async with ticking() as ticks:
            await call
        assert ticks.count >= 5
