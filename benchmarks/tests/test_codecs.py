"""The benchmark of the codecs runs, and holds what it measured against the stated goals."""

import json
import re

import pytest

from benchmarks.codecs import LOSSY, PRUNED, QUESTIONS, main
from ragcache.codecs import CODECS


@pytest.mark.slow
def test_it_runs_and_states_its_goals(tmp_path, capsys):
    sizes = ["--shape", "toy", "--passages", "2", "--tokens", "40", "--rounds", "1", "--questions", "1"]
    result = main([*sizes, "--out", str(tmp_path)])
    written = json.loads((tmp_path / "codecs.json").read_text())
    pruned = {f"{name}, kept {share:g}" for name, shares in PRUNED.items() for share in shares}
    assert written["figures"]["rates"].keys() == CODECS.keys()
    assert written["figures"]["fidelity"].keys() == CODECS.keys() | pruned
    assert all(own["questions"] == len(QUESTIONS) for own in written["figures"]["fidelity"].values())
    assert written["figures"]["fidelity"]["raw"]["top1_agreement"] == 1
    assert {f"{name}: cold disk / raw: cold disk" for name in LOSSY} <= written["ratios"].keys()
    assert not any(goal.applies for goal in result.goals if "raw" in goal.what), "too few questions, another size"
    assert all(goal.within for goal in result.goals if goal.what.endswith("tokens"))
    stored = {name: own["bytes_of_bfloat16"] for name, own in written["figures"]["fidelity"].items()}
    assert stored["raw"] == 1
    assert stored["raw, kept 0.2"] == pytest.approx(0.2, abs=0.02)
    assert stored["kvtc, kept 0.5"] < 0.7 * stored["kvtc"]
    text = (tmp_path / "codecs.md").read_text()
    assert len(text.splitlines()) == 2 + len(CODECS) + 3 + len(PRUNED) + len(pruned)


@pytest.mark.slow
def test_one_codec_is_measured_beside_raw_and_leaves_the_others_results_alone(tmp_path):
    result = main(["--rounds", "0", "--questions", "1", "--codec", "mikv", "--out", str(tmp_path)])
    assert [path.name for path in tmp_path.glob("*.json")] == ["codecs-mikv.json"]
    figures = json.loads((tmp_path / "codecs-mikv.json").read_text())["figures"]
    assert list(figures["rates"]) == ["raw", "mikv"]
    assert list(figures["fidelity"]) == ["raw", "mikv", "raw, kept 0.2", "raw, kept 0.1"]
    assert list(figures["sizes"]) == ["mikv"]
    assert not any("mikv" in goal.what for goal in result.goals), "none is stated for it"
    named = re.findall(r"^\| `(.+?)`", (tmp_path / "codecs-mikv.md").read_text(), re.M)
    assert named == ["raw", "mikv", "raw", "raw, kept 0.2", "raw, kept 0.1"]
