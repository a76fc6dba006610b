import json
from collections.abc import Callable

import numpy as np
import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import (
    BaseNode,
    Document,
    ImageNode,
    IndexNode,
    MediaResource,
    Node,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters, VectorStoreQuery, VectorStoreQueryMode
from waiting import ticking

import ragcache as rc
from llama_index.embeddings.ragcache import RagCacheEmbedding
from llama_index.llms.ragcache import RagCacheLLM
from llama_index.retrievers.ragcache import RagCacheRetriever
from llama_index.vector_stores.ragcache import HANDLE_KEY, RagCacheVectorStore
from ragcache.errors import ConfigError
from ragcache_demo.bag_of_words import BagOfWords

RIVER = "Where does the Arno rise?"


def query(text: str, k: int = 2, **more) -> VectorStoreQuery:
    return VectorStoreQuery(query_embedding=BagOfWords().embed_query(text).tolist(), similarity_top_k=k, **more)


def where(**fields) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key=key, value=value) for key, value in fields.items()])


def ids(nodes) -> list[str]:
    return [node.node_id for node in nodes]


# What is stored


def related() -> dict:
    return {
        NodeRelationship.SOURCE: RelatedNodeInfo(node_id="doc", metadata={"file_name": "a.md"}, hash="abc"),
        NodeRelationship.NEXT: RelatedNodeInfo(node_id="n2"),
        NodeRelationship.CHILD: [RelatedNodeInfo(node_id="c1"), RelatedNodeInfo(node_id="c2")],
    }


NODES: dict[str, Callable[[], BaseNode]] = {
    "plain": lambda: TextNode(id_="n", text="Some text."),
    "unicode and white space": lambda: TextNode(id_="ü/1", text="\n  Zeile – eins\r\n\tzwei 𝄞  \n\n"),
    "everything": lambda: TextNode(
        id_="n",
        text="Some text.",
        metadata={"a": 1, "b": [1, {"c": None}], "ref_doc_id": "own", "doc_id": 7, "float": 0.1, "yes": True},
        excluded_llm_metadata_keys=["a"],
        excluded_embed_metadata_keys=["b", "float"],
        relationships=related(),
        start_char_idx=3,
        end_char_idx=13,
        metadata_template="<{key}|{value}>",
        metadata_separator=";",
        text_template="# {metadata_str}\n{content}",
        mimetype="text/markdown",
    ),
    "document": lambda: Document(id_="n", text="A whole document.", metadata={"file_path": "a.md"}),
    "multimodal": lambda: Node(id_="n", text_resource=MediaResource(text="Text.", mimetype="text/plain")),
    "image": lambda: ImageNode(id_="n", text="Its caption.", image_url="http://localhost/a.png"),
    "index": lambda: IndexNode(id_="n", text="Look there.", index_id="other"),
}


@pytest.mark.parametrize("make", NODES.values(), ids=NODES)
def test_nodes_come_back_as_they_were(store, make):
    store.add([make()])
    [back] = store.get_nodes([make().node_id])
    assert type(back) is type(make())
    assert back == make()
    assert back.hash == make().hash


def test_a_stored_passage_is_the_text_and_its_id(store, nodes):
    store.add(nodes)
    chunk = store.client.chunks(["dogs"])[0]
    assert (chunk.id, chunk.document_id, chunk.text) == ("dogs", "dogs", nodes[1].text)
    assert {key: chunk.metadata[key] for key in ("topic", "rank")} == {"topic": "dogs", "rank": 1}
    assert chunk.handle


def test_the_handle_is_put_on_when_found_and_never_stored(store, nodes):
    store.add(nodes)
    [found] = store.query(query(RIVER, 1)).nodes
    assert found.metadata[HANDLE_KEY] == store.client.chunks(["rivers"])[0].handle
    for mode in ("llm", "embed"):
        assert HANDLE_KEY in getattr(found, f"excluded_{mode}_metadata_keys")
        assert HANDLE_KEY not in found.get_content(metadata_mode=mode)
    store.add([found])  # as a user would who read, changed and wrote back
    [again] = store.get_nodes(["rivers"])
    assert again == nodes[2]
    assert HANDLE_KEY not in json.dumps(store.client.chunks(["rivers"])[0].metadata)


def test_a_handle_in_given_metadata_is_neither_stored_nor_embedded(store):
    """A node made from the metadata of a node that was found has such a handle."""
    metadata = {"year": 2024}
    for id, given in (("bare", metadata), ("found", {**metadata, HANDLE_KEY: "x"})):
        store.add([TextNode(id_=id, text="Herons fish at dawn.", metadata=given)])
    bare, found = (store.client.document(id) for id in ("bare", "found"))
    assert found.title == bare.title == "year: 2024\n"
    assert HANDLE_KEY not in found.metadata
    assert np.array_equal(*store.client.vectors(["bare", "found"]))


