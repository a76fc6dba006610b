"""The connector in a vLLM worker: stored blocks read, rotated and written to the pages of vLLM's cache.

A worker places the KV heads of its own tensor-parallel rank and the layers of its own pipeline stage. Keys are rotated
in float32 from their stored, unrotated form; vLLM's own attention backend writes the pages, so that their layout and
their number format stay its affair.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragcache.errors import RagCacheError
from ragcache.kv.block import KVBlock
from ragcache.kv.rope import AnglesAt, Rope
from ragcache_vllm.plan import Stretch
from ragcache_vllm.scheduling import Load

log = logging.getLogger("vllm.ragcache")
READERS = 4

Fetch = Callable[[str], KVBlock | None]
"""The block of a key; None where there is none. Raises RagCacheError where it cannot be served."""


@dataclass(frozen=True)
class PagedLayer:
    """One layer of vLLM's model and its pages.

    index: the layer's number in the model
    layer: vLLM's attention layer, whose `impl` writes keys and values to `kv_cache`
    """

    index: int
    layer: Any

    @property
    def device(self) -> torch.device:
        device: torch.device = self.layer.kv_cache.device
        return device

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write rotated keys and values, [num_tokens, num_kv_heads, head_dim], to these slots (int64 [num_tokens])."""
        self.layer.impl.do_kv_cache_update(self.layer, keys, values, self.layer.kv_cache, slots)


@dataclass(frozen=True)
class Shard:
    """The KV heads of one tensor-parallel rank; with more ranks than heads, vLLM gives neighbours the same head."""

    rank: int
    num_ranks: int

    def heads(self, num_kv_heads: int) -> slice:
        if num_kv_heads >= self.num_ranks:
            own = num_kv_heads // self.num_ranks
            return slice(self.rank * own, (self.rank + 1) * own)
        head = self.rank * num_kv_heads // self.num_ranks
        return slice(head, head + 1)


class _Placing:
    """One request's load: its blocks and where their tokens go. `place` is called once a layer."""

    def __init__(self, load: Load, blocks: Mapping[str, KVBlock], rope: Rope, shard: Shard, page_tokens: int) -> None:
        self._stretches = [(blocks[stretch.key], stretch) for stretch in load.stretches]
        self._rope = rope
        self._shard = shard
        spans = [stretch.tokens for _, stretch in self._stretches]
        positions = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        pages = torch.tensor(load.page_ids)[positions // page_tokens]
        device = rope.device
        self._slots = (pages * page_tokens + positions % page_tokens).to(device)
        self._angles = AnglesAt(rope, positions.to(device))

    @torch.inference_mode()
    def place(self, paged: PagedLayer, dtype: torch.dtype) -> None:
        keys = torch.cat(self._parts([block.layer_keys(paged.index) for block, _ in self._stretches]), dim=1)
        keys = keys.to(paged.device, non_blocking=True)
        # The rotation runs head by head over rows that lie one behind the other: half as long as across the heads.
        rotated = torch.empty(keys.shape[1], keys.shape[0], keys.shape[2], dtype=dtype, device=paged.device)
        self._rope.turn(keys, self._angles.of(paged.index), rotated.transpose(0, 1))
        values = self._parts([block.layer_values(paged.index) for block, _ in self._stretches])
        by_token = torch.cat([part.transpose(0, 1) for part in values])
        paged.write(rotated, by_token.to(paged.device, non_blocking=True).to(dtype), self._slots)

    def _parts(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """This rank's heads of every stretch, [num_kv_heads, num_tokens, head_dim]."""
        heads = self._shard.heads(blocks[0].shape[0])
        return [
            block[heads, stretch.offset : stretch.offset + stretch.tokens.num_tokens]
            for block, (_, stretch) in zip(blocks, self._stretches, strict=True)
        ]


class WorkerSide:
    """Places what the scheduler side planned.

    fetch:       reads a block; called by several threads
    rope:        rotates keys as the model does, on the pages' device
    page_tokens: tokens of one page

    An asynchronous load runs in a thread, between steps; of the others a layer is placed when the step reaches it.
    """

    def __init__(self, fetch: Fetch, rope: Rope, shard: Shard, page_tokens: int) -> None:
        self._fetch = fetch
        self._rope = rope
        self._shard = shard
        self._page_tokens = page_tokens
        self._layers: dict[str, PagedLayer] = {}
        self._dtype = torch.float32
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ragcache-read")
        self._placer = ThreadPoolExecutor(1, thread_name_prefix="ragcache-place")
        self._current: list[_Placing] = []
        self._running: dict[str, Future[None]] = {}
        self._failed_pages: set[int] = set()
        self._lock = threading.Lock()

    def register(self, layers: Mapping[str, PagedLayer], dtype: torch.dtype) -> None:
        """Take the layers by vLLM's names. dtype: of keys and values as vLLM's backend takes them."""
        self._layers, self._dtype = dict(layers), dtype

    def begin(self, loads: Sequence[Load]) -> None:
        """Begin the loads of a step."""
        self._current = []
        for load in loads:
            if load.is_async:
                self._running[load.request_id] = self._placer.submit(self._place_all, load)
            elif (placing := self._opened(load)) is not None:
                self._current.append(placing)

    def place(self, layer_name: str) -> None:
        """Place one layer of all loads of this step, before its attention."""
        for placing in self._current:
            placing.place(self._layers[layer_name], self._dtype)

    def end(self) -> None:
        """End the step: its blocks may go."""
        self._current = []

    def finished(self) -> set[str]:
        """Requests whose asynchronous load has ended since the last call."""
        done = {name for name, future in self._running.items() if future.done()}
        for name in done:
            self._running.pop(name).result()
        return done

    def failed_pages(self) -> set[int]:
        """Pages whose load failed since the last call: all of a request's, so that what replaces it is exact."""
        with self._lock:
            failed, self._failed_pages = self._failed_pages, set()
        return failed

    def close(self) -> None:
        for threads in (self._readers, self._placer):
            threads.shutdown(wait=True, cancel_futures=True)

    def _place_all(self, load: Load) -> None:
        try:
            if (placing := self._opened(load)) is None:
                return
            for paged in self._layers.values():
                placing.place(paged, self._dtype)
        except Exception:  # a thread's error would stop every later step
            log.exception("request %s: its blocks could not be placed", load.request_id)
            self._fail(load)

    def _opened(self, load: Load) -> _Placing | None:
        """A load with its blocks; None where one of them cannot be read any more."""
        keys = list(dict.fromkeys(stretch.key for stretch in load.stretches))
        try:
            found = dict(zip(keys, self._readers.map(self._fetch, keys), strict=True))
        except RagCacheError as error:
            log.warning("request %s: %s", load.request_id, error)
            found = dict.fromkeys(keys)
        blocks = {key: block for key, block in found.items() if block is not None}
        if len(blocks) < len(keys) or not all(self._fits(blocks[one.key], one) for one in load.stretches):
            self._fail(load)
            return None
        return _Placing(load, blocks, self._rope, self._shard, self._page_tokens)

    def _fits(self, block: KVBlock, stretch: Stretch) -> bool:
        long_enough = block.num_tokens >= stretch.offset + stretch.tokens.num_tokens
        return long_enough and block.num_layers == len(self._rope.sources)

    def _fail(self, load: Load) -> None:
        with self._lock:
            self._failed_pages |= set(load.page_ids)
