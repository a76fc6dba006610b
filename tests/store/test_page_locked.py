"""Memory that a CUDA device reads by itself: what it takes of the budget, and a system that locks no more of it."""

import logging
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from blocks import make_block, make_key
from live_bytes import LiveBytes
from torch import Tensor

from ragcache.kv.block import KVBlock
from ragcache.store.eviction import LRU
from ragcache.store.kv_store import KVStore
from ragcache.store.tiers import MemoryTier

KEYS = [make_key(number) for number in range(6)]


class Locking:
    """Stands for PyTorch's page-locked tensors: each takes a power of two, and after `granted` there are no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, granted: float = float("inf")) -> None:
        self.granted = granted
        self.asked = 0
        self.together: Barrier | None = None
        self.live = LiveBytes()
        self._empty = torch.empty
        monkeypatch.setattr(torch, "empty", self.empty)

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made = self._empty(*size, **options)
        if not pin_memory or not made.nbytes:
            return made
        self.asked += 1
        if self.together is not None:
            self.together.wait(10)
        if self.asked > self.granted:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
        locked = self.live.empty(1 << (made.nbytes - 1).bit_length())
        return locked[: made.nbytes].view(made.dtype).view(made.shape)


def on_cuda(root: Path, **options: Any) -> KVStore:
    store = KVStore(root, **options)
    store.use_device(torch.device("cuda"))
    return store


def filled(root: Path, codec: str = "raw") -> list[KVBlock]:
    """Blocks on disk, in files large enough to be read past the page cache; as they are given back."""
    with KVStore(root, memory_bytes=0, codec=codec) as store:
        return [store.put(key, make_block(rank, num_tokens=9000 + rank)) for rank, key in enumerate(KEYS)]


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_what_is_locked_stays_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """A block of 9,000 tokens has 1.1 MiB: locked, it takes 2, whether it is put (two tensors) or read (one)."""
    held, locking = filled(tmp_path, codec), Locking(monkeypatch)
    budget = 4 * held[0].num_bytes
    with on_cuda(tmp_path, memory_bytes=budget, codec=codec) as store:
        for _ in range(2):
            for rank, key in enumerate(KEYS):
                loaded = store.get(key)
                assert loaded is not None
                assert loaded.block.equal(held[rank])
                del loaded
                assert store.stats().bytes_by_tier["memory"] == locking.live.now
        for rank, key in enumerate(KEYS):
            store.put(key, make_block(rank, num_tokens=9000 + rank))
            assert store.stats().bytes_by_tier["memory"] == locking.live.now
        assert budget / 2 <= locking.live.highest <= budget
        assert store.stats().evictions > 0


@pytest.mark.parametrize("granted", [0, 1, 3])
def test_a_system_that_locks_no_more_is_named_once_and_ordinary_memory_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, granted: int
) -> None:
    """At the first, the second (the first block's values, where it is put) and a later buffer; read and put."""
    held, locking = filled(tmp_path), Locking(monkeypatch, granted)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    with on_cuda(tmp_path) as store, caplog.at_level(logging.WARNING):
        store.put(KEYS[0], make_block(0, num_tokens=9000))
        for _ in range(2):
            for rank, key in enumerate(KEYS):
                loaded = store.get(key)
                assert loaded is not None
                assert loaded.block.equal(held[rank])
        assert store.stats().bytes_by_tier["memory"] >= sum(block.num_bytes for block in held)
    assert locking.asked == granted + 1, "who refused is not asked again"
    [said] = [record.getMessage() for record in caplog.records]
    assert "page-locks no more memory (CUDA error: out of memory; limit: 65,536 bytes)" in said
    assert "ulimit -l unlimited" in said
    assert "--memory less" in said


def test_threads_that_are_refused_together_name_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held, locking = filled(tmp_path), Locking(monkeypatch, 0)
    locking.together = Barrier(len(KEYS))
    with on_cuda(tmp_path) as store, ThreadPoolExecutor(len(KEYS)) as threads, caplog.at_level(logging.WARNING):
        loaded = list(threads.map(store.get, KEYS))
        assert all(one is not None and one.block.equal(of) for one, of in zip(loaded, held, strict=True))
    assert locking.asked == len(KEYS)
    assert len(caplog.records) == 1


def test_ordinary_memory_that_is_refused_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **_options: Any) -> Tensor:
        raise RuntimeError("can't allocate memory")

    for device in ("cpu", "cuda"):
        tier = MemoryTier(1 << 20, LRU())
        tier.on_device(torch.device(device))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", refuse)
            with pytest.raises(RuntimeError, match="can't allocate"):
                tier.put(KEYS[0], make_block(0))
        assert tier.usage().num_bytes == 0
