"""Every tier's budget is never exceeded, by whoever looks and whatever threads do; room is made only where it helps."""

import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from stat import S_ISREG

import pytest
import torch
from blocks import make_block, make_key, put_all, same
from filelock import FileLock
from forked import Forked
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from torch import Tensor

from ragcache.codecs import RawCodec
from ragcache.errors import MissingBlockError, PinError, StoreFullError
from ragcache.kv.block import KVBlock
from ragcache.store import tiers
from ragcache.store.counters import Loaded
from ragcache.store.eviction import LRU, POLICIES, Entry, get_policy
from ragcache.store.kv_store import KVStore
from ragcache.store.last_use import leased
from ragcache.store.tiers.block_names import BlockFiles

ONE = make_block(0).num_bytes
BYTES_PER_TOKEN = make_block(0, num_tokens=1).num_bytes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def one(tmp_path: Path) -> int:
    """Bytes of a block's file."""
    tier = tiers.DiskTier(tmp_path / "one", RawCodec())
    tier.put(make_key(0), make_block(0))
    return tier.path(make_key(0)).stat().st_size


@contextmanager
def threads_that_meet() -> Iterator[None]:
    """Threads take turns far more often than usual, and so meet in more places."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def keys(*numbers: int) -> list[str]:
    return sorted(map(make_key, numbers))


# Every tier

Make = Callable[..., tiers.Tier]


@pytest.fixture(params=["memory", "device", "disk"])
def make(request: pytest.FixtureRequest, root: Path, one: int) -> Make:
    """Opens tiers with room for so many blocks of five tokens, less some bytes."""
    folders = count()

    def open_one(blocks: int, missing: int = 0) -> tiers.Tier:
        if request.param == "memory":
            return tiers.MemoryTier(blocks * ONE - missing, LRU())
        if request.param == "device":
            return tiers.DeviceTier(torch.device("cpu"), blocks * ONE - missing, LRU())
        return tiers.DiskTier(root / str(next(folders)), RawCodec(), blocks * one - missing)

    return open_one


@pytest.mark.parametrize("missing", [0, 1])
def test_the_budget_holds_to_the_byte(make, missing):
    """What fits exactly is kept beside what is there; with one byte less it is not, or something goes for it."""
    lone, tier = make(1, missing), make(2, missing)
    assert (lone.put(make_key(0), make_block(0)) is None) == bool(missing)
    for number in range(2):
        assert tier.put(make_key(number), make_block(number)) is not None
    assert tier.put(make_key(2), make_block(2, num_tokens=50)) is None, "larger than the budget: nothing goes for it"
    assert sorted(tier.keys()) == (keys(1) if missing else keys(0, 1))
    assert tier.evictions == missing


def test_a_block_in_use_is_not_evicted(make):
    tier = make(2)
    put_all(tier, range(2))
    used = [tier.get(make_key(0)), tier.get(make_key(1))]
    assert tier.put(make_key(2), make_block(2)) is None, "served, not kept"
    assert sorted(tier.keys()) == keys(0, 1)
    view = used[0].layer_keys(1)[:, 2:]
    del used[0]
    assert tier.put(make_key(2), make_block(2)) is None, "a view of it is in use still"
    del view
    assert tier.put(make_key(2), make_block(2)) is not None
    assert sorted(tier.keys()) == keys(1, 2)


def test_what_is_deleted_while_in_use_is_counted_until_it_is_not(make):
    tier = make(1)
    tier.put(make_key(0), make_block(0))
    used, other = (tier.get(make_key(0)) for _ in range(2))
    tier.delete(make_key(0))
    del other
    assert make_key(0) not in tier
    if isinstance(tier, tiers.BudgetedTier):
        assert tier.usage() == tiers.TierUsage(0, ONE)
    assert tier.put(make_key(1), make_block(1)) is None
    assert same(used, make_block(0))
    del used
    assert tier.put(make_key(1), make_block(1)) is not None


# Tiers in memory


@settings(max_examples=100, deadline=None)
@given(
    budget_tokens=st.integers(0, 12),
    operations=st.lists(st.tuples(st.sampled_from(["put", "get", "delete", "look"]), st.integers(0, 7)), max_size=60),
)
@example(budget_tokens=9, operations=[("put", 2), ("put", 4), ("put", 5)])
@example(budget_tokens=10, operations=[("put", 5), ("put", 4), ("look", 5), ("put", 3)])
def test_what_is_held_equals_a_model(budget_tokens, operations):
    """Block n has n tokens. The model: a list by last use, from which the front goes until the newcomer fits."""
    tier, model = tiers.MemoryTier(budget_tokens * BYTES_PER_TOKEN, LRU()), []
    evictions = 0
    for name, number in operations:
        if name == "put":
            kept = tier.put(make_key(number), make_block(number, num_tokens=number)) is not None
            model = [held for held in model if held != number]
            assert kept == (number <= budget_tokens)
            if kept:
                while sum(model) + number > budget_tokens:
                    model.pop(0)
                    evictions += 1
                model.append(number)
        elif name == "get":
            assert same(tier.get(make_key(number)), make_block(number, num_tokens=number)) == (number in model)
            model = sorted(model, key=lambda held: held == number)
        elif name == "look":
            assert (make_key(number) in tier) == (number in model), "which is no use"
        else:
            tier.delete(make_key(number))
            model = [held for held in model if held != number]
        assert sorted(tier.keys()) == sorted(make_key(number) for number in model)
        assert tier.usage() == tiers.TierUsage(len(model), sum(model) * BYTES_PER_TOKEN)
    assert tier.evictions == evictions


def test_a_lease_ends_with_the_last_view_of_its_bytes_and_turned_tensors_keep_their_values():
    ended, block = [], make_block(1, num_tokens=4)
    held = leased(block, lambda: ended.append(True))
    view = held.keys.detach()[..., :1]
    del held
    assert not ended, "a detached view is in use, too"
    del view
    assert ended == [True]
    turned = block.map(lambda tensor: tensor.transpose(1, 2))
    assert same(leased(turned, ended.clear), turned)


def test_a_failed_copy_gives_its_reservation_back(monkeypatch):
    tier = tiers.MemoryTier(10 * BYTES_PER_TOKEN, LRU())

    def fail(tensor: Tensor, **options: object) -> Tensor:
        assert tier.usage() == tiers.TierUsage(0, 10 * BYTES_PER_TOKEN), "reserved before the copy begins"
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(tiers.budgeted, "private_copy", fail)
        with pytest.raises(MemoryError):
            tier.put(make_key(1), make_block(1, num_tokens=10))
    assert tier.usage() == tiers.TierUsage(0, 0)
    assert tier.put(make_key(1), make_block(1, num_tokens=10)) is not None


def test_what_leaves_is_counted_until_it_has_left_and_what_comes_is_in_use_at_once():
    tier, seen = tiers.MemoryTier(8 * BYTES_PER_TOKEN, LRU()), []
    tier.put(make_key(1), make_block(1, num_tokens=8))
    tier.demote = lambda key, block: seen.append(tier.usage().num_bytes)
    held = tier.put(make_key(2), make_block(2, num_tokens=1))
    assert seen == [8 * BYTES_PER_TOKEN]
    assert tier.usage().num_bytes == BYTES_PER_TOKEN
    assert tier.put(make_key(3), make_block(3, num_tokens=8)) is None
    assert same(held, make_block(2, num_tokens=1))


def test_a_key_put_twice_at_once_counts_once():
    """A second thread's put ends while the first one copies."""
    tier = tiers.MemoryTier(4 * ONE, LRU())
    copied = tier._made
    other = [make_block(2)]

    def copy(make: Callable[..., Tensor]) -> Tensor:
        while other:
            assert tier.put(make_key(1), other.pop()) is not None
        return copied(make)

    tier._made = copy  # type: ignore[method-assign]
    tier.put(make_key(1), make_block(1))
    assert same(tier.get(make_key(1)), make_block(1))
    assert tier.usage() == tiers.TierUsage(1, ONE)


