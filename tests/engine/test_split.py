"""The choice between loading and computing: its split against brute force and against either alone, on machines made of
numbers; and seen from a question, the same answer whichever path its blocks took."""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Self

import pytest
from blocks import size_of
from hypothesis import given, settings
from hypothesis import strategies as st

import ragcache as rc
from ragcache.engine.load_plan import MIN_GAIN_S, BlockSize, LoadPlan
from ragcache.engine.probe import open_rates, probe_disk
from ragcache.engine.rates import RateFigures, Rates, TierFigures, machine_key
from ragcache.errors import ConfigError
from ragcache.files import PAGE
from ragcache.store.prefill_rate import PrefillRate

# A machine made of numbers: a tier that serves one read after another, a model, and a clock that nobody waits for.

TIER = "disk"
POLL_S = 0.02


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """bytes_s:   what the tier gives at a moment, in bytes/s; 0 stalls it
    tokens_s:  what the model computes
    lost:      ranks that the tier turns out not to have
    """

    bytes_s: Callable[[float], float]
    tokens_s: float
    lost: frozenset[int] = frozenset()
    clock: Clock = field(default_factory=Clock)
    rates: Rates = field(init=False)
    read: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    moved_bytes: float = 0.0

    def __post_init__(self) -> None:
        self.rates = Rates(self.clock)

    def know(self, bytes_s: float, tokens_s: float) -> Self:
        self.rates.tier(TIER).set(1e-6, bytes_s)
        self.rates.compute.set(PrefillRate(1 / tokens_s, 0.0))
        return self

    def run(self, parts: Sequence[BlockSize], *, batch_tokens: int = 1, readers: int = 8) -> float:
        """Seconds until all parts are there. Raises AssertionError after an hour of the clock."""
        self.read, self.computed = [], []
        return _Run(self, parts, batch_tokens, readers).seconds()


class _Run:
    def __init__(self, world: World, parts: Sequence[BlockSize], batch_tokens: int, readers: int) -> None:
        self.world, self.parts = world, parts
        placed = {rank: part._replace(tier=TIER) for rank, part in enumerate(parts)}
        self.split = LoadPlan(placed, world.rates, batch_tokens=batch_tokens, readers=readers)
        self.queue: deque[tuple[int, int]] = deque()  # rank, number in the rates
        self.left_bytes = 0.0  # of the first in the queue

    def seconds(self) -> float:
        started = self.world.clock.now
        while not self.split.done:
            assert self.world.clock.now - started < 3600, "it does not end"
            self._begin_reads()
            batch = self.split.next_batch()
            if batch:
                self._compute(batch)
            else:
                self._pass(POLL_S, until_read=True)
        return self.world.clock.now - started

    def _compute(self, batch: Sequence[int]) -> None:
        padded = len(batch) * max(self.parts[rank].num_tokens for rank in batch)
        self._pass(padded / self.world.tokens_s)
        self.world.rates.compute.add([self.parts[rank].num_tokens for rank in batch], padded / self.world.tokens_s)
        self.split.computed()
        self.world.computed += batch

    def _begin_reads(self) -> None:
        for rank in self.split.next_reads():
            size = self.parts[rank].num_bytes
            assert size is not None
            assert rank not in [one for one, _ in self.queue], "read twice at once"
            if not self.queue:
                self.left_bytes = size
            self.queue.append((rank, self.world.rates.tier(TIER).begin(size)))

    def _pass(self, seconds: float, *, until_read: bool = False) -> None:
        """Let time go by in steps in which the tier's rate is taken as constant."""
        clock = self.world.clock
        end = clock.now + seconds
        while clock.now < end - 1e-12:
            rate = self.world.bytes_s(clock.now)
            step = min(end - clock.now, 0.005)
            if self.queue and rate:
                step = min(step, self.left_bytes / rate)
            clock.now += step
            if self.queue:
                self.left_bytes -= step * rate
                self.world.moved_bytes += step * rate
                if self.left_bytes <= 1e-6:
                    self._has_read()
                    if until_read:
                        return

    def _has_read(self) -> None:
        rank, number = self.queue.popleft()
        if self.queue:
            self.left_bytes = self.parts[self.queue[0][0]].num_bytes
        self.world.rates.tier(TIER).end(number, moved=rank not in self.world.lost)
        if rank in self.world.lost:
            self.split.lost(rank)
        else:
            self.split.loaded(rank)
            self.world.read.append(rank)
        self._begin_reads()


