"""A block on its way from disk: how often its bytes are copied, and whether the page cache is left out; and memory that
a CUDA device reads by itself: what it takes of the budget, and a system that locks no more of it."""

import errno
import fcntl
import logging
import os
import resource
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from blocks import make_block, make_key, same, served_from
from live_bytes import LiveBytes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ragcache.codecs import get_codec
from ragcache.codecs.block_file import write_block
from ragcache.errors import DamagedBlockError
from ragcache.files import PAGE
from ragcache.kv.block import KVBlock
from ragcache.store.eviction import LRU
from ragcache.store.kv_store import KVStore
from ragcache.store.tiers import MemoryTier

KEY = make_key(1)
LARGE = 40_000  # tokens of a block of more than a megabyte
CODECS = ["raw", "int8"]


class PageLocked:
    """Stands for the pool of page-locked memory: aligned, and it knows all that it gave."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def __call__(self, _tier: object, num_bytes: int) -> Tensor:
        room = torch.zeros(num_bytes + PAGE, dtype=torch.uint8)
        first = -room.data_ptr() % PAGE
        self.given.append(room[first : first + num_bytes])
        return self.given[-1]

    def holds(self, tensor: Tensor) -> bool:
        return any(
            one.data_ptr() <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= one.data_ptr() + one.nbytes
            for one in self.given
        )


COLD: set[int] = set()  # files of which the page cache has nothing: temporary files may lie where it has all


class Kernel:
    """Counts what the kernel is asked for: bytes that it copies, by whether the page cache was left out."""

    def __init__(self) -> None:
        self.moved: Counter[str] = Counter()
        self.reads: list[tuple[int, int]] = []  # offset and bytes, of a file's data
        self.on_direct: Callable[[], None] = lambda: None
        self.cannot_say = False
        self._preadv = os.preadv

    def preadv(self, descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        if flags == os.RWF_NOWAIT:
            return self._looked_up(os.fstat(descriptor).st_ino)
        if direct:
            self.on_direct()
        done = self._preadv(descriptor, buffers, offset, flags)
        self.moved["direct" if direct else "buffered"] += done
        self.reads.append((offset, done))
        return done

    def _looked_up(self, file: int) -> int:
        if self.cannot_say:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        if file in COLD:
            raise BlockingIOError
        return 1


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors' operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> PageLocked:
    pool = PageLocked()
    monkeypatch.setattr(MemoryTier, "empty", lambda tier, num_bytes: pool(tier, num_bytes))
    return pool


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(os, "preadv", kernel.preadv)
    return kernel


def kept(root: Path, codec: str, *, cold: bool, num_tokens: int = LARGE) -> KVBlock:
    """A block in a file below `root`, as it is given back. cold: the page cache has nothing of it"""
    path = root / KEY[:2] / KEY[2:4] / f"{KEY}.safetensors"
    held = write_block(path, KEY, make_block(1, num_tokens=num_tokens), get_codec(codec))
    (COLD.add if cold else COLD.discard)(path.stat().st_ino)
    return held


def tensors_of(block: KVBlock) -> list[Tensor]:
    return [tensor for tensor in block.held_tensors() if tensor.numel()]


def open_store(root: Path, device: str = "cpu", **options: Any) -> KVStore:
    store = KVStore(root, **{"memory_bytes": 1 << 26, **options})
    for tier in store._tiers:
        if tier.name == "disk":  # the memory tier would ask for page-locked memory, which no machine here has
            tier.on_device(torch.device(device))
    return store


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("codec", CODECS)
def test_the_kernel_copies_each_byte_once_to_where_it_stays_and_nobody_copies_it_again(
    tmp_path, pool, kernel, codec, device
):
    held = kept(tmp_path, codec, cold=False)
    with open_store(tmp_path, device) as store:
        with Copies() as copies:
            loaded = store.get(KEY)
        assert same(loaded.block, held)
        assert loaded.tier == "disk"
        [room] = pool.given
        assert kernel.moved == {"buffered": sum(done for _, done in kernel.reads)}
        assert kernel.reads[0][1] <= room.nbytes < kernel.reads[0][1] + PAGE
        assert not {"copy_", "clone", "_to_copy"} & copies.calls.keys()
        again = store.get(KEY)
        assert again.tier == "memory"
        assert store.stats().bytes_by_tier["memory"] == room.nbytes
        assert all(pool.holds(tensor) for one in (loaded, again) for tensor in tensors_of(one.block))
        assert len(pool.given) == 1
        whole = [tensor for tensor in tensors_of(loaded.block) if tensor.nbytes % 64 == 0]
        assert all(tensor.data_ptr() % 64 == 0 for tensor in whole), "as the placing kernel reads them"


@pytest.mark.parametrize("codec", CODECS)
def test_with_a_cuda_device_a_cold_file_comes_past_the_page_cache(tmp_path, pool, kernel, codec):
    held = kept(tmp_path, codec, cold=True)
    with open_store(tmp_path, "cuda") as store:
        loaded = store.get(KEY)
        assert same(loaded.block, held)
        assert kernel.moved.keys() == {"direct"}
        assert all(pool.holds(tensor) for tensor in tensors_of(loaded.block))


@pytest.mark.parametrize(("device", "cannot_say"), [("cpu", False), ("cuda", True)])
def test_on_a_cpu_or_where_nobody_can_say_what_the_page_cache_has_it_goes_through_it(
    tmp_path, pool, kernel, device, cannot_say
):
    kept(tmp_path, "raw", cold=True)
    kernel.cannot_say = cannot_say
    with open_store(tmp_path, device) as store:
        assert store.get(KEY) is not None
    assert kernel.moved.keys() == {"buffered"}


def test_what_costs_another_block_its_room_goes_through_the_page_cache(tmp_path, pool, kernel):
    """Memory is full: the page cache is where the block is found when it has gone again."""
    held = kept(tmp_path, "raw", cold=True)
    with open_store(tmp_path, "cuda", memory_bytes=held.num_bytes + held.num_bytes // 2) as store:
        store.put(make_key(2), make_block(2, num_tokens=LARGE), "memory")
        assert served_from(store, KEY, held) == "disk"
    assert kernel.moved.keys() == {"buffered"}


@pytest.mark.parametrize("refused_at", ["setting", "reading"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT])
def test_a_file_system_without_direct_reads_is_named_once(
    tmp_path, pool, kernel, caplog, monkeypatch, refused_at, number
):
    held = kept(tmp_path, "raw", cold=True)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    if refused_at == "reading":
        kernel.on_direct = refuse
    else:
        monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, what, *flags: flags[:1] == (os.O_DIRECT,) and refuse())
    with open_store(tmp_path, "cuda") as store, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert served_from(store, KEY, held) == "disk"
            store._tiers.memory.delete(KEY)
    [said] = [record.getMessage() for record in caplog.records]
    assert said == f"{tmp_path}: read through the page cache: O_DIRECT is refused ({os.strerror(number)})"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("where", ["length", "header", "first layer", "last layer", "cut", "sector"])
def test_damage_is_found_dropped_and_costs_no_room(tmp_path, pool, kernel, monkeypatch, where, device):
    kept(tmp_path, "raw", cold=True)
    [path] = tmp_path.rglob("*.safetensors")
    raw = bytearray(path.read_bytes())
    if where == "cut":
        path.write_bytes(raw[:-PAGE])
    elif where == "sector":

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", broken)
    else:
        position = {"length": 1, "header": 100, "first layer": PAGE + 8, "last layer": len(raw) - 1}[where]
        raw[position] ^= 1
        path.write_bytes(raw)
    with open_store(tmp_path, device) as store:
        assert store.get(KEY) is None
        assert store.stats().damaged == 1
        assert store.stats().bytes_by_tier["memory"] == 0
        assert not path.exists()
        store.put(KEY, make_block(1))


def test_deletion_during_a_read_leaves_the_block_whole_or_none(tmp_path, pool, kernel):
    """By another process: its file goes between two reads."""
    held = kept(tmp_path, "raw", cold=True)
    [path] = tmp_path.rglob("*.safetensors")
    kernel.on_direct = lambda: path.unlink(missing_ok=True)
    with open_store(tmp_path, "cuda") as store:
        assert served_from(store, KEY, held) == "disk"


def test_a_block_in_memory_keeps_no_file_on_a_full_disk_in_use(tmp_path):
    """Under a disk budget what is mapped is in use; what was read is not."""
    held = kept(tmp_path, "raw", cold=True)
    size = held.num_bytes + 2 * PAGE
    with KVStore(tmp_path, memory_bytes=1 << 26, disk_bytes=size) as store:
        loaded = store.get(KEY)
        assert loaded is not None
        store.put(make_key(2), make_block(2, num_tokens=LARGE))
        assert list(store.keys()) == [make_key(2)]
        assert same(loaded.block, held)


def test_without_room_in_memory_the_file_is_mapped_and_nothing_is_read_by_hand(tmp_path, pool, kernel):
    held = kept(tmp_path, "raw", cold=False)
    with open_store(tmp_path, "cuda", memory_bytes=held.num_bytes - 1) as store:
        kernel.reads.clear()
        assert served_from(store, KEY, held) == "disk"
        assert (kernel.reads, pool.given) == ([], [])


def test_a_block_that_cannot_be_decoded_takes_no_room(tmp_path, monkeypatch):
    kept(tmp_path, "int8", cold=False)

    def fail(*_: object) -> KVBlock:
        raise DamagedBlockError("not ours")

    monkeypatch.setattr(type(get_codec("int8")), "decode", fail)
    with KVStore(tmp_path, memory_bytes=1 << 26) as store:
        assert store.get(KEY) is None
        assert store.stats().bytes_by_tier["memory"] == 0
        assert store._tiers.memory.usage().num_bytes == 0


# Memory that a CUDA device reads by itself


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
                assert served_from(store, key, held[rank]) is not None
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
                assert served_from(store, key, held[rank]) is not None
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
        assert all(one is not None and same(one.block, of) for one, of in zip(loaded, held, strict=True))
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
