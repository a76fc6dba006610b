"""The disk tier's budget is never exceeded, by whoever looks, and what goes is only ever a file."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from stat import S_ISREG

import pytest
from blocks import make_block, make_key, tier_of
from filelock import FileLock
from forked import Forked
from tiny_disk import run_on_tiny_disk

from ragcache.codecs import RawCodec
from ragcache.errors import StoreFullError
from ragcache.store.eviction import get_policy
from ragcache.store.kv_store import KVStore
from ragcache.store.tiers import DiskTier, disk_budget
from ragcache.store.tiers import disk_budget as block_files
from ragcache.store.tiers.disk_budget import BlockFiles


def file_bytes(tmp_path: Path, num_tokens: int = 5) -> int:
    """Size of one block's file."""
    tier = DiskTier(tmp_path / "one", RawCodec())
    tier.put(make_key(0), make_block(0, num_tokens=num_tokens))
    return tier.path(make_key(0)).stat().st_size


def all_bytes(root: Path) -> int:
    """Size of all files beside the books. A temporary file may get its name meanwhile: it is one file still."""
    sizes = {}
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            if S_ISREG(status.st_mode) and not path.name.startswith((".budget", ".pins")):
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def test_the_least_recently_used_file_goes(tmp_path: Path) -> None:
    one, root = file_bytes(tmp_path), tmp_path / "kv"
    tier = DiskTier(root, RawCodec(), 3 * one + 1)
    for number in range(3):
        assert tier.put(make_key(number), make_block(number)) is not None
    assert tier.get(make_key(0)) is not None
    assert tier.put(make_key(3), make_block(3)) is not None
    assert sorted(tier.keys()) == sorted(make_key(number) for number in (0, 2, 3))
    assert tier.evictions == 1
    assert all_bytes(root) == 3 * one


@pytest.mark.parametrize("missing", [0, 1])
def test_the_budget_holds_to_the_byte(tmp_path: Path, missing: int) -> None:
    """What fits exactly is kept beside what is there; with one byte less it is not, or something goes for it."""
    one = file_bytes(tmp_path)
    lone = DiskTier(tmp_path / "lone", RawCodec(), one - missing)
    assert (lone.put(make_key(0), make_block(0)) is None) == bool(missing)
    tier = DiskTier(tmp_path / "kv", RawCodec(), 2 * one - missing)
    for number in range(2):
        assert tier.put(make_key(number), make_block(number)) is not None
    assert set(tier.keys()) == {make_key(number) for number in ((1,) if missing else (0, 1))}
    assert all_bytes(tmp_path / "kv") <= 2 * one - missing


@pytest.mark.parametrize("policy", ["lru", "pgdsf"])
def test_the_order_of_use_and_the_sizes_outlive_the_process(tmp_path: Path, policy: str) -> None:
    one, root = file_bytes(tmp_path), tmp_path / "kv"
    first = DiskTier(root, RawCodec(), 3 * one, get_policy(policy))
    for number in range(3):
        first.put(make_key(number), make_block(number))
        os.utime(first.path(make_key(number)), (1000 + number, 1000 + number))
    assert first.get(make_key(0)) is not None
    second = DiskTier(root, RawCodec(), 3 * one, get_policy(policy))
    assert second.put(make_key(3), make_block(3)) is not None
    assert sorted(second.keys()) == sorted(make_key(number) for number in (0, 2, 3))
    assert all_bytes(root) == 3 * one


def test_a_store_above_a_new_budget_gives_up_what_is_needed(tmp_path: Path) -> None:
    one, root = file_bytes(tmp_path), tmp_path / "kv"
    unbounded = DiskTier(root, RawCodec())
    for number in range(6):
        unbounded.put(make_key(number), make_block(number))
        os.utime(unbounded.path(make_key(number)), (1000 + number, 1000 + number))
    tier = DiskTier(root, RawCodec(), 2 * one)
    assert tier.put(make_key(9), make_block(9)) is not None
    assert sorted(tier.keys()) == sorted(make_key(number) for number in (5, 9))


def test_a_block_in_use_is_not_evicted(tmp_path: Path) -> None:
    one, root = file_bytes(tmp_path), tmp_path / "kv"
    tier = DiskTier(root, RawCodec(), 2 * one)
    tier.put(make_key(0), make_block(0))
    tier.put(make_key(1), make_block(1))
    used = [tier.get(make_key(0)), tier.get(make_key(1))]
    assert tier.put(make_key(2), make_block(2)) is None, "served, not kept"
    assert sorted(tier.keys()) == sorted([make_key(0), make_key(1)])
    del used[0]
    assert tier.put(make_key(2), make_block(2)) is not None
    assert sorted(tier.keys()) == sorted([make_key(1), make_key(2)])


