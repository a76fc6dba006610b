import time

import numpy as np
import pytest
from li_texts import QUESTION
from llama_index.core.schema import QueryBundle, TextNode
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters
from waiting import ticking

from llama_index.retrievers.ragcache import RagCacheRetriever
from llama_index.vector_stores.ragcache import HANDLE_KEY, RagCacheVectorStore
from ragcache_demo.bag_of_words import BagOfWords


def ids(nodes) -> list[str]:
    return [node.node_id for node in nodes]


def test_nodes_are_the_engines_passages(kb):
    found, hits = RagCacheRetriever(kb, k=3).retrieve(QUESTION), kb.retrieve(QUESTION, k=3)
    assert ids(found) == [hit.chunk.id for hit in hits]
    assert [node.score for node in found] == [hit.score for hit in hits]
    assert [node.text for node in found] == [hit.chunk.text for hit in hits]
    assert [node.metadata["year"] for node in found] == [hit.chunk.metadata["year"] for hit in hits]
    assert ids(RagCacheRetriever(kb, k=3).retrieve(QUESTION)) == ids(found)


def test_filters_narrow(kb):
    late = MetadataFilter(key="year", value=2022, operator=FilterOperator.GTE)
    clubs = MetadataFilter(key="year", value=2023)
    retriever = RagCacheRetriever(kb, k=9, filters=MetadataFilters(filters=[late]))
    assert sorted(ids(retriever.retrieve(QUESTION))) == ["clubs#0", "rivers#0"]
    nested = MetadataFilters(filters=[late, MetadataFilters(filters=[clubs], condition=FilterCondition.NOT)])
    assert ids(RagCacheRetriever(kb, k=9, filters=nested).retrieve(QUESTION)) == ["rivers#0"]
    assert ids(RagCacheRetriever(kb, k=9, filters={"year": {"$lt": 2021}}).retrieve(QUESTION)) == ["cats#0"]


def test_threshold_and_variety_are_the_engines(kb):
    scores = [hit.score for hit in kb.retrieve(QUESTION, k=4)]
    kept = RagCacheRetriever(kb, k=4, score_threshold=scores[1]).retrieve(QUESTION)
    assert [node.score for node in kept] == scores[:2]
    varied = RagCacheRetriever(kb, k=2, mmr_lambda=0.1, fetch_k=4).retrieve(QUESTION)
    assert ids(varied) == [hit.chunk.id for hit in kb.retrieve(QUESTION, k=2, mmr_lambda=0.1, fetch_k=4)]


def test_a_question_may_come_as_a_vector_or_as_other_texts(kb):
    retriever, embedder = RagCacheRetriever(kb, k=2), BagOfWords()
    vector = embedder.embed_query("Where does the Arno rise?")
    by_vector = retriever.retrieve(QueryBundle("unused", embedding=vector.tolist()))
    assert ids(by_vector) == [hit.chunk.id for hit in kb.retrieve("Where does the Arno rise?", k=2)]
    texts = ["The Arno rises in hills.", "A river rises."]
    mean = np.mean([embedder.embed_query(text) for text in texts], axis=0)
    found = retriever.retrieve(QueryBundle("unused", custom_embedding_strs=texts))
    assert [node.score for node in found] == pytest.approx([hit.score for hit in kb.retrieve(mean, k=2)])
    assert found[0].node_id == "rivers#0"


async def test_async_finds_the_same_and_leaves_the_loop_alone(kb, monkeypatch):
    retriever = RagCacheRetriever(kb, k=3)
    embed = kb.embedder.embed_query

    def slow(text):
        time.sleep(0.1)
        return embed(text)

    monkeypatch.setattr(kb.embedder, "embed_query", slow)
    async with ticking() as ticks:
        found = await retriever.aretrieve(QUESTION)
    assert ticks.count >= 5
    assert ids(found) == ids(retriever.retrieve(QUESTION))
    async with ticking() as ticks:
        await retriever.aretrieve(QueryBundle(QUESTION, custom_embedding_strs=["a"]))
    assert ticks.count >= 5


def test_what_has_no_kv_yet_is_said(open_kb, tmp_path):
    store = RagCacheVectorStore(open_kb(tmp_path / "lazy"), kv="lazy")
    store.add([TextNode(id_="n", text="Some text.")])
    [node] = RagCacheRetriever(store.client).retrieve("text")
    assert HANDLE_KEY not in node.metadata
