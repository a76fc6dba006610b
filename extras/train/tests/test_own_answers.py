"""Rows without labels: questions and answers that the model makes once, and rows drawn from a store."""

import json
from dataclasses import replace

import pytest
import torch
from families import oracle_model
from plain_oracle import greedy
from transformers import AutoTokenizer

import ragcache as rc
from ragcache.errors import ConfigError, DatabaseMismatchError
from ragcache.prompt import encode_text, prompt_format
from ragcache_train.own_answers import FILE, QUESTIONS, OwnAnswers
from ragcache_train.row_encoder import passage_text
from ragcache_train.train_options import EncodingOptions, TrainOptions
from ragcache_train.train_rows import Asked, BadLine, DataRow, parse_line, store_rows
from ragcache_train.trainer import train

PASSAGES = ("Ann lives in Oslo.", "Bob has a red boat.")
ASKED = DataRow("qa", "rows:1", None, PASSAGES, (Asked("Where is Ann?", ""), Asked("What has Bob?", "boat")))
ALONE = DataRow("qa", "rows:2", None, PASSAGES)
TOKENS = 12


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    """Make questions and answers short: a random model writes until its limit."""
    for name in ("QUESTION_TOKENS", "ANSWER_TOKENS"):
        monkeypatch.setattr(f"ragcache_train.own_answers.{name}", TOKENS)


@pytest.fixture(scope="module")
def lm(base):
    return rc.load_lm(base)


def own(lm, path, seed=0, **options):
    return OwnAnswers(lm, path, EncodingOptions(**options), seed)


def test_an_answer_is_the_greedy_one_of_full_prefill(lm, base, tmp_path):
    (row,) = own(lm, tmp_path / FILE).fill([ASKED])
    tokenizer = AutoTokenizer.from_pretrained(base)
    form = prompt_format(tokenizer)
    chunks = [encode_text(tokenizer, passage_text(text)) for text in PASSAGES]
    prompt = rc.Prompt(form.prefix_ids, chunks, form.suffix_ids(tokenizer, "Where is Ann?"))
    count = prompt.num_tokens
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    expected = greedy(oracle_model(str(base)), tokenizer, prompt, causal, TOKENS)
    assert row.asked == (Asked("Where is Ann?", expected.strip()), Asked("What has Bob?", "boat"))
    assert row == replace(ASKED, asked=row.asked)


def test_several_questions_over_the_same_passages_are_answered_as_one_by_one(lm, tmp_path):
    questions = ("Where is Ann?", "What has Bob?", "Who?")
    (together,) = own(lm, tmp_path / "a").fill([replace(ASKED, asked=tuple(Asked(q, "") for q in questions))])
    alone = own(lm, tmp_path / "b").fill([replace(ASKED, asked=(Asked(q, ""),)) for q in questions])
    assert together.asked == tuple(row.asked[0] for row in alone)


def test_questions_are_made_of_passages_and_depend_on_the_seed(lm, tmp_path):
    long = replace(ALONE, passages=tuple(f"Passage number {n}." for n in range(QUESTIONS + 2)))
    rows = {seed: own(lm, tmp_path / str(seed), seed).fill([long])[0] for seed in (0, 1)}
    again = own(lm, tmp_path / "again", 0).fill([long])[0]
    assert rows[0] == again != rows[1]
    assert 0 < len(rows[0].asked) <= QUESTIONS
    assert all(one.question.strip() for one in rows[0].asked)


def test_what_was_made_is_read_again(lm, tmp_path, monkeypatch):
    path = tmp_path / FILE
    first = own(lm, path).fill([ASKED, ALONE])
    lines = path.read_text().splitlines()
    assert [len(json.loads(line)["asked"]) for line in lines] == [len(row.asked) for row in first]
    path.write_text("\n".join([*lines, '{"row": "unfini']))  # a killed run
    monkeypatch.setattr(OwnAnswers, "_ask_about", lambda *given: pytest.fail("made again"))
    assert own(lm, path).fill([ASKED, ALONE]) == first
    monkeypatch.setattr(OwnAnswers, "_ask_about", lambda *given: [Asked("q", "other")])
    for changed in ({"system": "Be brief."}, {"seed": 1}):
        assert own(lm, path, **changed).fill([ASKED])[0].asked == (Asked("q", "other"),)
    assert own(lm, path).fill([ASKED, ALONE]) == first


def test_other_processes_wait_for_the_first(lm, tmp_path, monkeypatch):
    path = tmp_path / FILE
    first = own(lm, tmp_path / "first").fill([ASKED])
    monkeypatch.setenv("RANK", "1")
    written = (tmp_path / "first").read_text()
    monkeypatch.setattr("ragcache_train.own_answers.time.sleep", lambda seconds: path.write_text(written))
    assert own(lm, path).fill([ASKED]) == first


