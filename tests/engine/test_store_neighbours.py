"""A store whose chunks are read behind their neighbours: those nearest to them, or those before them in their document;
against brute force and plain forwards over both.

Laws 8 and 10 hold for what a chunk was read behind as they do for the chunk.
"""

import numpy as np
import pytest
import torch
from blocks import tier_of
from plain_oracle import assert_read_behind
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.engine import local_engine
from ragcache.errors import ConfigError, StoreMismatchError
from ragcache.ingest.context_chunks import Similar
from ragcache.kv.block_key import block_key

SHORT = rc.Sampling(max_tokens=6)
QUESTION = "Where do dogs bark at night?"
TEXTS = {
    "cats": "The cat sat on the mat in the town.\n",
    "dogs": "Dogs bark at night in the town of Kelbrook.\n",
    "rivers": "The river Arno rises in the Vale hills.\n",
    "clubs": "The rowing club of Kelbrook meets on Monday.\n",
    "boats": "The boats of the rowing club lie on the river Arno.\n",
    "mats": "A mat of straw lay in the hall.\n",
}
NEARER = rc.Document("howls", "At night, wolves howl and dogs bark by Kelbrook town.\n")


@pytest.fixture
def open_near(open_kb):
    def open_one(count=2, **options):
        return open_kb(store=rc.StoreConfig(neighbours=count, **options.pop("store", {})), **options)

    return open_one


@pytest.fixture
def near(open_near):
    return open_near(texts=TEXTS)


def chunks_of(kb):
    return [chunk for document in kb.documents() for chunk in kb.chunks_of(document.id)]


def chunk_of(kb, document):
    return kb.chunks_of(document)[0]


def brute_force(kb, count=2):
    """By chunk id, the token ids of the chunks with the highest inner products, of equals the older chunk first.

    Copies are left out: texts that share more than a third of the shorter text's runs of eight letters, which are this
    model's tokens.
    """
    chunks = sorted(chunks_of(kb), key=lambda chunk: chunk.vector_id)
    scores = kb.vectors([chunk.id for chunk in chunks]).astype(np.float64)
    scores = scores @ scores.T
    found = {}
    for row, chunk in enumerate(chunks):
        order = sorted(range(len(chunks)), key=lambda other: -round(scores[row, other], 5))
        unlike = [chunk.token_ids]
        for other in order:
            if all(shared(chunks[other].token_ids, before) <= 1 / 3 for before in unlike):
                unlike.append(chunks[other].token_ids)
        found[chunk.id] = [tuple(ids) for ids in unlike[1 : count + 1]]
    return found


def shared(one, other):
    short, long = sorted((bytes(id % 256 for id in ids) for ids in (one, other)), key=len)
    runs = {short[at : at + 8] for at in range(len(short) - 7)}
    return sum(run in long for run in runs) / len(runs)


def keys_by_id(kb, **options):
    recipe, near = kb._parts.block_keys.recipe, brute_force(kb, **options)
    return {c.id: block_key(kb.lm.fingerprint, recipe, (), c.token_ids, neighbours=near[c.id]) for c in chunks_of(kb)}


def handles(kb):
    return {chunk.id: chunk.handle for chunk in chunks_of(kb)}


def assert_true(kb, oracle, **options):
    """Every chunk has the block of a plain forward over its neighbours and itself, and nothing else is stored."""
    near = brute_force(kb, **options)
    assert handles(kb) == keys_by_id(kb, **options)
    assert set(kb.store.kv.keys()) == set(handles(kb).values())
    for chunk in chunks_of(kb):
        assert_read_behind(kb.store.kv.get(chunk.handle).block, oracle[0], near[chunk.id], chunk.token_ids)


