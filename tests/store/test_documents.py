"""The document store, on every database; what chunks are read behind, and what goes with a chunk that others were read
behind (law 10)."""

import time
from typing import Any

import numpy as np
import pytest
from blocks import garbage_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from postgres_server import engine_of
from sqlalchemy import text

from ragcache import errors
from ragcache.store.collections import OTHERS, CollectionTable, View
from ragcache.store.documents import DocumentStore
from ragcache.store.neighbours import KnownNeighbours, Near, NeighbourTable
from ragcache.store.records import Counts, NewChunk, NewDocument, StoredVersion
from ragcache.store.schema import SCHEMA_VERSION

DIM = 4


def new_chunk(id: str, handle: str | None = None, **changes: Any) -> NewChunk:
    number = sum(map(ord, id)) % 1000
    values = {"text": f"text of {id}", "token_ids": [number, 2**31 - 1], "embedding": np.full(DIM, number, np.float32)}
    return NewChunk(id=id, handle=handle, **{**values, **changes})


def put(store: DocumentStore, id: str, *handles: str | None, **changes: Any) -> list[int]:
    """Replace a document by one with a chunk for each handle; chunk ids follow from the document's."""
    chunks = [new_chunk(f"{id}.{ordinal}", handle) for ordinal, handle in enumerate(handles)]
    return store.replace_document(NewDocument(id, **changes), chunks)


def test_what_goes_in_comes_out(store):
    metadata = {"year": 2024, "tags": ["a", {"b": None}], "ü\"'": "é\n", "ratio": 0.1, "big": 2**53 + 1, "no": False}
    document = NewDocument("id é", source="dir/file.md", content_hash="f00", metadata=metadata, title="A title")
    chunks = [new_chunk("c0", "h0", metadata={"page": 1, "year": 1999}), new_chunk("c1", text="zwei 二 🎈")]
    before = time.time()
    ids = store.replace_document(document, chunks)
    stored = store.document("id é")
    assert (stored.source, stored.title, stored.content_hash) == ("dir/file.md", "A title", "f00")
    assert stored.metadata == metadata
    assert before <= stored.created_at == stored.updated_at <= time.time()
    assert (stored.num_chunks, stored.num_tokens, stored.num_pending, stored.state) == (2, 4, 1, "pending")
    first, second = store.chunks_of("id é")
    assert (first.id, first.document_id, first.ordinal, first.handle, first.state) == ("c0", "id é", 0, "h0", "ready")
    assert first.metadata == {**metadata, "page": 1, "year": 1999}, "the chunk's own lie on top of the document's"
    assert (second.text, second.handle, second.ordinal, second.state) == ("zwei 二 🎈", None, 1, "pending")
    assert second.token_ids == chunks[1].token_ids
    assert second.num_tokens == 2
    assert (first.source, first.title) == ("dir/file.md", "A title")
    assert [first.vector_id, second.vector_id] == ids
    assert store.chunks(["c1"]) == [second]
    assert store.counts() == Counts(1, 2, 4)


def test_an_empty_store_has_nothing(store):
    assert store.document("x") is None
    assert store.chunks(["x"]) == []
    assert store.documents() == store.chunks_of("x") == []
    assert store.chunks_by_vector_ids([1, 2]) == list(store.all_vectors()) == []
    assert store.vector_ids() == store.handles() == garbage_of(store) == store.collectable() == set()
    assert (store.counts(), store.generation()) == (Counts(0, 0, 0), 0)
    assert store.delete_documents(["x"]) == []
    assert store.generation() == 0, "nothing changed"


def test_replacing_drops_the_old_chunks_and_keeps_the_first_time(store):
    old = put(store, "d", "h0", "h1", "h2", content_hash="one")
    created = store.document("d").created_at  # type: ignore[union-attr]
    new = put(store, "d", "h9", content_hash="two")
    document = store.document("d")
    assert (document.content_hash, document.num_chunks, document.created_at) == ("two", 1, created)
    assert document.updated_at > created
    assert store.chunks_by_vector_ids(old) == []
    assert store.vector_ids() == set(new)
    assert {id: one.content_hash for id, one in store.versions().items()} == {"d": "two"}


