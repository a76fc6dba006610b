"""Who joins whose pass, in which order, and who fails: with a model that stands still until the test lets it go."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ragcache.errors import CancelledError, TimedOutError
from ragcache.kv.cache import BufferPool, CacheShape, FusedCache
from ragcache.models import turns as turns_module
from ragcache.models.joint import Run
from ragcache.models.limits import Limit, limited
from ragcache.models.turns import Turns

SHAPE = CacheShape(1, 1, 4, 4, torch.float32, torch.device("cpu"))
WAIT_S = 20.0  # for what must happen; nothing is measured


class Model:
    """Notes every pass: the first id of each piece, and how many tokens. Passes wait while the gate is closed.

    Logits are the piece's last id. An id in `bad` fails its pass.
    """

    def __init__(self) -> None:
        self.passes: list[dict[int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.bad: set[int] = set()
        self.running = 0

    def __call__(self, pieces):
        assert self.running == 0, "one pass at a time"
        self.running += 1
        try:
            self.passes.append({int(piece.run.ids[0]): piece.num_tokens for piece in pieces})
            self.entered.release()
            assert self.gate.wait(WAIT_S)
            if found := self.bad & {int(piece.run.ids[0]) for piece in pieces}:
                raise RuntimeError(f"bad {found}")
            return [piece.ids[-1].float() for piece in pieces]
        finally:
            self.running -= 1

    def await_pass(self) -> None:
        assert self.entered.acquire(timeout=WAIT_S)


def cache() -> FusedCache:
    return FusedCache(BufferPool(SHAPE, 0), 1)


def run_of(first: int, tokens: int = 1, *, ordered: bool = True, held: FusedCache | None = None) -> Run:
    ids = torch.arange(first, first + tokens)
    return Run(ids, ids, cache() if held is None else held, ordered)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def turns(model):
    return Turns(model, pass_tokens=64, alone_tokens=100)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as pool:
        yield pool


def until(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Crowd:
    """Submits runs one after another while a first one holds the model."""

    def __init__(self, turns, model, pool):
        self.turns, self.model, self.pool = turns, model, pool
        model.gate.clear()
        self.first = pool.submit(turns.run, run_of(1000))
        model.await_pass()

    def add(self, *arguments, limit=None, **options):
        waiting = len(self.turns._waiting)

        def work():
            with limited(limit or Limit()):
                return int(self.turns.run(run_of(*arguments, **options)))

        job = self.pool.submit(work)
        until(lambda: len(self.turns._waiting) > waiting)
        return job

    def add_alone(self, first, calls):
        waiting = len(self.turns._waiting)
        job = self.pool.submit(self.turns.run, run_of(first), lambda: calls.append(first) or torch.tensor(float(first)))
        until(lambda: len(self.turns._waiting) > waiting)
        return job

    def go(self):
        self.model.gate.set()
        assert int(self.first.result(WAIT_S)) == 1000


def test_one_caller_runs_at_once_and_whole(turns, model):
    assert int(turns.run(run_of(7, 100))) == 106
    assert model.passes == [{7: 100}]
    assert turns.stats().members == {1: 1}


def test_those_who_wait_join_one_pass(turns, model, pool):
    crowd = Crowd(turns, model, pool)
    jobs = [crowd.add(n) for n in range(5)]
    crowd.go()
    assert [job.result(WAIT_S) for job in jobs] == [0, 1, 2, 3, 4]
    assert model.passes == [{1000: 1}, dict.fromkeys(range(5), 1)]
    stats = turns.stats()
    assert (stats.passes, stats.tokens, stats.members) == (2, 6, {1: 1, 5: 1})


def test_a_waiting_question_goes_before_next_tokens(turns, model, pool):
    """It takes along the questions that fit; the sequences, which came later, have the next pass, with what is left."""
    crowd = Crowd(turns, model, pool)
    jobs = [crowd.add(100, 30), crowd.add(1), crowd.add(200, 30), crowd.add(2), crowd.add(300, 30)]
    crowd.go()
    assert [job.result(WAIT_S) for job in jobs] == [129, 1, 229, 2, 329]
    assert model.passes[1:] == [{100: 30, 200: 30}, {1: 1, 2: 1, 300: 30}]


def test_a_long_run_is_cut_and_others_go_on_beside_it(turns, model, pool):
    """While anybody else is there it has what they leave of each pass, and always its share."""
    crowd = Crowd(turns, model, pool)
    long, short = crowd.add(100, 150), crowd.add(1, 20)
    crowd.go()
    assert (long.result(WAIT_S), short.result(WAIT_S)) == (249, 20)
    assert model.passes[1] == {100: 44, 1: 20}
    assert [taken[100] for taken in model.passes[2:]] == [100, 6], "alone again: larger pieces"


def test_a_long_run_has_its_share_however_many_come(turns, model, pool):
    """Four runs of 60 tokens and one of 300: it leads first with what is left, later when it has waited longest."""
    crowd = Crowd(turns, model, pool)
    long = crowd.add(1000, 300)
    others = [crowd.add(n, 60) for n in (1, 100, 200, 300)]
    crowd.go()
    assert long.result(WAIT_S) == 1299
    assert [job.result(WAIT_S) for job in others] == [60, 159, 259, 359]
    assert all(sum(taken.values()) <= 64 for taken in model.passes[1:] if len(taken) > 1)
    assert model.passes[1][1000] >= 16


def test_a_run_that_cannot_be_cut_is_whole(turns, model, pool):
    crowd = Crowd(turns, model, pool)
    jobs = [crowd.add(1), crowd.add(100, 90, ordered=False), crowd.add(2)]
    crowd.go()
    assert [job.result(WAIT_S) for job in jobs] == [1, 189, 2]
    assert model.passes[1:] == [{1: 1, 2: 1}, {100: 90}]


def test_runs_with_a_pass_of_their_own_have_their_turn(turns, model, pool):
    """In the order of arrival: who comes behind may join the pass in front, but no pass joins a lone one."""
    crowd, calls = Crowd(turns, model, pool), []
    before = crowd.add(1)
    lone = crowd.add_alone(50, calls)
    after = crowd.add(2)
    crowd.go()
    assert [before.result(WAIT_S), int(lone.result(WAIT_S)), after.result(WAIT_S)] == [1, 50, 2]
    assert calls == [50]
    assert model.passes[1:] == [{1: 1, 2: 1}]
    first = Crowd(turns, model, pool)
    lone, after = first.add_alone(51, calls), first.add(3)
    first.go()
    assert (int(lone.result(WAIT_S)), after.result(WAIT_S), calls) == (51, 3, [50, 51])


def test_only_the_faulty_run_fails(turns, model, pool):
    crowd = Crowd(turns, model, pool)
    model.bad = {2}
    jobs = [crowd.add(n) for n in (1, 2, 3)]
    crowd.go()
    assert (jobs[0].result(WAIT_S), jobs[2].result(WAIT_S)) == (1, 3)
    with pytest.raises(RuntimeError, match=r"bad \{2\}"):
        jobs[1].result(WAIT_S)
    assert model.passes[2:] == [{1: 1}, {2: 1}, {3: 1}]
    model.bad = set()
    assert int(turns.run(run_of(4))) == 4, "the model is free again"


def test_an_error_alone_is_the_callers(turns, model):
    model.bad = {1}
    with pytest.raises(RuntimeError, match="bad"):
        turns.run(run_of(1))

    def fail():
        raise ValueError("alone")

    with pytest.raises(ValueError, match="alone"):
        turns.run(run_of(2), fail)
    assert int(turns.run(run_of(3))) == 3


def test_an_interrupted_leader_leaves_the_others_their_results(turns, model, pool):
    crowd = Crowd(turns, model, pool)
    original, interrupts = turns._forward, iter([True])

    def interrupted(pieces):
        if next(interrupts, False):
            raise KeyboardInterrupt
        return original(pieces)

    turns._forward = interrupted
    jobs = [crowd.add(n) for n in (1, 2, 3)]
    crowd.go()
    with pytest.raises(KeyboardInterrupt):
        jobs[0].result(WAIT_S)
    assert [job.result(WAIT_S) for job in jobs[1:]] == [2, 3]


def test_who_gives_up_while_it_waits_leaves(turns, model, pool):
    crowd = Crowd(turns, model, pool)
    cancelled = threading.Event()
    gone, late = crowd.add(1, limit=Limit(cancelled)), crowd.add(2, limit=Limit.of(None, 0.01, time.perf_counter()))
    stays = crowd.add(3)
    cancelled.set()
    with pytest.raises(CancelledError):
        gone.result(WAIT_S)
    with pytest.raises(TimedOutError, match=r"0\.01 s"):
        late.result(WAIT_S)
    crowd.go()
    assert stays.result(WAIT_S) == 3
    assert model.passes[1:] == [{3: 1}]


def test_who_gives_up_between_pieces_leaves(turns, model, pool):
    """Also the one that leads: the next takes its place."""
    cancelled = threading.Event()
    crowd = Crowd(turns, model, pool)
    gone, stays = crowd.add(1, 150, limit=Limit(cancelled)), crowd.add(300, 100)
    model.gate.set()
    model.gate.clear()
    model.await_pass()
    cancelled.set()
    model.gate.set()
    with pytest.raises(CancelledError):
        gone.result(WAIT_S)
    assert stays.result(WAIT_S) == 399
    assert sum(taken.get(1, 0) for taken in model.passes) < 150
    assert int(turns.run(run_of(5))) == 5


def test_sequences_that_are_decoded_stay_in_one_pass(turns, model, pool, monkeypatch):
    """However they come back after a pass: the leader waits for those that are due."""
    monkeypatch.setattr(turns_module, "LEAST_PATIENCE_S", WAIT_S)
    monkeypatch.setattr(turns_module, "MOST_PATIENCE_S", WAIT_S)
    caches, started = [cache() for _ in range(4)], threading.Barrier(4)

    def decode(number):
        with turns.decoding(caches[number]):
            started.wait(WAIT_S)
            for step in range(5):
                time.sleep(0.002 * number)
                turns.run(run_of(10 * number + step, held=caches[number]))

    list(pool.map(decode, range(4)))
    # One that has ended is waited for no more, and until then nobody runs without the others.
    assert [len(taken) for taken in model.passes] == [4] * 5


def test_a_sequence_that_does_not_come_back_is_waited_for_once(turns, model, monkeypatch):
    waits = []
    monkeypatch.setattr(turns, "_patience_s", lambda: 0.01)
    wait = turns._arrived.wait
    monkeypatch.setattr(turns._arrived, "wait", lambda timeout: waits.append(timeout) or wait(timeout))
    asleep, awake = cache(), cache()
    with turns.decoding(asleep), turns.decoding(awake):
        turns.run(run_of(1, held=asleep))
        for step in range(5):
            turns.run(run_of(10 + step, held=awake))
    assert len(waits) >= 1
    assert turns.stats().passes == 6
    late = [one for one in waits if one is not None]
    assert sum(one > 0 for one in late) <= 3, "not before every pass"


@pytest.fixture
def awaits_questions(turns):
    """Questions come in half of WAIT_S, and a leader has all of it for them."""
    turns._approaches.append(WAIT_S / 2)
    turns._last_pass_s = WAIT_S / turns_module.QUESTION_SHARE


def announce(turns, pool, run):
    """A thread that expects to run something once `go` is set; `run` None: it does not in the end."""
    announced, go = threading.Event(), threading.Event()

    def work():
        with turns.expected():
            announced.set()
            assert go.wait(WAIT_S)
            return None if run is None else int(turns.run(run))

    job = pool.submit(work)
    assert announced.wait(WAIT_S)
    return job, go


@pytest.mark.parametrize("comes", [True, False])
def test_a_question_on_its_way_is_waited_for(turns, model, pool, awaits_questions, comes):
    job, go = announce(turns, pool, run_of(500, 30) if comes else None)
    decoded = pool.submit(turns.run, run_of(1))
    until(lambda: turns._led)
    time.sleep(0.05)
    assert model.passes == []
    go.set()
    assert int(decoded.result(WAIT_S)) == 1
    assert job.result(WAIT_S) == (529 if comes else None)
    assert model.passes == ([{500: 30}, {1: 1}] if comes else [{1: 1}])


def test_a_question_that_fails_before_who_waited_for_it_fails_alone(turns, model, pool, awaits_questions):
    job, go = announce(turns, pool, run_of(500, 30))
    model.bad.add(500)
    decoded = pool.submit(turns.run, run_of(1))
    until(lambda: turns._led)
    time.sleep(0.05)
    go.set()
    assert int(decoded.result(WAIT_S)) == 1
    with pytest.raises(RuntimeError, match="bad"):
        job.result(WAIT_S)
    assert model.passes == [{500: 30}, {1: 1}]


def test_an_expectation_that_ends_under_the_lock_blocks_nobody(turns, monkeypatch):
    """As where the garbage collector ends an abandoned stream while its thread is in the queue's own code."""
    monkeypatch.setattr(turns_module, "LAST_WORD_S", 0.01)
    expectation = turns.expected()
    expectation.__enter__()
    with turns._lock:
        expectation.__exit__(None, None, None)
    assert turns._coming == {}
    assert int(turns.run(run_of(1))) == 1


