"""What chunks are read behind, as SQL has it, and what goes with a chunk that others were read behind (law 10)."""

import numpy as np
import pytest

from ragcache.errors import StoreReadOnlyError
from ragcache.store.documents import DocumentStore
from ragcache.store.neighbours import KnownNeighbours, Near, NeighbourTable
from ragcache.store.records import NewChunk, NewDocument, StoredVersion


@pytest.fixture
def table(store: DocumentStore) -> NeighbourTable:
    return NeighbourTable(store.database)


def put(store: DocumentStore, name: str, handle: str | None = None, uses_left: int = 0) -> int:
    chunk = NewChunk(f"{name}.0", name, [1], np.ones(2, np.float32), handle=handle, uses_left=uses_left)
    (id,) = store.replace_document(NewDocument(name), [chunk])
    return id


def handle_of(store: DocumentStore, name: str) -> str | None:
    return store.chunks([f"{name}.0"])[0].handle


def test_neighbours_come_back_in_their_order(store, table):
    a, b, c = (put(store, name) for name in "abc")
    assert table.record({a: [Near(c, 0.9), Near(b, 0.4)], b: [Near(c, 0.5)]}) == {a, b}
    assert table.of([a, b, c, 999]) == {a: [c, b], b: [c]}
    assert table.known() == {a: KnownNeighbours(2, 0.4), b: KnownNeighbours(1, 0.5)}


def test_other_neighbours_make_the_kv_garbage_and_the_same_ones_do_not(store, table):
    a, b, c = (put(store, name, f"h{name}") for name in "abc")
    table.record({a: [Near(b, 0.9), Near(c, 0.4)]})
    assert (handle_of(store, "a"), store.garbage()) == (None, {"ha"})
    store.clear_garbage(["ha"])
    store.set_handle("a.0", "h2")
    assert table.record({a: [Near(b, 0.9), Near(c, 0.4)]}) == {a}
    assert (handle_of(store, "a"), store.garbage()) == ("h2", set())
    table.record({a: [Near(c, 0.4), Near(b, 0.4)]})
    assert (handle_of(store, "a"), store.garbage(), table.of([a])) == (None, {"h2"}, {a: [c, b]})
    assert (handle_of(store, "b"), handle_of(store, "c")) == ("hb", "hc")


@pytest.mark.parametrize("how", ["delete", "replace", "move onto it"])
def test_a_chunk_that_goes_takes_the_kv_that_was_read_behind_it(store, table, how):
    a, b, c, d = (put(store, name) for name in "abcd")
    for id, near in ((a, [b, c]), (b, [a]), (c, [d]), (d, [c, b])):
        table.record({id: [Near(one, 0.5) for one in near]})
    store.set_handles({f"{name}.0": f"h{name}" for name in "abcd"})
    if how == "delete":
        store.delete_documents(["b"])
    elif how == "replace":
        put(store, "b", "new")
    else:
        store.move_document("a", "b", StoredVersion("", "", ""), ["b.0"])
    assert [handle_of(store, name) for name in "cd"] == ["hc", None]
    assert table.of([c, d]) == {c: [d]}
    assert store.garbage() == {"ha", "hb", "hd"}
    if how == "move onto it":  # the chunk keeps its vector id; what it was read behind is gone
        assert (handle_of(store, "b"), table.of([a])) == (None, {})
    else:
        assert (handle_of(store, "a"), table.of([a, b])) == (None, {})


def test_neighbours_follow_a_document_that_is_moved(store, table):
    a, b = put(store, "a"), put(store, "b")
    table.record({a: [Near(b, 0.5)], b: [Near(a, 0.5)]})
    store.set_handles({"a.0": "ha", "b.0": "hb"})
    store.move_document("a", "z", StoredVersion("", "", ""), ["z.0"])
    assert table.of([a, b]) == {a: [b], b: [a]}
    assert (handle_of(store, "z"), store.garbage()) == ("ha", set())


def test_a_chunk_that_has_gone_is_recorded_nowhere(store, table):
    a, b, c = put(store, "a", "ha"), put(store, "b"), put(store, "c")
    store.delete_documents(["b"])
    assert table.record({a: [Near(c, 0.6), Near(b, 0.5)], b: [Near(a, 0.5)], c: [Near(a, 0.6)]}) == {c}
    assert (table.of([a, b, c]), handle_of(store, "a")) == ({c: [a]}, "ha")


def test_what_waits_for_more_retrievals_is_not_to_be_computed(store, table):
    put(store, "a")
    put(store, "b", "hb")
    put(store, "c", uses_left=2)
    put(store, "d")
    assert table.without_kv() == ["a.0", "d.0"]


def test_the_last_id_compared_is_kept(store, table):
    assert table.compared() == 0
    table.set_compared(7)
    table.set_compared(12)
    assert table.compared() == 12
    assert store.generation() == 0


def test_nothing_is_recorded_where_nothing_may_be_written(store, url):
    a = put(store, "a")
    with DocumentStore.open(url, read_only=True) as reader, pytest.raises(StoreReadOnlyError):
        NeighbourTable(reader.database).record({a: []})
