"""The benchmark of loading and recomputing runs, on all disks, and holds itself against its goal."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.loading import PLACES, POLICIES, Bucket, main


@pytest.mark.slow
def test_it_measures_every_policy_on_every_disk(tmp_path):
    sizes = ["--shape=toy", "--passages=2", "--tokens=20", "--suffix=5", "--rounds=1", "--codecs=raw"]
    result = main([*sizes, "--workdir", str(tmp_path), "--out", str(tmp_path / "out")])
    written = json.loads((tmp_path / "out" / f"{result.name}.json").read_text())
    assert written["timings"].keys() == {f"raw, {place}: {name}" for place in PLACES for name in POLICIES.values()}
    assert len(written["goals"]) == len(PLACES)
    assert not any(goal["applies"] for goal in written["goals"])
    assert {goal["limit"] for goal in written["goals"]} == {1.1}
    # the round that warms up, the one that counts, and again where the hypervisor took its time
    assert all(len(written["figures"][f"raw, {place}: auto, blocks computed"]) >= 2 for place in PLACES)


def test_a_bucket_gives_no_more_than_its_rate(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr("benchmarks.loading.time", clock)
    bucket = Bucket(100.0)
    for _ in range(5):
        bucket.take(50)
    assert now[0] == 2.5
