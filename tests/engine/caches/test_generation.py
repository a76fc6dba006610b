"""When caches follow the documents: laws on a real document store, changed by this process and by others."""

import threading

import numpy as np
import pytest

from ragcache.engine.caches.generation import Generation
from ragcache.errors import StoreBusyError
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NewChunk, NewDocument


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'documents.sqlite3'}"


@pytest.fixture
def documents(url):
    with DocumentStore.open(url) as store:
        yield store


def change(documents, id="a"):
    chunk = NewChunk(id=f"{id}.0", handle=None, text=id, token_ids=[1], embedding=np.zeros(4, np.float32))
    documents.replace_document(NewDocument(id), [chunk])


def following(documents):
    """A generation, and the names of its functions in the order of their calls."""
    calls = []
    generation = Generation(documents, lambda: calls.append("blocks"))
    generation.follow(lambda: calls.append("first"), lambda: calls.append("second"))
    return generation, calls


def test_a_change_invalidates_every_cache_once(documents, url):
    generation, calls = following(documents)
    generation.check()
    assert calls == [], "opening is no change"
    with DocumentStore.open(url) as other:
        change(other)
    generation.check()
    assert calls == ["blocks", "first", "second"]
    generation.check()
    assert len(calls) == 3
    documents.delete_documents(["a"])
    generation.check()
    assert len(calls) == 6


def test_caches_see_the_new_generation_while_they_drop(documents):
    """KV that is computed meanwhile belongs to it, or is known to be older."""
    generation, during = Generation(documents, list), []
    before = generation.seen
    generation.follow(lambda: during.append(generation.seen))
    change(documents)
    generation.check()
    assert during == [generation.seen]
    assert generation.seen is not before
    assert (before.number, generation.seen.number) == (0, documents.generation())


def test_a_failed_invalidation_is_repeated(documents):
    calls, generation = [], Generation(documents, list)

    def fail_once():
        calls.append(len(calls))
        if len(calls) == 1:
            raise StoreBusyError("busy")

    generation.follow(fail_once)
    change(documents)
    with pytest.raises(StoreBusyError):
        generation.check()
    generation.check()
    generation.check()
    assert calls == [0, 1]


def test_no_caller_goes_on_before_the_caches_are_invalidated(documents):
    """The second of two callers does not rely on the first, which is still at it."""
    generation, entered, release, threads = Generation(documents, list), threading.Event(), threading.Event(), []

    def drop():
        threads.append(threading.current_thread())
        if len(threads) == 1:
            entered.set()
            assert release.wait(60)

    generation.follow(drop)
    change(documents)
    first = threading.Thread(target=generation.check)
    first.start()
    assert entered.wait(60)
    generation.check()
    release.set()
    first.join()
    assert threads == [first, threading.current_thread()]


def test_forgotten_passages_invalidate_caches_but_no_blocks(documents):
    generation, calls = following(documents)
    before = generation.seen
    generation.invalidate()
    assert calls == ["first", "second"]
    assert generation.seen is not before
