"""Reads blocks in threads while the asking thread computes others; see `ragcache.engine.split` for who takes which."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from ragcache.engine.blocks import COMPUTED, Keeper, LoadedBlocks
from ragcache.engine.rates import Rates
from ragcache.engine.split import Limits, Part, Split
from ragcache.errors import ConfigError
from ragcache.ingest.encoder import BlockEncoder
from ragcache.kv.block import KVBlock
from ragcache.models.encoding import AbandonedSignal
from ragcache.openmp import work_alone
from ragcache.store.kv_store import KVStore, Loaded
from ragcache.store.records import Chunk

AUTO, ALWAYS, NEVER = "auto", "always", "never"
LOADS = (AUTO, ALWAYS, NEVER)
# Reads on their way at once: a solid-state disk wants a deep queue, and threads that wait for it take no core.
READERS = 8
# How often a thread with nothing to do looks whether a read is late.
POLL_S = 0.02
# What is read before it is certain that it is wanted has to be here by the time that it is.
AHEAD_S = 0.25


@dataclass(frozen=True)
class LoadCounts:
    """Since the store was opened.

    recomputed:    blocks that were computed although a tier had them
    ahead_bytes:   read while retrieval still ranked
    wasted_bytes:  of these, read for nothing: the question did not take that passage
    overtaken_bytes: read in part or whole for a block that was computed sooner
    """

    recomputed: int = 0
    ahead_bytes: int = 0
    wasted_bytes: int = 0
    overtaken_bytes: int = 0


class _Read(NamedTuple):
    future: Future[Loaded | None]
    num_bytes: int


class BlockLoader:
    """Loads or computes the blocks of questions. Thread-safe; `close` it before the store.

    policy:      "auto": of loading and computing the faster one; "never": only what is in memory is loaded
    ahead_bytes: of blocks read before it is certain that they are wanted, held or on their way, of all questions
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
        encoder: BlockEncoder,
        keeper: Keeper,
        chunks: Sequence[Chunk],
        handles: Sequence[str],
        ahead: Ahead | None = None,
    ) -> LoadedBlocks:
        """One block a chunk; what `load_or_compute` promises."""
        return _Question(self, encoder, keeper, chunks, handles, ahead).run()

    def ahead(self) -> Ahead:
        """For one question; to be closed when that has its blocks, or does not want them any more."""
        return Ahead(self)

    def counts(self) -> LoadCounts:
        with self._lock:
            return LoadCounts(**{name: self._counts[name] for name in asdict(LoadCounts())})

    def close(self) -> None:
        """Waits for reads that are on their way. A second call is fine."""
        self._readers.shutdown(cancel_futures=True)

    # For questions and Ahead

    def read(self, keys: Sequence[str]) -> dict[str, _Read]:
        """Begin to read these from the durable tier."""
        tier = self.kv.durable_tier
        sizes = {key: self.kv.size(key) or 0 for key in keys}
        if len(sizes) > 1:  # in a thread: a device with a full queue lets even this wait
            self._readers.submit(self.kv.read_ahead, list(sizes))
        begun = {}
        for key, num_bytes in sizes.items():
            number = self.rates.begin_read(tier, num_bytes)
            with self._lock:
                self._reading[key] += 1
            future = self._readers.submit(self.kv.fetch, key)
            future.add_done_callback(lambda done, key=key, number=number: self._has_read(done, key, number))  # type: ignore[misc]
            begun[key] = _Read(future, num_bytes)
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

    def _has_read(self, done: Future[Loaded | None], key: str, number: int) -> None:
        tier = self.kv.durable_tier
        loaded = None if done.cancelled() or done.exception() is not None else done.result()
        self.rates.end_read(tier, number, moved=loaded is not None and loaded.tier == tier)
        with self._lock:
            self._reading[key] -= 1
            if not self._reading[key]:
                del self._reading[key]