def test_a_document_without_chunks_is_a_document(store):
    assert put(store, "empty") == []
    document = store.document("empty")
    assert (document.num_chunks, document.num_tokens, document.state) == (0, 0, "ready")
    put(store, "d", "h")
    assert store.counts() == Counts(2, 1, 2)
    put(store, "d")
    assert (store.counts(), garbage_of(store)) == (Counts(2, 0, 0), {"h"})


def test_vector_ids_rise_and_are_never_given_again(url):
    seen: list[int] = []
    for _ in range(3):
        with DocumentStore.open(url) as store:
            for _ in range(2):
                seen += put(store, "d", "a", "b")
                store.delete_documents(["d"])
    assert seen == sorted(set(seen))
    assert len(seen) == 12


def test_chunks_by_vector_ids_keep_their_order_and_leave_out_the_gone(store):
    ids = put(store, "d", *(f"h{number}" for number in range(5)))
    wanted = [ids[3], 999, ids[0], np.int64(ids[3]), -1]
    assert [chunk.ordinal for chunk in store.chunks_by_vector_ids(wanted)] == [3, 0, 3]


def test_all_vectors_come_in_batches_by_rising_id(store):
    rng = np.random.default_rng(0)
    expected: dict[int, np.ndarray] = {}
    for number in range(7):
        embeddings = rng.standard_normal((3, DIM)).astype(np.float32)
        chunks = [new_chunk(f"{number}.{row}", embedding=embeddings[row]) for row in range(3)]
        expected.update(zip(store.replace_document(NewDocument(str(number)), chunks), embeddings, strict=True))
    for batch_size in (1, 4, 21, 100):
        batches = list(store.all_vectors(batch_size=batch_size))
        assert all(len(batch.ids) == len(batch.vectors) <= batch_size for batch in batches)
        assert all(batch.ids.dtype == np.int64 and batch.vectors.dtype == np.float32 for batch in batches)
        assert np.concatenate([batch.ids for batch in batches]).tolist() == sorted(expected)
        assert np.array_equal(np.concatenate([batch.vectors for batch in batches]), np.stack(list(expected.values())))
    later = list(store.all_vectors(after=sorted(expected)[14]))
    assert [id for batch in later for id in batch.ids] == sorted(expected)[15:]


def test_vectors_are_those_of_one_moment(store, url):
    """A commit in the middle of the reading is seen by the next reading."""
    put(store, "a", "h0", "h1", "h2")
    batches = store.all_vectors(batch_size=1)
    seen = [next(batches)]
    with DocumentStore.open(url) as other:
        put(other, "b", "h3")
        other.delete_documents(["a"])
    seen += batches
    assert [id for batch in seen for id in batch.ids] == [1, 2, 3]
    assert [id for batch in store.all_vectors() for id in batch.ids] == [4]


def vector_id(store, chunk_id):
    return store.chunks([chunk_id])[0].vector_id


def test_handles_set_later(store):
    put(store, "a", None, None, "h")
    generation = store.generation()
    store.set_handles({vector_id(store, "a.0"): "x", vector_id(store, "a.1"): "y"})
    assert store.handles() == {"x", "y", "h"}
    assert store.document("a").state == "ready"  # type: ignore[union-attr]
    store.set_handles({vector_id(store, "a.0"): "z"})
    assert (garbage_of(store), store.chunks(["a.0"])[0].handle) == ({"x"}, "z")
    store.set_handles({vector_id(store, "a.1"): "x"})
    assert garbage_of(store) == {"y"}
    store.set_handles({vector_id(store, "a.1"): None})
    assert garbage_of(store) == {"x", "y"}
    assert store.generation() == generation, "the index does not depend on handles"