def best_s(loads: Sequence[float], computes: Sequence[float]) -> float:
    """The optimum over all assignments, by trying them all; `inf` in loads for what no tier has."""
    return min(
        max(
            sum(load for load, reads in zip(loads, choice, strict=True) if reads),
            sum(compute for compute, reads in zip(computes, choice, strict=True) if not reads),
        )
        for choice in product((True, False), repeat=len(loads))
        if not any(reads and math.isinf(load) for load, reads in zip(loads, choice, strict=True))
    )


MB = 10**6
TEN = [BlockSize(500, 23 * MB)] * 10
# What the clock's steps and polls add to any figure.
STEPS_S = 0.05

part_lists = st.lists(
    st.tuples(st.integers(20, 800), st.one_of(st.none(), st.integers(100_000, 40 * MB))), min_size=1, max_size=8
).map(lambda pairs: [BlockSize(*pair) for pair in pairs])
rates = st.floats(5.5, 9.5).map(lambda power: 10**power)
speeds = st.floats(2, 4.5).map(lambda power: 10**power)


def alone(parts: list[BlockSize], bytes_s: float, tokens_s: float) -> tuple[list[float], list[float]]:
    loads = [math.inf if part.num_bytes is None else part.num_bytes / bytes_s for part in parts]
    return loads, [part.num_tokens / tokens_s for part in parts]


@settings(max_examples=150, deadline=None)
@given(part_lists, rates, speeds)
def test_with_right_estimates_it_is_never_worse_than_either_alone_and_near_the_best_split(parts, bytes_s, tokens_s):
    taken = World(lambda now: bytes_s, tokens_s).know(bytes_s, tokens_s).run(parts)
    loads, computes = alone(parts, bytes_s, tokens_s)
    missing_s = sum(compute for load, compute in zip(loads, computes, strict=True) if math.isinf(load))
    finite = [load for load in loads if math.isfinite(load)]
    slack = STEPS_S + MIN_GAIN_S * (len(parts) + 1)
    assert taken <= max(sum(finite), missing_s) + max(computes) * bool(missing_s) + slack
    assert taken <= sum(computes) + slack
    longest = max(min(load, compute) for load, compute in zip(loads, computes, strict=True))
    assert taken <= best_s(loads, computes) + longest + slack


@settings(max_examples=150, deadline=None)
@given(
    part_lists,
    st.frozensets(st.integers(0, 7)),
    rates,
    speeds,
    rates,
    speeds,
    st.integers(1, 8),
    st.sampled_from([1, 512, 4096]),
)
def test_whatever_was_believed_every_part_comes_once(parts, lost, bytes_s, tokens_s, believed, guessed, readers, batch):
    """lost: damaged blocks, which are computed"""
    world = World(lambda now: bytes_s, tokens_s, lost).know(believed, guessed)
    taken = world.run(parts, readers=readers, batch_tokens=batch)
    assert lost & set(range(len(parts))) <= set(world.computed)
    assert sorted(world.read + world.computed) == list(range(len(parts)))
    loads, computes = alone(parts, bytes_s, tokens_s)
    assert taken >= best_s(loads, computes) - 1e-6, "faster than the machine"


COMPUTED = 5000 / 790
"""Seconds that the ten passages take to compute."""


