"""Stores that components open by path: one for all that name it, gone with the last of them. A worker that was forked
after its parent's first question: every call ends at once, with an error that says why."""

import gc
import inspect
import json
import os
import select
import signal
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Iterator

import forked
import pytest
from kit.makers import made_by, tiny_directory
from tiny_model import save_tiny_llama
from waiting import at_once, in_own_loop

import ragcache as rc
from ragcache.engine.keys import FULL
from ragcache.errors import ConfigError, ModelMismatchError, StoreClosedError
from ragcache.retrieval.priority_lock import QUESTION as QUESTIONS_RANK
from ragcache.retrieval.priority_lock import PriorityLock
from ragcache_demo.bag_of_words import BagOfWords

directory = tiny_directory()
embedder = made_by(BagOfWords, scope="function")


@pytest.fixture
def only_new_garbage():
    """Collecting looks at what is made from now on: all else takes a second each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def shared(tmp_path, directory, embedder):
    kb = rc.open_shared(tmp_path / "kb", model=directory, embedder=embedder)
    yield kb
    kb.close()


def test_a_path_is_opened_once(shared, tmp_path, directory, embedder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rc.open_shared(tmp_path / "kb") is shared
    assert rc.open_shared("kb", model=str(directory), method=None) is shared
    assert rc.open_shared("kb", embedder=embedder) is shared
    assert rc.open_shared("kb", model=shared.lm) is shared
    assert rc.open_shared(shared) is shared


def test_other_options_open_another_one_over_the_same_weights(shared, tmp_path, embedder):
    with rc.open_shared(tmp_path / "kb", system="b", embedder=embedder) as salted:
        assert salted is not shared
        assert salted.lm is shared.lm
        assert rc.open_shared(tmp_path / "kb") is shared


def test_two_stores_of_one_model_have_one_set_of_weights(shared, tmp_path, directory, embedder):
    with rc.open_shared(tmp_path / "other", model=str(directory), embedder=embedder) as other:
        assert other is not shared
        assert other.lm is shared.lm
    with rc.open_shared(tmp_path / "third", model=directory, dtype="bfloat16", embedder=embedder) as third:
        assert third.lm is not shared.lm


@pytest.mark.usefixtures("only_new_garbage")
def test_the_last_one_closes_it(tmp_path, directory, embedder):
    one = rc.open_shared(tmp_path / "kb", model=directory, embedder=embedder)
    two = rc.open_shared(tmp_path / "kb")
    one.ingest(rc.Document("a", "The ferry to the island goes every second hour.\n"))
    weights, parts, threads = weakref.ref(one.lm), one._parts, one._threads
    del one
    gc.collect()
    assert two.retrieve("ferry", k=1)
    del two
    gc.collect()
    with pytest.raises(StoreClosedError):
        threads._check_open()
    del parts, threads
    gc.collect()
    assert weights() is None
    with rc.open_shared(tmp_path / "kb", embedder=embedder) as again:
        assert [document.id for document in again.documents()] == ["a"]


def test_one_that_was_closed_is_opened_again(shared, tmp_path, embedder):
    shared.close()
    with rc.open_shared(tmp_path / "kb", embedder=embedder) as again:
        assert again is not shared
        assert again.retrieve("anything") == []


def test_threads_that_open_at_once_get_one(tmp_path, directory, embedder):
    start = threading.Barrier(4)

    def work():
        start.wait()
        return rc.open_shared(tmp_path / "kb", model=directory, embedder=embedder)

    found = at_once(*[work] * 4)
    assert len(set(map(id, found))) == 1
    found[0].close()


def test_bad_input(shared, tmp_path, directory, embedder, tmp_path_factory):
    with pytest.raises(ConfigError, match="system: given with a store that is open"):
        rc.open_shared(shared, system="a")
    with pytest.raises(ConfigError, match="path of a store"):
        rc.open_shared(7)
    other = save_tiny_llama(tmp_path_factory.mktemp("other"), seed=1)
    with pytest.raises(ModelMismatchError):
        rc.open_shared(tmp_path / "kb", model=other, embedder=embedder)
    assert rc.open_shared(tmp_path / "kb") is shared


PROGRAM = """
import sys
import ragcache as rc
from ragcache_demo.bag_of_words import BagOfWords
close = rc.RagCache.close
rc.RagCache.close = lambda kb: (close(kb), print("closed", flush=True))
kb = rc.open_shared(sys.argv[1], model=sys.argv[2], embedder=BagOfWords())
kb.ingest(rc.Document("a", "The ferry to the island goes every second hour.\\n"))
keep = [kb]
"""


@pytest.mark.parametrize("run", [forked.run, pytest.param(forked.run_real, marks=pytest.mark.slow)])
def test_a_process_that_ends_closes_it(tmp_path, directory, embedder, run):
    ended = run(PROGRAM + forked.END, tmp_path / "kb", directory)
    assert (ended.returncode, ended.stdout.split(), "Exception" in ended.stderr) == (0, ["closed"], False), ended.stderr
    with rc.RagCache.open(tmp_path / "kb", embedder=embedder) as kb:
        assert kb.info().blocks == 1


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
    **each("ask stream retrieve why aask astream aretrieve", QUESTION),
    **each("ask_many aask_many", [QUESTION]),
    **each("chat stream_chat achat astream_chat", TURNS),
    **each("complete stream_completion acomplete astream_completion", "Once"),
    **each("ingest aingest", NEW),
    **each("precompute aprecompute", [NEW]),
    **each("forget aforget", "new"),
    **each("delete adelete pin unpin document chunks_of", "cats"),
    **each("chunks vectors", ["cats"]),
    **each("documents info doctor warm_up pass_stats collections"),
    **each("collection delete_collection", "cats"),
    "as_key": lambda kb: (FULL,),
    "copy": lambda kb: (kb,),
}
# These wait for nothing.
OTHERS = {
    "open", "close", "rates", "count_tokens", "estimate_kv", "load_counts", "prefix_stats", "full_prefill_estimate_s",
    "seen_by", "count_chat", "token_limits",
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
