"""Metadata filters: SQL on every database against plain Python."""

from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcache.errors import FilterError
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NewChunk, NewDocument

# The oracle: the filter language's definition, over Python values.


def kind(value: Any) -> type:
    return float if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


def equal(one: Any, other: Any) -> bool:
    return kind(one) is kind(other) and one == other


def holds(condition: dict[str, Any], metadata: dict[str, Any]) -> bool:
    for name, value in condition.items():
        if name == "$and":
            passes = all(holds(part, metadata) for part in value)
        elif name == "$or":
            passes = any(holds(part, metadata) for part in value)
        elif name == "$not":
            passes = not holds(value, metadata)
        else:
            operators = value if isinstance(value, dict) else {"$eq": value}
            passes = all(holds_operator(metadata, name, *operator) for operator in operators.items())
        if not passes:
            return False
    return True


def holds_operator(metadata: dict[str, Any], field: str, operator: str, operand: Any) -> bool:
    there, value = field in metadata, metadata.get(field)
    comparable = there and kind(value) is kind(operand)
    results = {
        "$exists": lambda: there == operand,
        "$eq": lambda: there and equal(value, operand),
        "$ne": lambda: not (there and equal(value, operand)),
        "$in": lambda: there and any(equal(value, item) for item in operand),
        "$nin": lambda: not (there and any(equal(value, item) for item in operand)),
        "$gt": lambda: comparable and value > operand,
        "$gte": lambda: comparable and value >= operand,
        "$lt": lambda: comparable and value < operand,
        "$lte": lambda: comparable and value <= operand,
        "$contains": lambda: isinstance(value, list) and any(equal(item, operand) for item in value),
        "$glob": lambda: isinstance(value, str) and fnmatchcase(value, operand),
    }
    return results[operator]()


FIELDS = st.sampled_from(["a", "b", "", 'q"uote', "é", "do.t", "ba\\ck", "a.$", "new\nline", "a b", "'"])
TEXTS = st.sampled_from(["", "1", "true", "null", "A", "a", "b", "é", "z", "🎈", 'q"', "\\", "%"])
NUMBERS = st.sampled_from([0, 1, -1, 2**53 + 1, -(2**63), 2**63 - 1, 0.1, 1.0, -0.0, 1e300, 1e-300, 0.1 + 0.2])
GLOBS = st.sampled_from(
    ["", "*", "?", "??", "*1", "[*]", "[?]*", "[", "t*e", "q?", "\\", "%", "_", "*l*l*", "[[]", "a]"]
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
METADATA = st.dictionaries(FIELDS, SCALARS | st.lists(SCALARS, max_size=2) | st.just({"a": 1}), max_size=4)
OPERATORS = st.one_of(
    st.tuples(st.sampled_from(["$eq", "$ne"]), SCALARS),
    st.tuples(st.sampled_from(["$in", "$nin"]), st.lists(SCALARS, max_size=4)),
    st.tuples(st.sampled_from(["$gt", "$gte", "$lt", "$lte"]), NUMBERS | TEXTS),
    st.tuples(st.just("$exists"), st.booleans()),
    st.tuples(st.just("$contains"), SCALARS),
    st.tuples(st.just("$glob"), GLOBS),
)
LEAVES = st.dictionaries(FIELDS, SCALARS | st.lists(OPERATORS, min_size=1, max_size=2).map(dict), max_size=2)
FILTERS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"$and": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"$or": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"$not": inner}),
        st.tuples(LEAVES, inner).map(lambda pair: {**pair[0], **pair[1]}),
    ),
    max_leaves=5,
)


def chunk(id: str, metadata: dict[str, Any] | None = None) -> NewChunk:
    return NewChunk(id, "text", [1], np.zeros(2, np.float32), metadata=metadata or {})


def fill(store: DocumentStore, metadata: list[dict[str, Any]]) -> list[int]:
    """One document and chunk for each metadata object; returns the vector ids."""
    store.delete_documents([document.id for document in store.documents()])
    documents = [NewDocument(f"d{number}", metadata=values) for number, values in enumerate(metadata)]
    return [id for one in documents for id in store.replace_document(one, [chunk(f"c{one.id}")])]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(metadata=st.lists(METADATA, min_size=1, max_size=5), filters=st.lists(FILTERS, min_size=1, max_size=8))
