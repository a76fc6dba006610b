"""Stored passages that come as plain text are noticed, once, and nothing else is."""

import logging

import pytest

import ragcache as rc
from ragcache.engine.asking import plain_text

QUESTION = "Who meets on Monday?"
ONE = rc.Sampling(max_tokens=1)


@pytest.fixture
def said(caplog):
    """What was logged about plain text so far."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records if record.name == plain_text.__name__]


@pytest.fixture
def pasted(kb) -> str:
    texts = [hit.chunk.text.strip() for hit in kb.retrieve(QUESTION, k=3)]
    return "Answer from this.\n\n" + "\n\n".join(texts) + f"\n\n{QUESTION}"


def calls(kb, text):
    yield lambda: kb.chat([{"role": "user", "content": text}], sampling=ONE)
    yield lambda: kb.chat([{"role": "system", "content": text}, {"role": "user", "content": "Who?"}], sampling=ONE)
    yield lambda: kb.chat([{"role": "user", "content": ["Read:", text]}], k=1, sampling=ONE)
    yield lambda: kb.complete(text, sampling=ONE)
    yield lambda: kb.complete(["Read:", text], sampling=ONE)
    yield lambda: kb.ask(text, k=1, sampling=ONE)


@pytest.mark.parametrize("way", range(6))
def test_passages_as_text_are_noticed_once(kb, pasted, said, way):
    call = list(calls(kb, pasted))[way]
    call()
    assert len(said()) == 1
    assert "3 stored passages" in said()[0]
    for component in ("create_fused_documents_chain", "FusedSynthesizer", "rc.Passage", "ragcache.documents"):
        assert component in said()[0]
    call()
    assert len(said()) == 1


def test_passages_that_are_kept_apart_are_not(kb, said):
    hits = kb.retrieve(QUESTION, k=3)
    kb.ask(QUESTION, k=3, sampling=ONE)
    kb.chat([{"role": "user", "content": [*hits, QUESTION]}], sampling=ONE)
    earlier = [{"role": "user", "content": [*hits, QUESTION]}, {"role": "assistant", "content": hits[0].chunk.text * 3}]
    kb.chat([*earlier, {"role": "user", "content": "And who else?"}], sampling=ONE)
    kb.complete([*hits, QUESTION], sampling=ONE)
    assert said() == []


def test_a_quoted_line_and_other_text_are_not(kb, said):
    line = kb.retrieve(QUESTION, k=1)[0].chunk.text.strip()
    kb.chat([{"role": "user", "content": f"Is it true that '{line}'? " + "Say so in many words. " * 4}], sampling=ONE)
    kb.chat([{"role": "user", "content": "A text from somewhere else. " * 9}], sampling=ONE)
    assert said() == []


def test_reading_whole_prompts_loses_no_reuse(kb, pasted, said):
    kb.chat([{"role": "user", "content": pasted}], method="full", sampling=ONE)
    assert said() == []


def test_what_is_remembered_is_bounded_and_goes_with_its_documents(kb, pasted, monkeypatch, said):
    for _ in range(plain_text.REMEMBERED):
        kb.retrieve(QUESTION, k=4)
    assert len(kb._questions.plain_text._texts) == plain_text.REMEMBERED
    kb.delete("cats")
    kb.chat([{"role": "user", "content": "Who?"}], sampling=ONE)
    assert not kb._questions.plain_text._texts
