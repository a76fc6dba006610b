"""The benchmark of the codecs runs, and holds what it measured against the stated goals."""

from __future__ import annotations

import json

import pytest

from benchmarks.codecs import LOSSY, main
from ragcache.codecs import CODECS


@pytest.mark.slow
def test_it_runs_and_states_its_goals(tmp_path, capsys):
    sizes = ["--shape", "toy", "--passages", "2", "--tokens", "40", "--rounds", "1", "--questions", "1"]
    result = main([*sizes, "--out", str(tmp_path)])
    written = json.loads((tmp_path / "codecs.json").read_text())
    assert written["figures"]["fidelity"].keys() == written["figures"]["rates"].keys() == CODECS.keys()
    assert all(own["questions"] == 3 for own in written["figures"]["fidelity"].values())
    assert written["figures"]["fidelity"]["raw"]["top1_agreement"] == 1
    assert {f"{name}: cold disk / raw: cold disk" for name in LOSSY} <= written["ratios"].keys()
    assert not any(goal.applies for goal in result.goals if "raw" in goal.what), "too few questions, another size"
    assert all(goal.within for goal in result.goals if "bfloat16" in goal.what)
    assert len((tmp_path / "codecs.md").read_text().splitlines()) == 2 + len(CODECS)


def test_one_codec_is_measured_beside_raw_and_leaves_the_others_results_alone(tmp_path):
    result = main(["--rounds", "0", "--questions", "1", "--codec", "mikv", "--out", str(tmp_path)])
    assert [path.name for path in tmp_path.glob("*.json")] == ["codecs-mikv.json"]
    figures = json.loads((tmp_path / "codecs-mikv.json").read_text())["figures"]
    assert list(figures["fidelity"]) == list(figures["rates"]) == ["raw", "mikv"]
    assert list(figures["sizes"]) == ["mikv"]
    assert result.goals == [], "none is stated for it"
    assert [line.split("`")[1] for line in (tmp_path / "codecs-mikv.md").read_text().splitlines()[2:]] == [
        "raw",
        "mikv",
    ]