def test_the_policy_is_asked_under_the_tiers_lock():
    methods = ("insert", "touch", "remove", "victims", "evict", "admits")
    calls: dict[str, bool] = {}

    class Watched(LRU):
        def __getattribute__(self, name: str) -> object:
            if name in methods:
                calls[name] = calls.get(name, True) and tier._lock.locked()
            return super().__getattribute__(name)

    tier = tiers.MemoryTier(ONE, Watched())
    put_all(tier, [0, 1, 1])
    tier.get(make_key(1))
    tier.delete(make_key(1))
    assert calls == dict.fromkeys(methods, True)


def test_the_policy_learns_sizes_and_tokens():
    seen: list[Entry] = []

    class Spy(LRU):
        def insert(self, entry: Entry) -> None:
            seen.append(entry)
            super().insert(entry)

    tiers.MemoryTier(1 << 20, Spy()).put(make_key(1), make_block(1, num_tokens=7))
    assert seen == [Entry(make_key(1), 7 * BYTES_PER_TOKEN, 7)]


# Disk


def all_bytes(root: Path) -> int:
    """Size of all files beside the books. A temporary file may get its name meanwhile: it is one file still."""
    sizes = {}
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            if S_ISREG(status.st_mode) and not path.name.startswith((".budget", ".pins")):
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_least_recently_used_file_goes(one, root, policy, reopened):
    """The order of use and the sizes outlive the process."""
    first = tiers.DiskTier(root, RawCodec(), 3 * one, get_policy(policy))
    for number in range(3):
        first.put(make_key(number), make_block(number))
        os.utime(first.path(make_key(number)), (1000 + number, 1000 + number))
    assert first.get(make_key(0)) is not None
    last = tiers.DiskTier(root, RawCodec(), 3 * one, get_policy(policy)) if reopened else first
    assert last.put(make_key(3), make_block(3)) is not None
    assert sorted(last.keys()) == keys(0, 2, 3)
    assert last.evictions == 1
    assert all_bytes(root) == 3 * one