@pytest.mark.parametrize(("usual_s", "last_pass_s"), [(WAIT_S, 0.01), (1e-6, WAIT_S), (None, WAIT_S)])
def test_a_question_that_is_late_or_far_is_not_waited_for(turns, model, pool, usual_s, last_pass_s):
    turns._approaches.extend([] if usual_s is None else [usual_s])
    turns._last_pass_s = last_pass_s
    job, go = announce(turns, pool, run_of(500, 30))
    assert int(turns.run(run_of(1))) == 1
    assert model.passes == [{1: 1}]
    go.set()
    assert job.result(WAIT_S) == 529


def test_one_question_does_not_wait_for_another(turns, model, pool, awaits_questions):
    job, go = announce(turns, pool, run_of(500, 30))
    assert int(turns.run(run_of(100, 20))) == 119
    assert model.passes == [{100: 20}]
    go.set()
    assert job.result(WAIT_S) == 529


def test_an_abandoned_decoding_is_forgotten(turns, model):
    held = cache()
    with turns.decoding(held):
        assert turns._others(cache())
    assert not turns._others(cache())


def test_context_is_placed_before_the_turn_where_others_run(turns, model, pool):
    """A slow disk is waited for beside the others' pass, and its failure is its caller's alone."""
    placed = threading.Event()
    crowd = Crowd(turns, model, pool)
    slow = FusedCache(BufferPool(SHAPE, 0), 1, lambda layer: placed.set())
    job = crowd.add(1, held=slow)
    assert placed.is_set()
    assert len(model.passes) == 1

    def fail(layer):
        raise OSError("unreadable")

    broken = FusedCache(BufferPool(SHAPE, 0), 1, fail)
    with pytest.raises(OSError, match="unreadable"):
        turns.run(run_of(2, held=broken))
    crowd.go()
    assert job.result(WAIT_S) == 1


def test_many_threads_get_their_own_results(turns, model):
    """Whatever the order: nobody hangs, nobody gets another's logits."""

    def work(number):
        held = cache()
        with turns.decoding(held):
            return [int(turns.run(run_of(100 * number + n, 1 + (number * n) % 90))) for n in range(30)]

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(work, range(12)))
    assert found == [[100 * number + n + (number * n) % 90 for n in range(30)] for number in range(12)]
    assert not turns._waiting
    assert not turns._led