def ask(kb, **options):
    return kb.ask(QUESTION, k=4, sampling=SHORT, **options)


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_a_new_document_changes_what_it_is_nearer_to_and_nothing_else(open_near, oracle, kind):
    kb = open_near(store={"index": kind}, texts=TEXTS)
    before, near_before = handles(kb), brute_force(kb)
    report = kb.ingest(NEARER)
    near_now = brute_force(kb)
    changed = {id for id in before if near_before[id] != near_now[id]}
    assert 0 < len(changed) < len(before)
    assert {id for id, handle in handles(kb).items() if before.get(id) != handle} == {*changed, "howls#0"}
    assert_true(kb, oracle)
    read = [chunk for chunk in chunks_of(kb) if chunk.id in {*changed, "howls#0"}]
    behind = sum(len(one) for chunk in read for one in near_now[chunk.id])
    assert report.computed_tokens == behind + sum(chunk.num_tokens for chunk in read)
    assert kb.ingest(NEARER).computed_tokens == 0
    assert {source.kv for source in ask(kb).hits} == {"memory"}, "nothing is left to be computed"
    assert kb.doctor().sound


def test_deleting_a_document_deletes_what_was_read_behind_it_at_once(near, open_near, oracle):
    """Law 10: its neighbours' KV holds some of it."""
    other = open_near()
    ask(other)
    before, near_before, (gone,) = handles(near), brute_force(near), near.chunks_of("dogs")
    readers = {id for id, some in near_before.items() if tuple(gone.token_ids) in some}
    assert 0 < len(readers) < len(before) - 1
    assert near.delete("dogs") == ["dogs"]
    now = handles(near)
    assert {id for id in now if now[id] is None} == readers
    assert all(now[id] == before[id] for id in now if id not in readers)
    assert set(near.store.kv.keys()) == {handle for handle in now.values() if handle}
    for kb in (other, near):
        answer = kb.ask("Where does the rowing club of Kelbrook meet?", k=5, sampling=SHORT)
        assert {source.handle for source in answer.hits} == set(keys_by_id(kb).values())
        assert all(tier_of(kb.store.kv, before[id]) is None for id in (*readers, gone.id)), "nor in another's memory"
    assert_true(near, oracle)
    assert near.doctor().sound


def test_neighbours_are_found_at_first_use_where_kv_is(open_near, oracle):
    kb = open_near()
    for id, text in TEXTS.items():
        report = kb.ingest(rc.Document(id, text), kv="lazy")
        assert report.computed_tokens == 0
    first = kb.ask(QUESTION, k=6, sampling=SHORT)
    assert {source.kv for source in first.hits} == {"computed"}
    assert_true(kb, oracle)
    kb.ingest(NEARER, kv="lazy")
    assert {handle for handle in handles(kb).values() if handle} <= set(keys_by_id(kb).values()), "nothing is stale"
    kb.ask(QUESTION, k=7, sampling=SHORT)
    assert_true(kb, oracle)


def test_a_neighbour_that_is_deleted_while_its_reader_is_computed_leaves_nothing(near, monkeypatch):
    near_before, (gone,) = brute_force(near), near.chunks_of("dogs")
    reader = next(chunk for chunk in chunks_of(near) if tuple(gone.token_ids) in near_before[chunk.id])
    near.store.kv.delete(reader.handle)
    put = near.store.kv.put

    def put_too_late(key, block, **options):
        if key == reader.handle:
            assert near.delete("dogs") == ["dogs"]
        return put(key, block, **options)

    monkeypatch.setattr(near.store.kv, "put", put_too_late)
    answer = near.ask(" ".join(reader.text.split()[:-1]), k=1, sampling=SHORT)  # no passage of its own
    assert answer.hits[0].handle == reader.handle, "the question was asked before"
    assert tier_of(near.store.kv, reader.handle) is None
    assert near.document(reader.document_id).state == "pending"
    assert near.doctor().sound


def test_a_store_that_is_read_only_reads_behind_neighbours_and_records_none(open_near):
    kb = open_near()
    kb.ingest((rc.Document(id, text) for id, text in TEXTS.items()), kv="lazy")
    expected = keys_by_id(kb)
    kb.close()
    reader = open_near(store={"read_only": True})
    assert {source.chunk.id: source.handle for source in ask(reader).hits}.items() <= expected.items()
    assert set(handles(reader).values()) == {None}


