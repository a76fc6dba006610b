"""The benchmark of eviction policies at toy size: its page says what its rows say, and its plots are drawn."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import policies
from benchmarks.policies import STREAMS, Settings, rows, timed
from benchmarks.policies_page import page
from ragcache.store.eviction import ADMISSIONS, POLICIES

pytestmark = pytest.mark.slow

SMALL = ["--requests=60", "--k=3", "--blocks=200", "--million=500"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policies")
    policies.main([*SMALL, "--out", str(directory)])
    return directory


@pytest.fixture(scope="module")
def result(written: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((written / "policies.json").read_text())
    return found


def test_every_stream_budget_policy_and_filter_has_a_row(result: dict[str, Any]) -> None:
    found = [(row["stream"], row["share"], row["policy"], row["admission"]) for row in result["figures"]["rows"]]
    wanted = {
        (stream.name, share, policy, admission)
        for stream in STREAMS for share in policies.SHARES for policy in POLICIES for admission in ADMISSIONS
    }  # fmt: skip
    assert len(found) == len(wanted)
    assert set(found) == wanted


def test_rows_keep_what_holds_for_every_replay(result: dict[str, Any]) -> None:
    for row in result["figures"]["rows"]:
        assert row["memory"] + row["disk"] + row["computed"] == pytest.approx(1)
        assert row["memory"] <= row["bound"]
        assert row["optimum"] <= row["bound"]
        assert row["optimum"] == row["bound"] or not row["exact"]
        assert 0 < row["p50_s"] <= row["p95_s"] <= row["p99_s"]
    assert any(row["computed"] > 0 for row in result["figures"]["rows"] if "small disk" in row["stream"])
    assert all(row["computed"] == 0 for row in result["figures"]["rows"] if "small disk" not in row["stream"])


def test_the_page_holds_the_rows_and_marks_the_best(result: dict[str, Any], written: Path) -> None:
    text = (written / "policies.md").read_text()
    assert text.splitlines() == page(result)
    table = text.split("## Served from memory")[1].split("##")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(lines) == len(STREAMS) * len(policies.SHARES)
    of = [row for row in result["figures"]["rows"] if (row["stream"], row["share"]) == (STREAMS[1].name, 0.2)]
    (line,) = [line for line in lines if line.startswith(f"| {STREAMS[1].name} | 20% |")]
    cells = [cell.strip() for cell in line.split("|")[3:-2]]
    assert [cell.strip("*") for cell in cells] == [f"{100 * row['memory']:.1f}" for row in of]
    best = f"{max(100 * row['memory'] for row in of):.1f}"
    assert [cell.startswith("**") for cell in cells] == [cell.strip("*") == best for cell in cells]
    assert line.split("|")[-2].strip() == f"{100 * of[0]['optimum']:.1f}"


def test_tables_have_even_rows(written: Path) -> None:
    for part in (written / "policies.md").read_text().split("\n## ")[1:]:
        table = [line for line in part.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in table}) <= 1


def test_plots_are_drawn(written: Path) -> None:
    for name in ("policies-hits.png", "policies-ttft.png"):
        assert (written / name).read_bytes().startswith(b"\x89PNG")


def test_the_goal_is_for_a_million_reads(result: dict[str, Any]) -> None:
    (goal,) = result["goals"]
    assert (goal["limit"], goal["applies"]) == (60, False)
    speed = timed(500, seed=0)
    assert (speed.reads, speed.blocks) == (500, 500)
    assert result["figures"]["speed"]["reads"] == 500


def test_the_same_seed_gives_the_same_rows() -> None:
    small, other = Settings(60, 3, 200, 0), Settings(60, 3, 200, 0, seed=1)
    assert list(rows(small, STREAMS[4:6])) == list(rows(small, STREAMS[4:6]))
    assert list(rows(small, STREAMS[4:6])) != list(rows(other, STREAMS[4:6]))