def test_a_store_above_a_new_budget_gives_up_what_is_needed(one, root):
    unbounded = tiers.DiskTier(root, RawCodec())
    for number in range(6):
        unbounded.put(make_key(number), make_block(number))
        os.utime(unbounded.path(make_key(number)), (1000 + number, 1000 + number))
    tier = tiers.DiskTier(root, RawCodec(), 2 * one)
    assert tier.put(make_key(9), make_block(9)) is not None
    assert sorted(tier.keys()) == keys(5, 9)


def test_a_write_that_fails_gives_its_bytes_back(one, root, monkeypatch):
    tier = tiers.DiskTier(root, RawCodec(), one)
    tier.put(make_key(0), make_block(0))
    tier.delete(make_key(0))

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(StoreFullError):
            tier.put(make_key(1), make_block(1))
    assert all_bytes(root) == 0
    assert tier.put(make_key(1), make_block(1)) is not None


def test_a_sum_that_a_kill_left_too_high_is_counted_anew(one, root):
    first = tiers.DiskTier(root, RawCodec(), 2 * one)
    first.put(make_key(0), make_block(0))
    # As if killed between the sum and the file, and while writing.
    (root / ".budget").write_bytes((7).to_bytes(8, "little") + (100 * one).to_bytes(8, "little"))
    leftover = first.path(make_key(0)).parent / f".{make_key(5)}.safetensors.{2**22 + 1}-0123abcd.tmp"
    leftover.write_bytes(bytes(one))
    second = tiers.DiskTier(root, RawCodec(), 2 * one)
    assert second.put(make_key(1), make_block(1)) is not None
    assert sorted(second.keys()) == sorted([make_key(0), make_key(1)])
    assert not leftover.exists()
    (root / ".budget").write_bytes(b"cut")
    assert second.put(make_key(2), make_block(2)) is not None
    assert all_bytes(root) == 2 * one


def test_two_stores_evict_each_others_blocks(one, root):
    ours, theirs = (tiers.DiskTier(root, RawCodec(), 3 * one) for _ in range(2))
    put_all(ours, range(3))
    for number in range(3, 6):
        assert theirs.put(make_key(number), make_block(number)) is not None
        assert all_bytes(root) == 3 * one
    assert ours.get(make_key(0)) is None
    assert same(ours.get(make_key(4)), make_block(4))
    assert ours.put(make_key(6), make_block(6)) is not None
    assert all_bytes(root) == 3 * one


def test_a_file_that_gets_its_name_while_the_directory_is_counted_is_not_missed(one, root, monkeypatch):
    """A writer that has claimed its bytes needs no lock to rename its file: here, right behind the listing."""
    tier = tiers.DiskTier(root, RawCodec())
    put_all(tier, range(3))
    path = tier.path(make_key(1))
    temporary = path.with_name(f".{path.name}.{os.getpid()}-0123abcd.tmp")
    path.rename(temporary)
    listed = tiers.block_names._sorted_entries

    def listed_then_renamed(directory: Path) -> list[Path]:
        entries = listed(directory)
        if directory == path.parent:
            temporary.rename(path)
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(tiers.block_names, "_sorted_entries", listed_then_renamed)
        found = {file.key: file.num_bytes for file in BlockFiles(root).walk()}
    assert found == {make_key(number): one for number in range(3)}


def churn(tier: tiers.DiskTier, seed: int, steps: int) -> int:
    """Put, get (and hold on to some), delete; returns how many blocks were wrong."""
    rng, wrong, held = random.Random(seed), 0, []
    for step in range(steps):
        number = rng.randrange(14)
        got = tier.get(make_key(number)) or tier.put(make_key(number), make_block(number, num_tokens=number * 9))
        wrong += got is not None and not same(got, make_block(number, num_tokens=number * 9))
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