def test_a_conversation_lets_go_of_kv_read_behind_what_was_deleted(near):
    near.ask(QUESTION, k=2, sampling=SHORT)
    near.chat([{"role": "user", "content": QUESTION}], k=2, context="keep", sampling=SHORT)
    tree = near._engine.prefixes._tree
    assert tree.owners()
    near.delete("boats")
    near.ask(QUESTION, k=2, sampling=SHORT)
    assert not tree.owners() & {chunk.vector_id for chunk in chunks_of(near)}


def test_neither_another_release_of_a_text_nor_the_same_text_is_a_neighbour_of_it(open_near, oracle):
    """Thirty near copies crowd out unlike texts at first, so that the search has to go on."""
    kb = open_near()
    releases = [f"The river Arno rises in the Vale hills, says release {n}.\n" for n in range(30)]
    kb.ingest(rc.Document(f"release{n}", text) for n, text in enumerate(releases))
    kb.ingest(rc.Document(f"{id}{n}", text) for id, text in TEXTS.items() for n in range(2))
    assert_true(kb, oracle)
    assert len({handle for id, handle in handles(kb).items() if "release" not in id}) == len(TEXTS)
    near = brute_force(kb)
    assert all(b"release" not in bytes(ids) for ids in near[chunk_of(kb, "release0").id])
    assert len(near[chunk_of(kb, "release0").id]) == 2


def test_neighbours_that_do_not_fit_the_model_are_left_out_farthest_first(open_kb, tmp_path):
    small = rc.load_lm(save_tiny_llama(tmp_path / "small", positions=100))
    kb = open_kb(tmp_path / "kb", model=small, method="reposition", store=rc.StoreConfig(neighbours=2), texts=TEXTS)
    near = brute_force(kb)
    assert_left_out(kb, [(chunk, near[chunk.id]) for chunk in chunks_of(kb)], farthest=-1)


def assert_left_out(kb, read, farthest):
    """Every chunk's name is that of its neighbours that fit. read: chunks, with all of their neighbours"""
    left_out, recipe = 0, kb._parts.block_keys.recipe
    for chunk, near in read:
        while chunk.num_tokens + sum(map(len, near)) > kb.lm.max_positions:
            near.pop(farthest)
            left_out += 1
        assert chunk.handle == block_key(kb.lm.fingerprint, recipe, (), chunk.token_ids, neighbours=near)
    assert left_out


def test_a_lone_chunk_and_a_passage_from_outside_are_read_alone(open_near, oracle):
    kb = open_near()
    kb.ingest(rc.Document("cats", TEXTS["cats"]))
    assert_true(kb, oracle)
    (source,) = kb.ask(QUESTION, hits=[rc.Passage("Nobody stored this.\n")], sampling=SHORT).hits
    assert source.handle == block_key(kb.lm.fingerprint, kb._parts.block_keys.recipe, (), source.chunk.token_ids)
    kb.ingest(rc.Document("dogs", TEXTS["dogs"]))
    assert_true(kb, oracle)


@pytest.mark.parametrize("id", [None, "mine"])
def test_the_text_of_a_stored_passage_is_read_from_its_block(near, id):
    own = chunk_of(near, "boats")
    for given in (own.text, own.text.rstrip()):
        answer = near.ask(QUESTION, hits=[rc.Passage(given, id=id)], method="reposition", sampling=SHORT)
        (hit,) = answer.hits
        assert (hit.handle, hit.chunk.id) == (own.handle, id or own.id)
        assert hit.kv in ("memory", "shared")
        assert answer.usage.cached_tokens >= own.num_tokens - 1
    other = near.ask(QUESTION, hits=[rc.Passage(own.text[:-9] + "Arbo.", id=id)], method="reposition", sampling=SHORT)
    assert [hit.kv for hit in other.hits] == ["computed"]


def test_every_method_that_moves_blocks_reads_them(near):
    for method in ("reposition", "cacheblend", "epic", "a3", "prophet", "samkv"):
        answer = ask(near, method=method)
        assert {source.kv for source in answer.hits} <= {"memory", "shared"}
        assert answer.method == method


def test_pinned_blocks_are_those_read_behind_neighbours(near):
    assert near.pin(["dogs"]) == [keys_by_id(near)["dogs#0"]]
    assert near.unpin(["dogs"]) == [keys_by_id(near)["dogs#0"]]


