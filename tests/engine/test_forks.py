"""A worker that was forked after its parent's first question: every call ends at once, with an error that says why."""

from __future__ import annotations

import inspect
import os
import select
import signal
import warnings

import pytest
from waiting import in_own_loop

import ragcache as rc
from ragcache.retrieval.embedder import QUESTION as QUESTIONS_RANK
from ragcache.retrieval.embedder import PriorityLock
from ragcache_demo.bag_of_words import BagOfWords

SHORT = rc.Sampling(max_tokens=8)
QUESTION = "Where do dogs bark?"
TURNS = [{"role": "user", "content": QUESTION}]
NEW = rc.Document("new", "A new text.")
WAIT_S = 60.0


def in_a_fork(function):
    """What the function returns in a fork of this process; None where that hangs."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of what is tried here
        child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(function()).encode())
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    ready = select.select([reading], [], [], WAIT_S)[0]
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as answer:
        return answer.read().decode() if ready else None


async def first(stream):
    return [event async for event in stream]


def of_a_coroutine(call):
    return lambda kb: in_own_loop(call(kb))


CALLS = {
    "ask": lambda kb: kb.ask(QUESTION),
    "ask_many": lambda kb: kb.ask_many([QUESTION]),
    "stream": lambda kb: list(kb.stream(QUESTION)),
    "chat": lambda kb: kb.chat(TURNS),
    "stream_chat": lambda kb: list(kb.stream_chat(TURNS)),
    "complete": lambda kb: kb.complete("Once"),
    "stream_completion": lambda kb: list(kb.stream_completion("Once")),
    "retrieve": lambda kb: kb.retrieve(QUESTION),
    "ingest": lambda kb: kb.ingest(NEW),
    "copy": lambda kb: kb.copy(kb),
    "delete": lambda kb: kb.delete("cats"),
    "pin": lambda kb: kb.pin("cats"),
    "unpin": lambda kb: kb.unpin("cats"),
    "documents": lambda kb: kb.documents(),
    "document": lambda kb: kb.document("cats"),
    "chunks": lambda kb: kb.chunks(["cats"]),
    "chunks_of": lambda kb: kb.chunks_of("cats"),
    "vectors": lambda kb: kb.vectors(["cats"]),
    "info": lambda kb: kb.info(),
    "doctor": lambda kb: kb.doctor(),
    "warm_up": lambda kb: kb.warm_up(),
    "pass_stats": lambda kb: kb.pass_stats(),
    "precompute": lambda kb: kb.precompute([NEW]),
    "forget": lambda kb: kb.forget("new"),
    "aask": of_a_coroutine(lambda kb: kb.aask(QUESTION)),
    "aask_many": of_a_coroutine(lambda kb: kb.aask_many([QUESTION])),
    "achat": of_a_coroutine(lambda kb: kb.achat(TURNS)),
    "acomplete": of_a_coroutine(lambda kb: kb.acomplete("Once")),
    "aretrieve": of_a_coroutine(lambda kb: kb.aretrieve(QUESTION)),
    "aingest": of_a_coroutine(lambda kb: kb.aingest(NEW)),
    "adelete": of_a_coroutine(lambda kb: kb.adelete("cats")),
    "aprecompute": of_a_coroutine(lambda kb: kb.aprecompute([NEW])),
    "aforget": of_a_coroutine(lambda kb: kb.aforget("new")),
    "astream": of_a_coroutine(lambda kb: first(kb.astream(QUESTION))),
    "astream_chat": of_a_coroutine(lambda kb: first(kb.astream_chat(TURNS))),
    "astream_completion": of_a_coroutine(lambda kb: first(kb.astream_completion("Once"))),
}
# These wait for nothing.
OTHERS = {
    "open", "close", "rates", "count_tokens", "estimate_kv", "load_counts", "prefix_stats", "full_prefill_estimate_s",
    "seen_through",
}  # fmt: skip


def test_every_call_is_tried_here():
    public = {name for name, _ in inspect.getmembers(rc.RagCache, inspect.isfunction) if not name.startswith("_")}
    assert public | {"open"} == set(CALLS) | OTHERS


@pytest.fixture(scope="module")
def asked(tmp_path_factory, lm):
    with rc.RagCache.open(tmp_path_factory.mktemp("forks") / "kb", model=lm, embedder=BagOfWords()) as kb:
        kb.ingest(rc.Document(name, f"The {name} bark at night.") for name in ("cats", "dogs"))
        kb.ask(QUESTION, sampling=SHORT)
        in_own_loop(kb.aask(QUESTION, sampling=SHORT))
        yield kb


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_in_a_fork_raises_at_once(asked, name):
    answer = in_a_fork(lambda: CALLS[name](asked))
    assert answer is not None, f"{name} hangs"
    assert answer.startswith("ForkedError: "), answer
    assert str(os.getpid()) in answer
    assert 'multiprocessing.get_context("spawn")' in answer


def test_what_a_parent_began_ends_in_its_fork(asked, slow_model):
    stream = asked.stream(QUESTION, sampling=rc.Sampling(max_tokens=200, logit_bias={257: -100.0}))
    assert isinstance(next(stream), rc.Sources)
    next(stream)
    assert (in_a_fork(lambda: list(stream)) or "hangs").startswith("ForkedError: ")
    stream.close()


def test_a_model_and_an_embedder_alone_raise_too(lm, asked):
    prompt = rc.Prompt([1, 2], [[3, 4]], [5, 6])
    rc.fuse(lm, prompt)
    for call in (lambda: rc.fuse(lm, prompt), lambda: lm.encode([[3, 4]])):
        assert (in_a_fork(call) or "hangs").startswith("ForkedError: this model was loaded in process")
    lock = PriorityLock()  # an embedder's and a reranker's

    def hold():
        with lock.hold(QUESTIONS_RANK):
            return "held"

    assert hold() == "held"
    assert (in_a_fork(hold) or "hangs").startswith("ForkedError: this embedder or reranker was loaded in process")


def test_a_fork_leaves_its_parents_store_alone(asked):
    assert in_a_fork(asked.close) == "None"
    assert asked.ask(QUESTION, sampling=SHORT).text


def test_a_fork_that_opens_the_store_itself_answers(asked):
    """The way out that the error names."""
    root, name = asked.store.layout.root, asked.lm.name

    def ask():
        with rc.RagCache.open(root, model=name, embedder=BagOfWords()) as own:
            return own.ask(QUESTION, sampling=SHORT).text

    assert in_a_fork(ask) == asked.ask(QUESTION, sampling=SHORT).text
