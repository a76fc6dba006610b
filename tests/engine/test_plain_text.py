"""Stored passages that come as plain text are read from their KV; where they cannot be, they are noticed, once."""

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
    """Calls that cannot use the KV of passages in their text."""
    yield lambda: kb.chat([{"role": "user", "content": ["Read:", text]}], k=1, sampling=ONE)
    yield lambda: kb.chat([{"role": "user", "content": text}], method="epic", sampling=ONE)
    yield lambda: kb.complete(text, method="epic", sampling=ONE)
    yield lambda: kb.complete([rc.Passage("Other."), text], sampling=ONE)
    yield lambda: kb.complete(["Read:", text], method="epic", sampling=ONE)
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


def asked(kb, way, content):
    """The content where a chain may put it."""
    if way == "system":
        turns = [{"role": "system", "content": content}, {"role": "user", "content": "Who?"}]
        return kb.chat(turns, sampling=rc.Sampling(max_tokens=8))
    if way == "user":
        return kb.chat([{"role": "user", "content": content}], sampling=rc.Sampling(max_tokens=8))
    if way == "in pieces" and isinstance(content, str):
        content = [content[:9], content[9:]]
    return kb.complete(content, sampling=rc.Sampling(max_tokens=8))


@pytest.mark.parametrize("way", ["user", "system", "complete", "in pieces"])
def test_passages_as_text_are_read_from_their_kv(kb, pasted, said, way):
    """The answer is that over passages given as such, which other tests hold against plain transformers."""
    hits = kb.retrieve(QUESTION, k=3)
    answer = asked(kb, way, pasted)
    right = asked(kb, way, ["Answer from this.\n\n", *hits, f"\n{QUESTION}"])
    assert (answer.text, answer.usage.prompt_tokens) == (right.text, right.usage.prompt_tokens)
    assert [hit.chunk.id for hit in answer.hits] == [hit.chunk.id for hit in hits]
    assert answer.usage.cached_tokens == sum(len(hit.chunk.token_ids) for hit in hits)
    assert answer.usage.computed_tokens < answer.usage.prompt_tokens / 2
    assert said() == []


def test_labels_of_a_chain_stay_where_they_are(kb):
    hits = kb.retrieve(QUESTION, k=3)
    pasted = "".join(f"Source {n}:\n{hit.chunk.text.strip()}\n" for n, hit in enumerate(hits, 1))
    answer = asked(kb, "user", f"{pasted}{QUESTION}")
    labelled = [part for n, hit in enumerate(hits, 1) for part in (f"Source {n}:\n", hit)]
    assert answer.text == asked(kb, "user", [*labelled, QUESTION]).text
    assert len(answer.hits) == 3


def test_a_prompt_that_ends_with_a_passage_goes_on_from_it(kb):
    *others, last = kb.retrieve(QUESTION, k=4)
    text = "\n\n".join(hit.chunk.text.strip() for hit in (*others, last))
    answer = kb.complete(text, sampling=ONE)
    assert [hit.chunk.id for hit in answer.hits] == [hit.chunk.id for hit in others]
    assert answer.text == kb.complete([*others, last.chunk.text.strip()], sampling=ONE).text


def test_more_passages_than_a_method_reads_stay_text(kb, pasted):
    seen = kb._questions.handed_out
    assert len([part for part in seen.cut(pasted, 3) if isinstance(part, rc.Passage)]) == 3
    assert seen.cut(pasted, 2) == [pasted]


def test_a_changed_passage_is_text(kb):
    first, *rest = [hit.chunk.text.strip() for hit in kb.retrieve(QUESTION, k=4)]
    answer = asked(kb, "user", "\n\n".join([rest[0], first.swapcase(), *rest[1:], QUESTION]))
    assert [hit.chunk.text.strip() for hit in answer.hits] == rest


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
    assert len(kb._questions.handed_out._passages) == plain_text.REMEMBERED
    kb.delete("cats")
    kb.chat([{"role": "user", "content": "Who?"}], sampling=ONE)
    assert not kb._questions.handed_out._passages