def test_sql_agrees_with_python(store, metadata, filters):
    chunks = [chunk(f"c{number}", values) for number, values in enumerate(metadata)]
    ids = store.replace_document(NewDocument("d", metadata=metadata[0]), chunks)
    for condition in filters:
        passed = [holds(condition, {**metadata[0], **values}) for values in metadata]
        assert store.vector_ids(condition) == {id for id, passes in zip(ids, passed, strict=True) if passes}
        assert bool(store.documents(condition)) == passed[0]


def test_every_operator_on_every_pair_of_values(store):
    values = [
        None, True, False, 0, 1, 1.0, 0.5, "", "1", "a", "B", "é", {"x": 1}, "[1]", "*",
        [1], [], [None], [True, "a"], ["1", 0.5], [[1], "é"], [{"a": 1}], ["*"],
    ]  # fmt: skip
    metadata: list[dict[str, Any]] = [{"f": value} for value in values] + [{"other": 1}]
    ids = fill(store, metadata)
    operands = [value for value in values if not isinstance(value, list | dict)]
    cases = [{"f": {name: operand}} for name in ("$eq", "$ne") for operand in operands]
    cases += [{"f": {name: [operand, "a", 0]}} for name in ("$in", "$nin") for operand in operands]
    orderable = [value for value in operands if kind(value) in (float, str)]
    cases += [{"f": {name: operand}} for name in ("$gt", "$gte", "$lt", "$lte") for operand in orderable]
    cases += [{"f": {"$exists": flag}} for flag in (True, False)]
    cases += [{"f": {"$contains": operand}} for operand in operands]
    cases += [{"f": {"$glob": pattern}} for pattern in ("*", "?", "", "a", "A", "[*]", "*1*", "[[]?]")]
    cases += [{"$not": case} for case in cases]
    for case in cases:
        passing = [number for number, values in enumerate(metadata) if holds(case, values)]
        assert store.vector_ids(case) == {ids[number] for number in passing}
        assert {document.id for document in store.documents(case)} == {f"d{number}" for number in passing}


@pytest.mark.slow
def test_long_lists_pass(store):
    ids = fill(store, [{"n": number} for number in range(3)])
    assert store.vector_ids({"n": {"$in": list(range(1, 9000))}}) == set(ids[1:])
    assert store.vector_ids({"$or": [{"n": number} for number in range(1, 900)]}) == set(ids[1:])


DEEP: dict[str, Any] = {"a": 1}
for _ in range(40):
    DEEP = {"$not": DEEP}


MALFORMED = [
    ([], "an object"),
    ("text", "an object"),
    ({"$and": {}}, "a list of filters"),
    ({"$or": []}, "a list of filters"),
    ({"$and": ["text"]}, "an object"),
    ({"$not": [1]}, "an object"),
    ({"$nor": []}, "'\\$nor' is unknown"),
    ({"a": {}}, "no operator given"),
    ({"a": {"$regex": "x"}}, "'\\$regex' is unknown"),
    ({"a": {"plain": 1}}, "'plain' is unknown"),
    ({"a": {3: 1}}, "3 is unknown"),
    ({"a": [1]}, "is no string"),
    ({"a": {"$eq": {"x": 1}}}, "is no string"),
    ({"a": float("nan")}, "is no string"),
    ({"a": 2**63}, "is no string"),
    ({"a": "nul \0"}, "is no string"),
    ({"a": "\ud800"}, "is no string"),
    ({"a": b"x"}, "is no string"),
    ({"a": {"$in": "text"}}, "takes a list"),
    ({"a": {"$in": list(range(10_001))}}, "takes a list"),
    ({"a": {"$in": [[1]]}}, "is no string"),
    ({"a": {"$gt": None}}, "compares numbers or strings"),
    ({"a": {"$lt": True}}, "compares numbers or strings"),
    ({"a": {"$exists": 1}}, "takes true or false"),
    ({"a": {"$contains": [1]}}, "is no string"),
    ({"a": {"$glob": 1}}, "takes a pattern"),
    ({"a": {"$glob": "*" * 1001}}, "takes a pattern"),
    ({"source": {"$glob": None}}, "takes a pattern"),
    ({1: 2}, "a name is expected"),
    ({"nul \0": 2}, "a name is expected"),
    (DEEP, "nested deeper"),
    ({"$or": [{"a": number} for number in range(1001)]}, "more than 1000 conditions"),
]


