import numpy as np
import pytest
from li_texts import TEXTS
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import Document
from llama_index.core.storage.docstore import SimpleDocumentStore
from waiting import ticking

import ragcache as rc
from llama_index.embeddings.ragcache import RagCacheEmbedding
from llama_index.vector_stores.ragcache import RagCacheVectorStore


def documents(**changed: str) -> list[Document]:
    texts = {**TEXTS, **changed}
    return [Document(id_=id, text=text, metadata={"topic": id}) for id, text in texts.items() if text]


def splitter() -> SentenceSplitter:
    return SentenceSplitter(chunk_size=200, chunk_overlap=0)


@pytest.fixture
def pipeline(empty):
    def make(**options) -> IngestionPipeline:
        options.setdefault("vector_store", RagCacheVectorStore(empty))
        return IngestionPipeline(transformations=[splitter(), RagCacheEmbedding(empty)], **options)

    return make


def texts(kb: rc.RagCache) -> list[str]:
    return sorted(chunk.text for document in kb.documents() for chunk in kb.chunks_of(document.id))


def test_a_pipeline_stores_and_computes_each_passage_once(empty, pipeline, tokens_run, monkeypatch):
    embedded = []
    embed = empty.embedder.embed
    monkeypatch.setattr(empty.embedder, "embed", lambda given, **more: embedded.extend(given) or embed(given, **more))
    nodes = pipeline().run(documents=documents())
    read = tokens_run()
    assert len(nodes) == 4
    stripped = sorted(text.strip() for text in TEXTS.values())  # the splitter strips
    assert texts(empty) == stripped
    assert set(embedded) == {f"topic: {id}\n\n{text.strip()}" for id, text in TEXTS.items()}
    assert read <= 1.5 * sum(len(text) for text in TEXTS.values())  # a token a byte, padded
    for node in nodes:
        np.testing.assert_allclose(node.embedding, empty.vectors([node.node_id])[0], atol=1e-6)
        assert node.ref_doc_id in TEXTS


async def test_async_is_sync_and_leaves_the_loop_alone(empty, pipeline, slow_model):
    many = [Document(id_=f"d{n}", text=f"Number {n} is nothing special. " * 6) for n in range(60)]
    async with ticking() as ticks:
        nodes = await pipeline().arun(documents=many)
    assert ticks.count >= 5
    assert len(nodes) == 60
    assert [chunk.text for chunk in empty.chunks([node.node_id for node in nodes])] == [node.text for node in nodes]


def test_upserts_replace_what_changed_and_leave_the_rest(empty, pipeline):
    upserts = pipeline(docstore=SimpleDocumentStore(), docstore_strategy=DocstoreStrategy.UPSERTS)
    upserts.run(documents=documents())
    assert upserts.run(documents=documents()) == []
    [changed] = upserts.run(documents=documents(dogs="Dogs sleep by day."))
    assert changed.text == "Dogs sleep by day."
    assert texts(empty) == sorted({**{id: t.strip() for id, t in TEXTS.items()}, "dogs": changed.text}.values())