class Ahead:
    """Reads begun while retrieval still ranks (RAGCache's speculative step), for one question.

    Few and short ones: no more than `speculative_bytes` over all questions, and only what is expected to be here in
    AHEAD_S; from a slow tier nothing is read for a guess.
    """

    def __init__(self, loader: BlockLoader) -> None:
        self._loader = loader
        self._reads: dict[str, _Read] = {}
        self._held: dict[str, int] = {}

    def begin(self, keys: Sequence[str]) -> None:
        """Blocks that the question is likely to want, the likeliest first."""
        loader = self._loader
        if loader.policy != AUTO:
            return
        tier = loader.kv.durable_tier
        expected_s = loader.rates.backlog_s(tier)
        wanted: list[str] = []
        for key in dict.fromkeys(keys):
            if key in self._reads or loader.kv.locate(key) != tier:
                continue
            num_bytes = loader.kv.size(key) or 0
            expected_s += loader.rates.load_s(tier, num_bytes)
            if expected_s > AHEAD_S or len(wanted) == READERS or not loader.reserve_ahead(num_bytes):
                break
            self._held[key] = num_bytes
            wanted.append(key)
        self._reads |= loader.read(wanted)

    def take(self, keys: Sequence[str]) -> dict[str, _Read]:
        """Those of the keys whose reading was begun; the others are read for nothing."""
        taken = {key: self._reads.pop(key) for key in dict.fromkeys(keys) if key in self._reads}
        for key in taken:
            self._loader.release_ahead(self._held.pop(key))
        self.close()
        return taken

    def close(self) -> None:
        """What was not taken is wasted. A second call is fine."""
        reads, self._reads = self._reads, {}
        for key, read in reads.items():
            held = self._held.pop(key)
            if read.future.cancel():
                self._loader.release_ahead(held)
                self._loader.count("ahead_bytes", -held)
                continue
            self._loader.count("wasted_bytes", held)
            read.future.add_done_callback(lambda _done, held=held: self._loader.release_ahead(held))  # type: ignore[misc]


class _Need(NamedTuple):
    """One distinct block of a question."""

    handle: str
    chunk: Chunk


class _TierCosts:
    """What `Split` asks, of one tier and one model."""

    def __init__(self, rates: Rates, tier: str) -> None:
        self._rates = rates
        self._tier = tier

    def load_s(self, num_bytes: int) -> float:
        return self._rates.load_s(self._tier, num_bytes)

    def backlog_s(self) -> float:
        return self._rates.backlog_s(self._tier)

    def compute_s(self, lengths: Sequence[int]) -> float:
        return self._rates.compute_s(lengths)

    def explore_reading(self) -> bool:
        return self._rates.explore_tier(self._tier)

    def explore_computing(self) -> bool:
        return self._rates.explore_computing()


