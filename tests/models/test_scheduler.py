"""Order, sharing and failing of passes, with a model that stands still until the test lets it go."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import waiting
from kit.makers import made_by, threads

from ragcache.errors import CancelledError, TimedOutError
from ragcache.kv.buffers import BufferPool
from ragcache.kv.cache_shape import CacheShape, LayerShape
from ragcache.kv.fused_cache import FusedCache
from ragcache.models import scheduler as scheduler_module
from ragcache.models.batch import ForwardRequest
from ragcache.models.deadline import NO_LIMIT, Limit, limited
from ragcache.models.requests import DecodingSequence
from ragcache.models.scheduler import Scheduler

SHAPE = CacheShape((LayerShape(1, 4, 4),), torch.float32, torch.device("cpu"))
WAIT_S = 20.0  # for what must happen; nothing is measured
until = partial(waiting.until, seconds=WAIT_S)


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


def run_of(first: int, tokens: int = 1, *, ordered: bool = True, held: FusedCache | None = None) -> ForwardRequest:
    ids = torch.arange(first, first + tokens)
    return ForwardRequest(ids, ids, cache() if held is None else held, ordered)


model = made_by(Model, scope="function")


@pytest.fixture
def scheduler(model):
    return Scheduler(model, pass_tokens=64, alone_tokens=100)


pool = threads(16)


class Crowd:
    """Submits runs one after another while a first one holds the model."""

    def __init__(self, scheduler, model, pool):
        self.scheduler, self.model, self.pool = scheduler, model, pool
        model.gate.clear()
        before = len(model.passes)
        self.first = pool.submit(scheduler.run, run_of(1000))
        model.await_pass()
        until(lambda: len(model.passes) > before)  # earlier passes may have left their permits

    def add(self, *arguments, limit=None, **options):
        waiting = self.scheduler.waiting

        def work():
            with limited(limit or Limit()):
                return int(self.scheduler.run(run_of(*arguments, **options)))

        job = self.pool.submit(work)
        until(lambda: self.scheduler.waiting > waiting)
        return job

    def add_alone(self, first, calls):
        waiting = self.scheduler.waiting
        job = self.pool.submit(
            self.scheduler.run, run_of(first), lambda: calls.append(first) or torch.tensor(float(first))
        )
        until(lambda: self.scheduler.waiting > waiting)
        return job

    def go(self):
        self.model.gate.set()
        assert int(self.first.result(WAIT_S)) == 1000


@pytest.fixture
def crowd(scheduler, model, pool):
    return Crowd(scheduler, model, pool)


def test_one_caller_runs_at_once_and_whole(scheduler, model):
    assert int(scheduler.run(run_of(7, 100))) == 106
    assert model.passes == [{7: 100}]
    assert scheduler.stats().members == {1: 1}


def test_those_who_wait_join_one_pass(crowd, scheduler, model):
    jobs = [crowd.add(n) for n in range(5)]
    crowd.go()
    assert [job.result(WAIT_S) for job in jobs] == [0, 1, 2, 3, 4]
    assert model.passes == [{1000: 1}, dict.fromkeys(range(5), 1)]
    stats = scheduler.stats()
    assert (stats.passes, stats.tokens, stats.members) == (2, 6, {1: 1, 5: 1})


def test_a_waiting_question_goes_before_next_tokens(crowd, model):
    """It takes along the questions that fit; the sequences, which came later, have the next pass, with what is left."""
    jobs = [crowd.add(100, 30), crowd.add(1), crowd.add(200, 30), crowd.add(2), crowd.add(300, 30)]
    crowd.go()
    assert [job.result(WAIT_S) for job in jobs] == [129, 1, 229, 2, 329]
    assert model.passes[1:] == [{100: 30, 200: 30}, {1: 1, 2: 1, 300: 30}]


def test_a_long_run_is_cut_and_others_go_on_beside_it(crowd, model):
    """While anybody else is there it has what they leave of each pass, and always its share."""
    long, short = crowd.add(100, 150), crowd.add(1, 20)
    crowd.go()
    assert (long.result(WAIT_S), short.result(WAIT_S)) == (249, 20)
    assert model.passes[1] == {100: 44, 1: 20}
    assert [taken[100] for taken in model.passes[2:]] == [100, 6], "alone again: larger pieces"


def test_a_long_run_has_its_share_however_many_come(crowd, model):
    """Four runs of 60 tokens and one of 300: it takes what is left at first, later its share."""
    long = crowd.add(1000, 300)
    others = [crowd.add(n, 60) for n in (1, 100, 200, 300)]
    crowd.go()
    assert long.result(WAIT_S) == 1299
    assert [job.result(WAIT_S) for job in others] == [60, 159, 259, 359]
    assert all(sum(taken.values()) <= 64 for taken in model.passes[1:] if len(taken) > 1)
    assert model.passes[1][1000] >= 16


def test_a_run_that_cannot_be_cut_is_whole(crowd, model):
    jobs = [crowd.add(1), crowd.add(100, 90, ordered=False), crowd.add(2)]
    crowd.go()
    assert [job.result(WAIT_S) for job in jobs] == [1, 189, 2]
    assert model.passes[1:] == [{1: 1, 2: 1}, {100: 90}]


def test_runs_with_a_pass_of_their_own_have_their_turn(scheduler, model, pool):
    """In the order of arrival: who comes behind may join the pass in front, but no pass joins a lone one."""
    crowd, calls = Crowd(scheduler, model, pool), []
    before = crowd.add(1)
    lone = crowd.add_alone(50, calls)
    after = crowd.add(2)
    crowd.go()
    assert [before.result(WAIT_S), int(lone.result(WAIT_S)), after.result(WAIT_S)] == [1, 50, 2]
    assert calls == [50]
    assert model.passes[1:] == [{1: 1, 2: 1}]
    first = Crowd(scheduler, model, pool)
    lone, after = first.add_alone(51, calls), first.add(3)
    first.go()
    assert (int(lone.result(WAIT_S)), after.result(WAIT_S), calls) == (51, 3, [50, 51])


def test_only_the_faulty_run_fails(crowd, scheduler, model):
    model.bad = {2}
    jobs = [crowd.add(n) for n in (1, 2, 3)]
    crowd.go()
    assert (jobs[0].result(WAIT_S), jobs[2].result(WAIT_S)) == (1, 3)
    with pytest.raises(RuntimeError, match=r"bad \{2\}"):
        jobs[1].result(WAIT_S)
    assert model.passes[2:] == [{1: 1}, {2: 1}, {3: 1}]
    model.bad = set()
    assert int(scheduler.run(run_of(4))) == 4, "the model is free again"


def test_an_error_alone_is_the_callers(scheduler, model):
    model.bad = {1}
    with pytest.raises(RuntimeError, match="bad"):
        scheduler.run(run_of(1))

    def fail():
        raise ValueError("alone")

    with pytest.raises(ValueError, match="alone"):
        scheduler.run(run_of(2), fail)
    assert int(scheduler.run(run_of(3))) == 3


def test_who_gives_up_while_it_waits_leaves(crowd, model):
    cancelled = threading.Event()
    gone, stays = crowd.add(1, limit=Limit(cancelled)), crowd.add(3)
    late = crowd.add(2, limit=Limit.of(None, 0.5, time.perf_counter()))  # last: `add` counts those that wait
    cancelled.set()
    with pytest.raises(CancelledError):
        gone.result(WAIT_S)
    with pytest.raises(TimedOutError, match=r"0\.5 s"):
        late.result(WAIT_S)
    crowd.go()
    assert stays.result(WAIT_S) == 3
    assert model.passes[1:] == [{3: 1}]


def test_who_gives_up_between_pieces_leaves(scheduler, model, pool):
    """Also the one that comes first: the next takes its place."""
    cancelled = threading.Event()
    crowd = Crowd(scheduler, model, pool)
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
    assert int(scheduler.run(run_of(5))) == 5


def test_context_is_placed_before_the_turn_where_others_run(scheduler, model, pool):
    """A slow disk is waited for beside the others' pass, and its failure is its caller's alone."""
    placed = threading.Event()
    crowd = Crowd(scheduler, model, pool)
    slow = FusedCache(BufferPool(SHAPE, 0), 1, lambda _cache, _layer: placed.set())
    job = crowd.add(1, held=slow)
    assert placed.is_set()
    assert len(model.passes) == 1

    def fail(_cache, _layer):
        raise OSError("unreadable")

    broken = FusedCache(BufferPool(SHAPE, 0), 1, fail)
    with pytest.raises(OSError, match="unreadable"):
        scheduler.run(run_of(2, held=broken))
    crowd.go()
    assert job.result(WAIT_S) == 1


def decode(scheduler, first, tokens, *, held=None, eos=(), limit=NO_LIMIT):
    """Ids first, first + 10, ...: every token is ten more than what ran before it."""
    logits = torch.tensor(float(first))
    held = cache() if held is None else held
    return scheduler.decode(DecodingSequence(held, lambda found: int(found), 100, 100 + tokens, eos, limit), logits)


class Counting(Model):
    """Logits are the piece's last id and ten more."""

    def __call__(self, pieces):
        return [logits + 10 for logits in super().__call__(pieces)]


