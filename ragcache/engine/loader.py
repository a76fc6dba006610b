"""Loads blocks of a question in threads while the calling thread computes others; see `load_plan`."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate, takewhile

import torch

from ragcache import errors
from ragcache.engine.load_plan import BlockSize, LoadPlan
from ragcache.engine.rates import ALWAYS, AUTO, LOADS, NEVER, Rates
from ragcache.fusion.fuse import check_block
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock, part_of_block
from ragcache.kv.opaque_block import OpaqueBlock
from ragcache.models.deadline import LIMIT
from ragcache.models.kvzip import num_kept
from ragcache.models.language_model import LanguageModel
from ragcache.runtime import work_alone
from ragcache.store.counters import Loaded
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore, Where
from ragcache.store.records import Chunk
from ragcache.store.tiers.stack import Stored

log = logging.getLogger(__name__)
COMPUTED = "computed"
# Concurrent reads: a solid-state disk needs a deep queue, and threads that wait for the disk use no core.
READERS = 8
# Interval at which a waiting question checks for late reads; it then computes blocks whose read has not begun.
POLL_S = 0.02
# A block that is read ahead must arrive before retrieval has ranked.
AHEAD_S = 0.25
# Errors of keeping a block that may not recur at the next question, or the next day.
NOT_KEPT = (
    errors.StoreReadOnlyError,
    errors.StoreFullError,
    errors.StoreFailedError,
    errors.StoreBusyError,
    errors.StoreUnreachableError,
    errors.StoreNotFoundError,
)


@dataclass(frozen=True, eq=False)
class LoadedBlocks:
    """The KV blocks of a question.

    blocks, handles, origins: one for each chunk, in the chunks' order; an origin is a tier's name, or "computed"
    load_s, encode_s: seconds spent waiting for tiers, and computing; if both went on at once, waiting counts only while
                      nothing was computed
    encoded_tokens:   tokens of the blocks that were computed
    """

    blocks: Sequence[KVBlock] = ()
    handles: Sequence[str] = ()
    origins: Sequence[str] = ()
    load_s: float = 0.0
    encode_s: float = 0.0
    encoded_tokens: int = 0


@dataclass(frozen=True)
class LoadCounts:
    """Counts since the store was opened.

    recomputed:    blocks that were computed although a tier had them
    ahead_bytes:   read while retrieval still ranked
    wasted_bytes:  of these, read in vain: the question did not use the passage
    """

    recomputed: int = 0
    ahead_bytes: int = 0
    wasted_bytes: int = 0


class BlockLoader:
    """Loads or computes the blocks of questions. Thread-safe; `close` it before the store.

    rates:       the speeds that "auto" decides by; None: nothing is known yet
    policy:      "auto": the faster of loading and computing; "always": load every block that some tier has; "never":
                 load only blocks in memory
    ahead_bytes: most bytes read ahead under "auto", over all questions, until these take or drop them
    """

    def __init__(
        self, kv_store: KVStore, rates: Rates | None = None, *, policy: str = AUTO, ahead_bytes: int = 0
    ) -> None:
        """Create a loader. Raises ConfigError for an unknown policy, or a negative number of bytes."""
        errors.check_choice("load", policy, LOADS)
        errors.check_least("speculative_bytes", ahead_bytes, 0)
        self.kv = kv_store
        self.rates = rates or Rates()
        self.policy = policy
        self._ahead_budget = ahead_bytes if policy == AUTO else 0
        self._ahead_held = 0
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ragcache-load", initializer=work_alone)
        self._reading: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def chooses(self) -> bool:
        """Return whether rates are needed, because a block that a tier has may still be computed."""
        return self.policy != ALWAYS

    def load(
        self,
        encoder: ModelEncoder,
        documents: DocumentStore,
        chunks: Sequence[Chunk],
        *,
        passing: bool = False,
        ahead: Prefetch | None = None,
    ) -> LoadedBlocks:
        """Load or compute a block for each chunk. Blocks that no tier holds are computed from the chunk's ids and kept.

        passing: the encoder is not the store's own but has another prefix, or leaves out neighbours: blocks that it
                 computes are kept in memory only
        ahead:   reads that were begun while retrieval still ranked

        A block's key is derived from everything that the block depends on. A block made under another model, recipe or
        prefix is therefore not found here, even if the document store names it (law 8).

        Raises CancelledError and TimedOutError within `deadline.limited`, and StoreError.
        """
        whole = encoder.with_neighbours([chunk.whole for chunk in chunks])
        handles = [encoder.key_of(chunk) for chunk in whole]
        started = time.perf_counter()
        question = _Question(self, encoder, documents, passing, dict(zip(handles, whole, strict=True)))
        begun = {} if ahead is None else ahead.take(handles)
        try:
            for handle in self.kv.lookup(question.chunks, "memory"):  # blocks in memory are never computed
                if handle not in begun and (loaded := self.kv.fetch(handle)) is not None:
                    question.read[handle] = loaded
            question.load_and_compute(begun)
        finally:
            question.close()
            for handle in handles:  # in the chunks' order, whatever order they arrived in
                if handle in question.read or handle in question.made:
                    self.kv.count(question.read.get(handle))
        found = {handle: loaded.block for handle, loaded in question.read.items()} | question.made
        return LoadedBlocks(
            [_part(chunk, found[handle]) for chunk, handle in zip(chunks, handles, strict=True)],
            handles,
            [question.read[handle].tier if handle in question.read else COMPUTED for handle in handles],
            time.perf_counter() - started - question.encode_s,
            question.encode_s,
            sum(block.num_tokens for block in question.made.values()),
        )

    def load_chain(self, parts: Sequence[tuple[str, int]]) -> list[KVBlock]:
        """Load the first blocks of a chain of consecutive blocks that belong to no document, and return them in order.

        Loading stops at the first block that is not stored, or earlier if computing the rest is faster.

        parts: key of each block, and the number of its tokens that are needed

        Raises CancelledError and TimedOutError within `deadline.limited`, and StoreError.
        """
        kv = self.kv.foreign
        if kv is None or self.policy == NEVER:
            return []
        stored = kv.lookup([key for key, _ in parts])
        there = list(takewhile(lambda part: part[0] in stored, parts))
        if self.policy == AUTO:
            load_s = accumulate(self.rates.tier(stored[key].tier).load_s(stored[key].num_bytes) for key, _ in there)
            gains = [self.rates.compute.seconds([n]) for n in accumulate(tokens for _, tokens in there)]
            gains = [0.0, *(computed - loaded for computed, loaded in zip(gains, load_s, strict=True))]
            there = there[: gains.index(max(gains))]
        # The last block first, so that a conversation's end is evicted first.
        reads = self.begin_reads({key: stored[key] for key, _ in reversed(there)}, kv)
        blocks: list[KVBlock] = []
        for key, _ in there:
            while not wait([reads[key]], POLL_S).done:
                LIMIT.get().check()
            if (loaded := reads[key].result()) is None:
                break
            blocks.append(loaded.block)
        return blocks

    def counts(self) -> LoadCounts:
        with self._lock:
            return LoadCounts(**{name: self._counts[name] for name in asdict(LoadCounts())})

    def close(self) -> None:
        """Wait for reads in progress. May be called twice."""
        self._readers.shutdown(cancel_futures=True)

    # For questions and Prefetch

    def begin_reads(self, keys: Mapping[str, Stored], kv: KVStore | None = None) -> dict[str, Future[Loaded | None]]:
        """Begin to read these blocks, each from the tier that it was found in. kv: replaces the loader's own store"""
        kv = kv or self.kv
        begun = {}
        for key, (tier, num_bytes) in keys.items():
            number = self.rates.tier(tier).begin(num_bytes)
            with self._lock:
                self._reading[key] += 1
            begun[key] = self._readers.submit(kv.fetch, key)
            begun[key].add_done_callback(partial(self._has_read, key=key, tier=tier, number=number))
        return begun

    def is_reading(self, key: str) -> bool:
        with self._lock:
            return self._reading[key] > 0

    def count(self, counter: str, amount: int) -> None:
        with self._lock:
            self._counts[counter] += amount

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
        self.rates.tier(tier).end(number, moved=loaded is not None and loaded.tier == tier)
        with self._lock:
            self._reading[key] -= 1
            if not self._reading[key]:
                del self._reading[key]


