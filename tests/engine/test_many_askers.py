"""Many askers of one store: the same answers, memory in order of arrival, and whoever gives up holds nobody up. Those
over the same passages hold them once, at the same time and later."""

import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from engine_texts import QUESTIONS
from kit.makers import threads
from tiny_model import save_tiny_llama
from waiting import WAIT_S, model_held, until

import ragcache as rc
from ragcache.engine.admission import Admission, Size, default_budget, kv_bytes
from ragcache.engine.caches.prefix_cache import PrefixCache
from ragcache.engine.caches.shared_prefixes import MemoryNeed, SharedPrefixes
from ragcache.errors import AnswerTooLargeError, CancelledError, ConfigError, PromptError, TimedOutError
from ragcache.kv.buffers import BufferHandle, KVBuffers, SharedContext
from ragcache.models.deadline import NO_LIMIT, Limit
from ragcache.models.encode import AbandonedSignal

METHODS = ["reposition", "full", "cacheblend", "epic"]
SHORT, LONG = rc.Sampling(max_tokens=6), rc.Sampling(max_tokens=80)


pool = threads(12)


def test_eight_askers_get_what_one_gets(kb, lm, pool):
    """Law 7, text by text: other questions, methods and samplings in the same passes."""
    samplings = [SHORT, rc.Sampling(max_tokens=9, temperature=1.0, seed=3)]
    asked = [
        (QUESTIONS[n % 4], {"k": 1 + n % 3, "method": METHODS[n % 4], "sampling": samplings[n // 4]}) for n in range(8)
    ]
    alone = [kb.ask(question, **options) for question, options in asked]
    with model_held(lm, pool):
        jobs = [pool.submit(kb.ask, question, **options) for question, options in asked]
        until(lambda: lm.scheduler.waiting == len(asked))
    for job, expected in zip(jobs, alone, strict=True):
        answer = job.result(WAIT_S)
        assert answer.text == expected.text
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
        assert answer.finish_reason == expected.finish_reason
    assert kb.admission.reserved_bytes == 0


def test_giving_up_while_the_model_is_busy(kb, lm, pool):
    cancelled = threading.Event()
    with model_held(lm, pool):
        gone = pool.submit(kb.ask, QUESTIONS[0], sampling=SHORT, cancelled=cancelled)
        late = pool.submit(kb.ask, QUESTIONS[1], sampling=SHORT, timeout_s=0.2)
        until(lambda: late.done())
        until(lambda: lm.scheduler.waiting == 1)
        cancelled.set()
        with pytest.raises(CancelledError):
            gone.result(WAIT_S)
        with pytest.raises(TimedOutError, match=r"within 0\.2 s; allow more time"):
            late.result(WAIT_S)
        assert kb.admission.reserved_bytes == 0
    assert kb.ask(QUESTIONS[0], sampling=SHORT).text


def test_a_deadline_ends_loading(kb, monkeypatch):
    """The blocks of passages from outside are never ready."""
    begun = []

    def never(*_, is_needed, **__):
        begun.append(1)
        until(lambda: not is_needed())
        raise AbandonedSignal

    monkeypatch.setattr(kb._engine.lookup.encoder.lm, "encode", never)
    with pytest.raises(TimedOutError, match=r"within 0\.2 s"):
        kb.ask(QUESTIONS[0], hits=[rc.Passage("Nobody has read this passage.")], sampling=SHORT, timeout_s=0.2)
    assert begun == [1]
    assert kb.admission.reserved_bytes == 0


def reserved_for(kb, **options):
    """Bytes that a question reserves."""
    events = kb.stream(QUESTIONS[0], **options)
    next(events)
    reserved = kb.admission.reserved_bytes
    events.close()
    assert kb.admission.reserved_bytes == 0
    return reserved


def test_an_answer_reserves_its_cache(kb, lm):
    """Reserve as much as the buffers that it then takes."""
    asked = ((3, 1), (2, 10**6))  # of other passages, so that neither stands on the other's context
    reserved = [reserved_for(kb, k=k, sampling=rc.Sampling(max_tokens=count)) for k, count in asked]
    prompt = kb.ask(QUESTIONS[0], k=3, sampling=rc.Sampling(max_tokens=1)).usage.prompt_tokens
    buffers = [KVBuffers.allocate(lm.shape, -(-tokens // 64) * 64) for tokens in (prompt + 1, lm.max_positions)]
    assert [one.num_bytes for one in buffers] == reserved, "no answer is longer than the model's context"
    assert reserved[0] < reserved[1]


def test_what_can_never_fit_is_named(kb, open_kb, tmp_path, lm):
    kb.close()
    small = open_kb(store=rc.StoreConfig(answer_bytes=1000))
    with pytest.raises(AnswerTooLargeError, match=r"tokens, whose KV takes \d+ bytes.*1000; ask for a shorter answer"):
        small.ask(QUESTIONS[0], sampling=SHORT)
    assert issubclass(AnswerTooLargeError, PromptError)
    with pytest.raises(ConfigError, match="answer_bytes is 0"):
        rc.StoreConfig(answer_bytes=0)
    assert default_budget(lm) > 1 << 28


def test_a_question_waits_for_memory_and_every_way_out_frees_it(kb, open_kb, lm, pool):
    kb.close()
    room = kv_bytes(lm, 192)  # for one of these questions, not for two
    tight = open_kb(store=rc.StoreConfig(answer_bytes=room))
    options = {"k": 1, "sampling": rc.Sampling(max_tokens=40)}
    expected = tight.ask(QUESTIONS[1], **options).text
    first = tight.stream(QUESTIONS[0], **options)
    next(first)
    assert tight.admission.reserved_bytes == kv_bytes(lm, 128)
    cancelled = threading.Event()
    gone = pool.submit(tight.ask, QUESTIONS[2], cancelled=cancelled, **options)
    until(lambda: tight.admission.waiting == 1)
    second = pool.submit(tight.ask, QUESTIONS[1], **options)
    until(lambda: tight.admission.waiting == 2)
    with pytest.raises(TimedOutError):
        tight.ask(QUESTIONS[3], timeout_s=0.01, **options)
    cancelled.set()
    with pytest.raises(CancelledError):
        gone.result(WAIT_S)
    assert not second.done()
    first.close()
    assert second.result(WAIT_S).text == expected
    assert (tight.admission.reserved_bytes, tight.admission.waiting) == (0, 0)


@contextmanager
def held(admission, num_bytes, num_tokens, limit):
    admission.reserve(lambda: Size(num_tokens, num_bytes), limit)
    try:
        yield
    finally:
        admission.release(num_bytes)


def test_a_large_answer_is_not_overtaken():
    """Budget 10: while 6 are held, 8 wait; 2 that come later would fit, and wait behind."""
    admission, order = Admission(10), []

    def hold(size):
        with held(admission, size, size, NO_LIMIT):
            order.append(size)

    with ThreadPoolExecutor(2) as pool:
        with held(admission, 6, 6, NO_LIMIT):
            jobs = [pool.submit(hold, 8)]
            until(lambda: admission.waiting == 1)
            jobs.append(pool.submit(hold, 2))
            until(lambda: admission.waiting == 2)
            assert order == []
        for job in jobs:
            job.result(WAIT_S)
    assert order == [8, 2]
    assert admission.reserved_bytes == 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_answers_that_grow_always_end_within_the_budget(seed):
    """Some take all at once, some grow by steps to their most, many more than the budget holds at a time; what some
    took at first is given back when all others are done, as a context's is."""
    rng, budget, held, most, lock = random.Random(seed), 100, 0, [0], threading.Lock()
    admission = Admission(budget)

    def answer(first, more, steps):
        nonlocal held
        limit = Limit.of(None, WAIT_S, time.perf_counter())
        claim = admission.reserve(lambda: Size(1, first, more), limit)
        for rank, step in enumerate([first, *steps]):
            if rank:
                admission.grow(claim, step, limit)
            with lock:
                held += step
                most[0] = max(most[0], held)
            time.sleep(0.001)
        with lock:
            held -= first + sum(steps)
        admission.end(claim)
        admission.release(first)

    with ThreadPoolExecutor(12) as many:
        jobs = []
        for _ in range(60):
            first = rng.randint(1, 15)
            more = rng.choice([0, rng.randint(1, budget - first), budget - first])
            steps, left = [], more
            while left:
                steps.append(rng.randint(1, left))
                left -= steps[-1]
            jobs.append(many.submit(answer, first, more, steps))
        for job in jobs:
            job.result(WAIT_S)
    assert budget / 2 < most[0] <= budget
    assert (admission.reserved_bytes, admission.waiting, admission._claims) == (0, 0, set())


def test_who_waits_to_grow_goes_before_who_waits_to_begin_and_may_give_up():
    admission, order = Admission(10), []
    other = admission.reserve(lambda: Size(1, 6), NO_LIMIT)
    claim = admission.reserve(lambda: Size(1, 2, 2), NO_LIMIT)
    assert not admission._can_end(3, admission._claims), "what may still be asked for is kept free"
    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(TimedOutError):
            admission.grow(claim, 5, Limit.of(None, 0.01, time.perf_counter()))
        begins = pool.submit(lambda: order.append(admission.reserve(lambda: Size(1, 6), NO_LIMIT)))
        until(lambda: admission.waiting == 1)
        admission.grow(claim, 2, NO_LIMIT)
        assert (claim.grown_bytes, claim.more_bytes, order) == (2, 0, [])
        admission.end(other)
        admission.release(6)
        begins.result(WAIT_S)
    assert admission.reserved_bytes == 10


@pytest.mark.slow
def test_answers_without_a_limit_share_memory_that_their_contexts_would_not(open_kb, tmp_path, pool):
    """The budget holds three contexts, and the beginnings of four answers, any of which may fill its own."""
    lm = rc.load_lm(save_tiny_llama(tmp_path / "lm", positions=1024))
    on = rc.Sampling(logit_bias={lm.tokenizer.eos_token_id: -100})
    wide = open_kb(tmp_path / "wide", model=lm)
    expected = [wide.complete(question, sampling=replace(on, max_tokens=1024)) for question in QUESTIONS]
    tight = open_kb(tmp_path / "tight", model=lm, store=rc.StoreConfig(answer_bytes=3 * kv_bytes(lm, 1024)))
    streams = [tight.stream_completion(question, sampling=on) for question in QUESTIONS]
    for stream in streams:
        assert isinstance(next(stream), rc.Sources)
        next(stream)  # all have begun, before anybody has read on
    assert kv_bytes(lm, 256) * 4 < tight.admission.reserved_bytes <= tight.admission.budget_bytes
    answers = list(pool.map(lambda stream: list(stream)[-1].answer, streams))
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    assert [answer.finish_reason for answer in answers] == ["length"] * 4
    assert {answer.usage.prompt_tokens + answer.usage.completion_tokens for answer in answers} == {1024}
    assert (tight.admission.reserved_bytes, tight.admission.waiting) == (0, 0)


def test_memory_for_less_than_a_context_ends_an_answer_as_the_context_would(open_kb, lm):
    small = open_kb(store=rc.StoreConfig(answer_bytes=kv_bytes(lm, 512)))
    on = rc.Sampling(logit_bias={lm.tokenizer.eos_token_id: -100})
    answer = small.complete("Once upon a time", sampling=on)
    assert answer.finish_reason == "length"
    assert 128 < answer.usage.completion_tokens < 512 - answer.usage.prompt_tokens
    assert answer.text == small.complete("Once upon a time", method="full", sampling=on).text


def test_the_budget_holds_to_the_byte():
    """All of it can be held, at once or in parts; one byte more is refused, or waits."""
    admission = Admission(10)
    with held(admission, 10, 1, NO_LIMIT):
        assert admission.reserved_bytes == 10

    def soon():
        return Limit.of(None, 0.01, time.perf_counter())

    with pytest.raises(AnswerTooLargeError, match="11 bytes"), held(admission, 11, 1, soon()):
        pass
    with held(admission, 6, 1, NO_LIMIT):
        with held(admission, 4, 1, Limit.of(None, WAIT_S, time.perf_counter())):
            assert admission.reserved_bytes == 10
        with pytest.raises(TimedOutError), held(admission, 5, 1, soon()):
            pass
    assert (admission.reserved_bytes, admission.waiting) == (0, 0)


def test_ingestion_goes_on_beside_many_askers(kb, pool):
    expected = {q: kb.ask(q, k=1, sampling=SHORT).text for q in QUESTIONS}
    more = [rc.Document(f"filler {n}", f"Number {n} is nothing special, and so is {n + 1}.\n") for n in range(12)]
    ingesting = pool.submit(kb.ingest, more)
    while True:
        over = ingesting.done()
        found = list(pool.map(lambda q: kb.ask(q, k=1, sampling=SHORT).text, QUESTIONS))
        assert found == list(expected.values())
        if over:
            break
    assert len(ingesting.result().added) == 12


# Askers over the same passages


@pytest.fixture
def buffers(lm, monkeypatch):
    """Those that are made from now on, while anybody holds them; none is lent that was made before."""
    alive, allocate = weakref.WeakSet(), KVBuffers.allocate

    def counted(shape, capacity):
        made = allocate(shape, capacity)
        alive.add(made)
        return made

    monkeypatch.setattr(lm.pool, "max_bytes", 0)
    lm.pool._idle.clear()
    monkeypatch.setattr(KVBuffers, "allocate", counted)
    return alive


@pytest.mark.parametrize("method", ["reposition", "full", "concat"])
def test_askers_of_one_context_share_it(kb, buffers, method):
    """Streams that are open at once: the first placed it, the others stand on it and hold little more than their
    answers, and all say what one says."""
    hits = kb.retrieve(QUESTIONS[0], k=3)
    alone = [kb.ask(question, hits=hits, method=method, sampling=SHORT) for question in QUESTIONS]
    kb._engine.clear()
    streams = [kb.stream(question, hits=hits, method=method, sampling=SHORT) for question in QUESTIONS]
    sources, answers = [], []
    for stream in streams:  # each has its first token before the next is asked
        sources.append(next(stream).hits)
        next(event for event in stream if isinstance(event, rc.Token))
    context = sum(hit.chunk.num_tokens for hit in hits)
    assert sum(one.capacity >= context for one in buffers) == 1
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
        with contexts.admit("key", NEED, NO_LIMIT) as reference:
            with reference.placing(NO_LIMIT) as tell:
                begun.set()
                assert go.wait(WAIT_S)
                tell(context)
            until(lambda: found)
        return reference.claim.num_bytes

    def want():
        with contexts.admit("key", NEED, NO_LIMIT) as reference, reference.placing(NO_LIMIT) as tell:
            found.append((tell, reference.placed))
        return reference.claim.num_bytes

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(place)
        assert begun.wait(WAIT_S)
        second = pool.submit(want)
        until(lambda: admission.reserved_bytes == 110)
        cancelled = threading.Event()
        cancelled.set()
        with pytest.raises(CancelledError), contexts.admit("key", NEED, Limit(cancelled)):
            pass
        with contexts.admit("other", NEED, NO_LIMIT) as reference, reference.placing(NO_LIMIT):
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
                reference = later.enter_context(contexts.admit("key", NEED, NO_LIMIT))
                assert reference.placed is first.placed
                assert admission.reserved_bytes == 100 + 10 * count
        assert admission.reserved_bytes == 170
    assert admission.reserved_bytes == 0


def test_a_context_that_is_over_blocks_nobody_who_waits_for_memory(lm):
    """One waits for its own tokens while the first has all memory: once that ends, there is room for the whole."""
    contexts, admission, _ = contexts_within(lm, answer_bytes=100)

    def second():
        with contexts.admit("key", NEED, Limit.of(None, WAIT_S, time.perf_counter())) as reference:
            return reference.claim.num_bytes

    with ThreadPoolExecutor(1) as pool:
        with contexts.admit("key", NEED, NO_LIMIT):
            waiting = pool.submit(second)
            until(lambda: admission.waiting)
        assert waiting.result(WAIT_S) == 100
    assert admission.reserved_bytes == 0


def leave(contexts, lm, key, num_tokens):
    """One question over a context, from beginning to end; whether it was known."""
    with contexts.admit(key, NEED, NO_LIMIT, keep=True) as reference, reference.placing(NO_LIMIT) as tell:
        if tell is not None:
            tell(placed(lm, num_tokens))
    return tell is None


def test_contexts_stay_in_half_of_the_budget_and_the_least_recently_used_go(lm):
    contexts, admission, tree = contexts_within(lm, budget_tokens=100)
    one = placed(lm, 20).num_bytes
    assert [leave(contexts, lm, key, 20) for key in "abacba"] == [False, False, True, False, False, False]
    assert tree.stats().lent_bytes == tree.stats().num_bytes == 2 * one <= tree.budget_bytes // 2
    assert admission.reserved_bytes == 0
    contexts.clear()
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
    with contexts.admit("read", NEED, NO_LIMIT) as reference:
        leave(contexts, lm, "other", 80)
        assert tree.stats().lent_bytes == reference.placed.num_bytes
        contexts.clear()
        assert tree.stats().lent_bytes == reference.placed.num_bytes, "it is there as long as it is read"
        assert not leave(contexts, lm, "read", 90), "and in no further answer (law 10)"
    assert tree.stats().lent_bytes == 0


def test_real_bytes_stay_within_the_budget(kb, open_kb, lm, buffers):
    """Every buffer that outlives its answer is counted where it is made."""
    store = rc.StoreConfig(prefix_bytes=1200 * lm.kv_bytes_per_token)
    small, lent = open_kb(store=store), set()
    for count in (1, 2, 3, 2, 4, 1):
        for question in QUESTIONS:
            small.ask(question, k=count, sampling=SHORT)
            stats = small.prefix_stats()
            assert sum(one.num_bytes for one in buffers) == stats.lent_bytes
            assert stats.lent_bytes <= stats.num_bytes <= store.prefix_bytes
            lent.add(stats.lent_bytes)
    assert max(lent) > 0
    small.delete("cats")
    assert small.prefix_stats().lent_bytes == 0
    assert len(buffers) <= 1, "the model's thread still knows its last pass"


def test_a_repeated_prompt_only_runs_its_suffix(kb, open_kb):
    hits = kb.retrieve(QUESTIONS[0], k=3)
    for method in ("reposition", "concat"):
        first, again = (kb.ask(QUESTIONS[0], hits=hits, method=method, sampling=SHORT) for _ in range(2))
        suffix = kb._engine.prompts.question_ends(QUESTIONS[0]).suffix_ids
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