counting = made_by(Counting, scope="function")


@pytest.fixture
def decoder(counting):
    return Scheduler(counting, pass_tokens=64, alone_tokens=100)


def test_an_answer_ends_at_its_last_position_or_before_an_eos(decoder, counting):
    assert list(decode(decoder, 7, 4)) == [7, 17, 27, 37]
    assert [next(iter(taken)) for taken in counting.passes] == [7, 17, 27], "the last token is not run"
    assert list(decode(decoder, 7, 9, eos=(27,))) == [7, 17]
    assert list(decode(decoder, 7, 9, eos=(7,))) == list(decode(decoder, 7, 0)) == []
    until(lambda: not decoder._decoding)


def test_an_answer_waits_for_room_and_goes_on(decoder, counting):
    """No token runs before there is room for it; what is asked for room may fail, and ends this answer alone."""
    asked = []

    def more():
        asked.append(len(counting.passes))
        if len(asked) == 3:
            raise OSError("no room")
        return 2

    def grown(tokens):
        decoding = DecodingSequence(cache(), lambda found: int(found), 100, 100 + tokens, (), NO_LIMIT, 103, more)
        return decoder.decode(decoding, torch.tensor(7.0))

    assert list(grown(7)) == [7, 17, 27, 37, 47, 57, 67]
    assert asked == [3, 5]
    with pytest.raises(OSError, match="no room"):
        list(grown(9))
    until(lambda: not decoder._decoding)
    assert list(decode(decoder, 7, 2)) == [7, 17]


