"""Stores that components open by path: one for all that name it, gone with the last of them."""

import gc
import threading
import weakref

import forked
import pytest
from tiny_model import save_tiny_llama
from waiting import at_once

import ragcache as rc
from ragcache.errors import ConfigError, ModelMismatchError, StoreClosedError
from ragcache_demo.bag_of_words import BagOfWords


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def embedder():
    return BagOfWords()


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
    with rc.open_shared(tmp_path / "kb", tenant="b", embedder=embedder) as salted:
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
    with pytest.raises(ConfigError, match="tenant: given with a store that is open"):
        rc.open_shared(shared, tenant="a")
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
late = rc.StoreConfig(write_behind_bytes=1 << 20)
kb = rc.open_shared(sys.argv[1], model=sys.argv[2], embedder=BagOfWords(), store=late)
kb.ingest(rc.Document("a", "The ferry to the island goes every second hour.\\n"))
keep = [kb]
"""


@pytest.mark.parametrize("run", [forked.run, pytest.param(forked.run_real, marks=pytest.mark.slow)])
def test_a_process_that_ends_closes_it(tmp_path, directory, embedder, run):
    """What is written behind is on disk then."""
    ended = run(PROGRAM + forked.END, tmp_path / "kb", directory)
    assert (ended.returncode, "Exception" in ended.stderr) == (0, False), ended.stderr
    with rc.RagCache.open(tmp_path / "kb", embedder=embedder) as kb:
        assert kb.info().blocks == 1