def test_another_nodes_fields_are_not_believed(store):
    """A node that was read as a plain passage, and stored under another id, is a node with that id."""
    store.add([TextNode(id_="first", text="Herons fish at dawn.", metadata={"year": 2024})])
    [first] = store.client.chunks(["first"])
    store.client.ingest(rc.Document("second", "Herons sleep.", first.metadata), split=False)
    [second] = store.get_nodes(["second"])
    assert (second.node_id, second.text, second.metadata["year"]) == ("second", "Herons sleep.", 2024)
    assert not [key for key in second.metadata if key.startswith("_")]
    store.delete("first")
    assert store.get_nodes(["first", "second"]) == [second]
    store.delete("second")
    assert not store.get_nodes(["second"])


def test_a_store_is_there_when_it_is_opened_again(tmp_path, lm, nodes):
    options = {"model": lm, "embedder": BagOfWords()}
    first = RagCacheVectorStore.from_path(tmp_path / "kb", **options)
    first.add(nodes)
    first.persist(str(tmp_path / "elsewhere.json"))
    first.client.close()
    again = RagCacheVectorStore.from_path(tmp_path / "kb", **options)
    assert again.get_nodes(["cats"]) == [nodes[0]]
    again.client.close()


# What is found


def test_variety_is_that_of_the_engine(store, nodes):
    nodes.append(TextNode(id_="rivers again", text=nodes[2].text, metadata=nodes[2].metadata))
    store.add(nodes)
    plain = store.query(query(RIVER, 2)).ids
    assert sorted(plain) == ["rivers", "rivers again"]
    varied = store.query(query(RIVER, 2, mode=VectorStoreQueryMode.MMR, mmr_threshold=0.3)).ids
    hits = store.client.retrieve(RIVER, k=2, mmr_lambda=0.3)
    assert varied == [hit.chunk.id for hit in hits] != plain
    assert store.query(query(RIVER, 2, mode=VectorStoreQueryMode.MMR, mmr_threshold=1.0)).ids == plain
    narrow = store.query(query(RIVER, 2, mode=VectorStoreQueryMode.MMR), mmr_threshold=0.0, mmr_prefetch_k=2)
    assert sorted(narrow.ids) == sorted(plain)  # there were no others to choose from


@pytest.mark.parametrize(("mode", "search"), [("hybrid", "hybrid"), ("text_search", "text")])
def test_words_are_searched_as_the_engine_does(store, nodes, mode, search):
    store.add(nodes)
    hits = store.client.retrieve("Arno", k=3, search=search)
    asked = query("Arno", 3, mode=VectorStoreQueryMode(mode), query_str="Arno")
    assert store.query(asked).ids == [hit.chunk.id for hit in hits]


def test_documents_ingested_without_llamaindex_are_nodes_too(kb):
    store = RagCacheVectorStore(kb)
    [found] = store.query(query(RIVER, 1)).nodes
    assert (found.node_id, found.ref_doc_id, found.metadata["year"]) == ("rivers#0", "rivers", 2022)
    with pytest.raises(ConfigError, match=r"delete\('rivers'\)"):
        store.delete_nodes(["rivers#0"])
    store.delete("rivers")
    assert kb.document("rivers") is None


# Deletion


def test_deleting_a_document_deletes_its_nodes_text_vector_and_kv(store, nodes):
    for node in nodes[:2]:
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="animals")
    store.add(nodes)
    handle = store.client.chunks(["dogs"])[0].handle
    assert handle in store.client.store.kv
    store.delete("animals")
    assert sorted(ids(store.get_nodes())) == ["clubs", "rivers"]
    assert handle not in store.client.store.kv
    assert sorted(store.query(query("dogs", 9)).ids) == ["clubs", "rivers"]
    store.delete("animals")  # twice is no error
    store.delete("rivers")  # a node without a document goes by its own id
    assert ids(store.get_nodes()) == ["clubs"]


def test_deleting_nodes_by_id_filter_or_both(store, nodes):
    store.add(nodes)
    store.delete_nodes(["cats", "nobody"])
    assert sorted(ids(store.get_nodes())) == ["clubs", "dogs", "rivers"]
    store.delete_nodes(["dogs", "clubs"], filters=where(topic="clubs"))
    assert sorted(ids(store.get_nodes())) == ["dogs", "rivers"]
    store.delete_nodes(filters=where(topic="dogs"))
    assert ids(store.get_nodes()) == ["rivers"]
    with pytest.raises(ConfigError, match="clear"):
        store.delete_nodes()
    store.clear()
    assert store.get_nodes() == []
    assert store.client.info().blocks == 0