@pytest.mark.parametrize(
    ("bytes_s", "tokens_s", "believed", "change", "most"),
    [
        # What is believed is right.
        (2000 * MB, 790, (2000 * MB, 790), None, [230 / 2000]),
        (500 * MB, 790, (500 * MB, 790), None, [230 / 500]),
        (10 * MB, 790, (10 * MB, 790), None, [8 * 500 / 790]),
        (1 * MB, 790, (1 * MB, 790), None, [COMPUTED] * 8),
        # A first question knows nothing, and loses little.
        (2000 * MB, 790, None, None, [230 / 2000 * 1.1]),
        (500 * MB, 790, None, None, [230 / 500 * 1.1]),
        (60 * MB, 790, None, None, [230 / 60 * 1.1]),
        (10 * MB, 790, None, None, [COMPUTED * 1.1]),
        (0.77 * MB, 50, None, None, [100 * 1.6, 8 * 10 * 1.1 + 10]),  # 30 s to read a passage, 10 s to compute it
        # The disk turns slow amid the third question: what was begun is waited for, and the next question notices.
        (2000 * MB, 790, (2000 * MB, 790), (2, math.inf, 5 * MB), [0.15, 0.15, 8 * 23 / 5, COMPUTED * 1.1]),
        # It stalls for a second, which is lost; and for a minute, after which it is not believed to be slow.
        (2000 * MB, 790, (2000 * MB, 790), (0, 1.0, 0.0), [1.0 + 0.115]),
        (2000 * MB, 790, (2000 * MB, 790), (0, 60.0, 0.0), [60 + 0.115, COMPUTED]),
        # The model is not as fast as believed, which the first question learns.
        (10 * MB, 790, (10 * MB, 79), None, [math.inf, COMPUTED * 1.1]),
        (10 * MB, 790, (10 * MB, 7900), None, [math.inf, COMPUTED * 1.1]),
        (40 * MB, 79, (40 * MB, 790), None, [230 / 40 * 1.25, 230 / 40 * 1.1]),
    ],
)
def test_ten_passages_of_a_135m_model_take_no_longer(bytes_s, tokens_s, believed, change, most):
    """change: amid which question the disk changes, for how many seconds, and what it gives then, in bytes/s
    most: seconds that each question may take"""
    during = [math.inf, math.inf]
    world = World(lambda now: change[2] if during[0] <= now < during[1] else bytes_s, tokens_s)
    if believed:
        world.know(*believed)
    for number, seconds in enumerate(most):
        if change and number == change[0]:
            during[:] = [world.clock.now + 0.03, world.clock.now + 0.03 + change[1]]
        assert world.run(TEN) <= seconds + STEPS_S
    assert (world.moved_bytes == 0) == (bytes_s == MB), "a disk slower than computing is not read for a try"


@pytest.mark.parametrize(("tiers", "begun"), [(("disk", "remote"), [0, 1]), (("disk", "disk"), [0])])
def test_a_disk_and_a_network_are_read_side_by_side(tiers, begun):
    """Two passages that each take 1 s to load and 1.5 s to compute: one after the other, the second would come late."""
    rates = Rates()
    for tier in tiers:
        rates.tier(tier).set(1e-6, 10e6)
    rates.compute.set(PrefillRate(1.5 / 500, 0.0))
    split = LoadPlan(
        {rank: BlockSize(500, 10 * MB, tier) for rank, tier in enumerate(tiers)}, rates, batch_tokens=500, readers=8
    )
    assert split.next_reads() == begun


SHORT = rc.Sampling(max_tokens=6)
QUESTION = "Where do dogs bark?"


def asked(open_kb, **config):
    kb = open_kb(store=rc.StoreConfig(**config))
    answer = kb.ask(QUESTION, k=3, sampling=SHORT)
    counts = kb.load_counts()
    kb.close()
    return answer, counts


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_answers_do_not_depend_on_where_blocks_came_from(open_kb, codec):
    with open_kb(store=rc.StoreConfig(codec=codec)) as kb:
        kb.ingest(rc.Document(str(n), f"In town {n} of Kelbrook dogs bark at night, number {n}.") for n in range(4))
    found = {load: asked(open_kb, codec=codec, load=load) for load in ("always", "never", "auto")}
    answers = {load: answer for load, (answer, _) in found.items()}
    assert [hit.kv for hit in answers["always"].hits] == ["disk"] * 3
    assert [hit.kv for hit in answers["never"].hits] == ["computed"] * 3
    assert {hit.kv for hit in answers["auto"].hits} <= {"disk", "computed"}
    assert len({answer.text for answer in answers.values()}) == 1
    assert len({tuple(hit.handle for hit in answer.hits) for answer in answers.values()}) == 1
    assert found["never"][1].recomputed == 3
    never, always = answers["never"].usage, answers["always"].usage
    assert never.created_tokens - always.created_tokens == sum(
        len(hit.chunk.token_ids) for hit in answers["never"].hits
    )
    assert never.cached_tokens < always.cached_tokens