def _part(chunk: Chunk, block: KVBlock) -> KVBlock:
    """Return the KV of the chunk's tokens, cut from the whole passage's block."""
    if chunk.cut_from is None:
        return block
    start = chunk.cut_from[1]
    stop = start + chunk.num_tokens
    return block.part(start, stop) if isinstance(block, OpaqueBlock) else part_of_block(block, start, stop)


class Prefetch:
    """Reads that a question begins while retrieval still ranks (the speculative step of the paper RAGCache).

    Close it when the question has its blocks, or was cancelled.

    The reads are few and short: at most `speculative_bytes` over all questions, and only blocks that are expected to
    arrive within AHEAD_S. A slow tier is not read speculatively.
    """

    def __init__(self, loader: BlockLoader) -> None:
        self._loader = loader
        self._reads: dict[str, tuple[Future[Loaded | None], int]] = {}  # with the bytes reserved for the read

    def begin(self, keys: Sequence[str]) -> None:
        """Begin to read blocks that the question will probably need; the likeliest come first."""
        loader = self._loader
        if loader.policy != AUTO:
            return
        expected_s: dict[str, float] = {}  # by tier
        begun: dict[str, Stored] = {}
        near = loader.kv.lookup(keys, "memory")
        new = [key for key in dict.fromkeys(keys) if key not in self._reads and key not in near]
        for key, stored in loader.kv.lookup(new).items():
            rate = loader.rates.tier(stored.tier)
            before_s = expected_s.get(stored.tier, rate.backlog_s())
            expected_s[stored.tier] = before_s + rate.load_s(stored.num_bytes)
            late = expected_s[stored.tier] > AHEAD_S
            if late or len(begun) == READERS or not loader.reserve_ahead(stored.num_bytes):
                break
            begun[key] = stored
        self._reads |= {key: (future, begun[key].num_bytes) for key, future in loader.begin_reads(begun).items()}

    def take(self, keys: Sequence[str]) -> dict[str, Future[Loaded | None]]:
        """Return the begun reads of these keys; all other begun reads are wasted."""
        taken = {key: self._reads.pop(key) for key in dict.fromkeys(keys) if key in self._reads}
        for _, held in taken.values():
            self._loader.release_ahead(held)
        self.close()
        return {key: future for key, (future, _) in taken.items()}

    def close(self) -> None:
        """Count the reads that were not taken as wasted. May be called twice."""
        reads, self._reads = self._reads, {}
        for read, held in reads.values():
            if read.cancel():
                self._loader.release_ahead(held)
                self._loader.count("ahead_bytes", -held)
                continue
            self._loader.count("wasted_bytes", held)
            read.add_done_callback(lambda _done, held=held: self._loader.release_ahead(held))  # type: ignore[misc]


