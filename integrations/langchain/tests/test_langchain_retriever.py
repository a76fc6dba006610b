"""The retriever: the engine's own hits, with their handles."""

import asyncio

import pytest
from langchain_doubles import Seen, SlowEmbedder
from langchain_registry import QUESTION, is_json, registry_documents
from waiting import ticking

from langchain_ragcache import HANDLE_KEY, RagCacheRetriever, RagCacheVectorStore


def test_documents_name_their_kv(registry):
    found = RagCacheRetriever(kb=registry, k=3).invoke(QUESTION)
    hits = registry.retrieve(QUESTION, 3)
    assert [document.id for document in found] == [hit.chunk.id for hit in hits]
    assert [document.page_content for document in found] == [hit.chunk.text for hit in hits]
    stored = {document.id: document.metadata for document in registry_documents()}
    for document, hit in zip(found, hits, strict=True):
        assert document.metadata == {**stored[document.id], HANDLE_KEY: hit.handle}
        assert is_json(document.metadata)
        assert len(document.metadata[HANDLE_KEY]) <= 64


def test_a_passage_whose_kv_waits_has_no_handle(store):
    store.add_documents(registry_documents()[:1], kv="lazy")
    [found] = RagCacheRetriever(kb=store.kb).invoke(QUESTION)
    assert found == registry_documents()[0]


@pytest.mark.parametrize(
    "options",
    [
        {"k": 2},
        {"filter": {"kind": "person"}},
        {"score_threshold": 0.3},
        {"search": "hybrid", "k": 3},
        {"search": "text"},
        {"mmr_lambda": 0.2, "fetch_k": 4, "k": 3},
    ],
)
async def test_options_at_construction_and_at_invoke(registry, options):
    expected = [hit.chunk.id for hit in registry.retrieve(QUESTION, **options)]
    constructed, bare = RagCacheRetriever(kb=registry, **options), RagCacheRetriever(kb=registry)
    assert [document.id for document in constructed.invoke(QUESTION)] == expected
    assert [document.id for document in bare.invoke(QUESTION, **options)] == expected
    assert [document.id for document in await constructed.ainvoke(QUESTION)] == expected
    assert [document.id for document in await bare.ainvoke(QUESTION, **options)] == expected


def test_an_option_can_be_taken_back(registry):
    retriever = RagCacheRetriever(kb=registry, filter={"kind": "person"})
    assert len(retriever.invoke(QUESTION, filter=None, k=6)) == 6


async def test_many_at_once_in_an_event_loop(tmp_path, mini):
    with RagCacheVectorStore(tmp_path / "kb", SlowEmbedder(), model=mini) as store:
        await store.aadd_documents(registry_documents())
        retriever = RagCacheRetriever(kb=store.kb, k=2)
        async with ticking() as ticks:
            found = await asyncio.gather(*(retriever.ainvoke(QUESTION) for _ in range(16)))
        assert ticks.count >= 5
        assert all(documents == found[0] for documents in found)


def test_traces_name_the_store(registry):
    seen = Seen()
    retriever = RagCacheRetriever(kb=registry, tags=["mine"])
    found = retriever.invoke(QUESTION, {"callbacks": [seen], "metadata": {"user": "u1"}})
    assert seen.metadata["ls_vector_store_provider"] == "ragcache"
    assert seen.metadata["ls_embedding_model"] == registry.embedder.name
    assert seen.metadata["user"] == "u1"
    assert seen.tags == ["mine"]
    assert seen.documents == found
