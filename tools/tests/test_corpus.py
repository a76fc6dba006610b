"""The example corpus equals its command's output, and its questions name files that answer them."""

import json
import re
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from pypdf import PdfReader

from ragcache_eval.registry.names import is_held_out
from tools.mini.corpus import corpus_files, corpus_world, write_corpus

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"


def text_of(path):
    if path.suffix == ".pdf":
        text = "\n".join(page.extract_text() for page in PdfReader(path).pages)
    elif path.suffix == ".html":
        text = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser").body.get_text()
    else:
        text = path.read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", text)


@pytest.fixture(scope="module")
def questions():
    lines = CORPUS.with_name("corpus_questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_command_writes_the_committed_files(tmp_path):
    write_corpus(tmp_path / "corpus")
    written = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*") if path.is_file()}
    committed = {path.relative_to(CORPUS.parent) for path in CORPUS.rglob("*") if path.is_file()}
    assert set(written) == committed | {Path("corpus_questions.jsonl")}
    for name, path in written.items():
        if name.suffix != ".pdf":  # the bytes of a PDF depend on reportlab's version
            assert path.read_bytes() == (CORPUS.parent / name).read_bytes()
        else:
            assert text_of(path) == text_of(CORPUS.parent / name)


def test_every_name_is_held_out():
    assert all(is_held_out(name) for name in corpus_world().entities)


def test_every_document_can_be_read_from_its_file():
    files = corpus_files(corpus_world())
    assert {Path(file.source).suffix for file in files} == {".md", ".html", ".pdf"}
    for file in files:
        text = text_of(CORPUS / file.source)
        assert file.document.text in text
        assert file.document.title in text


def test_the_answers_stand_in_the_gold_files(questions):
    assert {question["hops"] for question in questions} == {1, 2}
    for question in questions:
        texts = [text_of(CORPUS / source) for source in question["sources"]]
        assert len(texts) == question["hops"]
        for text, value in zip(texts, last_words(question["answer"]), strict=True):
            assert value in text


def last_words(answer):
    """Return the last word of each clause of an answer, which is part of a value."""
    return [clause.split(" ")[-1] for clause in answer.removesuffix(".").split(", which ")]
