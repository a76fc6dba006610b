"""LlamaIndex's filters select what LlamaIndex says they select: its own in-memory evaluation is the oracle."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

import ragcache as rc
from llama_index.vector_stores.ragcache import RagCacheVectorStore
from llama_index.vector_stores.ragcache.filters import all_of, to_filter
from ragcache.errors import FilterError
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
    """LlamaIndex's own evaluation. It refuses nested filters, which are joined here."""
    results = [
        passes(one, id) if isinstance(one, MetadataFilters) else alone(one, METADATA[id]) for one in filters.filters
    ]
    if filters.condition == FilterCondition.NOT:
        return not any(results)
    return any(results) if filters.condition == FilterCondition.OR else all(results)


def alone(one: MetadataFilter, metadata: dict) -> bool:
    """Where the field is absent, LlamaIndex changed its mind between releases: it is unequal to everything now."""
    if one.key not in metadata:
        return one.operator in (FilterOperator.NE, FilterOperator.NIN)
    return build_metadata_filter_fn(lambda _: metadata, MetadataFilters(filters=[one]))("")


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(filters=joined(st.recursive(conditions(), joined, max_leaves=6)))
def test_filters_mean_what_llamaindex_means(store, filters):
    expected = {id for id in METADATA if passes(filters, id)}
    assert {node.node_id for node in store.get_nodes(filters=filters)} == expected


@pytest.mark.parametrize("operator", ["text_match", "text_match_insensitive", "is_empty"])
def test_operators_that_look_into_texts_are_refused_by_name(operator):
    one = MetadataFilter(key="town", value=["Arno"], operator=FilterOperator(operator))
    with pytest.raises(FilterError, match=rf"'town': operator '{operator}' is not supported"):
        to_filter(MetadataFilters(filters=[one]))


@pytest.mark.parametrize("filters", [None, {}, MetadataFilters(filters=[])])
def test_no_filter_is_none(filters):
    assert to_filter(filters) is None


def test_a_filter_of_the_store_passes_as_it_is():
    assert to_filter({"year": {"$exists": True}}) == {"year": {"$exists": True}}
    assert all_of(None, {"a": 1}, None) == {"a": 1}
    assert all_of({"a": 1}, {"b": 2}) == {"$and": [{"a": 1}, {"b": 2}]}


def test_a_value_that_cannot_be_compared_is_refused(store):
    one = MetadataFilter(key="town", value=["Arno"], operator=FilterOperator.EQ)
    with pytest.raises(FilterError, match="town"):
        store.get_nodes(filters=MetadataFilters(filters=[one]))


@pytest.mark.parametrize("operator", ["any", "all"])
def test_operators_over_several_members_want_a_list(operator):
    one = MetadataFilter(key="tags", value="a", operator=FilterOperator(operator))
    with pytest.raises(FilterError, match=rf"'tags': '{operator}' takes a list"):
        to_filter(MetadataFilters(filters=[one]))
