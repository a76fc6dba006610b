"""The choice between loading and computing, seen from a question: the same answer whichever path its blocks took."""

import json
import os
import time

import pytest
from blocks import size_of

import ragcache as rc
from ragcache.engine.probe import open_rates, probe_disk
from ragcache.engine.rates import RateFigures, Rates, TierFigures, machine_key
from ragcache.errors import ConfigError
from ragcache.files import PAGE
from ragcache.store.eviction import PrefillRate

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
    assert other.rates().tiers["disk"].measured


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
