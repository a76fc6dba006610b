"""The suites: the papers' tables as they were published, rows of every public form, the messages about missing data."""

import gzip
import json
import zipfile
from pathlib import Path
from statistics import fmean

import pytest

from ragcache.errors import ConfigError
from ragcache_eval.intervals import Estimate
from ragcache_eval.methods import MethodSpec
from ragcache_eval.suites import SUITES, get_suite
from ragcache_eval.suites.base import Download, QuestionSet
from ragcache_eval.suites.cases import suite_cases
from ragcache_eval.suites.compare import Measured, compare
from ragcache_eval.suites.rows import read_rows


def lines(text: str) -> list[str]:
    """Cuts at blank lines."""
    return text.split("\n\n")


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def column(suite: str, name: str) -> QuestionSet:
    (one,) = get_suite(suite).chosen([name])
    return one


def cases(suite: str, name: str, directory: Path, **more):
    return suite_cases(column(suite, name), lines, directory=directory, **more)


# The averages that the papers print behind their rows, by model in the order of the methods.
AVERAGES = {
    "a3": [44.93, 6.39, 40.31, 40.23, 40.02, 43.18, 38.27, 8.19, 36.50, 36.58, 36.86, 36.98],
}


@pytest.mark.parametrize("name", AVERAGES)
def test_rows_have_the_average_that_the_paper_prints(name):
    found = [fmean(row.scores) for row in SUITES[name].rows]
    assert found == pytest.approx(AVERAGES[name], abs=0.0051)


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_a_suite_is_consistent(suite):
    assert len({one.name for one in suite.columns}) == len(suite.columns)
    assert all(len(row.scores) <= len(suite.columns) for row in suite.rows)
    named = {theirs for names in suite.names.values() for theirs in names}
    assert named == {row.method for row in suite.rows}
    assert len({(row.model, row.method) for row in suite.rows}) == len(suite.rows)
    for spec in (MethodSpec.parse(text) for text in suite.methods):
        assert not suite.rows or suite.paper_rows(spec)


def test_the_papers_suites_are_there():
    assert list(SUITES) == ["kvlink", "a3", "samkv"]
    assert len(SUITES["kvlink"].columns) == 7
    with pytest.raises(ConfigError, match="suite 'glue' is unknown; choose one of kvlink, a3"):
        get_suite("glue")
    with pytest.raises(ConfigError, match="--data of suite a3 'nq' is unknown; choose one of qasper"):
        get_suite("a3").chosen(["nq"])


ASKED = {"id": "h1", "question": "Who?"}
TEXTS = {"Club": "Ada founded it. It is old.", "Town": "A town."}
PAIRS = [["Club", ["Ada founded it.", "It is old."]], ["Town", ["A town."]]]
HOTPOT = {
    **ASKED,
    "answer": "Ada",
    "context": {"title": ["Club", "Town"], "sentences": [["Ada founded it.", " It is old."], ["A town."]]},
    "supporting_facts": {"title": ["Club"], "sent_id": [0]},
}
PARAGRAPHS = [
    {"title": title, "paragraph_text": text, "is_supporting": title == "Club"} for title, text in TEXTS.items()
]
RETRIEVED = {**ASKED, "answers": ["Ada"], "ctxs": [{"title": title, "text": text} for title, text in TEXTS.items()]}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("hotpotqa", HOTPOT),
        ("2wikimqa", {**HOTPOT, "context": PAIRS, "supporting_facts": [["Club", 0]]}),
        ("2wikimqa", {**HOTPOT, "context": json.dumps(PAIRS), "supporting_facts": '[["Club", 0]]'}),
        ("musique", {**ASKED, "answer": "Ada", "answerable": True, "paragraphs": PARAGRAPHS}),
        ("triviaqa", RETRIEVED),
    ],
    ids=["hotpot", "2wiki file", "2wiki hub", "musique", "retrieved"],
)
def test_rows_of_every_form_become_passages_and_answers(name, row, tmp_path):
    write(tmp_path / f"{name}.jsonl", [row])
    (case,) = cases("kvlink", name, tmp_path)
    assert (case.id, case.question, case.answers, case.metric) == ("h1", "Who?", ("Ada",), "accuracy")
    assert [(p.title, p.text) for p in case.passages] == [*TEXTS.items()]
    if "ctxs" not in row:
        assert [p.is_gold for p in case.passages] == [True, False]


