"""The estimate of a full prefill: learnt from what is read anyway, and never from how loaded the machine was."""

from __future__ import annotations

import time

import pytest

import ragcache as rc
from ragcache.engine.estimate import LEAST_TOKENS, PrefillEstimate
from ragcache.store.eviction import PrefillRate

SHORT = rc.Sampling(max_tokens=1)
LONG = " ".join(f"word{number}" for number in range(30))


def test_the_fastest_read_of_a_length_counts():
    """A machine that was busy at the start does not make later answers look fast."""
    estimate = PrefillEstimate()
    for slower in (10.0, 1.0, 7.0):
        estimate.add(1000, slower)
    assert estimate.seconds(1000) == pytest.approx(1.0)
    assert estimate.samples == 3


def test_lengths_between_and_beyond():
    """Exact where a length was read; seconds a token in between; beyond, no attention is made up."""
    estimate, line = PrefillEstimate(), PrefillRate(0.001, 1e-6)
    for tokens in (4000, 200, 1000):
        estimate.add(tokens, line.seconds(tokens))
    for tokens in (200, 1000, 2500, 4000):
        assert estimate.seconds(tokens) == pytest.approx(line.seconds(tokens))
    beyond = estimate.seconds(8000)
    assert beyond == pytest.approx(2 * line.seconds(4000))
    assert beyond < line.seconds(8000)


def test_a_batch_is_as_many_reads_and_a_short_pass_is_none():
    estimate = PrefillEstimate()
    estimate.add(LEAST_TOKENS - 1, 100.0)
    assert (estimate.samples, estimate.seconds(50)) == (0, None)
    estimate.add(64, 4.0, sequences=4)
    assert estimate.seconds(64) == pytest.approx(1.0)


def test_the_engine_learns_from_prompts_that_it_read_whole(open_kb, monkeypatch):
    kb = open_kb()
    assert (kb.full_prefill_estimate_s(500), kb.full_prefill_samples) == (None, 0)
    passages = [rc.Passage(LONG)]
    run, slow = kb.lm.run, [0.3]

    def slowed(ids, *args, **options):
        time.sleep(slow.pop() if slow else 0)
        return run(ids, *args, **options)

    monkeypatch.setattr(kb.lm, "run", slowed)
    full = {"method": "full", "method_options": {"reuse": False}, "sampling": SHORT}
    tokens = kb.ask("Which word?", hits=passages, **full).usage.prompt_tokens
    assert tokens > LEAST_TOKENS
    loaded = kb.full_prefill_estimate_s(tokens)
    assert loaded > 0.3
    kb.ask("Which word?", hits=passages, **full)
    assert 0 < kb.full_prefill_estimate_s(tokens) <= loaded
    assert kb.full_prefill_samples == 2


def test_the_engine_learns_from_passages_and_not_from_questions(open_kb):
    kb = open_kb()
    kb.ingest(rc.Document("long", LONG))
    assert kb.full_prefill_samples > 0
    known, estimate = kb.full_prefill_samples, kb.full_prefill_estimate_s(1000)
    assert estimate > 0
    kb.ask("Which word?", 1, sampling=SHORT)  # its blocks are there: nothing is read whole
    assert (kb.full_prefill_samples, kb.full_prefill_estimate_s(1000)) == (known, estimate)


def test_a_prompt_that_goes_on_from_an_earlier_one_is_no_sample(open_kb):
    kb = open_kb()
    asked = {"hits": [rc.Passage(LONG)], "method": "full", "sampling": SHORT}
    for _ in range(2):
        answer = kb.ask("Which word?", **asked)
    assert answer.usage.cached_tokens > 0
    assert kb.full_prefill_samples == 1
