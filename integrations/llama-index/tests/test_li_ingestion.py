import numpy as np
import pytest
from li_loop import ticking
from li_texts import QUESTION, SHORT, TEXTS
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import Document, MetadataMode, NodeWithScore, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.simple import SimpleVectorStore

import ragcache as rc
from llama_index.ingestion.ragcache import RagCacheTransform
from llama_index.llms.ragcache import RagCacheLLM
from llama_index.response_synthesizers.ragcache import FusedSynthesizer
from llama_index.vector_stores.ragcache import HANDLE_KEY, RagCacheVectorStore
from ragcache.errors import EmbedderMismatchError
from ragcache_demo.bag_of_words import BagOfWords


def documents(**changed: str) -> list[Document]:
    texts = {**TEXTS, **changed}
    return [Document(id_=id, text=text, metadata={"topic": id}) for id, text in texts.items() if text]


def splitter() -> SentenceSplitter:
    return SentenceSplitter(chunk_size=200, chunk_overlap=0)


@pytest.fixture
def pipeline(empty):
    def make(**options) -> IngestionPipeline:
        options.setdefault("vector_store", RagCacheVectorStore(empty))
        return IngestionPipeline(transformations=[splitter(), RagCacheTransform(empty)], **options)

    return make


def texts(kb: rc.RagCache) -> list[str]:
    return sorted(chunk.text for document in kb.documents() for chunk in kb.chunks_of(document.id))


def test_a_pipeline_stores_embeds_and_computes_each_passage_once(empty, pipeline, tokens_run, monkeypatch):
    embedded = []
    embed = empty.embedder.embed
    monkeypatch.setattr(empty.embedder, "embed", lambda given, **more: embedded.extend(given) or embed(given, **more))
    nodes = pipeline().run(documents=documents())
    read = tokens_run()
    assert len(nodes) == 4
    stripped = sorted(text.strip() for text in TEXTS.values())  # the splitter strips
    assert texts(empty) == stripped
    assert set(embedded) == {f"topic: {id}\n\n{text.strip()}" for id, text in TEXTS.items()}
    assert len(embedded) == 5  # one was looked at again, to see that the nodes' embeddings are the store's
    assert read <= 1.5 * sum(len(text) for text in TEXTS.values())  # a token a byte, padded
    for node in nodes:
        chunk = empty.chunks([node.node_id])[0]
        assert node.metadata[HANDLE_KEY] == chunk.handle
        assert chunk.handle not in node.get_content(MetadataMode.LLM) + node.get_content(MetadataMode.EMBED)
        np.testing.assert_array_equal(node.embedding, empty.vectors([node.node_id])[0])
        assert node.ref_doc_id in TEXTS


def test_the_transform_alone_stores_passages(empty, nodes):
    done = RagCacheTransform(empty)(nodes)
    assert [node.node_id for node in done] == [node.node_id for node in nodes]
    assert texts(empty) == sorted(TEXTS.values())
    assert all(HANDLE_KEY not in node.metadata for node in nodes)  # what was given is left as it was
    assert [TextNode(**{**node.to_dict(), "embedding": None}) for node in done] != nodes
    oracle = BagOfWords().embed([f"topic: {n.node_id}\nrank: {rank}\n\n{n.text}" for rank, n in enumerate(nodes)])
    np.testing.assert_allclose([node.embedding for node in done], oracle, atol=1e-6)


def test_a_nodes_own_embedding_is_kept_and_the_store_has_its_own(empty, nodes):
    """Another vector store beside this one holds the vectors of the application's model, as before."""
    own = [np.full(5, rank, np.float32).tolist() for rank in range(len(nodes))]
    for node, vector in zip(nodes[1:], own[1:], strict=True):
        node.embedding = vector
    done = RagCacheTransform(empty)(nodes)
    assert [node.embedding for node in done[1:]] == own[1:]
    stored = empty.vectors([node.node_id for node in nodes])
    assert done[0].embedding == stored[0].tolist()
    oracle = BagOfWords().embed([node.get_content(MetadataMode.EMBED) for node in nodes])
    np.testing.assert_allclose(stored, oracle, atol=1e-6)
    with pytest.raises(EmbedderMismatchError):
        RagCacheVectorStore(empty).add(done)


async def test_async_is_sync_and_leaves_the_loop_alone(empty, pipeline, slow_model):
    many = [Document(id_=f"d{n}", text=f"Number {n} is nothing special. " * 6) for n in range(60)]
    async with ticking() as ticks:
        nodes = await pipeline().arun(documents=many)
    assert ticks.count >= 5
    assert len(nodes) == 60
    assert [node.metadata[HANDLE_KEY] for node in nodes] == [empty.chunks([node.node_id])[0].handle for node in nodes]


def test_lazy_nodes_carry_no_handle_yet(empty, nodes, tokens_run):
    done = RagCacheTransform(empty, kv="lazy")(nodes)
    assert tokens_run() == 0
    assert all(HANDLE_KEY not in node.metadata for node in done)


def test_handles_travel_through_another_vector_store(empty, recorder):
    nodes = IngestionPipeline(
        transformations=[splitter(), RagCacheTransform(empty)], vector_store=SimpleVectorStore()
    ).run(documents=documents())
    answer = FusedSynthesizer(RagCacheLLM(empty, **SHORT)).get_response(
        QUESTION, [], fused_nodes=[NodeWithScore(node=node) for node in nodes]
    )
    assert [kv for _, kv in recorder.sources()] == ["memory"] * 4
    hits = [rc.Passage(node.text) for node in nodes]
    assert answer == empty.ask(QUESTION, hits=hits, sampling=rc.Sampling(**SHORT)).text


# The pipeline's own cache


def test_a_cached_run_fills_a_store_that_was_cleared(empty, pipeline):
    once = pipeline()
    once.run(documents=documents())
    before = texts(empty)
    RagCacheVectorStore(empty).clear()
    nodes = once.run(documents=documents())
    assert texts(empty) == before
    assert {chunk.handle for chunk in empty.chunks([n.node_id for n in nodes])} == {
        node.metadata[HANDLE_KEY] for node in nodes
    }


def test_the_cache_tells_models_apart(empty, open_kb, tmp_path, other_lm):
    other = open_kb(tmp_path / "other", model=other_lm)
    assert RagCacheTransform(empty).to_dict() != RagCacheTransform(other).to_dict()
    assert RagCacheTransform(empty).to_dict() == RagCacheTransform(empty).to_dict()


# Docstore strategies


def test_upserts_replace_what_changed_and_leave_the_rest(empty, pipeline):
    upserts = pipeline(docstore=SimpleDocumentStore(), docstore_strategy=DocstoreStrategy.UPSERTS)
    upserts.run(documents=documents())
    assert upserts.run(documents=documents()) == []
    [changed] = upserts.run(documents=documents(dogs="Dogs sleep by day."))
    assert changed.text == "Dogs sleep by day."
    assert texts(empty) == sorted({**{id: t.strip() for id, t in TEXTS.items()}, "dogs": changed.text}.values())


def test_whole_documents_can_be_upserted_without_a_splitter(empty):
    store = RagCacheVectorStore(empty)
    whole = IngestionPipeline(
        transformations=[RagCacheTransform(empty)], vector_store=store, docstore=SimpleDocumentStore()
    )
    whole.run(documents=documents())
    assert whole.run(documents=documents()) == []  # hashes are of documents without handles
    whole.run(documents=documents(dogs="Dogs sleep by day.\n"))
    assert texts(empty) == sorted({**TEXTS, "dogs": "Dogs sleep by day.\n"}.values())


# Bad input
