"""KV for the nodes of a user's own index: stock synthesizers find it at the first question, and it is deleted with the
nodes.
"""

import pytest
from engine_texts import PAGES
from kit.makers import tiny_lm
from li_texts import SHORT
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import Document, MetadataMode, NodeWithScore, TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from waiting import in_own_loop

import ragcache as rc
from llama_index.ingestion.ragcache import RagCachePrecompute
from llama_index.llms.ragcache import RagCacheLLM

QUESTION = "When does the ferry go?"

wide = tiny_lm(positions=8192)


@pytest.fixture
def kb(open_kb, wide):
    return open_kb(model=wide, method="reposition", store=rc.StoreConfig(load="always"))


@pytest.fixture
def index():
    pages = [Document(id_=id, text=text, metadata={"page": id}) for id, text in PAGES.items()]
    return VectorStoreIndex.from_documents(pages, embed_model=MockEmbedding(4))


def read(node, mode=MetadataMode.LLM) -> str:
    return node.get_content(metadata_mode=mode)


def has(kb, *texts) -> list[bool]:
    return [one is not None for one in kb.precompute(list(texts), dry_run=True).handles]


def share(kb, recorder, nodes) -> float:
    """Return the number of cached tokens over that of the nodes' tokens."""
    [answer] = recorder.answers()
    return answer["usage"]["cached_tokens"] / sum(kb.count_tokens(read(node)) for node in nodes)


def test_a_stock_query_engine_finds_all_at_the_first_question(kb, index, recorder):
    nodes = list(index.docstore.docs.values())
    report = kb.precompute(index)
    assert (report.computed, report.failed) == (3, [])
    assert all(read(node).startswith("page: ") for node in nodes)
    engine = index.as_query_engine(llm=RagCacheLLM(kb, **SHORT), similarity_top_k=3)
    assert len(engine.query(QUESTION).source_nodes) == 3
    assert share(kb, recorder, nodes) >= 0.95
    assert kb.info().chunks == 0


@pytest.mark.parametrize("attached", [False, True])
def test_sources_name_the_users_own_documents(kb, index, attached):
    """This holds for texts in the prompt and for segments."""
    mine = rc.attach(index, kb) if attached else index
    if not attached:
        kb.precompute(index)
    nodes = mine.as_retriever(similarity_top_k=3).retrieve(QUESTION)
    llm = RagCacheLLM(kb, **SHORT)
    text = "\n\n".join(node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes)
    sources = llm.complete(f"{text}\n\n{QUESTION}").raw["hits"]
    assert {one["chunk_id"]: (one["document_id"], one["metadata"]) for one in sources} == {
        one.node.node_id: (one.node.ref_doc_id, {"page": one.node.ref_doc_id}) for one in nodes
    }
    given = llm.chat([ChatMessage(content=QUESTION)], segments=nodes).raw["hits"]
    assert {one["chunk_id"]: one["metadata"] for one in given} == {one["chunk_id"]: one["metadata"] for one in sources}


def test_an_attached_index_is_theirs(kb, index):
    mine = rc.attach(index, kb)
    assert isinstance(mine, VectorStoreIndex)
    mine.insert_nodes(
        [TextNode(id_="new", text="A node that was added through the attached index, and is looked for.")]
    )
    assert has(kb, read(index.docstore.docs["new"])) == [True]
    found = mine.as_retriever(similarity_top_k=9).retrieve(QUESTION)
    assert len(found) == 4
    handles = kb.precompute([read(one.node) for one in found], dry_run=True).handles
    assert [one.node.metadata["ragcache_handle"] for one in found] == handles
    assert all("ragcache_handle" not in read(one.node) for one in found)
    assert all("ragcache_handle" not in node.metadata for node in index.docstore.docs.values())
    [mill] = [one.node for one in found if one.node.ref_doc_id == "mill"]
    mine.delete_ref_doc("mill", delete_from_docstore=True)
    assert has(kb, read(mill), PAGES["mill"]) == [False, False]
    mine.delete_nodes(["new"])
    assert (
        has(kb, read(found[-1].node), "A node that was added through the attached index, and is looked for.")[1]
        is False
    )


def test_an_update_of_a_document_reaches_the_kv(kb, index):
    kb.precompute(index)
    mine = rc.attach(index, kb)
    old = [read(node) for node in index.docstore.docs.values() if node.ref_doc_id == "ferry"]
    assert has(kb, *old) == [True]
    mine.update_ref_doc(Document(id_="ferry", text="The ferry goes every hour now.", metadata={"page": "ferry"}))
    assert has(kb, *old, "page: ferry\n\nThe ferry goes every hour now.") == [False, True]


