"""Askers over the same passages at the same time hold them once, and get what each gets alone."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import ragcache as rc
from ragcache.engine.asking.contexts import Contexts
from ragcache.errors import CancelledError
from ragcache.kv.buffers import KVBuffers, SharedContext
from ragcache.models.limits import NO_LIMIT, Limit

QUESTIONS = [
    "Where do dogs bark?",
    "Where does the river rise?",
    "When does the rowing club meet?",
    "Is the cat happy?",
]
SHORT, LONG = rc.Sampling(max_tokens=6), rc.Sampling(max_tokens=200)
WAIT_S = 60.0


def until(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("method", ["reposition", "full", "concat"])
def test_askers_of_one_context_share_it(kb, method):
    """Eight streams that are open at once: the first placed it, the others stand on it, and all say what one says."""
    hits = kb.retrieve(QUESTIONS[0], k=3)
    alone = [kb.ask(question, hits=hits, method=method, sampling=SHORT) for question in QUESTIONS]
    if method == "full":
        kb._reader.prefixes.clear()
    streams = [kb.stream(question, hits=hits, method=method, sampling=SHORT) for question in QUESTIONS]
    sources, answers = [], []
    for stream in streams:  # each has its first token before the next is asked
        sources.append(next(stream).hits)
        next(event for event in stream if isinstance(event, rc.Token))
    for stream in streams:
        answers.append(next(event.answer for event in stream if isinstance(event, rc.Done)))
    assert {source.kv for found in sources[1:] for source in found} == {"shared"}
    assert "shared" not in {source.kv for source in sources[0]}
    for answer, expected in zip(answers, alone, strict=True):
        assert answer.text == expected.text
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    for answer in answers[1:]:
        assert answer.usage.computed_tokens < answers[0].usage.prompt_tokens / 2
    again = kb.ask(QUESTIONS[0], hits=hits, method=method, sampling=SHORT)
    assert "shared" not in {source.kv for source in again.hits}, "nobody reads it any more"


def test_their_memory_is_little_more_than_one_askers(kb, lm, monkeypatch):
    """Counted where buffers are made: the context once, and room for each answer."""
    hits = kb.retrieve(QUESTIONS[0], k=3)
    made = []
    allocate = KVBuffers.allocate

    def counted(shape, capacity):
        made.append(capacity)
        return allocate(shape, capacity)

    lm.pool._idle.clear()
    monkeypatch.setattr(KVBuffers, "allocate", counted)
    streams = [kb.stream(question, hits=hits, sampling=SHORT) for question in QUESTIONS]
    for stream in streams:
        next(event for event in stream if isinstance(event, rc.Token))
    prompt = sum(hit.chunk.num_tokens for hit in hits)
    assert sum(capacity >= prompt for capacity in made) <= 1 or max(made) == 256, made
    for stream in streams:
        stream.close()


def test_askers_that_come_at_once_place_it_once(kb, monkeypatch):
    hits = kb.retrieve(QUESTIONS[0], k=3)
    expected = {question: kb.ask(question, hits=hits, sampling=SHORT).text for question in QUESTIONS}
    shared, tell = [], Contexts._tell
    monkeypatch.setattr(Contexts, "_tell", lambda self, *args: shared.append(1) or tell(self, *args))
    together = threading.Barrier(len(QUESTIONS))

    def ask(question):
        together.wait(WAIT_S)
        return kb.ask(question, hits=hits, sampling=LONG).text

    long = {q: kb.ask(q, hits=hits, sampling=LONG).text for q in QUESTIONS}
    shared.clear()
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        assert dict(zip(QUESTIONS, pool.map(ask, QUESTIONS), strict=True)) == long
    assert 1 <= len(shared) < len(QUESTIONS), "some stood on what another had placed"
    assert {q: kb.ask(q, hits=hits, sampling=SHORT).text for q in QUESTIONS} == expected


def test_a_deleted_passage_is_in_no_further_answer(kb):
    """Law 10: who reads it now goes on; who asks afterwards does not find it."""
    hits = kb.retrieve(QUESTIONS[0], k=2)
    first = kb.stream(QUESTIONS[0], hits=hits, sampling=SHORT)
    next(event for event in first if isinstance(event, rc.Token))
    kb.delete(hits[0].chunk.document_id)
    second = kb.stream(QUESTIONS[1], hits=hits, sampling=SHORT)
    assert "shared" not in {source.kv for source in next(second).hits}
    assert next(event.answer for event in first if isinstance(event, rc.Done)).text
    second.close()


def test_one_makes_and_the_others_wait():
    contexts, made = Contexts(), []
    context = SharedContext.__new__(SharedContext)
    begun, go = threading.Event(), threading.Event()

    def make():
        with contexts.making("key", NO_LIMIT) as tell:
            begun.set()
            assert go.wait(WAIT_S)
            tell(context)
        return context

    def want():
        with contexts.making("key", NO_LIMIT) as found:
            made.append(found)
            return found

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(make)
        assert begun.wait(WAIT_S)
        second = pool.submit(want)
        cancelled = threading.Event()
        cancelled.set()
        with pytest.raises(CancelledError), contexts.making("key", Limit(cancelled)):
            pass
        with contexts.making("other", NO_LIMIT):
            assert not made
        go.set()
        assert second.result(WAIT_S) is first.result(WAIT_S) is context
    assert contexts.find("key") is context
    contexts.forget()
    assert contexts.find("key") is None


def test_who_fails_to_make_leaves_it_to_the_next():
    contexts = Contexts()
    with pytest.raises(OSError, match="unreadable"), contexts.making("key", NO_LIMIT):
        raise OSError("unreadable")
    with contexts.making("key", NO_LIMIT) as tell:
        assert callable(tell)