def test_setting_the_handle_of_an_unknown_chunk_changes_nothing(store):
    put(store, "a", None)
    with pytest.raises(errors.NoSuchDocumentError, match="no chunk 99"):
        store.set_handles({vector_id(store, "a.0"): "x", 99: "y"})
    assert store.handles() == set()


HANDLES = st.lists(st.sampled_from(["h1", "h2", "h3", "h4", None]), max_size=3)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(st.tuples(st.sampled_from([*"abc", "clear"]), HANDLES | st.none()), max_size=8))
@example([("a", ["h1", "h2"]), ("b", ["h2", "h3"]), ("a", None), ("b", []), ("c", ["h3"]), ("clear", ["h1"])])
def test_garbage_and_handles_equal_a_model(store, operations):
    """Every handle ever used is either referred to, or garbage: none is lost, none is both."""
    store.delete_documents("abc")
    store.clear_garbage(garbage_of(store))
    documents: dict[str, list[str | None]] = {}
    used: set[str] = set()
    for id, handles in operations:
        if handles is None:
            assert store.delete_documents([id]) == ([id] if documents.pop(id, None) is not None else [])
        elif id == "clear":
            store.clear_garbage(["never heard of", *filter(None, handles)])
            used -= {*handles} - {handle for held in documents.values() for handle in held}
        else:
            put(store, id, *handles)
            documents[id] = handles
            used |= {handle for handle in handles if handle}
        referred = {handle for handles in documents.values() for handle in handles if handle}
        assert store.handles() == referred
        assert garbage_of(store) == store.collectable() == used - referred


def test_deletion_takes_everything_of_a_document(store, url):
    """Law 10: looked up in the tables themselves."""
    put(store, "keep", "h0")
    put(store, "drop", "h1", "h2", source="secret place", title="secret title", metadata={"k": "secret"})
    assert store.delete_documents(["drop", "unknown", "drop"]) == ["drop"]
    assert store.document("drop") is None
    assert [document.id for document in store.documents()] == ["keep"]
    rows = dump(url)
    assert "keep" in rows
    assert "text of keep.0" in rows
    for trace in ("secret", "drop"):
        assert trace not in rows


def dump(url: str) -> str:
    """Every row of every table, read without the store."""
    engine = engine_of(url)
    with engine.connect() as connection:
        tables = [f"ragcache_{name}" for name in ("properties", "counters", "documents", "chunks", "garbage")]
        rows = [row for table in tables for row in connection.execute(text(f"SELECT * FROM {table}"))]
    engine.dispose()
    return repr(rows)


def test_generation_rises_with_every_change_of_documents(store):
    seen = [store.generation()]
    for change in (
        lambda: put(store, "a", "h"),
        lambda: put(store, "a", "h"),
        lambda: put(store, "b"),
        lambda: store.delete_documents(["a", "b"]),
    ):
        change()
        seen.append(store.generation())
    assert seen == sorted(set(seen))


def test_documents_are_listed_by_id_in_pages(store):
    ids = ["b", "B", "a", "é", "10", "9", "_"]
    for id in ids:
        put(store, id)
    assert [document.id for document in store.documents()] == sorted(ids), "by code point on every database"
    assert [document.id for document in store.documents(limit=2, offset=3)] == sorted(ids)[3:5]
    assert store.documents(limit=0) == []


def test_properties_are_bound_once(store, url):
    store.bind("embedder", {"name": "minilm", "dimension": 384})
    store.bind("embedder", {"dimension": 384, "name": "minilm"})
    store.bind("fingerprint", "abc")
    store.bind("prefix", [1, 2])
    assert store.properties() == {
        "schema": SCHEMA_VERSION,
        "embedder": {"name": "minilm", "dimension": 384},
        "fingerprint": "abc",
        "prefix": [1, 2],
    }
    with DocumentStore.open(url) as other:
        with pytest.raises(errors.EmbedderMismatchError, match=r"minilm.*contriever"):
            other.bind("embedder", {"name": "contriever", "dimension": 768})
        with pytest.raises(errors.ModelMismatchError, match=r"fingerprint 'abc', not 'abd'"):
            other.bind("fingerprint", "abd")
        with pytest.raises(errors.StoreMismatchError, match="prefix"):
            other.bind("prefix", (1, 3))
        other.bind("prefix", (1, 2))