@pytest.mark.parametrize("way", ["insert_nodes", "insert", "update_ref_doc", "refresh_ref_docs"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_found_nodes_come_back_without_handles(kb, index, way, asynchronous):
    mine = rc.attach(index, kb)
    found = next(one.node for one in mine.as_retriever(similarity_top_k=9).retrieve(QUESTION))
    handle, id = found.metadata["ragcache_handle"], found.ref_doc_id
    found.metadata["year"] = 2025
    changed = Document(id_=id, text=found.text, metadata=found.metadata)
    given = {"insert_nodes": [found], "refresh_ref_docs": [changed]}.get(way, changed)
    if asynchronous:
        in_own_loop(getattr(mine, f"a{way}")(given))
    else:
        getattr(mine, way)(given)
    nodes = [node for node in index.docstore.docs.values() if node.ref_doc_id == id]
    assert any(node.metadata.get("year") == 2025 for node in nodes)
    for node in nodes:
        hidden = [*node.excluded_embed_metadata_keys, *node.excluded_llm_metadata_keys]
        assert "ragcache_handle" not in [*node.metadata, *hidden]
        assert has(kb, read(node)) == [True]
    bare = Document(id_=id, text=found.text, metadata={"page": id, "year": 2025})
    assert way == "insert_nodes" or index.docstore.get_document_hash(id) == bare.hash
    assert found.metadata["ragcache_handle"] == handle


def test_nodes_without_kv_keep_no_old_handle(kb, index):
    """An old handle would name another text's KV, which would then be read."""
    mine = rc.attach(index, kb, learn=False)
    index.insert_nodes([TextNode(id_="old", text="Nobody has read this.", metadata={"ragcache_handle": "stale"})])
    found = {one.node.node_id: one.node for one in mine.as_retriever(similarity_top_k=9).retrieve(QUESTION)}
    assert found["old"].metadata == {}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_attached_vector_store(kb, asynchronous):
    mine = rc.attach(SimpleVectorStore(), kb, metadata_mode=MetadataMode.NONE)
    assert isinstance(mine, SimpleVectorStore)
    pages = [Document(id_=id, text=text, metadata={"page": id}) for id, text in PAGES.items()]
    nodes = SentenceSplitter()(pages)
    for node in nodes:
        node.embedding = [1.0, 0.0]
    texts = [read(node, MetadataMode.NONE) for node in nodes]
    if asynchronous:
        in_own_loop(mine.async_add(nodes))
        in_own_loop(mine.adelete("light"))
    else:
        mine.add(nodes)
        mine.delete("light")
    assert has(kb, *texts) == [False, True, True]
    mine.delete_nodes([nodes[1].node_id])
    assert has(kb, *texts) == [False, False, True]
    mine.clear()
    assert has(kb, *texts) == [False, False, False]


class Fixed(BaseRetriever):
    def __init__(self, nodes):
        self.nodes = nodes
        super().__init__()

    def _retrieve(self, query_bundle):
        return [NodeWithScore(node=node, score=0.5) for node in self.nodes]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_retriever_of_their_own_is_learnt_from(kb, recorder, asynchronous):
    nodes = [TextNode(id_=id, text=text) for id, text in PAGES.items()]
    mine = rc.attach(Fixed(nodes), kb)
    assert isinstance(mine, Fixed)
    engine = RetrieverQueryEngine.from_args(mine, llm=RagCacheLLM(kb, **SHORT))
    response = in_own_loop(engine.aquery(QUESTION)) if asynchronous else engine.query(QUESTION)
    assert [one.score for one in response.source_nodes] == [0.5] * 3
    assert share(kb, recorder, nodes) >= 0.95
    assert all("ragcache_handle" not in node.metadata for node in nodes)


@pytest.mark.parametrize("mode", [MetadataMode.LLM, MetadataMode.NONE, MetadataMode.ALL])
def test_a_step_of_a_pipeline(kb, mode):
    page = Document(id_="p", text=PAGES["mill"], metadata={"page": "mill", "secret": "x"})
    page.excluded_llm_metadata_keys = ["secret"]
    step = RagCachePrecompute(kb, metadata_mode=mode)
    [node] = IngestionPipeline(transformations=[SentenceSplitter(), step], disable_cache=True).run(documents=[page])
    [handle] = kb.precompute(read(node, MetadataMode.LLM), dry_run=True).handles
    if mode is MetadataMode.LLM:
        assert node.metadata["ragcache_handle"] == handle is not None
    else:
        assert handle is None
    assert node.embedding is None
    assert "ragcache_handle" not in read(node, MetadataMode.EMBED)
    assert in_own_loop(step.acall([node]))[0].metadata == node.metadata
    assert kb.info().chunks == 0