def test_what_is_deleted_while_in_use_is_counted_until_it_is_not(tmp_path: Path) -> None:
    one, root = file_bytes(tmp_path), tmp_path / "kv"
    tier = DiskTier(root, RawCodec(), one)
    tier.put(make_key(0), make_block(0))
    used = tier.get(make_key(0))
    tier.delete(make_key(0))
    assert tier.put(make_key(1), make_block(1)) is None, "the device has the deleted bytes still"
    assert used is not None
    assert used.equal(make_block(0))
    del used
    assert tier.put(make_key(1), make_block(1)) is not None


def test_a_block_larger_than_the_budget_is_not_kept_and_pushes_nothing_out(tmp_path: Path) -> None:
    one, root = file_bytes(tmp_path), tmp_path / "kv"
    with KVStore(root, disk_bytes=one, memory_bytes=0) as store:
        store.put(make_key(0), make_block(0))
        large = make_block(1, num_tokens=50)
        assert store.put(make_key(1), large).equal(large)
        assert (tier_of(store, make_key(0)), tier_of(store, make_key(1))) == ("disk", None)
        assert store.get(make_key(1)) is None


def test_a_write_that_fails_gives_its_bytes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, root = file_bytes(tmp_path), tmp_path / "kv"
    tier = DiskTier(root, RawCodec(), one)
    tier.put(make_key(0), make_block(0))
    tier.delete(make_key(0))
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(StoreFullError):
            tier.put(make_key(1), make_block(1))
    assert os.replace is replace
    assert all_bytes(root) == 0
    assert tier.put(make_key(1), make_block(1)) is not None


def test_a_sum_that_a_kill_left_too_high_is_counted_anew(tmp_path: Path) -> None:
    one, root = file_bytes(tmp_path), tmp_path / "kv"
    first = DiskTier(root, RawCodec(), 2 * one)
    first.put(make_key(0), make_block(0))
    # As if killed between the sum and the file, and while writing.
    (root / ".budget").write_bytes((7).to_bytes(8, "little") + (100 * one).to_bytes(8, "little"))
    leftover = first.path(make_key(0)).parent / f".{make_key(5)}.safetensors.{2**22 + 1}-0123abcd.tmp"
    leftover.write_bytes(bytes(one))
    second = DiskTier(root, RawCodec(), 2 * one)
    assert second.put(make_key(1), make_block(1)) is not None
    assert sorted(second.keys()) == sorted([make_key(0), make_key(1)])
    assert not leftover.exists()
    (root / ".budget").write_bytes(b"cut")
    assert second.put(make_key(2), make_block(2)) is not None
    assert all_bytes(root) == 2 * one


def test_two_stores_evict_each_others_blocks(tmp_path: Path) -> None:
    one, root = file_bytes(tmp_path), tmp_path / "kv"
    ours, theirs = (DiskTier(root, RawCodec(), 3 * one) for _ in range(2))
    for number in range(3):
        ours.put(make_key(number), make_block(number))
    for number in range(3, 6):
        assert theirs.put(make_key(number), make_block(number)) is not None
        assert all_bytes(root) == 3 * one
    assert ours.get(make_key(0)) is None
    got = ours.get(make_key(4))
    assert got is not None
    assert got.equal(make_block(4))
    del got
    assert ours.put(make_key(6), make_block(6)) is not None
    assert all_bytes(root) == 3 * one


