"""Every tier's budget at once, whatever several threads do to one store."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Barrier

import pytest
import torch
from blocks import make_block, make_key
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from test_disk_budget import all_bytes

from ragcache.errors import MissingBlockError, PinError
from ragcache.kv.block import KVBlock
from ragcache.store.counters import Loaded
from ragcache.store.eviction import POLICIES
from ragcache.store.kv_store import KVStore
from ragcache.store.tiers import DeviceTier, MemoryTier

BYTES_PER_TOKEN = make_block(0, num_tokens=1).num_bytes
NUMBERS = st.integers(0, 7)  # block n has n + 1 tokens
STEPS = st.one_of(
    st.tuples(
        st.sampled_from(["put", "get", "hold", "delete", "remember", "pin", "unpin"]), NUMBERS.map(lambda n: [n])
    ),
    st.tuples(st.sampled_from(["get", "unpin"]), st.lists(NUMBERS, min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["let go", "flush"]), st.just([])),
)
Step = tuple[str, list[int]]


def block(number: int) -> KVBlock:
    return make_block(number, num_tokens=number + 1)


class Worker:
    """One thread's steps. wrong: blocks that were not what was put."""

    def __init__(self, store: KVStore, root: Path) -> None:
        self.store, self.root = store, root
        self.held: list[Loaded] = []
        self.wrong, self.highest_on_disk, self.highest_unwritten = 0, 0, 0

    def run(self, steps: list[Step], together: Barrier) -> None:
        together.wait(60)
        for name, numbers in steps:
            self.step(name, numbers)
            self.highest_unwritten = max(self.highest_unwritten, self.store._durable.unwritten_bytes)
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
                self.wrong += sum(not one.block.equal(block(n)) for n, one in loaded)
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
            case "flush":
                self.store.flush()


@contextmanager
def counting() -> Iterator[dict[str, LiveBytes]]:
    live = {"device": LiveBytes(), "memory": LiveBytes()}
    interval = sys.getswitchinterval()
    with pytest.MonkeyPatch.context() as patch:
        for tier in (DeviceTier, MemoryTier):
            patch.setattr(tier, "_copy", lambda own, tensor: live[own.name].copy(tensor))
            patch.setattr(tier, "empty", lambda own, num_bytes: live[own.name].empty(num_bytes))
        sys.setswitchinterval(1e-5)  # threads meet in more places
        try:
            yield live
        finally:
            sys.setswitchinterval(interval)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    budgets=st.fixed_dictionaries({"device": st.integers(0, 16), "memory": st.integers(0, 24)}),
    disk_files=st.integers(1, 6),
    write_behind=st.sampled_from([0, 3_000]),
    policy=st.sampled_from(sorted(POLICIES)),
    admission=st.sampled_from(["all", "tinylfu"]),
    work=st.lists(st.lists(STEPS, max_size=25), min_size=2, max_size=4),
)
def test_no_tier_ever_exceeds_its_budget(
    budgets: dict[str, int], disk_files: int, write_behind: int, policy: str, admission: str, work: list[list[Step]]
) -> None:
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
            write_behind_bytes=write_behind,
            eviction=policy,
            admission=admission,
        ) as store:
            store.use_device(torch.device("cpu"))
            workers = [Worker(store, root) for _ in work]
            together = Barrier(len(work))
            with ThreadPoolExecutor(len(work)) as threads:
                for done in [threads.submit(w.run, steps, together) for w, steps in zip(workers, work, strict=True)]:
                    done.result()
            assert sum(worker.wrong for worker in workers) == 0
            assert max(worker.highest_unwritten for worker in workers) <= write_behind
            assert len(store._key_locks) == 0
        assert {name: one.highest <= tokens[name] for name, one in live.items()} == {"device": True, "memory": True}
        assert max(worker.highest_on_disk for worker in workers) <= disk
        assert all_bytes(root) <= disk
    assert {name: one.now for name, one in live.items()} == {"device": 0, "memory": 0}
