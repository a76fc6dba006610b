"""Loads blocks of a question in threads while the asking thread computes others; see `split`."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import torch

from ragcache.engine.block_writer import COMPUTED, BlockWriter, LoadedBlocks, encode_chunks
from ragcache.engine.load_plan import BlockSize, LoadPlan
from ragcache.engine.rates import AUTO, LOADS, NEVER, Rates
from ragcache.errors import ConfigError
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.models.deadline import LIMIT
from ragcache.runtime import work_alone
from ragcache.store.counters import Loaded
from ragcache.store.kv_store import KVStore
from ragcache.store.records import Chunk
from ragcache.store.tiers.stack import Stored

# Reads on their way at once: a solid-state disk wants a deep queue, and threads that wait for it take no core.
READERS = 8
# How often a waiting question looks whether a read is late: it then computes what has not begun.
POLL_S = 0.02
# What is read ahead has to be here by the time that retrieval has ranked.
AHEAD_S = 0.25


@dataclass(frozen=True)
class LoadCounts:
    """Counts since the store was opened.

    recomputed:    blocks that were computed although a tier had them
    ahead_bytes:   read while retrieval still ranked
    wasted_bytes:  of these, read for nothing: the question did not take that passage
    """

    recomputed: int = 0
    ahead_bytes: int = 0
    wasted_bytes: int = 0


class BlockLoader:
    """Loads or computes the blocks of questions. Thread-safe; `close` it before the store.

    policy:      "auto": the faster of loading and computing; "never": only what is in memory is loaded
    ahead_bytes: most bytes read ahead, over all questions, until these take or drop them
    """

    def __init__(self, kv_store: KVStore, rates: Rates, *, policy: str = AUTO, ahead_bytes: int = 0) -> None:
        """Raises ConfigError for an unknown policy, or a negative number of bytes."""
        if policy not in (AUTO, NEVER):
            raise ConfigError(f"load {policy!r} is unknown; choose one of {', '.join(LOADS)}")
        if ahead_bytes < 0:
            raise ConfigError(f"speculative_bytes is {ahead_bytes}; give 0 (read nothing ahead) or more")
        self.kv = kv_store
        self.rates = rates
        self.policy = policy
        self._ahead_budget = ahead_bytes
        self._ahead_held = 0
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ragcache-load", initializer=work_alone)
        self._reading: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def load(
        self,
        encoder: ModelEncoder,
        keeper: BlockWriter,
        chunks: Sequence[Chunk],
        handles: Sequence[str],
        ahead: Prefetch | None = None,
    ) -> LoadedBlocks:
        """Load or compute one block a chunk; see `load_or_compute`."""
        return _Question(self, encoder, keeper, chunks, handles, ahead).run()

    def ahead(self) -> Prefetch:
        """The early reads of one question; close it when the question has its blocks, or was given up."""
        return Prefetch(self)

    def counts(self) -> LoadCounts:
        with self._lock:
            return LoadCounts(**{name: self._counts[name] for name in asdict(LoadCounts())})

    def close(self) -> None:
        """Wait for reads in progress. A second call is fine."""
        self._readers.shutdown(cancel_futures=True)

    # For questions and Ahead

    def read(self, keys: Mapping[str, Stored]) -> dict[str, Future[Loaded | None]]:
        """Begin to read these, each from the tier that it was found in."""
        if len(keys) > 1:  # in a thread: a device with a full queue lets even this wait
            self._readers.submit(self.kv.read_ahead, list(keys))
        begun = {}
        for key, (tier, num_bytes) in keys.items():
            number = self.rates.begin_read(tier, num_bytes)
            with self._lock:
                self._reading[key] += 1
            future = self._readers.submit(self.kv.fetch, key)
            future.add_done_callback(partial(self._has_read, key=key, tier=tier, number=number))
            begun[key] = future
        return begun

    def is_reading(self, key: str) -> bool:
        with self._lock:
            return self._reading[key] > 0

    def count(self, what: str, amount: int) -> None:
        with self._lock:
            self._counts[what] += amount

    def reserve_ahead(self, num_bytes: int) -> bool:
        with self._lock:
            if self._ahead_held + num_bytes > self._ahead_budget:
                return False
            self._ahead_held += num_bytes
            self._counts["ahead_bytes"] += num_bytes
            return True

    def release_ahead(self, num_bytes: int) -> None:
        with self._lock:
            self._ahead_held -= num_bytes

    def _has_read(self, done: Future[Loaded | None], *, key: str, tier: str, number: int) -> None:
        loaded = None if done.cancelled() or done.exception() is not None else done.result()
        self.rates.end_read(tier, number, moved=loaded is not None and loaded.tier == tier)
        with self._lock:
            self._reading[key] -= 1
            if not self._reading[key]:
                del self._reading[key]


class Prefetch:
    """Reads that one question begins while retrieval still ranks (RAGCache's speculative step).

    They are few and short: at most `speculative_bytes` over all questions, and only what is expected to be here within
    AHEAD_S. A slow tier is not read for a guess.
    """

    def __init__(self, loader: BlockLoader) -> None:
        self._loader = loader
        self._reads: dict[str, tuple[Future[Loaded | None], int]] = {}  # with the bytes that are held for it

    def begin(self, keys: Sequence[str]) -> None:
        """Begin to read blocks that the question is likely to want; the likeliest come first."""
        loader = self._loader
        if loader.policy != AUTO:
            return
        expected_s: dict[str, float] = {}  # by tier
        begun: dict[str, Stored] = {}
        near = loader.kv.lookup(keys, "memory")
        new = [key for key in dict.fromkeys(keys) if key not in self._reads and key not in near]
        for key, stored in loader.kv.lookup(new).items():
            before_s = expected_s.get(stored.tier, loader.rates.backlog_s(stored.tier))
            expected_s[stored.tier] = before_s + loader.rates.load_s(*stored)
            late = expected_s[stored.tier] > AHEAD_S
            if late or len(begun) == READERS or not loader.reserve_ahead(stored.num_bytes):
                break
            begun[key] = stored
        self._reads |= {key: (future, begun[key].num_bytes) for key, future in loader.read(begun).items()}

    def take(self, keys: Sequence[str]) -> dict[str, Future[Loaded | None]]:
        """The reads of these keys that have begun; what else was begun is read for nothing."""
        taken = {key: self._reads.pop(key) for key in dict.fromkeys(keys) if key in self._reads}
        for _, held in taken.values():
            self._loader.release_ahead(held)
        self.close()
        return {key: future for key, (future, _) in taken.items()}

    def close(self) -> None:
        """Count what was not taken as wasted. A second call is fine."""
        reads, self._reads = self._reads, {}
        for read, held in reads.values():
            if read.cancel():
                self._loader.release_ahead(held)
                self._loader.count("ahead_bytes", -held)
                continue
            self._loader.count("wasted_bytes", held)
            read.add_done_callback(lambda _done, held=held: self._loader.release_ahead(held))  # type: ignore[misc]


class _Question:
    """The blocks of one question. `run` once.

    The asking thread computes; the loader's threads read, and begin the next reads as theirs end.
    """

    def __init__(
        self,
        loader: BlockLoader,
        encoder: ModelEncoder,
        keeper: BlockWriter,
        chunks: Sequence[Chunk],
        handles: Sequence[str],
        ahead: Prefetch | None,
    ) -> None:
        self._loader = loader
        self._kv = loader.kv
        self._encoder = encoder
        self._keeper = keeper
        self._handles = handles
        self._chunks = dict(zip(handles, chunks, strict=True))
        self._ahead = {} if ahead is None else ahead.take(list(self._chunks))
        self._blocks: dict[str, KVBlock] = {}
        self._origins: dict[str, str] = {}
        self._read: dict[str, Loaded] = {}
        self._encoded_tokens = 0
        self._encode_s = 0.0
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._absent: set[int] = set()  # ranks of parts that no tier has, or had when it was asked

    def run(self) -> LoadedBlocks:
        started = time.perf_counter()
        request = self._kv.ask(self._handles)
        try:
            self._slow = [handle for handle in self._chunks if not self._take_from_memory(handle)]
            if self._slow:
                self._load_and_compute()
        finally:
            with self._changed:
                self._closed = True
            self._report(request)
        total_s = time.perf_counter() - started
        return LoadedBlocks(
            blocks=[self._blocks[handle] for handle in self._handles],
            handles=list(self._handles),
            origins=[self._origins[handle] for handle in self._handles],
            load_s=total_s - self._encode_s,
            encode_s=self._encode_s,
            encoded_tokens=self._encoded_tokens,
        )

    def _take_from_memory(self, handle: str) -> bool:
        """Take the block if a fast tier has it: such a block is never computed."""
        if handle in self._ahead or handle not in self._kv.lookup([handle], "memory"):
            return False
        loaded = self._kv.fetch(handle)
        if loaded is None:
            return False
        self._use(handle, loaded)
        return True

    def _load_and_compute(self) -> None:
        begun = {rank: self._ahead[handle] for rank, handle in enumerate(self._slow) if handle in self._ahead}
        self._stored = self._kv.lookup(self._slow)
        self._absent = {rank for rank, key in enumerate(self._slow) if key not in self._stored and rank not in begun}
        readable = self._stored if self._loader.policy != NEVER else {}
        self._split = LoadPlan(
            [self._size(handle, readable.get(handle)) for handle in self._slow],
            self._loader.rates,
            batch_tokens=self._encoder.batch_tokens,
            readers=READERS,
            reading=list(begun),
        )
        with self._changed:
            for rank, future in begun.items():
                self._follow(rank, future)
        while (batch := self._next_batch()) is not None:
            self._compute(batch)

    def _size(self, handle: str, stored: Stored | None) -> BlockSize:
        num_tokens = len(self._chunks[handle].token_ids)
        return BlockSize(num_tokens) if stored is None else BlockSize(num_tokens, stored.num_bytes, stored.tier)

    def _next_batch(self) -> tuple[int, ...] | None:
        """The ranks to compute now; waits while there are none. None when all blocks are here."""
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._split.done:
                    return None
                LIMIT.get().check()
                self._begin_reads()
                if batch := self._split.next_batch():
                    return batch
                self._changed.wait(POLL_S)

    def _begin_reads(self) -> None:
        ranks = self._split.next_reads()
        reads = self._loader.read({self._slow[rank]: self._stored[self._slow[rank]] for rank in ranks})
        for rank in ranks:
            self._follow(rank, reads[self._slow[rank]])

    def _follow(self, rank: int, future: Future[Loaded | None]) -> None:
        future.add_done_callback(lambda done: self._has_read(rank, done))

    def _has_read(self, rank: int, done: Future[Loaded | None]) -> None:
        """Take what was read, in the reading thread. An error would be lost there: the asking thread raises it."""
        with self._changed:
            if self._closed:
                return
            try:
                self._take_read(rank, None if done.cancelled() else done.result())
                self._begin_reads()
            except BaseException as error:
                self._error = error
            self._changed.notify_all()

    def _take_read(self, rank: int, loaded: Loaded | None) -> None:
        if loaded is None:
            self._absent.add(rank)
            self._split.lost(rank)
        else:
            self._split.loaded(rank)
            self._use(self._slow[rank], loaded)

    def _compute(self, batch: Sequence[int]) -> None:
        started = time.perf_counter()
        try:
            made = encode_chunks(self._encoder, [self._chunks[self._slow[rank]] for rank in batch])
            for rank, block in self._keep_all(batch, made, started).items():
                self._use_computed(rank, block)
            with self._changed:
                self._split.computed()
        finally:
            self._encode_s += time.perf_counter() - started

    def _keep_all(self, batch: Sequence[int], made: Sequence[KVBlock], started: float) -> dict[int, KVBlock]:
        """Keep what was computed, and learn how long it took: to the block as it would have been read. A codec's
        encoding belongs to that, writing to the disk does not."""
        computed = made[0].layer_keys(0)
        if computed.is_cuda:
            torch.cuda.synchronize(computed.device)  # a GPU has only been told so far
        taken_s = time.perf_counter() - started
        kept = {}
        for rank, block in zip(batch, made, strict=True):
            began, writes = time.perf_counter(), rank in self._absent
            kept[rank] = self._keep(rank, block)
            taken_s += 0.0 if writes else time.perf_counter() - began
        self._loader.rates.computed([block.num_tokens for block in made], taken_s)
        return kept

    def _keep(self, rank: int, block: KVBlock) -> KVBlock:
        """The block as it will be read from now on."""
        handle = self._slow[rank]
        if rank in self._absent:
            return self._keeper.keep(self._chunks[handle], handle, block)
        # Another question that is reading the block will hold it, and is not to be waited for.
        return self._kv.put(handle, block, "nowhere" if self._loader.is_reading(handle) else "again")

    def _use_computed(self, rank: int, block: KVBlock) -> None:
        self._blocks[self._slow[rank]] = block
        self._origins[self._slow[rank]] = COMPUTED
        self._encoded_tokens += block.num_tokens
        if rank not in self._absent:
            self._loader.count("recomputed", 1)

    def _use(self, handle: str, loaded: Loaded) -> None:
        self._blocks[handle] = loaded.block
        self._origins[handle] = loaded.tier
        self._read[handle] = loaded

    def _report(self, request: str) -> None:
        """Count and trace what became of each block, in the question's order: they came in any."""
        for handle in self._handles:
            if handle in self._blocks:
                self._kv.serve(request, handle, self._read.get(handle))