def test_embeddings_keep_the_length_of_the_first(store):
    put(store, "a", "h")
    with pytest.raises(errors.EmbedderMismatchError, match="embedding_dim 4, not 5"):
        store.replace_document(NewDocument("b"), [new_chunk("b.0", embedding=np.zeros(5, np.float32))])
    assert store.document("b") is None
    with pytest.raises(errors.ConfigError, match="differ in length"):
        store.replace_document(
            NewDocument("b"), [new_chunk("b.0"), new_chunk("b.1", embedding=np.zeros(5, np.float32))]
        )


DEEP: dict[str, Any] = {}
for _ in range(3000):
    DEEP = {"x": DEEP}
NO_JSON: list[Any] = [
    {"x": float("nan")}, {"x": [1, {"y": float("inf")}]}, {"x": {1: "key"}}, {"x": b"bytes"}, {"x": "nul \0"},
    {"nul \0": 1}, {"x": "\ud800"}, {"x": {2}}, {"x": object()}, ["no object"], None,
]  # fmt: skip
REFUSED: list[tuple[NewDocument, list[NewChunk], type[errors.RagCacheError], str]] = [
    (NewDocument(""), [], errors.IngestError, "without an id"),
    (NewDocument("d", metadata=DEEP), [], errors.MetadataError, "levels"),
    *((NewDocument("d", metadata=metadata), [], errors.MetadataError, "'d'") for metadata in NO_JSON),
    *((NewDocument("d"), [new_chunk("c", metadata=metadata)], errors.MetadataError, "'d'") for metadata in NO_JSON),
    *(
        (NewDocument("d"), [new_chunk("d.0", embedding=embedding)], errors.ConfigError, r"chunk 'd.0'.*finite")
        for embedding in (np.zeros((1, DIM)), np.array([1.0, np.nan, 0, 0]), np.zeros(0))
    ),
    *(
        (document, chunks, errors.IngestError, "remove it")
        for bad in ("nul \0", "half \udfff")
        for document, chunks in (
            (NewDocument(bad), []),
            (NewDocument("d", source=bad), []),
            (NewDocument("d", title=bad), []),
            (NewDocument("d"), [new_chunk("c", text=bad)]),
            (NewDocument("d"), [new_chunk(bad)]),
            (NewDocument("d"), [new_chunk("c", handle=bad)]),
        )
    ),
]


def test_what_a_database_cannot_hold_is_refused(store):
    for document, chunks, error, words in REFUSED:
        with pytest.raises(error, match=words):
            store.replace_document(document, chunks)
    assert store.counts() == Counts(0, 0, 0)


def test_two_chunks_of_one_id_are_refused(store):
    generation = store.generation()
    with pytest.raises(errors.DuplicateDocumentError, match="two chunks with the id 'c'"):
        store.replace_document(NewDocument("b"), [new_chunk("c"), new_chunk("c")])
    assert (store.document("b"), store.handles(), store.generation()) == (None, set(), generation)