def test_nq_is_asked_with_its_gold_passage_at_each_of_ten_positions(tmp_path):
    found = [{"title": f"T{n}", "text": f"text {n}", "isgold": n == 0} for n in range(12)]
    rows = [{"question": "who", "answers": ["Ada"], "ctxs": found}] * 3
    write(tmp_path / "nq.jsonl.gz", rows)
    asked = cases("kvlink", "nq", tmp_path, limit=1)
    assert [[p.text for p in case.passages].index("text 0") for case in asked] == list(range(10))
    assert {len(case.passages) for case in asked} == {10}
    assert len({case.cluster for case in asked}) == 1


def test_questions_without_an_answer_are_left_out(tmp_path):
    paragraphs = [{"title": "T", "paragraph_text": "Text.", "is_supporting": False}]
    row = {"id": "m", "question": "Q?", "answer": "a", "paragraphs": paragraphs}
    write(tmp_path / "musique.jsonl", [{**row, "answerable": False}, {**row, "id": "n", "answerable": True}])
    assert [case.id for case in cases("kvlink", "musique", tmp_path)] == ["n"]


def long_row(context: str, **more) -> dict:
    return {"_id": "l", "input": "Who?", "context": context, "answers": ["Ada"], "all_classes": None, **more}


@pytest.mark.parametrize(
    ("name", "context", "passages"),
    [
        ("hotpotqa", "Passage 1:\nClub\nAda.\n\nPassage 2:\nTown\nOld.\n", ["Club\nAda.", "Town\nOld."]),
        ("samsum", "Dialogue: A\nSummary:\nDialogue: B\n", ["Dialogue: A\nSummary:", "Dialogue: B"]),
        ("passage_count", "Paragraph 1: A\n\nParagraph 2: B", ["Paragraph 1: A", "Paragraph 2: B"]),
        ("gov_report", "One.\n\nTwo.", ["One.", "Two."]),
        ("lcc", "def f():\n\n    x = 1", ["def f():", "    x = 1"]),
    ],
)  # fmt: skip
def test_long_contexts_are_cut_into_their_own_passages(name, context, passages, tmp_path):
    write(tmp_path / "data" / f"{name}_e.jsonl", [long_row(context)])
    (case,) = cases("a3", name, tmp_path)
    assert [p.text for p in case.passages] == passages
    assert case.metric == column("a3", name).metric
    assert case.question.endswith("Who?") == ("{question}" in column("a3", name).asked)


def test_many_short_examples_are_put_together(tmp_path):
    context = "".join(f"Question: what is {n}?\nType: Number\n" for n in range(200))
    write(tmp_path / "trec_e.jsonl", [long_row(context, answers=["Number"], all_classes=["Number", "City"])])
    (case,) = cases("a3", "trec", tmp_path)
    assert "".join(f"{p.text}\n" for p in case.passages) == context
    assert 3 <= len(case.passages) <= 5
    assert case.classes == ("Number", "City")


def test_files_may_have_any_ending_and_lines_of_our_own(tmp_path):
    (tmp_path / "hotpot_dev_distractor_v1.json").write_text(json.dumps([HOTPOT]))
    assert len(cases("kvlink", "hotpotqa", tmp_path)) == 1
    documents = [{"title": "T", "text": "Text.", "is_gold": True}, "Other text."]
    write(tmp_path / "dev" / "nq10.jsonl.gz", [{"id": "a", "question": "Q?", "answers": ["x"], "documents": documents}])
    (case,) = cases("kvlink", "nq", tmp_path)
    assert [p.text for p in case.passages] == ["Text.", "Other text."]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """`datasets` keeps what it made where the test ends."""
    pytest.importorskip("datasets", reason="needs ragcache-kv[eval]")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)  # an archive counts as remote wherever it is


def test_a_file_inside_an_archive_is_read_by_datasets(tmp_path, cache):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/hotpotqa.jsonl", json.dumps(long_row("Passage 1:\nA\n\nPassage 2:\nB")) + "\n")
    one = QuestionSet(
        "h", "H", metric="f1", max_tokens=8, form=column("a3", "hotpotqa").form,
        download=Download("json", data_files=f"zip://data/hotpotqa.jsonl::{tmp_path / 'data.zip'}"),
    )  # fmt: skip
    (case,) = suite_cases(one, lines)
    assert [p.text for p in case.passages] == ["A", "B"]