def test_threads_and_processes_stay_within_the_budget(root):
    budget, stop = 40_000, threading.Event()
    tier = tiers.DiskTier(root, RawCodec(), budget, get_policy("hyperbolic"))
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
from test_budgets import churn
from ragcache.codecs import RawCodec
from ragcache.store.tiers import DiskTier
tier = DiskTier(Path(sys.argv[1]), RawCodec(), int(sys.argv[2]))
raise SystemExit(churn(tier, 99, 150))
"""


def test_another_process_that_never_lets_go_of_the_lock_is_named(root, monkeypatch):
    monkeypatch.setattr(tiers.disk_budget, "BUSY_AFTER_S", 0.05)
    with KVStore(root, disk_bytes=100_000) as store:
        store.put(make_key(0), make_block(0))
        with FileLock(root / ".budget.lock"), pytest.raises(tiers.disk_budget.StoreBusyError, match="lock"):
            store.put(make_key(1), make_block(1))
        store.put(make_key(1), make_block(1))


# Every tier of a store at once, whatever several threads do to it


NUMBERS = st.integers(0, 7)  # block n has n + 1 tokens
STEPS = st.one_of(
    st.tuples(
        st.sampled_from(["put", "get", "hold", "delete", "remember", "pin", "unpin"]), NUMBERS.map(lambda n: [n])
    ),
    st.tuples(st.sampled_from(["get", "unpin"]), st.lists(NUMBERS, min_size=1, max_size=4)),
    st.tuples(st.just("let go"), st.just([])),
)
Step = tuple[str, list[int]]


def block(number: int) -> KVBlock:
    return make_block(number, num_tokens=number + 1)


class Worker:
    """One thread's steps. wrong: blocks that were not what was put."""

    def __init__(self, store: KVStore, root: Path) -> None:
        self.store, self.root = store, root
        self.held: list[Loaded] = []
        self.wrong, self.highest_on_disk = 0, 0

    def run(self, steps: list[Step], together: threading.Barrier) -> None:
        together.wait(60)
        for name, numbers in steps:
            self.step(name, numbers)
            with FileLock(self.root / ".budget.lock", thread_local=False).acquire(poll_interval=0.0005):
                self.highest_on_disk = max(self.highest_on_disk, all_bytes(self.root))
        self.held.clear()

    def step(self, name: str, numbers: list[int]) -> None:
        keys = [make_key(number) for number in numbers]
        match name:
            case "put":
                self.store.put(keys[0], block(numbers[0]))
            case "remember":
                self.store.put(keys[0], block(numbers[0]), "memory")
            case "get" | "hold":
                found = [self.store.get(key) for key in keys]
                loaded = [(n, one) for n, one in zip(numbers, found, strict=True) if one is not None]
                self.wrong += sum(not same(one.block, block(n)) for n, one in loaded)
                if name == "hold":
                    self.held += [one for _, one in loaded]
            case "delete":
                self.store.delete(keys[0])
            case "pin":
                with suppress(PinError, MissingBlockError):
                    self.store.pin(keys)
            case "unpin":
                self.store.unpin(keys)
            case "let go":
                self.held.clear()


@contextmanager
def counting() -> Iterator[dict[str, LiveBytes]]:
    live = {"device": LiveBytes(), "memory": LiveBytes()}
    with pytest.MonkeyPatch.context() as patch, threads_that_meet():
        for tier in (tiers.DeviceTier, tiers.MemoryTier):
            patch.setattr(tier, "_made", lambda own, make: live[own.name].copy(make()))
            patch.setattr(tier, "empty", lambda own, num_bytes: live[own.name].empty(num_bytes))
        yield live


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    budgets=st.fixed_dictionaries({"device": st.integers(0, 16), "memory": st.integers(0, 24)}),
    disk_files=st.integers(1, 6),
    policy=st.sampled_from(sorted(POLICIES)),
    admission=st.sampled_from(["all", "tinylfu"]),
    work=st.lists(st.lists(STEPS, max_size=25), min_size=2, max_size=4),
)
def test_no_tier_ever_exceeds_its_budget(budgets, disk_files, policy, admission, work):
    tokens = {name: count * BYTES_PER_TOKEN for name, count in budgets.items()}
    disk = disk_files * (block(7).num_bytes + 1500)
    with tempfile.TemporaryDirectory() as directory, counting() as live:
        root = Path(directory) / "kv"
        root.mkdir()
        with KVStore(
            root,
            memory_bytes=tokens["memory"],
            device_bytes=tokens["device"],
            disk_bytes=disk,
            eviction=policy,
            admission=admission,
        ) as store:
            store.use_device(torch.device("cpu"))
            workers = [Worker(store, root) for _ in work]
            together = threading.Barrier(len(work))
            with ThreadPoolExecutor(len(work)) as threads:
                for done in [threads.submit(w.run, steps, together) for w, steps in zip(workers, work, strict=True)]:
                    done.result()
            assert sum(worker.wrong for worker in workers) == 0
            assert len(store._key_locks) == 0
        assert {name: one.highest <= tokens[name] for name, one in live.items()} == {"device": True, "memory": True}
        assert max(worker.highest_on_disk for worker in workers) <= disk
        assert all_bytes(root) <= disk
    assert {name: one.now for name, one in live.items()} == {"device": 0, "memory": 0}
