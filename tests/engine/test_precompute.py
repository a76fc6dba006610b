"""KV of passages that stay where they are: kept without embedding or text, found in any prompt, removed by name."""

import logging
import threading
from pathlib import Path

import pytest
from blocks import same, served_from
from engine_texts import TEXTS
from kit.makers import open_loading

import ragcache as rc
from ragcache.errors import CancelledError, ConfigError, ContextTooLongError, PromptError, StoreReadOnlyError

ONE = rc.Sampling(max_tokens=2)
MINE = [
    "The lighthouse of Brenholm was built of oak, and burnt down in a night of May, as its people tell.",
    "A ferry goes from Brenholm to the island every second hour, but not on Sundays, when its captain rests at home.",
]
TEXT = "Read this.\n\n" + "\n\n".join(MINE) + "\n\nWhere does the ferry go?"


open_kb = open_loading()


@pytest.fixture
def kb(open_kb):
    with open_kb() as opened:
        yield opened


def kvs(kb):
    return [hit.kv for hit in kb.complete(TEXT, sampling=ONE).hits]


def has(kb, *texts):
    return [one is not None for one in kb.precompute(list(texts), dry_run=True).handles]


@pytest.mark.parametrize(
    "given",
    [
        MINE,
        [rc.Document(str(rank), text) for rank, text in enumerate(MINE)],
        [rc.Passage(text) for text in MINE],
        (text for text in MINE),
        [MINE[:1], [rc.Document("b", MINE[1])]],
    ],
)
def test_passages_are_found_in_a_prompt_that_was_never_asked(open_kb, given):
    with open_kb() as kb:
        report = kb.precompute(given)
        assert (report.computed, report.known, report.failed, report.forgotten) == (2, 0, [], [])
        assert report.tokens == sum(kb.count_tokens(f"{text}\n") for text in MINE)
        assert kvs(kb) == ["disk", "disk"]
    with open_kb() as kb:
        assert kvs(kb) == ["disk", "disk"]
        assert (kb.info().documents, kb.info().chunks) == (0, 0)


def test_the_kv_is_that_of_the_passage_handed_over(open_kb, tmp_path):
    """Bit for bit, and under the same name."""
    with open_kb() as kb:
        made = kb.precompute(MINE).handles
    with open_kb(path=tmp_path / "other") as other:
        answer = other.complete([*map(rc.Passage, MINE), "Where?"], sampling=ONE)
        assert [hit.handle for hit in answer.hits] == made
        blocks = [other.store.kv.get(handle).block for handle in made]
    with open_kb() as kb:
        assert all(same(kb.store.kv.get(name).block, block) for name, block in zip(made, blocks, strict=True))


