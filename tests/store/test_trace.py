"""What a store's trace says."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import pytest
from blocks import make_block, make_key

from ragcache.errors import TraceError
from ragcache.store import trace as trace_module
from ragcache.store.counters import Loaded
from ragcache.store.kv_store import KVStore
from ragcache_plan.accesses import read_trace


def ask(store: KVStore, *keys: str) -> list[Loaded | None]:
    """One request for several blocks."""
    request, found = store.ask(keys), [store.fetch(key) for key in keys]
    for key, loaded in zip(keys, found, strict=True):
        store.serve(request, key, loaded)
    return found


def test_every_access_is_one_line(tmp_path: Path) -> None:
    path, (a, b, c) = tmp_path / "trace.jsonl", (make_key(n) for n in range(3))
    with KVStore(tmp_path / "kv", trace=path) as store:
        store.put(a, make_block(0, num_tokens=3))
        store.put(b, make_block(1, num_tokens=4))
        assert path.read_text() == "", "ingestion is no access"
        assert ask(store, a, c, b)[1] is None
        store.put(c, make_block(2, num_tokens=5))
        store.get(c)
    with KVStore(tmp_path / "kv", trace=path) as store:
        ask(store, c, a)
        store.get(make_key(9))
        store.put(make_key(9), make_block(9, num_tokens=7), "memory")
    found = list(read_trace(path))
    size = make_block(0, num_tokens=1).num_bytes
    assert [access[1:5] for access in found] == [
        (a, 3 * size, 3, "memory"),
        (b, 4 * size, 4, "memory"),
        (c, 5 * size, 5, "computed"),
        (c, 5 * size, 5, "memory"),
        (c, 5 * size, 5, "disk"),
        (a, 3 * size, 3, "disk"),
        (make_key(9), 7 * size, 7, "computed"),
    ]
    first, second, third, fourth = dict.fromkeys(access.request for access in found)
    assert [access.request for access in found] == [first] * 3 + [second] + [third] * 2 + [fourth]
    written = {"at", "request", "handle", "bytes", "tokens", "tier"}
    assert all(set(json.loads(line)) == written for line in path.read_text().splitlines())


def test_no_trace_unless_asked(tmp_path: Path) -> None:
    with KVStore(tmp_path / "kv") as store:
        store.put(make_key(0), make_block(0))
        store.get(make_key(0))
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def test_a_trace_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be written") as caught:
        KVStore(tmp_path / "kv", trace=tmp_path / "nowhere" / "trace.jsonl")
    assert caught.value.line is None


def test_a_full_disk_ends_the_trace_and_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def write(self, descriptor: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with KVStore(tmp_path / "kv", trace=tmp_path / "trace.jsonl") as store:
        store.put(make_key(0), make_block(0))
        monkeypatch.setattr(trace_module, "os", FullDisk())
        with caplog.at_level(logging.WARNING):
            assert store.get(make_key(0)) is not None
            assert store.get(make_key(0)) is not None
    assert [record.message.count("the trace ends here") for record in caplog.records] == [1]


def test_what_is_never_made_is_not_remembered_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MOST_AWAITED", 2)
    with KVStore(tmp_path / "kv", trace=tmp_path / "trace.jsonl") as store:
        for number in range(5):
            store.get(make_key(number))
        for number in range(5):
            store.put(make_key(number), make_block(number), "memory")
    assert [a.handle for a in read_trace(tmp_path / "trace.jsonl")] == [make_key(3), make_key(4)]
