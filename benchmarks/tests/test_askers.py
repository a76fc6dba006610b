"""The benchmark of many askers runs, compares the answers, and reports its goals."""

import json
from pathlib import Path

import pytest

from benchmarks.askers import APART, JOINED, ONE, Settings
from benchmarks.runner import main
from ragcache.errors import ConfigError


@pytest.mark.slow
def test_it_runs_and_compares(tmp_path: Path) -> None:
    sizes = ["--shape=toy", "--askers=3", "--questions=6", "--passages=2", "--tokens=12", "--documents=4"]
    sizes += ["--answer=3", "--rounds=1", "--embedder=words"]
    result = main("askers", [*sizes, "--workdir", str(tmp_path), "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / f"{result.name}.json").read_text())
    assert {f"{name}: first token" for name in (ONE, JOINED, APART)} <= found["timings"].keys()
    assert [goal["limit"] for goal in found["goals"]] == [1.5, 1.5, 1.5, 1.0]
    assert [goal["applies"] for goal in found["goals"]] == [False, False, False, True]
    bytes_held = found["figures"]["kv bytes by askers over the same passages"]
    assert 0 < bytes_held["1"] < bytes_held["3"] <= 3 * bytes_held["1"]  # 256 tokens each: these are short
    assert found["figures"][f"{JOINED}, answers like {ONE}"] == 1
    assert sum(found["figures"][f"{JOINED}, passes by members"].values()) == found["figures"][f"{JOINED}, passes"]
    assert found["timings"][f"{JOINED}: answer"]["runs"] == 6
    assert str(tmp_path) not in found["hardware"]["command"]


def test_goals_are_stated_for_these_sizes() -> None:
    assert Settings().on_goal
    assert Settings(shape="Llama-3.1-8B", dtype="bfloat16", device="cuda:0").on_goal
    assert not Settings(askers=4).on_goal
    assert not Settings(tokens=10).on_goal


@pytest.mark.slow
def test_too_many_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no English for 100000 documents"):
        main("askers", ["--shape=toy", "--documents=100000", "--embedder=words", "--out", str(tmp_path)])