def test_a_taken_chunk_id_gets_a_suffix(store):
    def named(id: str) -> list[tuple[str, str]]:
        return [(chunk.id, chunk.text) for chunk in store.chunks_of(id)]

    put(store, "a", "h0", "h1")
    store.replace_document(NewDocument("b"), [new_chunk("a.0", text="x"), new_chunk("a.0##1", text="y")])
    assert named("b") == [("a.0##2", "x"), ("a.0##1", "y")]
    # A document is called what its caller says: a chunk of that name gives way, and keeps all else.
    [before] = store.chunks(["a.1"])
    store.replace_document(NewDocument("a.1"), [new_chunk("a.1", "h2", text="whole")])
    assert named("a.1") == [("a.1", "whole")]
    assert named("a") == [("a.0", "text of a.0"), ("a.1##1", "text of a.1")]
    [after] = store.chunks(["a.1##1"])
    assert (after.handle, after.vector_id, after.text) == (before.handle, before.vector_id, before.text)
    put(store, "a", "h0", "h1")
    assert [id for id, _ in named("a")] == ["a.0", "a.1##1"], "stable when the document is replaced"
    # The other way round, and by a move.
    put(store, "c", "h3")
    store.move_document("c", "a.0", StoredVersion("", "", ""), ["a.1"])
    assert named("a.0") == [("a.1##2", "text of c.0")]
    assert [id for id, _ in named("a")] == ["a.0##3", "a.1##1"]
    assert store.delete_documents(["a.1"]) == ["a.1"]
    assert [len(named(id)) for id in ("a", "a.0", "a.1", "b")] == [2, 1, 0, 2]


def test_a_failure_in_the_middle_changes_nothing(store, monkeypatch):
    put(store, "a", "h0", "h1")
    before = (store.chunks_of("a"), store.generation(), garbage_of(store), store.counts())

    def fail(connection: object) -> None:
        raise RuntimeError("stop")

    with monkeypatch.context() as patch:
        patch.setattr("ragcache.store.documents.rescue", fail)
        for change in (lambda: put(store, "a", "h2"), lambda: store.delete_documents(["a"])):
            with pytest.raises(RuntimeError, match="stop"):
                change()
    assert (store.chunks_of("a"), store.generation(), garbage_of(store), store.counts()) == before


def test_a_read_only_store_reads(url):
    with DocumentStore.open(url) as store:
        put(store, "a", "h")
        store.bind("embedder", "minilm")
    with DocumentStore.open(url, read_only=True) as reader:
        assert reader.chunks_of("a")[0].handle == "h"
        reader.bind("embedder", "minilm")
        reader.bind("fingerprint", "not recorded")
        assert "fingerprint" not in reader.properties()
        with pytest.raises(errors.EmbedderMismatchError):
            reader.bind("embedder", "contriever")
        for change in (
            lambda: put(reader, "b"),
            lambda: reader.delete_documents(["a"]),
            lambda: reader.set_handles({vector_id(reader, "a.0"): None}),
            lambda: reader.clear_garbage(["h"]),
        ):
            with pytest.raises(errors.StoreReadOnlyError, match="read-only"):
                change()
    with DocumentStore.open(url) as store:
        assert store.counts() == Counts(1, 1, 2)


def test_long_lists_are_taken_in_parts(store, monkeypatch):
    monkeypatch.setattr("ragcache.store.rows.IN_LIMIT", 7)
    ids = put(store, "large", *(f"h{number}" for number in range(50)))
    assert [chunk.vector_id for chunk in store.chunks_by_vector_ids(reversed(ids))] == ids[::-1]
    for number in range(20):
        put(store, f"d{number}")
    assert len(store.delete_documents([*(f"d{number}" for number in range(20)), "large"])) == 21
    assert len(store.collectable()) == 50
    store.clear_garbage(store.collectable())
    assert store.collectable() == set()


def test_a_large_document_is_one_insert(store):
    ids = put(store, "large", *(f"h{number}" for number in range(2500)))
    assert len(store.chunks_by_vector_ids(ids)) == 2500


# Neighbours


@pytest.fixture
def table(store: DocumentStore) -> NeighbourTable:
    return NeighbourTable(store.database)


def put_one(store: DocumentStore, name: str, handle: str | None = None) -> int:
    """A document of one chunk; its vector id."""
    return put(store, name, handle)[0]


def handle_of(store: DocumentStore, name: str) -> str | None:
    return store.chunks([f"{name}.0"])[0].handle


def test_neighbours_come_back_in_their_order(store, table):
    a, b, c = (put_one(store, name) for name in "abc")
    assert table.record({a: [Near(c, 0.9), Near(b, 0.4)], b: [Near(c, 0.5)]}) == {a, b}
    assert table.of([a, b, c, 999]) == {a: [c, b], b: [c]}
    assert table.known() == {a: KnownNeighbours(2, 0.4), b: KnownNeighbours(1, 0.5)}


