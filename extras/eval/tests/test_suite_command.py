"""`ragcache eval --suite` as it is typed, over tiny files in the form of the public ones."""

import json
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest
from terminal import invoke

CONTEXT = "Passage 1:\nClub\nAda founded the club.\n\nPassage 2:\nTown\nThe town is old.\n"
ROWS = [
    {"_id": "a", "input": "Who founded it?", "context": CONTEXT, "answers": ["Ada"], "all_classes": None},
    {"_id": "b", "input": "What is old?", "context": CONTEXT, "answers": ["the town", "town"], "all_classes": None},
]


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("hotpotqa_e", "2wikimqa_e"):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    return folder


def f1(prediction: str, answer: str) -> float:
    """Token F1 of plain lower-case words, which is all that is written here."""
    left, right = Counter(prediction.lower().split()), Counter(answer.lower().removeprefix("the ").split())
    shared = sum((left & right).values())
    return 2 * shared / (left.total() + right.total()) if shared else 0.0


def test_a_suites_table_has_the_papers_rows_beside_the_measured_ones(model, data, tmp_path):
    command = ("eval", "--suite", "a3", "--model", model, "--data-dir", data, "--out", tmp_path / "out", "--no-plot")
    command += ("--data", "hotpotqa", "--data", "2wikimqa", "--methods", "reposition", "--max-tokens", "4")
    result = invoke(*command, "--json")
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    assert (table["suite"], table["columns"]) == ("a3", ["hotpotqa", "2wikimqa"])
    rows = [(row["source"], row["method"]) for row in table["rows"]]
    theirs = [[("paper", name)] * 2 for name in ("Vanilla", "PIE")]
    assert rows == [("measured", "full"), *theirs[0], ("measured", "reposition"), *theirs[1]]
    assert table["rows"][1]["scores"] == {"hotpotqa": 48.81, "2wikimqa": 33.51}
    assert table["rows"][1]["average"] == pytest.approx((48.81 + 33.51) / 2)
    lines = (tmp_path / "out" / "a3-hotpotqa.results.jsonl").read_text().splitlines()[1:]
    scores = [json.loads(line) for line in lines]
    golden = {row["_id"]: row["answers"][-1] for row in ROWS}
    for row in (table["rows"][0], table["rows"][3]):
        own = [score for score in scores if score["method"].startswith(f"{row['method']}@")]
        expected = fmean(f1(score["prediction"], golden[score["case"]]) for score in own)
        assert row["scores"]["hotpotqa"]["mean"] == pytest.approx(100 * expected)
        assert row["scores"]["hotpotqa"]["size"] == 2
    page = (tmp_path / "out" / "a3.md").read_text()
    assert "| paper | LLaMA3-8B-Instruct | PIE | 38.55 | 30.29 | 34.42 |" in page
    assert invoke(*command).exit_code == 0  # goes on where the first one stopped
    assert (tmp_path / "out" / "a3-hotpotqa.results.jsonl").read_text().splitlines()[1:] == lines


def test_methods_that_the_model_cannot_use_are_named_with_the_reason(model, data, tmp_path):
    (data / "hotpotqa.jsonl").write_text(
        json.dumps({"question": "Who?", "answer": "Ada", "context": [["Club", ["Ada founded the club."]]]}) + "\n"
    )
    command = ("eval", "--suite", "kvlink", "--model", model, "--data-dir", data, "--out", tmp_path / "out")
    command += ("--no-plot", "--data", "hotpotqa", "--max-tokens", "2")
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    table = json.loads((tmp_path / "out" / "kvlink.json").read_text())
    assert list(table["left_out"]) == ["link"]
    assert "no trained link tokens; train them with" in table["left_out"]["link"]
    assert "Not measured: link." in (tmp_path / "out" / "kvlink.md").read_text()
    assert "Not measured: link." in " ".join(result.stdout.split())
    assert {row["method"] for row in table["rows"] if row["source"] == "measured"} == {
        "full",
        "reposition",
        "cacheblend:ratio=0.18",
    }
    asked = invoke(*command, "--methods", "link")
    assert asked.exit_code == 2
    assert "no trained link tokens" in asked.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--suite", "glue"), "suite 'glue' is unknown; choose one of kvlink, a3, samkv"),
        (("--suite", "a3", "--data", "nq"), "--data of suite a3 'nq' is unknown"),
        (("--suite", "kvlink", "--data", "triviaqa"), "the questions of triviaqa are missing"),
        (("--suite", "kvlink", "--data", "triviaqa", "--methods", "nothing"), "method 'nothing' is unknown"),
    ],
)
def test_what_a_suite_lacks_is_named(model, data, tmp_path, arguments, message):
    result = invoke("eval", "--model", model, "--data-dir", data, "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