# Async


async def test_every_call_has_an_async_twin_with_the_same_result(store, nodes):
    assert await store.async_add(nodes) == ids(nodes)
    assert await store.aget_nodes(["cats"]) == store.get_nodes(["cats"])
    assert (await store.aquery(query(RIVER, 3))).ids == store.query(query(RIVER, 3)).ids
    await store.adelete_nodes(["cats"])
    await store.adelete("dogs")
    assert sorted(ids(await store.aget_nodes())) == ["clubs", "rivers"]
    await store.aclear()
    assert store.get_nodes() == []


async def test_adding_does_not_block_the_loop(store, slow_model):
    many = [TextNode(id_=f"n{n}", text=f"Number {n} is nothing special. " * 8) for n in range(60)]
    async with ticking() as ticks:
        await store.async_add(many)
    assert ticks.count >= 5


# With LlamaIndex's index


def test_an_index_over_the_store_finds_what_the_engine_finds(store, nodes):
    kb, embed_model = store.client, RagCacheEmbedding(store.client)
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex(nodes, storage_context=context, embed_model=embed_model)
    found = index.as_retriever(similarity_top_k=3).retrieve(RIVER)
    hits = kb.retrieve(RIVER, k=3)
    assert [node.node_id for node in found] == [hit.chunk.id for hit in hits]
    np.testing.assert_allclose([node.score for node in found], [hit.score for hit in hits], atol=1e-6)
    again = VectorStoreIndex.from_vector_store(store, embed_model=embed_model)
    again.insert_nodes([TextNode(id_="new", text="The Arno ends in the sea.")])
    assert "new" in [node.node_id for node in again.as_retriever(similarity_top_k=5).retrieve(RIVER)]
    again.delete_nodes(["new"])
    again.delete_ref_doc("rivers")
    assert sorted(ids(store.get_nodes())) == ["cats", "clubs", "dogs"]


async def test_the_embedding_model_is_the_stores_own(store, nodes):
    embed_model = RagCacheEmbedding(store.client)
    embedded = embed_model(nodes)
    store.add(embedded)
    vectors = store.client.vectors(ids(nodes))
    np.testing.assert_allclose(vectors, [node.embedding for node in embedded], atol=1e-6)
    oracle = BagOfWords()
    np.testing.assert_allclose(embed_model.get_query_embedding(RIVER), oracle.embed_query(RIVER), atol=1e-7)
    np.testing.assert_allclose(embed_model.get_text_embedding(RIVER), oracle.embed_query(RIVER), atol=1e-7)
    assert embed_model.model_name == "bag-of-words"
    assert await embed_model.aget_query_embedding(RIVER) == embed_model.get_query_embedding(RIVER)
    assert await embed_model.aget_text_embedding(RIVER) == embed_model.get_text_embedding(RIVER)
    texts = [RIVER, "another text"]
    assert await embed_model.aget_text_embedding_batch(texts) == embed_model.get_text_embedding_batch(texts)


# Bad input


def test_nodes_without_text_are_left_out_and_the_last_of_an_id_is_kept(store, caplog):
    """A crawler or an empty file gives such nodes, which other stores take: the rest of the batch is stored."""
    texts = [("page", "First."), ("none", " \n"), ("other", "Other."), ("page", "Second.")]
    assert store.add([TextNode(id_=id, text=text) for id, text in texts]) == ["page", "none", "other", "page"]
    assert {node.node_id: node.text for node in store.get_nodes()} == {"page": "Second.", "other": "Other."}
    assert "2 of 4 nodes" in caplog.text


def test_too_long_a_text_is_named(store, nodes):
    store.add(nodes[:1])
    with pytest.raises(rc.RagCacheError, match="512") as caught:
        store.add([nodes[1], TextNode(id_="long", text="word " * 400), TextNode(id_="longer", text="word " * 500)])
    assert "2 nodes were not stored" in caught.value.__notes__[0]
    assert sorted(ids(store.get_nodes())) == ["cats", "dogs"]


def test_components_of_a_collection_see_it_alone(empty, nodes):
    everyone, a = RagCacheVectorStore(empty), RagCacheVectorStore(empty, collection="a")
    everyone.add(nodes[:1])
    a.add(nodes[1:2])
    assert [one.id for one in a.client.documents()] == [nodes[1].node_id]
    found = RagCacheRetriever(empty, k=9, collection="a").retrieve("Where do dogs bark?")
    assert [one.node.node_id for one in found] == [nodes[1].node_id]
    assert RagCacheLLM(empty, collection="a").kb is a.client
    a.clear()
    assert [one.id for one in everyone.client.documents()] == [nodes[0].node_id]