def test_sequences_that_are_decoded_share_every_pass(decoder, counting, pool):
    """However slowly their readers take what is decoded."""
    counting.gate.clear()
    first = pool.submit(decoder.run, run_of(1000))
    counting.await_pass()

    def read(number):
        found = []
        for token in decode(decoder, 1000 * number, 6):
            time.sleep(0.002 * number)
            found.append(token)
        return found

    jobs = [pool.submit(read, number) for number in range(1, 5)]
    until(lambda: decoder.waiting == 4)
    counting.gate.set()
    first.result(WAIT_S)
    assert [job.result(WAIT_S) for job in jobs] == [[1000 * n + 10 * step for step in range(6)] for n in range(1, 5)]
    assert [len(taken) for taken in counting.passes[1:]] == [4] * 5


def test_a_new_prompt_runs_between_two_steps(decoder, counting, pool):
    """It waits for the pass that runs, not for the answers of others."""
    steps = decode(decoder, 1, 50)
    counting.gate.clear()  # before any pass: of one that is under way nobody knows whether it takes the prompt along
    assert next(steps) == 1
    counting.await_pass()
    job = pool.submit(decoder.run, run_of(700, 30))
    until(lambda: decoder.waiting >= 1)
    before = len(counting.passes)
    counting.gate.set()
    assert int(job.result(WAIT_S)) == 739
    assert any(700 in taken for taken in counting.passes[before : before + 2])
    assert list(steps)[-1] == 491


