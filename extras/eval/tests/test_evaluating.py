"""`ragcache eval` and `ragcache check` on the command line."""

import json
from pathlib import Path

import pytest
from terminal import invoke

from ragcache.engine.verdict import FILE

ROWS = [
    {"id": "1", "question": "Where did the cat sit?", "answers": ["mat"], "passages": ["The cat sat on the mat."]},
    {"id": "2", "question": "Who barks?", "answers": ["Dogs"], "passages": ["Dogs bark.", "Cats do not bark."]},
]

FEW = ("--methods", "reposition", "--questions", "2", "--max-tokens", "3", "--k", "2")
LOOSE = ("--min-agreement", "0", "--max-kl", "1000", "--min-same-answer", "0", "--max-accuracy-drop", "1")


@pytest.fixture
def questions(tmp_path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def test_eval_writes_json_and_a_table_and_goes_on(questions, model, tmp_path):
    out = tmp_path / "out"
    command = ("eval", "--model", model, "--methods", "reposition,few=epic:first_tokens=2", "--data", questions)
    command += ("--out", out, "--max-tokens", "4")
    result = invoke(*command, "--questions", "1", "--json")
    assert result.exit_code == 0, result.output
    assert [row["method"] for row in json.loads(result.stdout)["rows"]] == ["no passages", "full", "reposition", "few"]
    lines = (out / "own.results.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 4
    assert invoke(*command).exit_code == 0
    assert (out / "own.results.jsonl").read_text().splitlines()[: len(lines)] == lines
    report = json.loads((out / "own.json").read_text())
    assert {row["questions"] for row in report["rows"]} == {2}
    assert "| few | 2 |" in (out / "own.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nothing"), "'nothing' is neither a file nor one of registry, pages"),
        (("--methods", "nothing"), "method 'nothing' is unknown"),
        (("--methods", "link"), "has no trained link tokens"),
    ],
)
def test_eval_names_what_it_cannot_do(model, tmp_path, questions, arguments, message):
    default = () if "--data" in arguments else ("--data", questions)
    result = invoke("eval", "--model", model, "--out", tmp_path / "out", *default, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_check_keeps_its_verdict_in_the_store(store):
    command = ("check", "--store", store, *FEW)
    result = invoke(*command, *LOOSE)
    assert result.exit_code == 0, result.output
    assert "auto takes: reposition" in result.stdout
    assert "sentences of the store to be completed" in result.stdout
    (kept,) = json.loads((store / FILE).read_text())["verdicts"].values()
    assert kept["methods"][0]["safe"]
    strict = invoke(*command, "--min-agreement", "1", "--max-kl", "0", "--json")
    assert strict.exit_code == 1
    assert json.loads(strict.stdout)["methods"][0]["safe"] is False
    (kept,) = json.loads((store / FILE).read_text())["verdicts"].values()
    assert not kept["methods"][0]["safe"]


def test_check_finds_layers_for_prophet_and_keeps_them(store):
    """Layers are searched on half of the questions, and methods are judged on the other half."""
    asked = ("--store", store, "--questions", "3", "--max-tokens", "3", "--k", "2")
    result = invoke("check", *asked, *LOOSE, "--methods", "prophet:ratio=0.3", "--profile-layers", "1", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["questions"] == 1
    (kept,) = json.loads((store / FILE).read_text())["verdicts"].values()
    for found in (printed, kept):
        (method,) = found["methods"]
        assert method["name"] == "prophet"
        assert len(method["options"]["layers"]) == 1
    refused = invoke("check", *asked, "--methods", "a3", "--profile-layers", "1")
    assert refused.exit_code == 2
    assert "prophet, which is not among the methods" in refused.stderr
    lone = invoke("check", *asked, "--questions", "1", "--methods", "prophet", "--profile-layers", "1")
    assert lone.exit_code == 2
    assert "needs 2 questions" in lone.stderr


def test_check_without_a_store_asks_about_generated_text(model, tmp_path):
    result = invoke("check", "--model", model, "--methods", "reposition", "--questions", "2", "--k", "2")
    assert "(registry:passages=2)" in result.stdout
    assert result.exit_code == 1  # a random model: nothing agrees
    assert invoke("check", "--store", tmp_path / "none").exit_code == 1