def test_malformed_filters_are_refused(store):
    for bad, reason in MALFORMED:
        for refused in (store.vector_ids, store.documents):
            with pytest.raises(FilterError, match=reason):
                refused(bad or [None])


def test_the_fields_that_no_metadata_has_are_named(store):
    fill(store, [{"a": 1, "b'": {"nested": 2}}, {"c": None}])
    where = {"$and": [{"a": 1, "d": 2}, {"$not": {"nested": 3}}, {"$or": [{"b'": {"$gt": 1}}, {"c": None}]}]}
    assert store.unknown_fields(where) == (["d", "nested"], ["a", "b'", "c"])


def test_chunks_are_narrowed_by_their_own_metadata(store):
    for id in ("b", "a"):
        parts = [chunk(f"{id}#{n}", {"page": n}) for n in range(3)]
        store.replace_document(NewDocument(id, metadata={"year": 2020}), parts)

    def found(*given: Any) -> list[str]:
        return [one.id for one in store.chunks(*given)]

    assert found() == [f"{id}#{n}" for id in "ab" for n in range(3)]
    assert found(None, {"page": {"$gte": 1}}) == ["a#1", "a#2", "b#1", "b#2"]
    assert found(["b#2", "a#0", "b#0", "c#0"], {"page": 0}) == ["a#0", "b#0"]
    assert found(["b#2", "a#0"], {"year": 2020}) == ["b#2", "a#0"]
    assert found([], {"year": 2020}) == found(None, {"chunk_id": "a"}) == []
    store.refuse_unknown_fields({"page": 9, "chunk_id": "a", "_framework": 1})
    with pytest.raises(FilterError, match=r"no document has metadata field 'page'.*have: year, source, title"):
        store.refuse_unknown_fields({"page": 9}, "document")
    with pytest.raises(FilterError, match=r"no passage has metadata field 'pgae'.*have: page, year, source"):
        store.refuse_unknown_fields({"pgae": 9})
    store.delete_documents(["a", "b"])
    store.refuse_unknown_fields({"pgae": 9})


def test_own_columns_are_fields_beside_metadata(store):
    documents = [
        NewDocument("/srv/a.md", source="/srv/a.md", title="Ferries"),
        NewDocument("/srv/b.md", source="/srv/b.md", metadata={"source": "https://example.org/b"}),
        NewDocument("x", source="a.md", metadata={"document_id": 7, "source": ["a", "b"], "title": "Own"}),
    ]
    ids = {one.id: store.replace_document(one, [chunk(f"{one.id}#0")])[0] for one in documents}
    for where, passing in [
        ({"source": "/srv/b.md"}, "b"), ({"source": "https://example.org/b"}, "b"), ({"source": "a.md"}, "x"),
        ({"source": {"$glob": "/srv/*"}}, "ab"), ({"source": {"$glob": "https:*"}}, "b"),
        ({"source": {"$ne": "a.md"}}, "ab"),
        ({"source": {"$in": ["/srv/a.md", "a.md", 5]}}, "ax"), ({"source": {"$nin": ["/srv/a.md"]}}, "bx"),
        ({"source": {"$gt": "/srv/a.md"}}, "bx"), ({"source": {"$exists": True}}, "abx"),
        ({"source": {"$contains": "a"}}, "x"),
        ({"document_id": "x"}, "x"), ({"document_id": 7}, "x"), ({"document_id": {"$exists": False}}, ""),
        ({"document_id": {"$glob": "*.md"}}, "ab"), ({"$not": {"document_id": {"$glob": "*.md"}}}, "x"),
        ({"title": "Ferries"}, "a"), ({"title": {"$in": ["Ferries", "Own"]}}, "ax"), ({"title": {"$ne": "Own"}}, "ab"),
        ({"title": {"$exists": True}}, "ax"), ({"chunk_id": "x#0"}, "x"), ({"chunk_id": {"$ne": "x#0"}}, "ab"),
    ]:  # fmt: skip
        expected = {id for id in ids if id.removeprefix("/srv/")[0] in passing}
        assert {document.id for document in store.documents(where)} == expected, where
        assert store.vector_ids(where) == {ids[id] for id in expected}, where
        assert store.count(where) == len(expected)
    assert store.unknown_fields({"source": "a", "document_id": "b", "chunk_id": "b#0", "c": 1})[0] == ["c"]
    assert store.unknown_fields({"$or": [{"c": 1}, {"_framework": 2}]})[0] == []