def test_a_copy_finds_its_own_neighbours(near, open_near, tmp_path, oracle):
    copy = open_near(path=tmp_path / "copy")
    copy.copy(near)
    assert_true(copy, oracle)


def test_a_store_that_had_none_takes_them_up_at_its_next_ingestion(open_kb, open_near, oracle):
    kb = open_kb(texts=TEXTS)
    kb.close()
    near = open_near()
    near.ingest(rc.Document("cats", TEXTS["cats"]))
    assert_true(near, oracle)


def test_what_failed_midway_is_finished_by_the_next_run(open_near, monkeypatch, oracle):
    kb = open_near()
    find = Similar._find

    def dying(self, vector_id):
        if vector_id == 4:
            raise MemoryError
        return find(self, vector_id)

    with monkeypatch.context() as patch:
        patch.setattr(Similar, "_find", dying)
        with pytest.raises(MemoryError):
            kb.ingest(rc.Document(id, text) for id, text in TEXTS.items())
    assert len(kb.documents()) == len(TEXTS)
    kb.ingest(rc.Document(id, text) for id, text in TEXTS.items())
    assert_true(kb, oracle)


# The number, and what does not go with it


def test_the_store_knows_how_many(near, open_kb, open_near):
    assert open_kb()._parts.block_keys.recipe.neighbours == 2
    assert open_kb(recipe=rc.Recipe(neighbours=2))._parts.block_keys.recipe.neighbours == 2
    for other in (0, 3):
        with pytest.raises(StoreMismatchError, match=rf"made with neighbours=2, .* not neighbours={other}"):
            open_near(other)
    with pytest.raises(StoreMismatchError, match=r"made with neighbours=2, .* not neighbours=1"):
        open_kb(recipe=rc.Recipe(neighbours=1))


@pytest.mark.parametrize("count", [-1, 1.5, "2"])
def test_what_is_no_number_of_neighbours_is_refused(count):
    with pytest.raises(ConfigError, match=r"neighbours=.*choose 0 or more"):
        rc.StoreConfig(neighbours=count)


def test_what_cannot_read_such_blocks_is_refused_before_anything_is_bound(open_near, open_kb):
    with pytest.raises(ConfigError, match="'concat' leaves blocks at the positions"):
        open_near(method="concat")
    assert "neighbours" not in open_kb().store.documents.properties()


def test_what_does_not_go_with_neighbours_says_so(near):
    with pytest.raises(ConfigError, match="ingest without a cluster"):
        near.ingest(rc.Document("x", "y"), ray=True)


# Those before a chunk in its document

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
def behind(open_behind):
    kb = open_behind()
    kb.ingest([FIRST, SECOND])
    return kb


def assert_in_order(kb, oracle, count=2):
    """Every chunk's KV is that of a plain forward over the chunks before it in its document, in order, and itself."""
    several = 0
    for one in kb.documents():
        chunks = kb.chunks_of(one.id)
        several += len(chunks) > count
        for rank, chunk in enumerate(chunks):
            before = [other.token_ids for other in chunks[max(0, rank - count) : rank]]
            assert_read_behind(kb.store.kv.get(chunk.handle).block, oracle[0], before, chunk.token_ids)
    assert several, "no document is longer than what its chunks are read behind"


def test_every_chunk_is_read_behind_those_before_it_in_its_document(behind, oracle):
    assert_in_order(behind, oracle)
    assert {source.kv for source in behind.ask("Where do dogs bark?", k=3, sampling=SHORT).hits} == {"memory"}
    assert behind.doctor().sound


def test_what_is_computed_at_first_use_is_the_same(behind, open_behind, tmp_path):
    other = open_behind(path=tmp_path / "other")
    other.ingest([FIRST, SECOND], kv="lazy")
    for line in LINES:
        other.ask(line, k=4, sampling=SHORT)
    found = {id: handle for id, handle in handles(other).items() if handle}
    assert len(found) > 2
    assert found.items() <= handles(behind).items()


