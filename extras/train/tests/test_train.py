"""`ragcache train`: options start a run, its report is printed, and errors are a single line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from terminal import invoke

from ragcache.cli.commands import build_app
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.train_options import TrainOptions

COMMANDS = typer.main.get_command(build_app()).commands
LINE = {"type": "qa", "passages": ["Ann lives in Oslo.", "Bob has a boat."], "question": "Where?", "answer": "Oslo"}


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(LINE) + "\n{}\n", encoding="utf-8")
    return path


def run(base, data, out, *more):
    return invoke("train", "--model", str(base), "--data", str(data), "--out", str(out), "--device", "cpu", *more)


def test_a_run(base, data, tmp_path):
    out = tmp_path / "out"
    result = run(base, data, out, "--steps", "2", "--link-tokens", "1", "--link-slots", "3")
    assert result.exit_code == 0, result.output
    assert "1 used, 1 left out" in result.stdout
    last = re.search(r"step 2 of 2 +loss ([0-9.]+)", result.stderr)
    assert re.search(rf"last loss +{last[1]}\n", result.stdout)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["ragcache"] == TrainedTokens("link", "isolated", 1, 3, 258, 261, 262).section()


def test_a_run_without_data_or_a_store_says_so(base, tmp_path):
    result = invoke("train", "--model", str(base), "--out", str(tmp_path / "out"), env={"RAGCACHE_STORE": "/nowhere"})
    assert result.exit_code == 2
    assert "no training data" in result.stderr


def test_json(base, data, tmp_path):
    out = tmp_path / "out"
    result = run(base, data, out, "--steps", "1", "--reuse", "markers", "--positions", "composite", "--json")
    report = json.loads(result.stdout)
    assert (report["steps"], report["rows"]) == (1, 1)
    assert [line["where"] for line in report["bad"]] == [f"{data}:2"]
    spec = TrainedTokens("markers", doc_start_id=258, doc_end_id=259, positions="composite")
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["ragcache"] == spec.section()


OPTIONS = {
    "--mix qa=0.4 --mix text=1 --keep-order --max-length 90": {
        "mixture": {"qa": 0.4, "text": 1.0},
        "shuffle_passages": False,
        "max_tokens": 90,
    },
    "--reuse markers --lora-rank 4 --seed 7 --epochs 2.5": {
        "reuse": "markers",
        "lora_rank": 4,
        "seed": 7,
        "epochs": 2.5,
    },
    "--objective distill --store kb --passages 3": {"objective": "distill", "store": Path("kb"), "passages": 3},
}


@pytest.mark.parametrize(("words", "fields"), OPTIONS.items())
def test_options_reach_the_run(base, data, tmp_path, monkeypatch, words, fields):
    seen = []

    def caught(options, show=None):
        seen.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr("ragcache_train.trainer.train", caught)
    assert run(base, data, tmp_path / "out", *words.split()).exit_code == 130
    assert seen == [TrainOptions(model=str(base), data=(data,), out=tmp_path / "out", device="cpu", **fields)]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--link-slots", "1"], "link_slots=2"),
        (["--separate-share", "2"], "separate_share is 2"),
        (["--mix", "qa"], "not a share"),
        (["--resume"], "no training run to resume"),
        (["--store", "kb"], "store goes with objective='distill'"),
    ],
)
def test_what_is_wrong_is_said(base, data, tmp_path, more, reason):
    result = run(base, data, tmp_path / "out", "--steps", "1", *more)
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.replace("│", " ").split())


@pytest.fixture
def script(tmp_path):
    """Return a function that runs scripts/train-reuse with a `ragcache` that records its arguments."""
    root = Path(__file__).parents[3]
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    command = venv / "bin" / "ragcache"
    command.write_text(f"#!/bin/bash\nprintf '%s\\n' ... \"$@\" >> {tmp_path}/asked\n")
    command.chmod(0o755)
    project = (root / "pyproject.toml").read_bytes()
    pinned = subprocess.run(["cksum"], input=project, capture_output=True, check=True).stdout.decode().strip()
    (venv / ".ragcache-train,offline").write_text(f"{pinned} {root}\n")

    def run_it(*arguments, **environment):
        own = {"PATH": os.environ["PATH"], "VENV": str(venv), **environment}
        command = [root / "scripts" / "train-reuse", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=60, check=False)
        asked = (tmp_path / "asked").read_text().split("...\n")[1:] if (tmp_path / "asked").exists() else []
        (tmp_path / "asked").unlink(missing_ok=True)
        return done, [lines.splitlines() for lines in asked]

    return run_it


def test_one_command_fetches_trains_and_checks(script, tmp_path):
    done, (pulled, (name, *words), checked) = script("some/model", "rows.jsonl.xz", "--minutes", "3", "--out", "mine")
    assert (done.returncode, pulled, name) == (0, ["pull", "some/model"], "train")
    assert checked == ["check", "--model", "mine"]
    found = COMMANDS["train"].make_context("train", words).params
    expected = {"model": "some/model", "objective": "distill", "recipe": "primer", "link_tokens": 5, "lora_rank": 16}
    assert {key: found[key] for key in expected} == expected
    assert (found["data"], found["out"], found["minutes"]) == ([tmp_path / "rows.jsonl.xz"], Path("mine"), 3.0)
    assert (found["reuse"], found["merge"]) == ("link", False)


def test_rows_may_come_from_the_environment(script, tmp_path):
    (tmp_path / "local").mkdir()
    done, ((_, *words), checked) = script("local", "--link-tokens", "0", RAGCACHE_DATA="rows.jsonl")
    assert (done.returncode, checked[-1]) == (0, "local-reuse")  # and a directory is not pulled
    found = COMMANDS["train"].make_context("train", words).params
    assert (found["link_tokens"], found["epochs"], found["steps"]) == (0, 3.0, None)
    assert (found["model"], found["data"]) == (str(tmp_path / "local"), [tmp_path / "rows.jsonl"])


@pytest.mark.parametrize(("arguments", "reason"), [((), "name a model"), (("smollm2",), "name the rows")])
def test_a_missing_argument_is_named(script, arguments, reason):
    done, asked = script(*arguments)
    assert (done.returncode, asked) == (2, [])
    assert reason in done.stderr


def test_without_the_extra_nothing_is_loaded(base, data, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "ragcache_train.trainer", raising=False)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    result = run(base, data, tmp_path / "out")
    assert result.exit_code != 0
    assert "training needs accelerate; install ragcache-kv[train]" in result.output
    assert not (tmp_path / "out").exists()
