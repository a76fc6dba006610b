"""Conditions of the verdict "met": enough pairs, an interval, a quiet machine, and the commit's own code."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import askers, decode, environment, ingest, methods, peers, ttft, vllm_placing
from benchmarks.report import LEAST_PAIRS, Goal, Result, write
from benchmarks.timing import Ratio, median_interval

QUIET = {
    "load_1min": 0.3,
    "load_after_1min": 2.1,
    "stolen_share": 0.05,
    "threads": 2,
    "commit": "abc1234",
    "clean": True,
}
GOOD = Goal("a / b", "at most", 1.10, 1.05, True, 10, 1.02, 1.08)


@pytest.mark.parametrize(
    ("goal", "run", "verdict"),
    [
        (GOOD, {}, "met"),
        (replace(GOOD, measured=1.2, low=1.15, high=1.3), {}, "missed"),
        (replace(GOOD, kind="at least"), {}, "missed"),
        (replace(GOOD, kind="at least", measured=1.2, low=1.15, high=1.3), {}, "met"),
        (replace(GOOD, pairs=None, low=None, high=None), {}, "met"),
        (replace(GOOD, high=1.2), {}, "open: the limit is within 1.02 to 1.2"),
        (replace(GOOD, applies=False), {}, "other sizes than the goal's"),
        (replace(GOOD, pairs=9), {}, "to be measured again: 9 pairs"),
        (replace(GOOD, pairs=None), {"load_1min": 12.0, "load_after_1min": 12.0}, "met"),  # counted, not timed
        (replace(GOOD, pairs=None), {"clean": False}, "to be measured again: uncommitted changes"),
    ],
)
def test_a_good_run_decides(goal: Goal, run: dict[str, object], verdict: str) -> None:
    assert goal.verdict({**QUIET, **run}) == verdict


@pytest.mark.parametrize(
    ("run", "doubts"),
    [
        ({"load_1min": 0.51}, "load 0.51 before"),
        ({"load_after_1min": 3.01}, "load 3.01 after"),
        ({"stolen_share": 0.123}, "the host took 12% of the processors' time"),
        ({"clean": False}, "uncommitted changes"),
        ({"load_1min": 2.94, "clean": False}, "load 2.94 before, uncommitted changes"),
    ],
)
def test_a_poor_run_decides_nothing(run: dict[str, object], doubts: str) -> None:
    assert GOOD.verdict({**QUIET, **run}) == f"to be measured again: {doubts}"
    assert replace(GOOD, measured=9.0, low=8.0, high=10.0).verdict({**QUIET, **run}).startswith("to be measured again")


def test_a_result_states_its_run(tmp_path: Path) -> None:
    where = environment.environment("x", ["--rounds", "3"], torch.device("cpu"))
    goal = Goal.of("a / b", "at most", 2.0, Ratio.of([1.0 + rank / 100 for rank in range(12)]), True)
    result = Result("x", {}, replace(where, clean=True, load_1min=0.1), {}, {}, {}, [goal], load_after_1min=0.2)
    found = json.loads(write(result, tmp_path).read_text())
    assert found["goals"][0]["verdict"] == "met"
    assert (found["goals"][0]["pairs"], found["goals"][0]["low"], found["goals"][0]["high"]) == (12, 1.02, 1.09)
    assert found["hardware"]["load_after_1min"] == 0.2
    dirty = replace(result, environment=replace(where, clean=False, load_1min=0.1))
    assert dirty.to_json()["goals"][0]["verdict"] == "to be measured again: uncommitted changes"


def test_code_that_is_not_committed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and pages, which a run writes before the next run begins, do not count as code."""

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    def clean() -> bool:
        return environment.environment("x", [], torch.device("cpu")).clean

    for name in ("benchmarks/environment.py", "benchmarks/results/x.json", "docs/results.md", "ragcache/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "benchmarks" / "environment.py"))
    assert not clean(), "no repository"
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    assert clean()
    (tmp_path / "benchmarks/results/x.json").write_text("2")
    (tmp_path / "docs/results.md").write_text("2")
    assert clean()
    (tmp_path / "ragcache/a.py").write_text("2")
    assert not clean()
    git("commit", "-q", "-am", "more")
    (tmp_path / "ragcache/b.py").write_text("new")
    assert not clean()


def test_few_values_have_no_interval_but_their_range() -> None:
    assert median_interval([3.0]) == (3.0, 3.0)
    assert median_interval([5.0, 1.0, 3.0]) == (1.0, 5.0)
    assert median_interval([float(number) for number in range(10, 0, -1)]) == (2.0, 9.0)
    with pytest.raises(ValueError, match="nothing"):
        median_interval([])


def test_every_benchmark_measures_enough_pairs_by_default() -> None:
    for module in (askers, decode, ingest, methods, peers, ttft, vllm_placing):
        settings = module.Settings()
        assert getattr(settings, "long_rounds", settings.rounds) >= LEAST_PAIRS, module.__name__


def test_waiting_for_a_quiet_machine_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([2.0, 0.9, 0.4])
    monkeypatch.setattr(environment, "load_average", lambda: next(loads))
    monkeypatch.setattr(environment.time, "sleep", lambda _seconds: None)
    assert environment.settle(0.5, 60)
    monkeypatch.setattr(environment, "load_average", lambda: 2.0)
    assert not environment.settle(0.5, 0)