def test_a_file_that_gets_its_name_while_the_directory_is_counted_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that has claimed its bytes needs no lock to rename its file: here, right behind the listing."""
    one, root = file_bytes(tmp_path), tmp_path / "kv"
    tier = DiskTier(root, RawCodec())
    for number in range(3):
        tier.put(make_key(number), make_block(number))
    path = tier.path(make_key(1))
    temporary = path.with_name(f".{path.name}.{os.getpid()}-0123abcd.tmp")
    path.rename(temporary)
    listed = block_files._sorted_entries

    def listed_then_renamed(directory: Path) -> list[Path]:
        entries = listed(directory)
        if directory == path.parent:
            temporary.rename(path)
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(block_files, "_sorted_entries", listed_then_renamed)
        found = {file.key: file.num_bytes for file in BlockFiles(root).walk()}
    assert found == {make_key(number): one for number in range(3)}


def churn(tier: DiskTier, seed: int, steps: int) -> int:
    """Put, get (and hold on to some), delete; returns how many blocks were wrong."""
    rng, wrong, held = random.Random(seed), 0, []
    for step in range(steps):
        number = rng.randrange(14)
        got = tier.get(make_key(number)) or tier.put(make_key(number), make_block(number, num_tokens=number * 9))
        wrong += got is not None and not got.equal(make_block(number, num_tokens=number * 9))
        held = [*held, got][-(step % 4) :] if step % 4 else []
        if rng.random() < 0.15:
            tier.delete(make_key(rng.randrange(14)))
    return wrong


@dataclass
class Watch:
    """Sums up a directory again and again, as a state that no writer changes meanwhile."""

    root: Path
    looks: int = 0
    highest: int = 0

    def run(self, stop: threading.Event) -> None:
        lock = FileLock(self.root / ".budget.lock", thread_local=False)
        while not stop.is_set():
            with lock.acquire(poll_interval=0.0005):
                self.highest = max(self.highest, all_bytes(self.root))
            self.looks += 1


def test_threads_and_processes_stay_within_the_budget(tmp_path: Path) -> None:
    root, budget, stop = tmp_path / "kv", 40_000, threading.Event()
    tier = DiskTier(root, RawCodec(), budget, get_policy("gdsf"))
    tier.put(make_key(99), make_block(99))
    watch, wrong, seeds = Watch(root), 0, iter(range(400))
    with ThreadPoolExecutor(5) as threads, Forked(OTHER_PROCESS, root, budget) as other:
        watching = threads.submit(watch.run, stop)
        while some := list(islice(seeds, 4)):  # at least once: the watcher may have looked often before it begins
            wrong += sum(threads.map(lambda seed: churn(tier, seed, 60), some))  # the lock is polled: few looks a round
            if watch.looks > 20 or watching.done():
                break
        status = other.wait(120)
        stop.set()
        watching.result()
    assert (wrong, status) == (0, 0)
    assert watch.looks > 20
    assert budget // 2 < watch.highest <= budget
    assert tier.evictions > 0
    for key in list(tier.keys()):
        tier.verify(key)


OTHER_PROCESS = """
import sys
from pathlib import Path
from test_disk_budget import churn
from ragcache.codecs import RawCodec
from ragcache.store.tiers import DiskTier
tier = DiskTier(Path(sys.argv[1]), RawCodec(), int(sys.argv[2]))
raise SystemExit(churn(tier, 99, 150))
"""

KERNEL_LOOKS = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from test_disk_budget import churn
from ragcache.codecs import RawCodec
from ragcache.store.tiers import DiskTier
mount, budget, page = sys.argv[1], 300_000, os.sysconf("SC_PAGESIZE")
tier, stop, highest = DiskTier(Path(mount) / "kv", RawCodec(), budget), threading.Event(), 0
def look():
    global highest
    while not stop.is_set():
        status = os.statvfs(mount)
        highest = max(highest, (status.f_blocks - status.f_bfree) * status.f_frsize)
with ThreadPoolExecutor(5) as threads:
    looking = threads.submit(look)
    wrong = sum(threads.map(lambda seed: churn(tier, seed, 150), range(4)))
    stop.set()
    looking.result()
assert wrong == 0
# Every file takes whole pages, of which it may not fill the last; the sum and the lock are two files more.
assert budget // 4 < highest <= budget + 16 * page, highest
print("done")
"""


def test_the_file_system_itself_never_holds_more(tmp_path: Path) -> None:
    """Deleted files that are mapped still included: the kernel counts them."""
    run_on_tiny_disk(tmp_path, KERNEL_LOOKS, size="4m")


def test_another_process_that_never_lets_go_of_the_lock_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_budget, "BUSY_AFTER_S", 0.05)
    with KVStore(tmp_path / "kv", disk_bytes=100_000) as store:
        store.put(make_key(0), make_block(0))
        with FileLock(tmp_path / "kv" / ".budget.lock"), pytest.raises(disk_budget.StoreBusyError, match="lock"):
            store.put(make_key(1), make_block(1))
        store.put(make_key(1), make_block(1))