def test_other_neighbours_make_the_kv_garbage_and_the_same_ones_do_not(store, table):
    a, b, c = (put_one(store, name, f"h{name}") for name in "abc")
    table.record({a: [Near(b, 0.9), Near(c, 0.4)]})
    assert (handle_of(store, "a"), garbage_of(store)) == (None, {"ha"})
    store.clear_garbage(["ha"])
    store.set_handles({vector_id(store, "a.0"): "h2"})
    assert table.record({a: [Near(b, 0.9), Near(c, 0.4)]}) == {a}
    assert (handle_of(store, "a"), garbage_of(store)) == ("h2", set())
    table.record({a: [Near(c, 0.4), Near(b, 0.4)]})
    assert (handle_of(store, "a"), garbage_of(store), table.of([a])) == (None, {"h2"}, {a: [c, b]})
    assert (handle_of(store, "b"), handle_of(store, "c")) == ("hb", "hc")


@pytest.mark.parametrize("how", ["delete", "replace", "move onto it"])
def test_a_chunk_that_goes_takes_the_kv_that_was_read_behind_it(store, table, how):
    a, b, c, d = (put_one(store, name) for name in "abcd")
    for id, near in ((a, [b, c]), (b, [a]), (c, [d]), (d, [c, b])):
        table.record({id: [Near(one, 0.5) for one in near]})
    store.set_handles(dict(zip((a, b, c, d), ("ha", "hb", "hc", "hd"), strict=True)))
    if how == "delete":
        store.delete_documents(["b"])
    elif how == "replace":
        put_one(store, "b", "new")
    else:
        store.move_document("a", "b", StoredVersion("", "", ""), ["b.0"])
    assert [handle_of(store, name) for name in "cd"] == ["hc", None]
    assert table.of([c, d]) == {c: [d]}
    assert garbage_of(store) == {"ha", "hb", "hd"}
    if how == "move onto it":  # the chunk keeps its vector id; what it was read behind is gone
        assert (handle_of(store, "b"), table.of([a])) == (None, {})
    else:
        assert (handle_of(store, "a"), table.of([a, b])) == (None, {})


def test_neighbours_follow_a_document_that_is_moved(store, table):
    a, b = put_one(store, "a"), put_one(store, "b")
    table.record({a: [Near(b, 0.5)], b: [Near(a, 0.5)]})
    store.set_handles({a: "ha", b: "hb"})
    store.move_document("a", "z", StoredVersion("", "", ""), ["z.0"])
    assert table.of([a, b]) == {a: [b], b: [a]}
    assert (handle_of(store, "z"), garbage_of(store)) == ("ha", set())


def test_a_chunk_that_has_gone_is_recorded_nowhere(store, table):
    a, b, c = put_one(store, "a", "ha"), put_one(store, "b"), put_one(store, "c")
    store.delete_documents(["b"])
    assert table.record({a: [Near(c, 0.6), Near(b, 0.5)], b: [Near(a, 0.5)], c: [Near(a, 0.6)]}) == {c}
    assert (table.of([a, b, c]), handle_of(store, "a")) == ({c: [a]}, "ha")


def test_chunks_without_kv_come_in_the_order_of_storing(store, table):
    put(store, "d", None)
    put(store, "b", "hb")
    put(store, "a", None)
    assert table.without_kv() == [vector_id(store, "d.0"), vector_id(store, "a.0")]


def test_the_last_id_compared_is_kept(store, table):
    assert table.compared() == 0
    table.set_compared(7)
    table.set_compared(12)
    assert table.compared() == 12
    assert store.generation() == 0


def test_nothing_is_recorded_where_nothing_may_be_written(store, url):
    a = put_one(store, "a")
    with DocumentStore.open(url, read_only=True) as reader, pytest.raises(errors.StoreReadOnlyError):
        NeighbourTable(reader.database).record({a: []})


