"""A worker that was forked after its parent's first question: every call ends at once, with an error that says why."""

import inspect
import json
import os
import select
import signal
import warnings
from collections.abc import AsyncIterator, Awaitable, Iterator

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


async def ended(found):
    return [event async for event in found] if isinstance(found, AsyncIterator) else await found


def called(kb, name):
    """What a call gives, to its end."""
    found = getattr(kb, name)(*CALLS[name](kb))
    if isinstance(found, Awaitable | AsyncIterator):
        return in_own_loop(ended(found))
    return list(found) if isinstance(found, Iterator) else found


def each(names, *given):
    return dict.fromkeys(names.split(), lambda kb: given)


CALLS = {
    **each("ask stream retrieve aask astream aretrieve", QUESTION),
    **each("ask_many aask_many", [QUESTION]),
    **each("chat stream_chat achat astream_chat", TURNS),
    **each("complete stream_completion acomplete astream_completion", "Once"),
    **each("ingest aingest", NEW),
    **each("precompute aprecompute", [NEW]),
    **each("forget aforget", "new"),
    **each("delete adelete pin unpin document chunks_of", "cats"),
    **each("chunks vectors", ["cats"]),
    **each("documents info doctor warm_up pass_stats"),
    "copy": lambda kb: (kb,),
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


def hangs(*_):
    raise TimeoutError


def test_a_call_in_a_fork_raises_at_once(asked):
    def all_of_them():
        signal.signal(signal.SIGALRM, hangs)
        answers = {}
        for name in CALLS:
            signal.alarm(20)
            try:
                answers[name] = called(asked, name)
            except BaseException as error:
                answers[name] = f"{type(error).__name__}: {error}"
        return json.dumps(answers, default=str)

    answers = in_a_fork(all_of_them)
    assert answers is not None, "they hang"
    for name, answer in json.loads(answers).items():
        assert answer.startswith("ForkedError: "), (name, answer)
        assert str(os.getpid()) in answer, name
        assert 'multiprocessing.get_context("spawn")' in answer, name


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
