"""Askers over the same passages hold them once, at the same time and later, and get what each gets alone."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from waiting import WAIT_S, until

import ragcache as rc
from ragcache.engine.admission import Admission, MemoryNeed, SharedPrefixes, SharedPrefixRef, Size
from ragcache.errors import CancelledError
from ragcache.kv.buffers import BufferHandle, KVBuffers, SharedContext
from ragcache.kv.prefix_cache import PrefixCache
from ragcache.models.deadline import NO_LIMIT, Limit

QUESTIONS = [
    "Where do dogs bark?",
    "Where does the river rise?",
    "When does the rowing club meet?",
    "Is the cat happy?",
]
SHORT, LONG = rc.Sampling(max_tokens=6), rc.Sampling(max_tokens=200)


@pytest.mark.parametrize("method", ["reposition", "full", "concat"])
def test_askers_of_one_context_share_it(kb, method):
    """Eight streams that are open at once: the first placed it, the others stand on it, and all say what one says."""
    hits = kb.retrieve(QUESTIONS[0], k=3)
    alone = [kb.ask(question, hits=hits, method=method, sampling=SHORT) for question in QUESTIONS]
    kb._reader.clear()
    streams = [kb.stream(question, hits=hits, method=method, sampling=SHORT) for question in QUESTIONS]
    sources, answers = [], []
    for stream in streams:  # each has its first token before the next is asked
        sources.append(next(stream).hits)
        next(event for event in stream if isinstance(event, rc.Token))
    for stream in streams:
        answers.append(next(event.answer for event in stream if isinstance(event, rc.Done)))
    assert {source.kv for found in sources[1:] for source in found} == {"shared"}
    assert "shared" not in {source.kv for source in sources[0]}
    for answer, expected in zip(answers, alone, strict=True):
        assert answer.text == expected.text
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    for answer in answers[1:]:
        assert answer.usage.computed_tokens < answers[0].usage.prompt_tokens / 2
    for stream in streams:
        stream.close()
    again = kb.ask(QUESTIONS[0], hits=hits, method=method, sampling=SHORT)
    assert {source.kv for source in again.hits} == {"exact" if method == "full" else "shared"}
    assert again.text == alone[0].text


def test_their_memory_is_little_more_than_one_askers(kb, lm, monkeypatch):
    """Counted where buffers are made: the context once, and room for each answer."""
    hits = kb.retrieve(QUESTIONS[0], k=3)
    made = []
    allocate = KVBuffers.allocate

    def counted(shape, capacity):
        made.append(capacity)
        return allocate(shape, capacity)

    kb._reader.clear()
    lm.pool._idle.clear()
    monkeypatch.setattr(KVBuffers, "allocate", counted)
    streams = [kb.stream(question, hits=hits, sampling=SHORT) for question in QUESTIONS]
    for stream in streams:
        next(event for event in stream if isinstance(event, rc.Token))
    prompt = sum(hit.chunk.num_tokens for hit in hits)
    assert sum(capacity >= prompt for capacity in made) <= 1 or max(made) == 256, made
    for stream in streams:
        stream.close()


def test_askers_that_come_at_once_place_it_once(kb, monkeypatch):
    hits = kb.retrieve(QUESTIONS[0], k=3)
    expected = {question: kb.ask(question, hits=hits, sampling=SHORT).text for question in QUESTIONS}
    shared, tell = [], SharedPrefixRef._tell
    monkeypatch.setattr(SharedPrefixRef, "_tell", lambda self, *args: shared.append(1) or tell(self, *args))
    together = threading.Barrier(len(QUESTIONS))

    def ask(question):
        together.wait(WAIT_S)
        return kb.ask(question, hits=hits, sampling=LONG).text

    long = {q: kb.ask(q, hits=hits, sampling=LONG).text for q in QUESTIONS}
    shared.clear()
    kb._reader.clear()
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        assert dict(zip(QUESTIONS, pool.map(ask, QUESTIONS), strict=True)) == long
    assert 1 <= len(shared) < len(QUESTIONS), "some stood on what another had placed"
    assert {q: kb.ask(q, hits=hits, sampling=SHORT).text for q in QUESTIONS} == expected


def test_a_deleted_passage_is_in_no_further_answer(kb):
    """Law 10: who reads it now goes on; who asks afterwards does not find it."""
    hits = kb.retrieve(QUESTIONS[0], k=2)
    first = kb.stream(QUESTIONS[0], hits=hits, sampling=SHORT)
    next(event for event in first if isinstance(event, rc.Token))
    kb.delete(hits[0].chunk.document_id)
    second = kb.stream(QUESTIONS[1], hits=hits, sampling=SHORT)
    assert "shared" not in {source.kv for source in next(second).hits}
    assert next(event.answer for event in first if isinstance(event, rc.Done)).text
    second.close()


NEED = MemoryNeed(Size(10, 100), Size(1, 10))


def contexts_within(lm, answer_bytes=1000, budget_tokens=0):
    tree = PrefixCache(lm.shape, budget_tokens * lm.kv_bytes_per_token)
    admission = Admission(answer_bytes)
    return SharedPrefixes(admission, tree), admission, tree


def placed(lm, num_tokens):
    """A context in buffers of its own."""
    return SharedContext(BufferHandle(lm.pool, KVBuffers.allocate(lm.shape, num_tokens)), num_tokens)


def test_one_places_and_the_others_wait(lm):
    (contexts, admission, _), found = contexts_within(lm), []
    context, begun, go = placed(lm, 8), threading.Event(), threading.Event()

    def place():
        with contexts.admit("key", NEED, NO_LIMIT) as seat:
            with seat.placing(NO_LIMIT) as tell:
                begun.set()
                assert go.wait(WAIT_S)
                tell(context)
            until(lambda: found)
        return seat.claim.num_bytes

    def want():
        with contexts.admit("key", NEED, NO_LIMIT) as seat, seat.placing(NO_LIMIT) as tell:
            found.append((tell, seat.placed))
        return seat.claim.num_bytes

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(place)
        assert begun.wait(WAIT_S)
        second = pool.submit(want)
        until(lambda: admission.reserved_bytes == 110)
        cancelled = threading.Event()
        cancelled.set()
        with pytest.raises(CancelledError), contexts.admit("key", NEED, Limit(cancelled)):
            pass
        with contexts.admit("other", NEED, NO_LIMIT) as seat, seat.placing(NO_LIMIT):
            assert not found
        go.set()
        assert (first.result(WAIT_S), second.result(WAIT_S)) == (100, 10)
    assert found == [(None, context)]
    assert admission.reserved_bytes == 0


def test_who_fails_to_place_leaves_it_to_the_next(lm):
    contexts, admission, _ = contexts_within(lm)
    with ExitStack() as second, ExitStack() as first:
        failing = first.enter_context(contexts.admit("key", NEED, NO_LIMIT))
        other = second.enter_context(contexts.admit("key", NEED, NO_LIMIT))
        with pytest.raises(OSError, match="unreadable"), failing.placing(NO_LIMIT):
            raise OSError("unreadable")
        first.close()
        assert admission.reserved_bytes == 110, "what the first had is there for the second"
        with other.placing(NO_LIMIT) as tell:
            assert callable(tell)
    assert admission.reserved_bytes == 0


def test_memory_stays_reserved_while_anybody_reads_the_context(lm):
    """The first reserves all and ends first; the others reserve what is theirs."""
    contexts, admission, _ = contexts_within(lm)
    with ExitStack() as later:
        with contexts.admit("key", NEED, NO_LIMIT) as first:
            with first.placing(NO_LIMIT) as tell:
                tell(placed(lm, 8))
            for count in range(1, 8):
                seat = later.enter_context(contexts.admit("key", NEED, NO_LIMIT))
                assert seat.placed is first.placed
                assert admission.reserved_bytes == 100 + 10 * count
        assert admission.reserved_bytes == 170
    assert admission.reserved_bytes == 0


def test_a_context_that_is_over_blocks_nobody_who_waits_for_memory(lm):
    """One waits for its own tokens while the first has all memory: once that ends, there is room for the whole."""
    contexts, admission, _ = contexts_within(lm, answer_bytes=100)

    def second():
        with contexts.admit("key", NEED, Limit.of(None, WAIT_S, time.perf_counter())) as seat:
            return seat.claim.num_bytes

    with ThreadPoolExecutor(1) as pool:
        with contexts.admit("key", NEED, NO_LIMIT):
            waiting = pool.submit(second)
            until(lambda: admission.waiting)
        assert waiting.result(WAIT_S) == 100
    assert admission.reserved_bytes == 0


def leave(contexts, lm, key, num_tokens):
    """One question over a context, from beginning to end; whether it was known."""
    with contexts.admit(key, NEED, NO_LIMIT, keep=True) as seat, seat.placing(NO_LIMIT) as tell:
        if tell is not None:
            tell(placed(lm, num_tokens))
    return tell is None


def test_contexts_stay_in_half_of_the_budget_and_the_least_recently_used_go(lm):
    contexts, admission, tree = contexts_within(lm, budget_tokens=100)
    one = placed(lm, 20).num_bytes
    assert [leave(contexts, lm, key, 20) for key in "abacba"] == [False, False, True, False, False, False]
    assert tree.stats().lent_bytes == tree.stats().num_bytes == 2 * one <= tree.budget_bytes // 2
    assert admission.reserved_bytes == 0
    contexts.forget()
    assert tree.stats().lent_bytes == 0
    assert not leave(contexts, lm, "a", 20)


@pytest.mark.parametrize(("num_tokens", "is_kept"), [(80, True), (101, False)])
def test_one_context_may_take_more_than_half_and_no_more_than_all(lm, num_tokens, is_kept):
    contexts, _, tree = contexts_within(lm, budget_tokens=100)
    leave(contexts, lm, "small", 10)
    assert leave(contexts, lm, "large", num_tokens) is False
    assert leave(contexts, lm, "large", num_tokens) is is_kept
    assert leave(contexts, lm, "small", 10) is not is_kept
    assert tree.stats().num_bytes <= tree.budget_bytes


def test_what_is_read_is_not_given_up_for_another(lm):
    contexts, _, tree = contexts_within(lm, budget_tokens=100)
    leave(contexts, lm, "read", 80)
    with contexts.admit("read", NEED, NO_LIMIT) as seat:
        leave(contexts, lm, "other", 80)
        assert tree.stats().lent_bytes == seat.placed.num_bytes
        contexts.forget()
        assert tree.stats().lent_bytes == seat.placed.num_bytes, "it is there as long as it is read"
    assert tree.stats().lent_bytes == 0


def test_real_bytes_stay_within_the_budget(kb, open_kb, lm, monkeypatch):
    """Every buffer that outlives its answer is counted where it is made."""
    store = rc.StoreConfig(prefix_bytes=1200 * lm.kv_bytes_per_token)
    monkeypatch.setattr(lm.pool, "max_bytes", 0)
    lm.pool._idle.clear()
    alive, allocate = weakref.WeakSet(), KVBuffers.allocate

    def counted(shape, capacity):
        buffers = allocate(shape, capacity)
        alive.add(buffers)
        return buffers

    monkeypatch.setattr(KVBuffers, "allocate", counted)
    small, lent = open_kb(store=store), set()
    for count in (1, 2, 3, 2, 4, 1):
        for question in QUESTIONS:
            small.ask(question, k=count, sampling=SHORT)
            stats = small.prefix_stats()
            assert sum(buffers.num_bytes for buffers in alive) == stats.lent_bytes
            assert stats.lent_bytes <= stats.num_bytes <= store.prefix_bytes
            lent.add(stats.lent_bytes)
    assert max(lent) > 0
    small.delete("cats")
    assert small.prefix_stats().lent_bytes == 0
    assert len(alive) <= 1, "the model's thread still knows its last pass"


def test_a_repeated_prompt_only_runs_its_suffix(kb, open_kb):
    hits = kb.retrieve(QUESTIONS[0], k=3)
    for method in ("reposition", "concat"):
        first, again = (kb.ask(QUESTIONS[0], hits=hits, method=method, sampling=SHORT) for _ in range(2))
        suffix = kb._reader.prompts.question_ends(QUESTIONS[0]).suffix_ids
        assert again.usage.computed_tokens == len(suffix)
        assert {hit.kv for hit in again.hits} == {"shared"}
        assert again.text == first.text
    for method in ("cacheblend", "samkv"):  # what they compute depends on the question
        kinds = [{hit.kv for hit in kb.ask(QUESTIONS[0], hits=hits, method=method).hits} for _ in range(2)]
        assert "shared" not in kinds[0] | kinds[1]
    kb.ingest(rc.Document("new", "Something new.\n"))
    assert "shared" not in {hit.kv for hit in kb.ask(QUESTIONS[0], hits=hits, sampling=SHORT).hits}
    without = open_kb(store=rc.StoreConfig(prefix_bytes=0))
    for _ in range(2):
        answer = without.ask(QUESTIONS[0], hits=hits, sampling=SHORT)
        assert "shared" not in {hit.kv for hit in answer.hits}
    assert without.prefix_stats().num_bytes == 0
