"""LlamaIndex's own engines join nodes to a single text, in which the store's passages are still read from KV."""

import pytest
from kit.makers import tiny_lm
from li_texts import QUESTION, SHORT, TEXTS
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine

import ragcache as rc
from llama_index.llms.ragcache import RagCacheLLM
from llama_index.retrievers.ragcache import RagCacheRetriever

lm = tiny_lm(positions=8192)  # with room for LlamaIndex's prompts


@pytest.fixture
def kb(open_kb):
    kb = open_kb()
    kb.ingest(rc.Document(id, text) for id, text in TEXTS.items())
    return kb


def test_a_query_engine(kb, recorder):
    llm = RagCacheLLM(kb, **SHORT)
    engine = RetrieverQueryEngine.from_args(RagCacheRetriever(kb, k=3), llm=llm)
    found = [node.node_id for node in engine.query(QUESTION).source_nodes]
    assert recorder.sources() == [(id, "memory") for id in found]


def test_a_citation_query_engine(kb, recorder):
    """Its labels are between the passages, and run with the question."""
    llm = RagCacheLLM(kb, **SHORT)
    engine = CitationQueryEngine(RagCacheRetriever(kb, k=3), llm=llm)
    sources = engine.query(QUESTION).source_nodes
    assert [node.text.splitlines()[0] for node in sources] == ["Source 1:", "Source 2:", "Source 3:"]
    assert recorder.sources() == [(hit.chunk.id, "memory") for hit in kb.retrieve(QUESTION, k=3)]