def test_rows_that_lack_nothing_stay_and_long_ones_are_named(lm, tmp_path):
    whole = replace(ASKED, asked=(Asked("Who?", "Ann"),))
    long = replace(ALONE, where="rows:9", passages=("x" * 600,))
    found = own(lm, tmp_path / FILE).fill([whole, long])
    assert found[0] is whole
    assert isinstance(found[1], BadLine)
    assert (found[1].where, "does not fit the model" in found[1].reason) == ("rows:9", True)
    assert own(lm, tmp_path / "none" / FILE).fill([whole]) == [whole]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, ()),
        ({"question": None, "answer": None}, ()),
        ({"question": "Who?"}, (Asked("Who?", ""),)),
        ({"questions": [{"question": "A?"}, {"question": "B?", "answer": "b"}]}, (Asked("A?", ""), Asked("B?", "b"))),
    ],
)
def test_lines_may_lack_labels_where_the_model_makes_them(fields, asked):
    line = json.dumps({"type": "qa", "passages": ["P"], **fields})
    assert parse_line(line, "f:1", True).asked == asked
    assert isinstance(parse_line(line, "f:1"), BadLine)


@pytest.mark.parametrize("fields", [{"answer": "A"}, {"question": " "}, {"question": "Q?", "answer": 5}])
def test_half_a_label_is_none(fields):
    assert isinstance(parse_line(json.dumps({"type": "qa", "passages": ["P"], **fields}), "f:1", True), BadLine)


@pytest.fixture
def store(open_kb, tmp_path):
    kb = open_kb()
    for name in ("a", "b"):
        kb.ingest([rc.Document(name, "".join(f"{name}{n} stands here.\n" for n in range(4)))], split=False)
    texts = [f"{name}{n}" for name in "ab" for n in range(9)]
    kb.ingest([rc.Document(text, f"{text} is a passage.\n") for text in texts])
    kb.close()
    return tmp_path / "kb"


def test_rows_of_a_store_are_neighbours_in_its_order(store):
    with rc.Store.open(store) as library:
        whole = [chunk.text for one in library.documents() for chunk in library.chunks_of(one.id)]
    rows = store_rows(store, rows=5, passages=3, seed=0)
    starts = [whole.index(row.passages[0]) for row in rows]
    assert len(set(starts)) == 5
    assert [row.passages for row in rows] == [tuple(whole[start : start + 3]) for start in starts]
    assert not any(row.shuffle for row in rows)
    assert store_rows(store, rows=5, passages=3, seed=0) == rows != store_rows(store, rows=5, passages=3, seed=1)
    assert len(store_rows(store, rows=999, passages=3, seed=0)) == len(whole) - 2
    (all_of_it,) = store_rows(store, rows=5, passages=999, seed=0)
    assert list(all_of_it.passages) == whole


def test_an_empty_store_says_so(open_kb, tmp_path):
    open_kb().close()
    with pytest.raises(ConfigError, match="the store is empty; ingest something first"):
        store_rows(tmp_path / "kb", rows=1, passages=1, seed=0)


def test_rows_of_a_store_whose_documents_are_in_another_database(open_kb, base, tmp_path):
    url = f"sqlite:///{tmp_path / 'elsewhere.sqlite3'}"
    kb = open_kb(store=rc.StoreConfig(database=url))
    kb.ingest([rc.Document(str(n), f"Passage {n} stands here.\n") for n in range(4)])
    kb.close()
    (row,) = store_rows(tmp_path / "kb", rows=1, passages=4, seed=0, database=url)
    assert row.passages == tuple(f"Passage {n} stands here.\n" for n in range(4))
    with pytest.raises(DatabaseMismatchError, match="--database URL"):
        store_rows(tmp_path / "kb", rows=1, passages=4, seed=0)
    out, data = tmp_path / "out", tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"type": "qa", "passages": list(PASSAGES), "question": "Who?"}) + "\n")
    store = {"store": tmp_path / "kb", "database": url}
    options = TrainOptions(model=base, data=(data,), out=out, objective="distill", steps=1, device="cpu", **store)
    assert train(options).rows == 2, "a row of the data and a row of the store"
    assert len((out / FILE).read_text().splitlines()) == 2
    assert "sqlite" not in (out / "training_options.json").read_text(), "a URL may hold a password"
    with pytest.raises(ConfigError, match="database is that of a store; add store"):
        replace(options, store=None)
    with pytest.raises(ConfigError, match=r"no usable line.*'answer'"):
        train(replace(options, objective="labels", store=None, database=None, out=tmp_path / "labelled"))