def test_nothing_is_embedded_and_no_text_is_kept(kb, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something was embedded")

    monkeypatch.setattr(kb.embedder, "embed", refuse)
    kb.precompute([rc.Document("a", MINE[0])])

    for file in kb.store.layout.root.rglob("*"):
        assert not file.is_file() or b"lighthouse" not in file.read_bytes(), file


def test_what_is_there_is_not_computed_again(kb):
    kb.precompute(MINE)
    seen = []
    with kb.lm.model.get_input_embeddings().register_forward_hook(lambda *_: seen.append(1)):
        report = kb.precompute([*MINE, *MINE])
    assert (report.computed, report.known, report.tokens) == (0, 4, 0)
    assert report.handles[:2] == report.handles[2:]
    assert not seen


def test_a_store_that_has_the_passage_as_a_document_keeps_one_block(kb):
    kb.ingest(rc.Document("own", MINE[0]), split=False)
    report = kb.precompute([rc.Document("a", MINE[0])], collection="theirs")
    assert (report.computed, report.known) == (0, 1)
    assert kb.forget(["a"], collection="theirs") == report.handles
    [chunk] = kb.chunks(["own"])
    assert chunk.handle in kb.store.kv
    assert [hit.kv for hit in kb.complete([rc.Passage(MINE[0]), "What?"], sampling=ONE).hits] != ["computed"]


def test_an_id_takes_the_place_of_the_one_before(kb):
    kb.precompute([rc.Document("a", MINE[0])], collection="c")
    report = kb.precompute([rc.Document("a", MINE[1])], collection="c")
    assert len(report.forgotten) == 1
    assert has(kb, *MINE) == [False, True]


def test_forgetting_by_id_source_and_text(kb):
    kb.precompute([rc.Document("a", MINE[0], source="page"), rc.Document("b", MINE[1])], collection="c")
    assert kb.forget("a") == []  # of another collection
    assert len(kb.forget(sources=["page"], collection="c")) == 1
    assert has(kb, *MINE) == [False, True]
    assert kb.forget(given=MINE[1]) == []  # the collection names it
    assert len(kb.forget("b", collection="c")) == 1
    kb.precompute(MINE)
    assert len(kb.forget(given=MINE)) == 2
    assert kvs(kb) == []


def test_what_is_forgotten_is_in_no_tier_and_no_prefix(kb):
    kb.precompute([rc.Document("a", MINE[0]), rc.Document("b", MINE[1])])
    assert kvs(kb) == ["disk", "disk"]
    assert kvs(kb)[0] in ("memory", "shared")
    [handle] = kb.forget("a")
    assert kb.store.kv.get(handle) is None
    assert kvs(kb) in (["disk"], ["memory"])
    assert kb.complete([rc.Passage(MINE[0]), "What?"], sampling=ONE).hits[0].kv == "computed"


MANUAL = {"page": 3, "page_label": "4", "title": "Ferries", "author": {"name": "Ann"}}


@pytest.mark.parametrize(
    ("given", "id", "document", "source"),
    [
        (rc.Document("b#1", MINE[1], MANUAL, source="b.pdf"), "b#1", "b.pdf", "b.pdf"),
        (rc.Document("b#1", MINE[1], {**MANUAL, "title": "Other"}, title="Ferries"), "b#1", "b#1", ""),
        (rc.Passage(MINE[1], "b#1", metadata={**MANUAL, "source": "b.pdf"}), "b#1", "b.pdf", "b.pdf"),
        (rc.Passage(MINE[1], metadata=MANUAL), "", "", ""),
    ],
)
@pytest.mark.parametrize("collection", ["", "theirs"])
def test_a_source_names_the_users_own_document(open_kb, given, id, document, source, collection):
    """In another process, too, and until the document is forgotten."""
    with open_kb() as kb:
        kb.precompute([MINE[0], given], collection=collection)
    with open_kb() as kb:
        first, second = (hit.chunk for hit in kb.complete(TEXT, sampling=ONE).hits)
        assert (first.id, first.title, first.metadata) == ("", "", {})
        assert (second.id, second.document_id, second.source) == (id, document, source)
        assert (second.title, second.place) == ("Ferries", "p. 4")
        assert second.metadata == dict(given.metadata)
        kb.forget(id or (), given=None if id else MINE[1], collection=collection)
        assert has(kb, MINE[1]) == [False]
        assert b"Ferries" not in kb.store.kv.passages.path.read_bytes()


def test_metadata_without_an_id_keep_no_kv_and_go_with_it(kb):
    kb.precompute(rc.Passage(MINE[0], metadata={"title": "Ferries"}))
    kb.precompute(rc.Document("a", MINE[0]), collection="c")
    assert len(kb.forget("a", collection="c")) == 1
    assert has(kb, MINE[0]) == [False]
    assert b"Ferries" not in kb.store.kv.passages.path.read_bytes()


def test_metadata_that_are_no_json_are_kept_as_text(kb):
    kb.precompute([rc.Document("a", MINE[0], {"path": Path("a/b.pdf"), 1: float("nan"), "bad": "\ud800 \0"}), MINE[1]])
    [metadata, _] = [hit.chunk.metadata for hit in kb.complete(TEXT, sampling=ONE).hits]
    assert metadata == {"path": "a/b.pdf", "1": "nan", "bad": "? "}


@pytest.mark.parametrize("other", ["c", "d"])
def test_one_text_of_two_documents_has_the_name_that_is_left(kb, other):
    kb.precompute([rc.Document("a", MINE[0], {"page": 1}), MINE[1]], collection="c")
    kb.precompute([rc.Document("b", MINE[0], {"page": 2})], collection=other)

    def pages():
        return [hit.chunk.metadata.get("page") for hit in kb.complete(TEXT, sampling=ONE).hits]

    assert pages() == [1, None]
    kb.forget("a", collection="c")
    assert pages() == [2, None]
    kb.precompute([rc.Document("b", MINE[0], {"page": 3})], collection=other)
    assert pages() == [3, None]
    kb.forget("b", collection=other)
    assert has(kb, MINE[0]) == [False]


def test_sync_removes_what_is_no_longer_given(kb):
    kb.precompute([rc.Document("a", MINE[0]), rc.Document("b", MINE[1])], collection="c")
    kb.precompute([rc.Document("a", MINE[0])], collection="other")
    report = kb.precompute([rc.Document("b", MINE[1])], collection="c", sync=True)
    assert report.forgotten == []  # the other collection names it
    assert has(kb, *MINE) == [True, True]
    assert len(kb.precompute([], collection="other", sync=True).forgotten) == 1
    assert has(kb, *MINE) == [False, True]


def test_texts_without_ids_can_be_kept_in_step(kb):
    kb.precompute(MINE, collection="c", sync=True)
    assert len(kb.precompute(MINE[:1], collection="c", sync=True).forgotten) == 1
    assert has(kb, *MINE) == [True, False]


def test_what_cannot_be_read_is_told_and_the_others_go_on(kb):
    report = kb.precompute(
        [rc.Document("long", "word " * 4000), rc.Document("blank", " \n"), rc.Document("a", MINE[0])]
    )
    assert [handle is None for handle in report.handles] == [True, True, False]
    assert [(one.source, type(one.error)) for one in report.failed] == [
        ("long", ContextTooLongError),
        ("blank", PromptError),
    ]


def test_an_id_whose_new_text_cannot_be_read_loses_its_old_kv(kb):
    kb.precompute([rc.Document("a", MINE[0])])
    kb.precompute([rc.Document("a", " ")])
    assert has(kb, MINE[0]) == [False]


def test_a_store_that_is_read_only(open_kb):
    with open_kb() as kb:
        kb.precompute(MINE[:1])
    with open_kb(store=rc.StoreConfig(read_only=True)) as kb:
        with pytest.raises(StoreReadOnlyError):
            kb.precompute(MINE)
        with pytest.raises(StoreReadOnlyError):
            kb.forget(given=MINE)
        assert has(kb, *MINE) == [True, False]


def test_a_budget_that_is_too_small_is_told(open_kb, tmp_path, caplog):
    with open_kb() as kb:
        [handle] = kb.precompute(MINE[:1]).handles
        one = kb.store.kv.foreign.lookup([handle])[handle].num_bytes
    texts = [f"{MINE[0]} Number {rank}." for rank in range(8)]
    with (
        open_kb(path=tmp_path / "small", store=rc.StoreConfig(foreign_cache=3 * one)) as kb,
        caplog.at_level(logging.WARNING),
    ):
        report = kb.precompute(texts)
        assert report.computed == 8
        assert "foreign_cache is too small" in caplog.text
        assert 0 < (kept := sum(has(kb, *texts))) < 8
        assert (report.evicted, report.budget_bytes) == (8 - kept, 3 * one)
        assert report.kv_bytes == kb.info().foreign.bytes <= 3 * one
        assert report.evicted_bytes > 0
        assert report.warning in caplog.text
        assert "raise StoreConfig(foreign_cache=...) or --foreign-cache" in report.warning


def test_what_a_later_call_evicts_is_told(open_kb, tmp_path, caplog):
    """One passage a call, as documents are added to an attached store: each fits, and pushes out one before it."""
    with open_kb() as kb:
        one = kb.precompute(MINE[:1]).kv_bytes
    texts = [rc.Document(f"{rank}", f"{MINE[0]} Number {rank}.") for rank in range(5)]
    small = rc.StoreConfig(foreign_cache=int(2.5 * one), prefix_bytes=0)
    with open_kb(path=tmp_path / "small", store=small) as kb, caplog.at_level(logging.WARNING):
        reports = [kb.precompute(text, collection="theirs") for text in texts]
        assert [bool(report.warning) for report in reports] == [False, False, True, True, True]
        assert "KV of 3 passages" in reports[-1].warning
        assert sum("foreign_cache is too small" in line.getMessage() for line in caplog.records) == 2  # not each time
        assert sum(has(kb, *(text.text for text in texts))) == 2
    with open_kb(path=tmp_path / "small", store=small) as kb:
        assert as_text(kb, f"{TEXT} {texts[0].text} Where?").hits == []  # looked for, and not taken off the list
        usage = kb.info().foreign
        assert (usage.passages, usage.evicted) == (2, 3)
        assert usage.budget_bytes == small.foreign_cache >= usage.bytes
        assert usage.evicted_bytes == pytest.approx(usage.bytes * 3 / 2, rel=0.05)
        kb.forget([text.id for text in texts[:2]], collection="theirs")
        assert kb.info().foreign.evicted == 1


def test_the_info_states_passages_bytes_and_budget(open_kb):
    with open_kb() as kb:
        assert kb.info().foreign.passages == 0
        report = kb.precompute(MINE)
        usage = kb.info().foreign
        assert (usage.passages, usage.bytes, usage.evicted, usage.prompt_bytes) == (2, report.kv_bytes, 0, 0)
        assert usage.budget_bytes == report.budget_bytes == 10 << 30
        assert report.kv_bytes > 0
        assert (report.evicted, report.warning) == (0, "")
        as_text(kb, "The story of the ferry. " * 9)
    with open_kb(store=rc.StoreConfig(read_only=True)) as kb:
        usage = kb.info().foreign
        assert (usage.passages, usage.bytes) == (2, report.kv_bytes)
        assert usage.prompt_bytes == kb.store.kv.foreign.stats().bytes_by_tier["disk"] - usage.bytes > 0
        assert kb.info().to_json()["foreign"]["passages"] == 2
    with open_kb(store=rc.StoreConfig(foreign_cache=0)) as kb:
        assert kb.info().foreign is None


def test_stopping_keeps_what_was_made(kb):
    stop = threading.Event()

    def texts():
        for rank in range(200):
            if rank == 100:
                stop.set()
            yield f"{MINE[0]} It is told for the time number {rank}."

    with pytest.raises(CancelledError):
        kb.precompute(texts(), cancelled=stop)
    assert has(kb, f"{MINE[0]} It is told for the time number 0.") == [True]
    assert has(kb, f"{MINE[0]} It is told for the time number 150.") == [False]


def test_progress_counts_passages(kb):
    seen = []
    kb.precompute((f"{MINE[0]} {rank}" for rank in range(70)), progress=seen.append)
    assert [event.done for event in seen] == [64, 70]


async def test_the_twins(kb):
    report = await kb.aprecompute(rc.Document("a", MINE[0]))
    assert await kb.aforget("a") == report.handles


def test_the_stores_own_hits(kb):
    kb.ingest(rc.Document(id, text) for id, text in TEXTS.items())
    hits = kb.retrieve("Kelbrook", k=2)
    assert kb.precompute(hits).known == 2


# Passages that were handed over: kept within a budget, found again in any prompt, after a restart too


def origins(answer):
    return [hit.kv for hit in answer.hits]


def given(kb, **options):
    return kb.complete([*map(rc.Passage, MINE), "Where does the ferry go?"], sampling=ONE, **options)


def as_text(kb, text=TEXT, **options):
    return kb.complete(text, sampling=ONE, **options)


def test_passages_of_no_document_outlive_the_process(open_kb):
    with open_kb() as kb:
        assert as_text(kb).hits == []
        assert origins(given(kb)) == ["computed", "computed"]
        first = as_text(kb)
        assert origins(first) == ["memory", "memory"]
    with open_kb() as kb:
        again = as_text(kb)
        assert origins(again) == ["disk", "disk"]
        assert (again.text, again.usage.prompt_tokens) == (first.text, first.usage.prompt_tokens)
        assert origins(given(kb)) == ["disk", "disk"]
        assert kb.info().chunks == 0


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_what_the_disk_gives_back_is_what_the_first_answer_read(open_kb, codec):
    store = rc.StoreConfig(codec=codec)
    with open_kb(store=store) as kb:
        given(kb)
        (key,) = kb._parts.block_keys.keys([hit.chunk for hit in given(kb).hits][:1])
        held = kb.store.kv.get(key).block
    with open_kb(store=store) as kb:
        assert served_from(kb.store.kv, key, held) == "disk"


def test_a_passage_handed_over_names_its_document(kb):
    one = rc.Passage(MINE[0], "b#1", metadata={"title": "Ferries", "source": "b.pdf", "page_label": "4"})
    [hit] = kb.complete([one, "Where does the ferry go?"], sampling=ONE).hits
    assert (hit.chunk.id, hit.chunk.title, hit.chunk.source, hit.chunk.place) == ("b#1", "Ferries", "b.pdf", "p. 4")


def test_zero_keeps_none(open_kb):
    with pytest.raises(ConfigError, match="foreign_cache is 0"):
        open_kb(store=rc.StoreConfig(foreign_cache=0)).precompute(MINE)
    with pytest.raises(ConfigError, match="foreign_cache"):
        rc.StoreConfig(foreign_cache=-1)


@pytest.mark.parametrize("way", ["precompute", "ask"])
def test_a_damaged_list_is_made_anew(open_kb, caplog, way):
    with open_kb() as kb:
        given(kb)
        path = kb.store.kv.passages.path
    path.write_bytes(b"no database " * 1000)
    with open_kb() as kb:
        assert as_text(kb).hits == []
        assert "damaged" in caplog.text
        if way == "precompute":
            report = kb.precompute(MINE)
            assert (report.computed, report.known) == (0, 2)
            assert kvs(kb) == ["disk", "disk"]
            return
        for hit in given(kb).hits:
            kb.store.kv.delete(kb._parts.block_keys.key(hit.chunk.token_ids))
        kb.complete([*map(rc.Passage, MINE[::-1]), "Where?"], sampling=ONE)  # in the same order they are shared
        assert len(as_text(kb).hits) == 2


def test_a_deleted_document_leaves_no_bytes(open_kb):
    """A passage that a caller handed over has the name that it has as a document (law 10)."""
    with open_kb() as kb:
        kb.ingest([rc.Document("ferry", MINE[1])], split=False)
        given(kb)
        kb.delete("ferry")
        given(kb)
        foreign = kb.store.kv.foreign
        assert len(list(foreign.keys())) == 2
        kb.ingest([rc.Document("ferry", MINE[1])], split=False)
        kb.delete("ferry")
        assert len(list(foreign.keys())) == len(kb.store.kv.passages.passages(kb._parts.block_keys.owner)) == 1
        assert [hit.chunk.text for hit in as_text(kb, TEXT + " " + MINE[0]).hits] != []