def test_other_documents_change_nothing(behind, oracle):
    before = handles(behind)
    report = behind.ingest(document("third", LINES[::-1]))
    now = handles(behind)
    assert before.items() <= now.items()
    third, read = behind.chunks_of("third"), 0
    for rank, chunk in enumerate(third):
        if chunk.handle not in before.values():  # the same text behind the same text is one block
            read += sum(one.num_tokens for one in third[max(0, rank - 2) : rank + 1])
    assert report.computed_tokens == read > 0
    behind.delete("second")
    assert handles(behind) == {id: handle for id, handle in now.items() if not id.startswith("second")}
    assert set(behind.store.kv.keys()) == set(handles(behind).values()), "a deletion leaves no KV (law 10)"
    assert_in_order(behind, oracle)


def test_more_neighbours_than_there_are_chunks_are_all_of_them(open_behind):
    kb = open_behind(10**9)
    kb.ingest([document("first", LINES[:2]), document("second", LINES[2:4])])
    for one in kb.documents():
        near = kb._parts.block_keys.with_neighbours(kb.chunks_of(one.id))
        assert [len(chunk.neighbours) for chunk in near] == [*range(len(near))]


def test_what_does_not_fit_is_left_out_farthest_first(open_kb, tmp_path):
    small = rc.load_lm(save_tiny_llama(tmp_path / "small", positions=40))
    store = rc.StoreConfig(neighbours=3, neighbours_from="document")
    kb = open_kb(tmp_path / "kb", model=small, method="reposition", store=store, chunker=CUT)
    kb.ingest(FIRST)
    chunks = kb.chunks_of("first")
    before = [[other.token_ids for other in chunks[max(0, rank - 3) : rank]] for rank in range(len(chunks))]
    assert_left_out(kb, zip(chunks, before, strict=True), farthest=0)


def test_a_question_over_first_chunks_writes_nothing(open_behind):
    kb = open_behind()
    kb.ingest([rc.Document("one", LINES[0])])
    kb.close()
    reader = open_behind(store={"read_only": True})
    assert reader.ask("Where did the cat sit?", k=1, sampling=SHORT).hits[0].kv == "disk"


def test_the_store_knows_where_its_neighbours_are_from(behind, open_kb, open_behind):
    assert type(open_kb()._parts.block_keys.neighbourhood).__name__ == "Preceding"
    with pytest.raises(StoreMismatchError, match="neighbours=2, neighbours_from='document', not neighbours=1"):
        open_behind(1)
    with pytest.raises(StoreMismatchError, match="'document', not neighbours=2, neighbours_from='similarity'"):
        open_kb(store=rc.StoreConfig(neighbours=2, neighbours_from="similarity"))
    assert open_kb(store=rc.StoreConfig(neighbours=2))._parts.block_keys.recipe.neighbours == 2


def test_a_source_without_neighbours_and_an_unknown_one_are_refused(open_kb):
    with pytest.raises(ConfigError, match="give neighbours=1"):
        open_kb(store=rc.StoreConfig(neighbours_from="document"))
    with pytest.raises(ConfigError, match="neighbours_from"):
        rc.StoreConfig(neighbours=1, neighbours_from="title")


def test_a_passage_found_in_part_is_cut_from_its_own_block(near, monkeypatch):
    """Text follows the passages without the line break that ends them."""
    chunks, given = [chunks_of(near)[0], *chunks_of(near)[2:5]], []
    prefill = local_engine.prefill
    monkeypatch.setattr(local_engine, "prefill", lambda *all, **named: given.append(all[2]) or prefill(*all, **named))
    text = "".join(f"{chunk.text.strip()} and\n" for chunk in chunks)
    answer = near.complete(text, sampling=SHORT, method="reposition")
    assert [hit.chunk.whole.token_ids for hit in answer.hits] == [chunk.token_ids for chunk in chunks]
    for chunk, hit, block in zip(chunks, answer.hits, given[0], strict=True):
        start, stop = hit.chunk.cut_from[1], hit.chunk.cut_from[1] + hit.chunk.num_tokens
        assert 0 <= start <= 2
        assert 1 <= chunk.num_tokens - hit.chunk.num_tokens <= 2
        stored = near.store.kv.get(chunk.handle).block
        assert torch.equal(block.keys, stored.keys[:, :, start:stop])
        assert torch.equal(block.values, stored.values[:, :, start:stop])