def test_parquet_is_read_by_datasets(tmp_path, cache):
    from datasets import Dataset

    Dataset.from_list([HOTPOT]).to_parquet(tmp_path / "hotpotqa.parquet")
    (case,) = cases("kvlink", "hotpotqa", tmp_path)
    assert [p.title for p in case.passages] == ["Club", "Town"]


def test_missing_data_is_named_with_where_to_get_it(tmp_path, cache, monkeypatch):
    def unreachable(*_args, **_options):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(
        ConfigError, match=r"hotpotqa are missing: .*no hotpotqa\.jsonl or .*no route to the hub.*--data-dir"
    ):
        cases("kvlink", "hotpotqa", tmp_path)
    with pytest.raises(ConfigError, match=r"triviaqa are missing: it is on no hub in this form; get .*FiD"):
        next(read_rows(column("kvlink", "triviaqa"), None))


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Q?", "answer": "a"},
        {"question": "Q?", "answer": "a", "context": "no pairs"},
        {"question": "Q?", "answer": "a", "context": 5},
        {"answer": "a", "context": PAIRS},
        {"question": "Q?", "context": PAIRS},
        {"question": "Q?", "answer": "a", "context": [["T", [5]]]},
    ],
)
def test_rows_of_another_form_are_named(row, tmp_path):
    write(tmp_path / "hotpotqa.jsonl", [row])
    with pytest.raises(ConfigError, match=r"hotpotqa\.jsonl, line 1: .*another set's file"):
        cases("kvlink", "hotpotqa", tmp_path)


def estimate(mean: float) -> Estimate:
    return Estimate(mean, mean - 0.1, mean + 0.1, 10)


def test_the_papers_rows_stand_below_the_measured_one():
    suite = get_suite("samkv")
    scores = {"2wikimqa": estimate(0.5), "musique": estimate(0.2), "hotpotqa": estimate(0.3)}
    full, other = Measured(MethodSpec("full", "full"), scores), Measured(MethodSpec.parse("ape"), scores)
    found = compare(suite, suite.columns, "mine", [full, other])
    assert [(one.source, one.model, one.method) for one in found] == [
        ("measured", "mine", "full"),
        ("paper", "Mistral 7B Instruct", "Recompute"),
        ("paper", "Llama 3.1 8B Instruct", "Recompute"),
        ("measured", "mine", "ape"),
    ]
    assert found[0].scores["2wikimqa"] == pytest.approx((50.0, 40.0, 60.0, 10))
    assert found[0].average == pytest.approx(100 / 3)
    assert found[1].scores == {"2wikimqa": 25.06, "musique": 19.94, "hotpotqa": 37.70}
    some = compare(suite, suite.chosen(["hotpotqa"]), "mine", [Measured(full.spec, {})])
    assert (some[0].scores, some[0].average) == ({}, None)
    assert some[1].scores == {"hotpotqa": 37.70}


@pytest.mark.parametrize(("number", "theirs"), [(0, "KVLink 0"), (1, "KVLink 1"), (5, "KVLink 5"), (3, None)])
def test_link_tokens_stand_beside_the_papers_row_of_as_many(number, theirs):
    suite = get_suite("kvlink")
    found = compare(suite, suite.columns, "mine", [Measured(MethodSpec("link", "link"), {}, number)])
    assert {one.method for one in found if one.source == "paper"} == ({theirs} if theirs else set())
    assert len(found) == (4 if theirs else 1)  # three models


def test_all_of_nqs_questions_are_asked_at_every_position(tmp_path):
    """The paper asks all 2,655 of Lost in the Middle's, not the first 500."""
    documents = [{"text": "Text.", "title": "T", "isgold": True}, {"text": "Other.", "title": "O", "isgold": False}]
    rows = [{"question": f"Q{n}?", "answers": ["x"], "ctxs": documents} for n in range(501)]
    write(tmp_path / "nq10.jsonl", rows)
    assert len(cases("kvlink", "nq", tmp_path)) == 2 * 501