def test_likely_passages_are_read_ahead_within_their_budget(kb, open_kb):
    kb.close()
    kb.store.rates.unlink(missing_ok=True)
    for budget in (0, 1 << 30):
        other = open_kb(store=rc.StoreConfig(speculative_bytes=budget, measure_s=0))
        answer = other.ask(QUESTION, k=2, sampling=SHORT)
        counts = other.load_counts()
        assert counts.ahead_bytes == (0 if not budget else sum(_sizes(other, answer)))
        assert counts.wasted_bytes == 0
        assert {hit.kv for hit in answer.hits} == {"disk"}
        assert other.info().hits_by_tier["disk"] >= 2
        other.close()


def _sizes(kb, answer):
    for hit in answer.hits:
        kb.store.kv._tiers.volatile[-1].delete(hit.handle)
    return [size_of(kb.store.kv, hit.handle) for hit in answer.hits]


def test_what_the_ranking_leaves_out_was_read_for_nothing(kb, open_kb):
    kb.close()
    other = open_kb(store=rc.StoreConfig(measure_s=0))
    other.ask(QUESTION, k=2, score_threshold=1e9, sampling=SHORT)
    counts = other.load_counts()
    assert counts.wasted_bytes == counts.ahead_bytes


def test_rates_are_measured_once_kept_and_shown(kb, open_kb, monkeypatch):
    assert kb.rates().prefill is None, "a store without blocks has nothing to choose"
    kb.close()
    with open_kb() as first:
        figures = first.rates()
        assert figures.prefill_tokens_s > 0
        assert {"disk", "memory"} <= figures.tiers.keys()
        assert figures.decode_bytes_s["raw"] > 0
    monkeypatch.setattr("ragcache.engine.probe.probe", lambda *args: pytest.fail("measured again"))
    with open_kb() as second:
        assert second.rates().prefill_tokens_s == pytest.approx(figures.prefill_tokens_s, rel=0.5)
    with rc.Store.open(kb.store.layout.root) as care:
        assert care.rates().tiers.keys() == figures.tiers.keys()
    assert json.dumps(figures.to_json())


def test_measuring_can_be_turned_off_and_corrected_by_real_work(kb, open_kb):
    kb.close()
    (kb.store.layout.root / "rates.json").unlink(missing_ok=True)
    other = open_kb(store=rc.StoreConfig(measure_s=0))
    assert not other.rates().is_measured
    other.ask(QUESTION, k=2, sampling=SHORT)
    assert "disk" in other.rates().tiers


def test_a_disk_that_was_slow_is_measured_again_at_the_next_opening(kb, open_kb):
    """A tier that seems slower than computing is never read, so no read would correct its rate."""
    kb.close()
    kept = RateFigures({"disk": (slow := TierFigures(5.0, 1.0))}, PrefillRate(1e-3, 0.0))
    kept.write(kb.store.rates, machine_key(kb.lm))
    with open_kb(store=rc.StoreConfig(measure_s=0)) as other:
        assert other.rates().tiers["disk"] == slow
        assert {hit.kv for hit in other.ask(QUESTION, k=3, sampling=SHORT).hits} == {"computed"}
        assert other.rates().tiers["disk"] == slow
    kept.write(kb.store.rates, machine_key(kb.lm))
    with open_kb() as other:
        assert other.rates().tiers["disk"].bytes_s > 1e4
        assert other.rates().prefill == PrefillRate(1e-3, 0.0), "the model's rate is kept"


@pytest.mark.parametrize("bad", [{"load": "maybe"}, {"speculative_bytes": -1}, {"measure_s": -0.1}])
def test_bad_settings_are_refused_with_their_names(bad):
    with pytest.raises(ConfigError, match=next(iter(bad)).removesuffix("_s")):
        rc.StoreConfig(**bad)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"machine": "m", "rates": {"tiers": {"disk": {"latency_s": -1, "bytes_s": 0}}}}', "\xff"]
)
def test_a_bad_rates_file_is_no_rates(tmp_path, text):
    (tmp_path / "rates.json").write_text(text, encoding="latin-1")
    assert RateFigures.read(tmp_path / "rates.json", "m") is None


