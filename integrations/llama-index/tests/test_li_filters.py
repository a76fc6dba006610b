"""LlamaIndex's filters select the nodes that LlamaIndex's own in-memory evaluation selects."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

import ragcache as rc
from llama_index.retrievers.ragcache import RagCacheRetriever
from llama_index.vector_stores.ragcache import RagCacheVectorStore
from llama_index.vector_stores.ragcache.filters import all_of, to_filter
from ragcache.errors import ConfigError, FilterError
from ragcache_demo.bag_of_words import BagOfWords

TAGS = (None, [], ["a"], ["a", "b"], ["b", "c", "d"])
METADATA = {
    f"n{number}": {
        key: value
        for key, value in (("year", year), ("town", town), ("score", score), ("tags", TAGS[number % len(TAGS)]))
        if value is not None
    }
    for number, (year, town, score) in enumerate(
        (year, town, score)
        for year in (2019, 2020, 2021, None)
        for town in ("Arno", "Kelbrook", None)
        for score in (0.5, None)
    )
}


@pytest.fixture(scope="module")
def store(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("filters") / "kb"
    with rc.RagCache.open(path, model=lm, method="reposition", embedder=BagOfWords()) as kb:
        store = RagCacheVectorStore(kb, kv="lazy")
        store.add([TextNode(id_=id, text=f"Text {id}.", metadata=metadata) for id, metadata in METADATA.items()])
        yield store


def conditions() -> st.SearchStrategy[MetadataFilter]:
    compare = st.sampled_from([FilterOperator(sign) for sign in ("==", "!=", ">", "<", ">=", "<=")])
    member = st.sampled_from([FilterOperator.IN, FilterOperator.NIN])
    years, towns = st.integers(2018, 2022), st.sampled_from(["Arno", "Kelbrook", "Vale"])
    tags, members = st.sampled_from("abcde"), st.sampled_from([FilterOperator.ANY, FilterOperator.ALL])
    return st.one_of(
        st.builds(MetadataFilter, key=st.just("tags"), value=tags, operator=st.just(FilterOperator.CONTAINS)),
        st.builds(MetadataFilter, key=st.just("tags"), value=st.lists(tags), operator=members),
        st.builds(MetadataFilter, key=st.just("year"), value=years, operator=compare),
        st.builds(MetadataFilter, key=st.just("town"), value=towns, operator=compare),
        st.builds(MetadataFilter, key=st.just("score"), value=st.sampled_from([0.25, 0.5]), operator=compare),
        st.builds(MetadataFilter, key=st.just("year"), value=st.lists(years, min_size=1), operator=member),
        st.builds(MetadataFilter, key=st.just("town"), value=st.lists(towns, min_size=1), operator=member),
    )


def joined(children: st.SearchStrategy) -> st.SearchStrategy[MetadataFilters]:
    how = st.sampled_from(list(FilterCondition))
    return st.builds(MetadataFilters, filters=st.lists(children, min_size=1, max_size=3), condition=how)


def passes(filters: MetadataFilters, id: str) -> bool:
    """Return LlamaIndex's own evaluation. It refuses nested filters, so their results are combined here."""
    results = [
        passes(one, id) if isinstance(one, MetadataFilters) else alone(one, METADATA[id]) for one in filters.filters
    ]
    if filters.condition == FilterCondition.NOT:
        return not any(results)
    return any(results) if filters.condition == FilterCondition.OR else all(results)


def alone(one: MetadataFilter, metadata: dict) -> bool:
    """Return whether a condition holds. If the field is absent, releases of LlamaIndex differ; now it is unequal to
    every value.
    """
    if one.key not in metadata:
        return one.operator in (FilterOperator.NE, FilterOperator.NIN)
    return build_metadata_filter_fn(lambda _: metadata, MetadataFilters(filters=[one]))("")


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(filters=joined(st.recursive(conditions(), joined, max_leaves=6)))
def test_filters_mean_what_llamaindex_means(store, filters):
    expected = {id for id in METADATA if passes(filters, id)}
    assert {node.node_id for node in store.get_nodes(filters=filters)} == expected


@pytest.mark.parametrize("filters", [None, {}, MetadataFilters(filters=[])])
def test_no_filter_is_none(filters):
    assert to_filter(filters) is None


def test_a_filter_of_the_store_passes_as_it_is():
    assert to_filter({"year": {"$exists": True}}) == {"year": {"$exists": True}}
    assert all_of(None, {"a": 1}, None) == {"a": 1}
    assert all_of({"a": 1}, {"b": 2}) == {"$and": [{"a": 1}, {"b": 2}]}


# Names of LlamaIndex


@pytest.fixture(scope="module")
def mixed(lm, tmp_path_factory):
    """Return a store with nodes of two documents, a node with the other document's name, and a document ingested
    without LlamaIndex.
    """
    path = tmp_path_factory.mktemp("names") / "kb"
    with rc.RagCache.open(path, model=lm, method="reposition", embedder=BagOfWords()) as kb:
        store = RagCacheVectorStore(kb, kv="lazy")
        sources = {"petra-1": "petra", "petra-2": "petra", "petra": "rosa"}
        for id, source in sources.items():
            related = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=source)}
            store.add([TextNode(id_=id, text=f"Text {id}.", relationships=related, metadata={"town": "Arno"})])
        kb.ingest(rc.Document("plain", "Text of its own.", {"id": "R-7", "doc_id": "D-7"}, title="Plain"))
        yield store