class _Question:
    """The blocks of one question, from all sides. `run` once."""

    def __init__(
        self,
        loader: BlockLoader,
        encoder: BlockEncoder,
        keeper: Keeper,
        chunks: Sequence[Chunk],
        handles: Sequence[str],
        ahead: Ahead | None,
    ) -> None:
        self._loader = loader
        self._kv = loader.kv
        self._encoder = encoder
        self._keeper = keeper
        self._handles = handles
        chunk_of = dict(zip(handles, chunks, strict=True))
        self._needs = [_Need(handle, chunk) for handle, chunk in chunk_of.items()]
        self._ahead = {} if ahead is None else ahead.take(list(chunk_of))
        self._blocks: dict[str, KVBlock] = {}
        self._origins: dict[str, str] = {}
        self._read: dict[str, Loaded] = {}
        self._encoded_tokens = 0
        self._encode_s = 0.0
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._absent: set[int] = set()  # ranks of parts that no tier has, or had when it was asked
        self._request = ""

    def run(self) -> LoadedBlocks:
        started = time.perf_counter()
        self._request = self._kv.ask(self._handles)
        try:
            self._slow = [need for need in self._needs if not self._take_from_memory(need)]
            if self._slow:
                self._load_and_compute()
        finally:
            with self._changed:
                self._closed = True
            self._report()
        total_s = time.perf_counter() - started
        return LoadedBlocks(
            blocks=[self._blocks[handle] for handle in self._handles],
            handles=list(self._handles),
            origins=[self._origins[handle] for handle in self._handles],
            load_s=total_s - self._encode_s,
            encode_s=self._encode_s,
            encoded_tokens=self._encoded_tokens,
        )

    def _take_from_memory(self, need: _Need) -> bool:
        """What a fast tier has is never computed: it is here."""
        if need.handle in self._ahead or self._kv.locate(need.handle) in (None, self._kv.durable_tier):
            return False
        loaded = self._kv.fetch(need.handle)
        if loaded is None:
            return False
        self._use(need, loaded)
        return True

    def _load_and_compute(self) -> None:
        loader, kv = self._loader, self._kv
        parts = []
        for rank, need in enumerate(self._slow):
            num_bytes = kv.size(need.handle)
            if num_bytes is None and need.handle in self._ahead:
                num_bytes = self._ahead[need.handle].num_bytes
            if num_bytes is None:
                self._absent.add(rank)
            refused = loader.policy == NEVER and need.handle not in self._ahead
            parts.append(Part(len(need.chunk.token_ids), None if refused else num_bytes))
        begun = {rank: self._ahead[need.handle] for rank, need in enumerate(self._slow) if need.handle in self._ahead}
        costs = _TierCosts(loader.rates, kv.durable_tier)
        limits = Limits(self._encoder.batch_tokens, READERS)
        self._split = Split(parts, costs, loader.rates.clock, limits, list(begun))
        self._sizes = [part.num_bytes or 0 for part in parts]
        with self._changed:
            for rank, read in begun.items():
                self._follow(rank, read.future)
        while (batch := self._next_batch()) is not None:
            self._compute(batch)

    def _next_batch(self) -> tuple[int, ...] | None:
        """What to compute now; waits while there is nothing. None when all blocks are here."""
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._split.done:
                    return None
                self._begin_reads()
                if batch := self._split.next_batch():
                    return batch
                self._changed.wait(POLL_S)

    def _begin_reads(self) -> None:
        if self._closed:
            return
        ranks = self._split.next_reads()
        if ranks:
            reads = self._loader.read([self._slow[rank].handle for rank in ranks])
            for rank in ranks:
                self._follow(rank, reads[self._slow[rank].handle].future)

    def _follow(self, rank: int, future: Future[Loaded | None]) -> None:
        future.add_done_callback(lambda done: self._has_read(rank, done))

    def _has_read(self, rank: int, done: Future[Loaded | None]) -> None:
        """In the reading thread, where an error would be lost: the asking one raises it."""
        with self._changed:
            if self._closed or done.cancelled():
                return
            try:
                self._take_read(rank, done)
                self._begin_reads()
            except BaseException as error:
                self._error = error
            self._changed.notify_all()

    def _take_read(self, rank: int, done: Future[Loaded | None]) -> None:
        if self._split.is_done(rank):  # computed sooner: how the read ended is of no interest
            self._split.loaded(rank)
        elif (loaded := done.result()) is None:
            self._absent.add(rank)
            self._split.lost(rank)
        elif self._split.loaded(rank):
            self._use(self._slow[rank], loaded)

    def _compute(self, batch: Sequence[int]) -> None:
        ids = [self._slow[rank].chunk.token_ids for rank in batch]
        started = time.perf_counter()
        try:
            made = self._encoder.encode(ids, self._is_wanted)
        except AbandonedSignal:
            with self._changed:
                self._split.abandoned()
        else:
            kept = self._keep_all(batch, made, started)
            with self._changed:
                for rank in self._split.computed():
                    self._use_computed(rank, kept[rank])
        finally:
            self._encode_s += time.perf_counter() - started

    def _keep_all(self, batch: Sequence[int], made: Sequence[KVBlock], started: float) -> dict[int, KVBlock]:
        """Computing is as long as it takes until a block is as it would have been read: a codec's encoding belongs to
        it, writing to the disk does not."""
        if made[0].keys.is_cuda:
            torch.cuda.synchronize(made[0].keys.device)  # a GPU has only been told so far
        taken_s = time.perf_counter() - started
        kept = {}
        for rank, block in zip(batch, made, strict=True):
            began, writes = time.perf_counter(), rank in self._absent
            kept[rank] = self._keep(rank, block)
            taken_s += 0.0 if writes else time.perf_counter() - began
        self._loader.rates.computed([block.num_tokens for block in made], taken_s)
        return kept

    def _is_wanted(self) -> bool:
        """Asked by the model in every layer; a chance to see whether it is late itself."""
        with self._changed:
            self._begin_reads()
            return self._split.is_wanted()

    def _keep(self, rank: int, block: KVBlock) -> KVBlock:
        """As it will be read from now on."""
        need = self._slow[rank]
        with self._changed:
            if self._split.is_done(rank):
                return block
            absent = rank in self._absent
        if absent:
            return self._keeper.keep(need.chunk, need.handle, block)
        # Who reads it holds it, and is not to be waited for; what was read is held then.
        return self._kv.pass_on(need.handle, block, hold=not self._loader.is_reading(need.handle))

    def _use_computed(self, rank: int, block: KVBlock) -> None:
        need = self._slow[rank]
        self._blocks[need.handle] = block
        self._origins[need.handle] = COMPUTED
        self._encoded_tokens += block.num_tokens
        if rank not in self._absent:
            self._loader.count("recomputed", 1)
        if self._split.is_reading(rank):
            self._loader.count("overtaken_bytes", self._sizes[rank])

    def _use(self, need: _Need, loaded: Loaded) -> None:
        self._blocks[need.handle] = loaded.block
        self._origins[need.handle] = loaded.tier
        self._read[need.handle] = loaded

    def _report(self) -> None:
        """Count and trace what became of each block, in the question's order: they came in any."""
        for handle in self._handles:
            if handle in self._blocks:
                self._kv.serve(self._request, handle, self._read.get(handle))
