"""The demo, over a corpus and a model of the test's own."""

from __future__ import annotations

import json
import re

import pytest
from terminal import invoke

from ragcache.cli.demo import EXAMPLES, DemoQuestion, choose, is_right, load_questions

QUESTIONS = [
    {"question": "Where is the cat?", "answer": "on the mat", "hops": 1},
    {"question": "Where do dogs bark?", "answer": "in Kelbrook", "hops": 1},
    {"question": "Which club meets where dogs bark?", "answer": "the rowing club", "hops": 2},
]


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return path


def test_the_demo_compares_fused_with_full_prefill(model, folder, questions, tmp_path):
    options = ["--corpus", folder, "--questions", questions, "--store", tmp_path / "kb", "--model", model, "--k", 2]
    options += ["--method", "reposition"]
    result = invoke("demo", *options)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    asked = re.findall(r"^Q \((\d) hops?\): (.*)$", result.stdout, re.M)
    assert [int(hops) for hops, _ in asked] == [1, 2, 1]
    assert {text for _, text in asked} == {question["question"] for question in QUESTIONS}
    times = r"^ {13}first token after [\d.]+ m?s, asked again after [\d.]+ m?s$"
    assert len(re.findall(times, result.stdout, re.M)) == 2 * len(QUESTIONS)
    assert len(re.findall(r"^(?:reposition|full) +\d of 3 right", result.stdout, re.M)) == 2
    assert "KV: disk" in result.stdout
    assert "KV: memory" in result.stdout
    assert "ragcache chat --store" in result.stdout
    again = invoke("demo", *options)
    assert "0 added, 0 updated, 4 unchanged" in again.stdout


def test_without_a_corpus_the_demo_says_what_to_do(tmp_path, questions, model):
    absent = tmp_path / "nothing"
    result = invoke("demo", "--corpus", absent, "--store", tmp_path / "kb", "--model", model)
    assert result.exit_code == 2
    assert str(absent) in result.stderr
    result = invoke("demo", "--corpus", absent, "--questions", questions, "--store", tmp_path / "kb")
    assert result.exit_code == 2
    assert "--corpus" in result.stderr
    assert not (tmp_path / "kb").exists()


@pytest.mark.parametrize("line", ["{", "[]", '{"question": "x"}', '{"question": "x", "answer": "y", "hops": "many"}'])
def test_a_broken_line_of_questions_is_named(tmp_path, line):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(QUESTIONS[0]) + "\n" + line + "\n")
    result = invoke("demo", "--questions", path, "--corpus", tmp_path, "--store", tmp_path / "kb")
    assert result.exit_code == 2
    assert "line 2" in result.stderr


def test_questions_come_in_turn_and_as_many_as_asked_for():
    pool = [DemoQuestion(str(rank), "", hops) for rank, hops in enumerate([1, 1, 1, 2, 2])]
    assert [question.hops for question in choose(pool, 4)] == [1, 2, 1, 2]
    assert len(choose(pool, 99)) == len(set(choose(pool, 99))) == 5
    assert [question.text for question in choose(pool[:3], 2)] == ["0", "1"]
    many = [DemoQuestion(str(rank), "", 1) for rank in range(100)]
    assert [question.text for question in choose(many, 4)] == ["0", "25", "50", "75"]


def test_right_answers():
    assert is_right(" The Tulip  Club.\n", "the tulip club")
    assert not is_right("the tulip club of Osby", "the tulip club")
    assert not is_right("", "1823")


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="runs in a clone, where examples/ is")
def test_the_bundled_questions_can_be_asked():
    hops = [question.hops for question in choose(load_questions(EXAMPLES / "corpus_questions.jsonl"), 6)]
    assert hops == [1, 2, 1, 2, 1, 2]