NAMES = [
    *(
        (key, operator, value, passing)
        for key in ("document_id", "doc_id", "ref_doc_id")
        for operator, value, passing in [
            ("==", "petra", {"petra-1", "petra-2"}),
            ("!=", "petra", {"petra", "plain#0"}),
            ("==", "rosa", {"petra"}),
            ("in", ["rosa", "plain"], {"petra", "plain#0"}),
            ("nin", ["rosa", "plain"], {"petra-1", "petra-2"}),
            ("==", "nobody", set()),
        ]
    ),
    *(
        (key, operator, value, passing)
        for key in ("node_id", "id_", "id")
        for operator, value, passing in [
            ("==", "petra", {"petra"}),
            ("!=", "petra", {"petra-1", "petra-2", "plain#0"}),
            ("in", ["petra-1", "plain#0"], {"petra-1", "plain#0"}),
            ("==", "nobody", set()),
        ]
    ),
    ("id", "==", "R-7", {"plain#0"}),
    ("doc_id", "==", "D-7", {"plain#0"}),
    ("title", "==", "Plain", {"plain#0"}),
    ("source", "==", "plain", {"plain#0"}),
]


@pytest.mark.parametrize(("key", "operator", "value", "passing"), NAMES)
def test_names_of_documents_and_nodes_are_llamaindexs(mixed, key, operator, value, passing):
    one = MetadataFilter(key=key, value=value, operator=FilterOperator(operator))
    filters = MetadataFilters(filters=[one])
    query = VectorStoreQuery(query_str="Text", similarity_top_k=9, filters=filters)
    assert set(mixed.query(query).ids) == passing
    plain = {"==": value, "!=": {"$ne": value}, "in": {"$in": value}, "nin": {"$nin": value}}[operator]
    for same in (filters, {key: plain}, {"$not": {"$or": [{"$not": {key: plain}}]}}):
        assert {node.node_id for node in mixed.get_nodes(filters=same)} == passing
        retriever = RagCacheRetriever(mixed.client, k=9, filters=same)
        assert {hit.node.node_id for hit in retriever.retrieve("Text")} == passing


@pytest.mark.parametrize("key", ["document_id", "doc_id", "ref_doc_id", "node_id", "id_", "id"])
def test_operators_of_the_store_mean_llamaindexs_names(mixed, key):
    def found(condition: object) -> set[str]:
        return {node.node_id for node in mixed.get_nodes(filters={key: condition, "$and": [{}]})}

    everything = {"petra-1", "petra-2", "petra", "plain#0"}
    assert found({"$exists": True}) == everything
    assert found({"$exists": False}) == found({"$contains": "petra"}) == set()
    named = {"petra": "rosa"} if key in ("document_id", "doc_id", "ref_doc_id") else {}
    assert found({"$gte": "petra", "$lt": "petrb", "$glob": "p*"}) == everything - {*named, "plain#0"}
    for refused in ({}, {"$near": 1}, [1]):
        with pytest.raises(FilterError):
            found(refused)


def test_passages_are_chosen_by_their_own_id_and_metadata(open_kb):
    text = "\n\n".join(f"## Part {n}\n\n" + f"A sentence about part {n}. " * 30 for n in range(9))
    kb = open_kb()
    kb.ingest(rc.Document("manual", text))
    store = RagCacheVectorStore(kb, kv="lazy")
    assert len(store.get_nodes()) > 2

    def found(where: dict[str, object], ids: list[str] | None = None) -> list[str]:
        return [node.node_id for node in store.get_nodes(ids, filters=where)]

    assert found({"node_id": "manual#1"}) == ["manual#1"]
    assert found({"document_id": "manual"}, ["manual#2", "manual#0"]) == ["manual#2", "manual#0"]
    assert found({"node_id": {"$in": ["manual#1", "manual#2"]}}, ["manual#2", "manual#0"]) == ["manual#2"]
    with pytest.raises(ConfigError, match="'manual#1' is a passage of the document 'manual'"):
        store.delete_nodes(filters=where("manual#1"))
    store.delete_nodes(filters=where("manual#99"))
    assert kb.document("manual") is not None


def where(node_id: str) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key="node_id", value=node_id)])


def test_nodes_are_not_deleted_by_a_misspelt_field(mixed):
    for call in (mixed.get_nodes, mixed.delete_nodes):
        with pytest.raises(FilterError, match=r"no passage has metadata field 'documentid'.*document_id"):
            call(filters=MetadataFilters(filters=[MetadataFilter(key="documentid", value="petra")]))
    deep = {"document_id": "petra"}
    for _ in range(5000):
        deep = {"$not": deep}
    with pytest.raises(FilterError, match="nested too deeply"):
        to_filter(deep)


def test_a_query_by_ids_finds_every_passage(mixed):
    def found(**ids: list[str]) -> set[str]:
        return set(mixed.query(VectorStoreQuery(query_str="Text", similarity_top_k=9, **ids)).ids)

    assert found(doc_ids=["petra", "plain"]) == {"petra-1", "petra-2", "plain#0"}
    assert found(node_ids=["petra", "plain#0"]) == {"petra", "plain#0"}
    assert found(doc_ids=["petra"], node_ids=["petra"]) == set()


def test_nodes_are_deleted_by_their_documents_name(mixed):
    mixed.add([TextNode(id_="gone", text="Soon gone.")])
    mixed.delete_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="ref_doc_id", value="gone")]))
    assert mixed.get_nodes(["gone", "petra"])[0].node_id == "petra"