def test_a_view_shows_and_changes_its_collections_alone(url):
    with DocumentStore.open(url) as documents:
        everyone, table = View.of([OTHERS], [OTHERS]), CollectionTable(documents.database)
        for name in ("a", "b", "vs_1"):
            table.create(name)
        for name in ("default", "a", "b", "vs_1"):
            chunk = NewChunk("one#0", f"text of {name}", [1], np.ones(2, np.float32), handle="same")
            documents.seen_by(View().only(name)).replace_document(
                NewDocument("one", f"of {name}", "hash", {"of": name}), [chunk]
            )
        for view, seen in (
            (View().only("a"), ["a"]),
            (View().only("vs_1"), ["vs_1"]),
            (everyone, ["a", "b", "default"]),
        ):
            store = documents.seen_by(view)
            assert [one.collection for one in store.documents()] == seen
            assert (store.count(), store.counts().documents, len(store.versions())) == (len(seen), len(seen), 1)
            assert {one.collection for one in store.chunks_of("one")} == set(seen)
            assert store.document("one").collection == store.chunks(["one#0"])[0].collection == seen[0]
            assert {one.collection for one in store.chunks_by_handle(["same"])} <= set(seen)
            found = store.chunks_by_vector_ids(documents.vector_ids())
            assert sorted(one.collection for one in found) == seen
            assert {one.salt for one in found} == {table.secret(name) for name in seen}
            assert store.vector_ids() == {one.vector_id for one in found}
            assert store.vector_ids() is store.vector_ids(), "found once"
            assert [id for batch in store.token_ids() for id, _ in batch] == sorted(store.vector_ids())
            assert store.search_text("text", 9) == sorted(store.vector_ids()) or len(seen) > 1
            assert set(store.search_text("text", 9)) == set(store.search_text("text", 9, {})) == store.vector_ids()
            assert len(store.handles_by_vector_ids(sorted(documents.vector_ids()))) == len(seen)
            assert store.unknown_fields({"of": "a"})[0] == []
            generation = store.generation()
            assert not store.shows_all()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(store.database, "read", lambda: pytest.fail("the generation is known"))
                assert not store.shows_all(generation=generation)
            assert not documents.seen_by(store.view).shows_all(generation=-1), (
                "an index that was never brought up to date"
            )
        a = documents.seen_by(View().only("a"))
        before = a.vector_ids()
        a.replace_document(NewDocument("two", "", "hash"), [NewChunk("two#0", "t", [1], np.ones(2, np.float32))])
        assert a.vector_ids() > before
        a.move_document("two", "three", StoredVersion("hash", "", ""), ["three#0"])
        assert [one.id for one in a.documents()] == ["one", "three"]
        assert documents.seen_by(View(frozenset("ab"), frozenset("b"), "b")).delete_documents(["one", "three"]) == [
            "one"
        ]
        assert [one.collection for one in documents.documents()] == ["a", "default", "vs_1", "a"]
        assert documents.shows_all()
        assert documents.shows_all({"of": "a"}) is False


def test_secrets_differ_and_the_salt_is_of_all_of_them(url):
    with DocumentStore.open(url) as documents:
        table = CollectionTable(documents.database)
        for name in ("a", "b"):
            table.create(name)
        table.create("open", public=True)
        assert (table.secret("default"), table.secret("open"), table.secret("none")) == ("", "", None)
        assert len({table.secret("a"), table.secret("b"), ""}) == 3
        salts = [table.salt(View.of(names, [])) for names in ("a", "b", "ab", ["default"], ["default", "a"], [OTHERS])]
        assert len(set(salts)) == 6
        assert table.salt(View.of("ba", [])) == salts[2]
        assert (salts[0], salts[5], table.salt(View())) == (table.secret("a"), "", "")
        first = table.secret("a")
        table.create("a")
        assert table.secret("a") == first
        table.drop("a")
        with pytest.raises(errors.NoSuchCollectionError, match="no collection 'a'"):
            table.salt(View.of("a", []))
