"""A store whose chunks are read behind those before them in their document, against plain forwards over both."""

from __future__ import annotations

import pytest
from plain_oracle import assert_read_behind
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.errors import ConfigError, StoreMismatchError

SHORT = rc.Sampling(max_tokens=4)
LINES = [
    "The cat sat on the mat in the town.",
    "Dogs bark at night in the town of Kelbrook.",
    "The river Arno rises in the Vale hills.",
    "The rowing club of Kelbrook meets on Monday.",
    "Its boats lie on the river Arno.",
]
CUT = rc.ChunkerConfig(max_tokens=16, min_tokens=1)


def document(id, lines):
    return rc.Document(id, "\n\n".join(lines) + "\n")


FIRST, SECOND = document("first", LINES), document("second", LINES[2:] + LINES[:2])


@pytest.fixture
def open_behind(open_kb):
    def open_one(count=2, **options):
        store = rc.StoreConfig(neighbours=count, neighbours_from="document", **options.pop("store", {}))
        return open_kb(store=store, chunker=CUT, **options)

    return open_one


@pytest.fixture
def kb(open_behind):
    kb = open_behind()
    kb.ingest([FIRST, SECOND])
    return kb


def assert_true(kb, oracle, count=2):
    """Every chunk's KV is that of a plain forward over the chunks before it in its document, in order, and itself."""
    several = 0
    for one in kb.documents():
        chunks = kb.chunks_of(one.id)
        several += len(chunks) > count
        for rank, chunk in enumerate(chunks):
            before = [other.token_ids for other in chunks[max(0, rank - count) : rank]]
            assert_read_behind(kb.store.kv.get(chunk.handle).block, oracle[0], before, chunk.token_ids)
    assert several, "no document is longer than what its chunks are read behind"


def handles(kb):
    return {chunk.id: chunk.handle for one in kb.documents() for chunk in kb.chunks_of(one.id)}


def test_every_chunk_is_read_behind_those_before_it_in_its_document(kb, oracle):
    assert_true(kb, oracle)
    assert {source.kv for source in kb.ask("Where do dogs bark?", k=3, sampling=SHORT).hits} == {"memory"}
    assert kb.doctor().sound


@pytest.mark.parametrize("mode", ["lazy", "hot"])
def test_what_is_computed_at_first_use_is_the_same(kb, open_behind, tmp_path, mode):
    other = open_behind(path=tmp_path / "other")
    other.ingest([FIRST, SECOND], kv=mode, hot_after=1)
    for line in LINES:
        other.ask(line, k=4, sampling=SHORT)
    found = {id: handle for id, handle in handles(other).items() if handle}
    assert len(found) > 2
    assert found.items() <= handles(kb).items()


def test_other_documents_change_nothing(kb, oracle):
    before = handles(kb)
    report = kb.ingest(document("third", LINES[::-1]))
    now = handles(kb)
    assert before.items() <= now.items()
    third, read = kb.chunks_of("third"), 0
    for rank, chunk in enumerate(third):
        if chunk.handle not in before.values():  # the same text behind the same text is one block
            read += sum(one.num_tokens for one in third[max(0, rank - 2) : rank + 1])
    assert report.computed_tokens == read > 0
    kb.delete("second")
    assert handles(kb) == {id: handle for id, handle in now.items() if not id.startswith("second")}
    assert set(kb.store.kv.keys()) == set(handles(kb).values()), "a deletion leaves no KV (law 10)"
    assert_true(kb, oracle)


def test_a_document_that_is_replaced_is_read_anew(kb, oracle):
    kb.ingest(document("first", [LINES[4], *LINES[:4]]))
    assert_true(kb, oracle)
    assert set(kb.store.kv.keys()) == set(handles(kb).values())


def test_more_neighbours_than_there_are_chunks_are_all_of_them(open_behind):
    kb = open_behind(10**9)
    kb.ingest([document("first", LINES[:2]), document("second", LINES[2:4])])
    for one in kb.documents():
        near = kb._parts.names.with_neighbours(kb.chunks_of(one.id))
        assert [len(chunk.neighbours) for chunk in near] == [*range(len(near))]


def test_what_does_not_fit_is_left_out_farthest_first(open_kb, tmp_path):
    small = rc.load_lm(save_tiny_llama(tmp_path / "small", positions=40))
    store = rc.StoreConfig(neighbours=3, neighbours_from="document")
    kb = open_kb(tmp_path / "kb", model=small, method="reposition", store=store, chunker=CUT)
    kb.ingest(FIRST)
    chunks, recipe, left_out = kb.chunks_of("first"), kb._parts.names.recipe, 0
    for rank, chunk in enumerate(chunks):
        before = [other.token_ids for other in chunks[max(0, rank - 3) : rank]]
        while sum(map(len, before)) + chunk.num_tokens > 40:
            before, left_out = before[1:], left_out + 1
        assert chunk.handle == small.block_key(chunk.token_ids, recipe, neighbours=before)
    assert left_out


def test_a_question_over_first_chunks_writes_nothing(open_behind):
    kb = open_behind()
    kb.ingest([rc.Document("one", LINES[0])])
    kb.close()
    reader = open_behind(store={"read_only": True})
    assert reader.ask("Where did the cat sit?", k=1, sampling=SHORT).hits[0].kv == "disk"


def test_the_store_knows_where_its_neighbours_are_from(kb, open_kb, open_behind):
    assert type(open_kb()._parts.names.neighbourhood).__name__ == "Preceding"
    with pytest.raises(StoreMismatchError, match="neighbours=2, neighbours_from='document', not neighbours=1"):
        open_behind(1)
    with pytest.raises(StoreMismatchError, match="'document', not neighbours=2, neighbours_from='similarity'"):
        open_kb(store=rc.StoreConfig(neighbours=2, neighbours_from="similarity"))
    assert open_kb(store=rc.StoreConfig(neighbours=2))._parts.names.recipe.neighbours == 2


def test_a_source_without_neighbours_and_an_unknown_one_are_refused(open_kb):
    with pytest.raises(ConfigError, match="give neighbours=1"):
        open_kb(store=rc.StoreConfig(neighbours_from="document"))
    with pytest.raises(ConfigError, match="neighbours_from"):
        rc.StoreConfig(neighbours=1, neighbours_from="title")