def test_closing_an_answer_waits_for_its_pass_and_no_other_follows(decoder, counting, pool):
    steps = decode(decoder, 3, 50)
    counting.gate.clear()
    assert next(steps) == 3
    counting.await_pass()
    closing = pool.submit(steps.close)
    time.sleep(0.05)
    assert not closing.done(), "a pass works on its cache"
    counting.gate.set()
    closing.result(WAIT_S)
    passes = len(counting.passes)
    assert int(decoder.run(run_of(5))) == 15
    assert len(counting.passes) == passes + 1
    assert not decoder._decoding


def test_a_cache_that_is_released_amid_a_pass_is_let_go_behind_it(decoder, counting):
    """The garbage collector may end an abandoned stream in the very thread that runs the model."""
    shared = BufferPool(SHAPE, 1 << 20)
    held = FusedCache(shared, 1)
    steps = decode(decoder, 3, 50, held=held)
    released = []

    def abandon(pieces):
        if not released:
            released.append(True)
            steps.close()
            held.release()
            assert not shared._idle, "the pass goes on with these buffers"
        return counting(pieces)

    decoder.forward = abandon
    assert next(steps) == 3
    until(lambda: bool(shared._idle))
    assert len(counting.passes) == 1
    assert int(decoder.run(run_of(5))) == 15


def test_a_failing_step_is_its_readers_alone(decoder, counting, pool):
    counting.bad = {21}
    jobs = [pool.submit(lambda first=first: list(decode(decoder, first, 5))) for first in (1, 2)]
    assert jobs[1].result(WAIT_S) == [2, 12, 22, 32, 42]
    with pytest.raises(RuntimeError, match=r"bad \{21\}"):
        jobs[0].result(WAIT_S)
    assert not decoder._decoding


def test_choosing_may_fail(decoder):
    def choose(logits):
        if float(logits) > 15:
            raise ValueError("nothing to choose from")
        return int(logits)

    steps = decoder.decode(DecodingSequence(cache(), choose, 0, 9, (), NO_LIMIT), torch.tensor(1.0))
    with pytest.raises(ValueError, match="nothing to choose"):
        list(steps)
    assert int(decoder.run(run_of(5))) == 15


def test_a_deadline_ends_an_answer_that_nobody_reads(decoder, counting):
    steps = decode(decoder, 1, 10**6, limit=Limit.of(None, 0.2, time.perf_counter()))
    assert next(steps) == 1
    until(lambda: decoder.waiting == 0 and not decoder._running)
    with pytest.raises(TimedOutError):
        list(steps)


def test_the_thread_ends_when_idle_and_comes_back(decoder, monkeypatch):
    monkeypatch.setattr(scheduler_module, "IDLE_S", 0.01)
    assert int(decoder.run(run_of(5))) == 15
    until(lambda: decoder._thread is None)
    assert int(decoder.run(run_of(6))) == 16


def test_without_sharing_every_run_has_a_pass(scheduler, model, pool):
    scheduler.sharing = False
    crowd = Crowd(scheduler, model, pool)
    jobs = [crowd.add(n, 1 + 10 * n) for n in range(3)]
    crowd.go()
    assert [job.result(WAIT_S) for job in jobs] == [0, 11, 22]
    assert model.passes[1:] == [{0: 1}, {1: 11}, {2: 21}]


def test_many_threads_get_their_own_results(decoder, counting):
    """Whatever the order: nobody hangs, nobody gets another's logits."""

    def work(number):
        found = []
        for n in range(30):
            first = 10_000 * number + 100 * n
            found.append(int(decoder.run(run_of(first, 1 + (number * n) % 90))))
            found += list(decode(decoder, first, n % 5))
        return found

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(work, range(12)))
    for number in range(12):
        expected = []
        for n in range(30):
            first = 10_000 * number + 100 * n
            expected += [first + (number * n) % 90 + 10, *(first + 10 * step for step in range(n % 5))]
        assert found[number] == expected
    assert not decoder.waiting
    assert not decoder._decoding
