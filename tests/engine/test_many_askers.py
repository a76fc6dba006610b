"""Many askers of one store: the same answers, memory in order of arrival, and whoever gives up holds nobody up."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tiny_model import save_tiny_llama
from waiting import WAIT_S, until

import ragcache as rc
from ragcache.engine.admission import Admission, Size, default_budget, kv_bytes
from ragcache.errors import AnswerTooLargeError, CancelledError, ConfigError, PromptError, TimedOutError
from ragcache.kv.buffers import KVBuffers
from ragcache.models.deadline import NO_LIMIT, Limit
from ragcache.models.encode import AbandonedSignal

QUESTIONS = [
    "Where do dogs bark?",
    "Where does the river rise?",
    "When does the rowing club meet?",
    "Is the cat happy?",
]
METHODS = ["reposition", "full", "cacheblend", "epic"]
SHORT = rc.Sampling(max_tokens=6)


@contextmanager
def model_held(lm, pool):
    """Within, somebody else's pass is on its way: runs pile up."""
    gate, entered = threading.Event(), threading.Event()
    layer = lm.model.model.layers[0]

    def hold(*_args):
        entered.set()
        assert gate.wait(WAIT_S)

    hook = layer.register_forward_pre_hook(hold)
    job = pool.submit(lm.run, [1], 0, lm.new_cache(1))
    assert entered.wait(WAIT_S)
    hook.remove()
    try:
        yield
    finally:
        gate.set()
        job.result(WAIT_S)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(12) as pool:
        yield pool


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


def test_one_question_fails_and_the_others_are_answered(kb, lm, pool):
    """A pass that runs out of memory for one of them is tried again for each."""
    expected = [kb.ask(question, k=2, sampling=SHORT).text for question in QUESTIONS]

    def fail(_module, _args, kwargs):
        if " 7, 7, 7" in str(kwargs["input_ids"].flatten().tolist()):
            raise RuntimeError("out of memory")

    hook = lm.model.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        with model_held(lm, pool):
            jobs = [pool.submit(kb.ask, question, k=2, sampling=SHORT) for question in QUESTIONS]
            until(lambda: lm.scheduler.waiting == 4)
            broken = pool.submit(lm.run, [1, 7, 7, 7], 0, lm.new_cache(4))
            until(lambda: lm.scheduler.waiting == 5)
        assert [job.result(WAIT_S).text for job in jobs] == expected
        with pytest.raises(RuntimeError, match="out of memory"):
            broken.result(WAIT_S)
    finally:
        hook.remove()
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


def test_a_prompt_is_given_up_between_its_pieces(kb, lm, pool, monkeypatch):
    monkeypatch.setattr(lm.scheduler, "alone_tokens", 16)
    cancelled, passes = threading.Event(), []

    def count(_module, _args, kwargs):
        passes.append(kwargs["input_ids"].shape[1])
        if len(passes) == 2:
            cancelled.set()

    hook = lm.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        with pytest.raises(CancelledError):
            kb.ask(QUESTIONS[0], k=3, method="full", sampling=SHORT, cancelled=cancelled)
    finally:
        hook.remove()
    assert passes == [16, 16]
    assert kb.admission.reserved_bytes == 0


def test_a_deadline_ends_loading(kb, monkeypatch):
    """The blocks of passages from outside are never ready."""
    begun = []

    def never(*_, wanted, **__):
        begun.append(1)
        until(lambda: not wanted())
        raise AbandonedSignal

    monkeypatch.setattr(kb._reader.lookup.encoder.lm, "encode", never)
    with pytest.raises(TimedOutError, match=r"within 0\.2 s"):
        kb.ask(QUESTIONS[0], hits=[rc.Passage("Nobody has read this passage.")], sampling=SHORT, timeout_s=0.2)
    assert begun == [1]
    assert kb.admission.reserved_bytes == 0


def test_a_deadline_ends_decoding(kb):
    events = kb.stream(QUESTIONS[0], k=1, sampling=rc.Sampling(max_tokens=100), timeout_s=WAIT_S)
    next(event for event in events if isinstance(event, rc.Token))
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        kb.ask(QUESTIONS[0], timeout_s=0)
    limit = Limit.of(None, 1.0, time.perf_counter() - 2)
    with pytest.raises(TimedOutError):
        limit.check()
    events.close()
    assert kb.admission.reserved_bytes == 0
    assert not kb.lm.scheduler.decoding


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


async def test_a_time_for_each_question_in_async_calls(kb):
    with pytest.raises(TimedOutError):
        await kb.aask(QUESTIONS[0], sampling=rc.Sampling(max_tokens=400), timeout_s=1e-6)
    assert (await kb.aask(QUESTIONS[0], sampling=SHORT, timeout_s=WAIT_S)).text