@dataclass(eq=False, repr=False)
class _Question:
    """The blocks of a question: those that were read, and those that were computed.

    The calling thread computes. The loader's threads read, and begin the next reads as earlier reads end.
    """

    _loader: BlockLoader
    _encoder: ModelEncoder
    _documents: DocumentStore
    _passing: bool
    chunks: dict[str, Chunk]
    read: dict[str, Loaded] = field(default_factory=dict)
    made: dict[str, KVBlock] = field(default_factory=dict)
    encode_s: float = 0.0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False
    _error: BaseException | None = None

    def __post_init__(self) -> None:
        self._kv = self._loader.kv

    def load_and_compute(self, begun: Mapping[str, Future[Loaded | None]]) -> None:
        """Load and compute the missing blocks. begun: reads that began earlier"""
        if len(self.read) == len(self.chunks):
            return
        slow = {handle: chunk for handle, chunk in self.chunks.items() if handle not in self.read}
        self._stored = self._kv.lookup(slow)
        # Blocks that no tier had at the lookup, or that a read did not find.
        self._absent = slow.keys() - self._stored.keys() - begun.keys()
        sizes = {handle: BlockSize(len(chunk.token_ids)) for handle, chunk in slow.items()}
        for handle, (tier, num_bytes) in () if self._loader.policy == NEVER else self._stored.items():
            sizes[handle] = sizes[handle]._replace(tier=tier, num_bytes=num_bytes)
        self._plan = LoadPlan(
            sizes,
            self._loader.rates,
            batch_tokens=self._encoder.batch_tokens,
            readers=READERS,
            reading=list(begun),
            load_all=self._loader.policy == ALWAYS,
        )
        with self._changed:
            self._follow(begun)
        while batch := self._next_batch():
            started = time.perf_counter()
            try:
                self._compute(batch, started)
            finally:
                self.encode_s += time.perf_counter() - started

    def close(self) -> None:
        """Ignore the results of reads that are still in progress."""
        with self._changed:
            self._closed = True

    def _next_batch(self) -> tuple[str, ...]:
        """Wait for blocks to compute and return them; return an empty tuple once all blocks are here."""
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._plan.done:
                    return ()
                LIMIT.get().check()
                self._begin_reads()
                if batch := self._plan.next_batch():
                    return batch
                self._changed.wait(POLL_S)

    def _begin_reads(self) -> None:
        self._follow(self._loader.begin_reads({key: self._stored[key] for key in self._plan.next_reads()}))

    def _follow(self, reads: Mapping[str, Future[Loaded | None]]) -> None:
        for handle, future in reads.items():
            future.add_done_callback(partial(self._has_read, handle))

    def _has_read(self, handle: str, done: Future[Loaded | None]) -> None:
        """Store a read block, in the reading thread. An error would be lost there, so the calling thread raises it."""
        with self._changed:
            if self._closed:
                return
            try:
                if (loaded := self._checked(handle, None if done.cancelled() else done.result())) is None:
                    self._absent.add(handle)
                    self._plan.lost(handle)
                else:
                    self._plan.loaded(handle)
                    self.read[handle] = loaded
                self._begin_reads()
            except BaseException as error:
                self._error = error
            self._changed.notify_all()

    def _checked(self, handle: str, loaded: Loaded | None) -> Loaded | None:
        """Return the block that was read if it fits the passage's text and the model's shape; else drop it."""
        if loaded is None:
            return None
        recipe, ids = self._encoder.recipe, self.chunks[handle].token_ids
        tokens = len(recipe.marked(ids))
        lm = self._encoder.lm
        try:
            if isinstance(lm, LanguageModel):  # another engine checks its own states when it sets them
                check_block(lm, "a passage", loaded.block, tokens, num_kept(recipe, tokens))
        except errors.StaleBlockError as error:
            self._kv.reject(handle, error)
            return None
        return loaded

    def _compute(self, batch: Sequence[str], started: float) -> None:
        """Compute the blocks of a batch, keep them, and record the time that this took, which later choices go by.

        The time includes the codec's encoding of blocks that were computed although a tier has them, but not the write
        of other blocks to disk.

        started: when the batch began, by `time.perf_counter`
        """
        chunks = [self.chunks[handle] for handle in batch]
        made = self._encoder.encode([chunk.token_ids for chunk in chunks], [chunk.neighbours for chunk in chunks])
        computed = made[0].held_tensors()[0]
        if computed.is_cuda:
            torch.cuda.synchronize(computed.device)  # on a GPU the work is only queued so far
        taken_s = time.perf_counter() - started
        for handle, chunk, block in zip(batch, chunks, made, strict=True):
            began = time.perf_counter()
            if handle in self._absent:
                self.made[handle] = self._keep(chunk, handle, block)
                continue
            # If another question is reading the block, that question will keep it; do not wait for it.
            where: Where = "nowhere" if self._loader.is_reading(handle) else "again"
            self.made[handle] = self._kv.put(handle, block, where)
            taken_s += time.perf_counter() - began
            self._loader.count("recomputed", 1)
        self._loader.rates.compute.add([block.num_tokens for block in made], taken_s)
        with self._changed:
            self._plan.computed()

    def _keep(self, chunk: Chunk, handle: str, block: KVBlock) -> KVBlock:
        """Keep a block and return it as stored, so that with a lossy codec the first answer equals all later answers.

        The store's own chunks are kept with its documents' KV. Others are kept apart, within a separate budget, since
        no deletion would ever find them.
        """
        if self._passing:
            return self._kv.put(handle, block, "memory")
        if not chunk.is_stored:
            return self._kv.keep_foreign(handle, block, self._encoder.owner, chunk.token_ids)
        return self._store(chunk, handle, block)

    def _store(self, chunk: Chunk, handle: str, block: KVBlock) -> KVBlock:
        """Write a block to the store and return it as stored.

        If the store cannot take the block, a warning is logged: the next question takes longer, but this question still
        gets its answer.
        """
        stored = block
        try:
            stored = self._kv.put(handle, block)
            if chunk.handle != handle:
                self._documents.set_handles({chunk.vector_id: handle})
            elif not self._documents.chunks_by_vector_ids([chunk.vector_id]):
                self._forget(handle)
            if chunk.neighbours and self._encoder.keys([chunk]) != [handle]:
                self._documents.set_handles({chunk.vector_id: None})
                self._forget(handle)
        except errors.NoSuchDocumentError:
            self._forget(handle)
        except NOT_KEPT as error:
            log.warning("the block of chunk %s is kept in memory only: %s", chunk.id, error)
            with suppress(errors.StoreError, OSError):  # the block may be stored, and its chunk not name it
                self._forget(handle)
            stored = self._kv.put(handle, block, "memory")
        return stored

    def _forget(self, handle: str) -> None:
        """Delete a block whose chunk, or a chunk encoded before it, was deleted since retrieval (law 10).

        The block stays if other chunks refer to it.
        """
        if handle not in self._documents.handles():
            self._kv.delete(handle)