def test_rates_of_another_machine_are_not_taken(tmp_path, lm):
    file = tmp_path / "rates.json"
    RateFigures({"disk": TierFigures(0.001, 1e6)}).write(file, "other")
    assert RateFigures.read(file, "other").tiers["disk"].bytes_s == 1e6
    assert RateFigures.read(file, "mine") is None
    assert not open_rates(file, tmp_path, lm, None, 0.0).figures().is_measured


def test_a_probe_reads_any_file(tmp_path):
    for size in (10, 5000, 3 << 20):
        path = tmp_path / str(size)
        path.write_bytes(bytes(size))
        latency_s, bytes_s = probe_disk(path, 0.01)
        assert latency_s > 0
        assert bytes_s > 0


@pytest.mark.parametrize(("bytes_s", "pieces"), [(1e9, [256 << 10, 5 << 20]), (4e6, [256 << 10])])
def test_a_probe_reads_a_block_in_one_piece_where_time_allows(tmp_path, monkeypatch, bytes_s, pieces):
    """The store reads so, too. On a slow disk the first part is all that is read. The rate is the disk's."""
    path = tmp_path / "block"
    path.write_bytes(bytes(PAGE + sum(pieces) + (0 if len(pieces) > 1 else 5 << 20)))
    now, seen, preadv = [0.0], [], os.preadv

    def read(descriptor, buffers, offset, flags=0):
        done = preadv(descriptor, buffers, offset, flags)
        now[0] += 1e-4 + done / bytes_s
        seen.append((offset, done))
        return done

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    latency_s, rate = probe_disk(path, 0.075)
    assert latency_s == pytest.approx(1e-4 + PAGE / bytes_s)
    assert rate == pytest.approx(bytes_s, rel=0.05)
    assert [done for _, done in seen[:4]] == [PAGE] * 4
    assert seen[4:] == [(PAGE + sum(pieces[:n]), count) for n, count in enumerate(pieces)]


def test_rates_follow_reads_but_not_a_single_outlier():
    now = [0.0]
    rates = Rates(lambda: now[0])
    rates.tier("disk").set(1e-6, 1e9)

    def read(seconds):
        number = rates.tier("disk").begin(10**7)
        now[0] += seconds
        rates.tier("disk").end(number, moved=True)
        return rates.figures().tiers["disk"].bytes_s

    for _ in range(3):
        read(0.01)
    assert read(5.0) > 0.5e9, "one outlier"
    assert read(0.01) > 0.6e9
    read(1.0)
    assert read(1.0) == pytest.approx(1e7, rel=0.1), "two in a row are a slow disk"
    read(0.01)
    assert read(0.01) == pytest.approx(1e9, rel=0.1), "and two the other way its recovery"


def test_reads_that_overlap_share_the_device():
    now = [0.0]
    rates = Rates(lambda: now[0])
    rates.tier("disk").set(1e-6, 1e6)
    for _ in range(4):
        numbers = [rates.tier("disk").begin(10**6) for _ in range(5)]
        assert rates.tier("disk").backlog_s() == pytest.approx(5.0, rel=0.01)
        now[0] += 5.0
        for number in numbers:
            rates.tier("disk").end(number, moved=True)
    assert rates.figures().tiers["disk"].bytes_s == pytest.approx(1e6, rel=0.01)
    assert rates.tier("disk").backlog_s() == 0.0


def test_a_read_that_is_late_is_expected_to_take_as_long_again():
    now = [0.0]
    rates = Rates(lambda: now[0])
    rates.tier("disk").set(1e-6, 1e9)
    number = rates.tier("disk").begin(10**7)
    now[0] = 0.2
    assert rates.tier("disk").backlog_s() == 0.0, "too little to say"
    now[0] = 1.5
    assert rates.tier("disk").backlog_s() == pytest.approx(1.5)
    rates.tier("disk").end(number, moved=False)
    assert rates.figures().tiers["disk"].bytes_s == pytest.approx(1e9), "nothing was learnt"
