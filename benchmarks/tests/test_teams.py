"""The benchmark of OpenMP teams runs, beside threads that do what it says."""

import json
import threading
from pathlib import Path

import pytest

from benchmarks import teams
from benchmarks.teams import KINDS, NONE, Others, Settings


@pytest.mark.slow
def test_it_runs_and_compares(tmp_path: Path) -> None:
    result = teams.main(["--shape=toy", "--others=1", "--steps=2", "--tokens=8", "--rounds=2", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "teams.json").read_text())
    assert set(found["timings"]) == {f"{what}: {kind}" for what in ("a token", "an int8 block") for kind in KINDS}
    assert [goal["applies"] for goal in found["goals"]] == [False] * 4
    assert all(ratio["pairs"] == 2 for ratio in found["ratios"].values())
    assert result.settings != Settings()


def test_others_are_there_until_they_are_replaced() -> None:
    others, before = Others(2), set(threading.enumerate())  # threads of earlier tests may end meanwhile
    for kind in KINDS:
        others.replace(kind)
        assert len(set(threading.enumerate()) - before) == (0 if kind == NONE else 2)
    others.replace(NONE)
    assert set(threading.enumerate()) <= before
