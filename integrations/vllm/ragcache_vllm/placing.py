"""The connector in a vLLM worker: it reads stored blocks, rotates their keys and writes them to pages of vLLM's cache.

A worker places the KV heads of its own tensor-parallel rank and the layers of its own pipeline stage. Keys are rotated
in float32 from their stored, unrotated form. A kernel places all blocks of a step, once per layer. On CUDA it is the
embedded engine's (`ragcache/fusion/place_kernel.py`), which reads page-locked memory and writes vLLM's pages on a
separate stream; on a CPU it is a function in C++ that reads blocks where they are mapped (`host_kernel.py`). Without a
kernel, and if it failed its test (`probe.py`), vLLM's own attention backend writes the pages, in its own layout and
number format.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ragcache.errors import RagCacheError, first_line
from ragcache.fusion.place_check import runs_on
from ragcache.kv.block import KVBlock
from ragcache.kv.lane import Lane, Wait
from ragcache.kv.rope import AnglesAt, Rope
from ragcache.runtime import work_alone
from ragcache.store.tiers.budgeted import private_copy
from ragcache_vllm.host_kernel import HostKernel, place_function
from ragcache_vllm.plan import Load, Stretch

if TYPE_CHECKING:
    from ragcache.fusion.place_kernel import PlaceKernel

log = logging.getLogger("vllm.ragcache")
READERS = 4
WITHOUT = "stored blocks are placed without the kernel, which takes longer"

Fetch = Callable[[str], KVBlock | None]
"""Returns the block of a key, or None if it does not exist. Raises RagCacheError if it cannot be served."""


@dataclass(frozen=True)
class PagedLayer:
    """A layer of vLLM's model and its pages.

    index: the layer's number in the model
    layer: vLLM's attention layer, whose `impl` writes keys and values to `kv_cache`
    """

    index: int
    layer: Any

    @property
    def device(self) -> torch.device:
        device: torch.device = self.layer.kv_cache.device
        return device

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """Return views of the keys and of the values, [num_kv_heads, num_pages, page_tokens, head_dim]."""
        return page_views(self.layer.kv_cache, by_channel=self.device.type == "cpu")

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write rotated keys and values, [num_tokens, num_kv_heads, head_dim], to these slots (int64 [num_tokens])."""
        self.layer.impl.do_kv_cache_update(self.layer, keys, values, self.layer.kv_cache, slots)


def page_views(cache: Tensor, *, by_channel: bool) -> tuple[Tensor, Tensor]:
    """Return views of the keys and values of vLLM 0.32's pages, [num_kv_heads, num_pages, page_tokens, head_dim].

    cache: [num_pages, num_kv_heads, page_tokens, 2 * head_dim], of any strides: a token's key, then its value
    by_channel: the layout on a CPU: in a page all keys of a head come before its values, channel by channel
    """
    num_pages, heads, tokens, width = cache.shape
    if by_channel:
        keys, values = cache.view(num_pages, heads, 2 * tokens, width // 2).chunk(2, dim=2)
        keys = keys.view(num_pages, heads, width // 2, tokens).transpose(2, 3)
    else:
        keys, values = cache.split(width // 2, dim=3)  # type: ignore[no-untyped-call]
    return keys.transpose(0, 1), values.transpose(0, 1)


@dataclass(frozen=True)
class Shard:
    """The KV heads of a tensor-parallel rank; with more ranks than heads, vLLM gives neighbouring ranks the same
    head.
    """

    rank: int
    num_ranks: int

    def heads(self, num_kv_heads: int) -> slice:
        if num_kv_heads >= self.num_ranks:
            own = num_kv_heads // self.num_ranks
            return slice(self.rank * own, (self.rank + 1) * own)
        head = self.rank * num_kv_heads // self.num_ranks
        return slice(head, head + 1)


def kernel_on(device: torch.device) -> type[PlaceKernel | HostKernel] | None:
    """Return the kernel for pages on this device; None if there is none, or it is switched off."""
    if runs_on(device):
        from ragcache.fusion.place_kernel import PlaceKernel

        return PlaceKernel
    return HostKernel if device.type == "cpu" and place_function() is not None else None


class Opened(NamedTuple):
    """A load and its blocks, by key."""

    load: Load
    blocks: Mapping[str, KVBlock]


class Placing:
    """The blocks of some loads, and the slots of their tokens. `place` is called once per layer.

    by_kernel: whether to use a kernel, if there is a kernel here that can read all of the blocks
    slots:     int64 [num_tokens], numbers of the tokens' places in vLLM's cache
    """

    def __init__(
        self, opened: Sequence[Opened], rope: Rope, shard: Shard, page_tokens: int, *, by_kernel: bool
    ) -> None:
        self._stretches = [(blocks[stretch.key], stretch) for load, blocks in opened for stretch in load.stretches]
        self._rope = rope
        self._shard = shard
        placed = [_positions(load) for load, _ in opened]
        pages = [torch.tensor(load.page_ids)[one // page_tokens] for (load, _), one in zip(opened, placed, strict=True)]
        positions = torch.cat(placed)
        self.slots = (torch.cat(pages) * page_tokens + positions % page_tokens).to(rope.device)
        self._angles = AnglesAt(rope, positions)
        self._kernel = None
        if by_kernel and (kernel := kernel_on(rope.device)) is not None:
            blocks = [block for block, _ in self._stretches]
            parts_of = [(stretch.offset, stretch.tokens.num_tokens) for _, stretch in self._stretches]
            self._kernel = kernel.of(blocks, rope.device, parts_of)

    @property
    def is_by_kernel(self) -> bool:
        return self._kernel is not None

    def look_up(self, layers: Iterable[PagedLayer]) -> None:
        """Compute the rotation angles for all layers, on the current stream."""
        for paged in layers:
            self._angles.of(paged.index)

    @torch.inference_mode()
    def place(self, paged: PagedLayer, dtype: torch.dtype) -> None:
        """Write a layer's rotated keys, and its values, to its pages. dtype: as for `WorkerSide.register`"""
        angles = self._angles.of(paged.index)
        if self._kernel is not None:
            head = self._shard.heads(self._stretches[0][0].layers[paged.index].num_kv_heads).start
            self._kernel.place(paged.index, angles, *paged.pages, self.slots, head)
            return
        keys = torch.cat(self._parts([block.layer_keys(paged.index) for block, _ in self._stretches]), dim=1)
        keys = keys.to(paged.device, non_blocking=True)
        # Rotating head by head over contiguous rows takes half as long as across the heads.
        rotated = torch.empty(keys.shape[1], keys.shape[0], keys.shape[2], dtype=dtype, device=paged.device)
        self._rope.turn(keys, angles, rotated.transpose(0, 1))
        values = self._parts([block.layer_values(paged.index) for block, _ in self._stretches])
        by_token = torch.cat([part.transpose(0, 1) for part in values])
        paged.write(rotated, by_token.to(paged.device, non_blocking=True).to(dtype), self.slots)

    def _parts(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's heads of every stretch, [num_kv_heads, num_tokens, head_dim]."""
        heads = self._shard.heads(blocks[0].shape[0])
        return [
            block[heads, stretch.offset : stretch.offset + stretch.tokens.num_tokens]
            for block, (_, stretch) in zip(blocks, self._stretches, strict=True)
        ]


def _positions(load: Load) -> Tensor:
    """Return the positions of the tokens to place, int64 [num_tokens]."""
    return torch.cat([torch.arange(stretch.tokens.start, stretch.tokens.stop) for stretch in load.stretches])


class WorkerSide:
    """The worker's part: places the loads that the scheduler's part planned.

    fetch:       reads a block; called by several threads
    rope:        rotates keys as the model does, on the pages' device
    page_tokens: tokens in a page
    lane:        a CUDA device's stream to place on; None: the model's own stream
    by_kernel:   whether the kernel places blocks that it can read

    A thread begins asynchronous loads, between steps. Of the others, loads by kernel begin with the step, all layers on
    the lane, and the step's own stream waits for each layer when it gets there. Loads without the kernel, whose copies
    block the host, run layer by layer, when the step gets there.
    """

    def __init__(
        self, fetch: Fetch, rope: Rope, shard: Shard, page_tokens: int, lane: Lane | None, *, by_kernel: bool
    ) -> None:
        self._fetch = fetch
        self._rope = rope
        self._shard = shard
        self._page_tokens = page_tokens
        self._lane = lane
        self._by_kernel = by_kernel
        self._locks_memory = by_kernel and kernel_on(rope.device) is not HostKernel
        self._layers: dict[str, PagedLayer] = {}
        self._dtype = torch.float32
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ragcache-read")
        self._placer = ThreadPoolExecutor(1, thread_name_prefix="ragcache-place", initializer=work_alone)
        self._current: Placing | None = None
        self._waits: dict[str, Wait] = {}
        self._running: dict[str, Future[None]] = {}
        self._failed_pages: set[int] = set()
        self._lock = threading.Lock()

    def register(self, layers: Mapping[str, PagedLayer], dtype: torch.dtype, max_tokens: int) -> None:
        """Set the layers, by vLLM's names, before the first step.

        dtype: data type in which vLLM's backend takes keys and values
        max_tokens: the longest sequence
        """
        self._layers, self._dtype = dict(sorted(layers.items(), key=lambda item: item[1].index)), dtype
        for paged in self._layers.values():
            last = min(max_tokens, self._rope.longest) - 1
            self._rope.angles(paged.index, last, 1)  # makes the tables of angles, before several streams read them

    def begin(self, loads: Sequence[Load]) -> None:
        """Begin the loads of a step."""
        self.end()
        if self._lane is not None and loads:
            self._lane.follow()  # earlier owners of these pages may read them until then
        for load in loads:
            if load.is_async:
                self._running[load.request_id] = self._placer.submit(self._place_all, load)
        found = [self._opened(load) for load in loads if not load.is_async]
        if opened := [one for one in found if one is not None]:
            placing = self._placing(opened, by_kernel=self._by_kernel)
            if self._lane is not None and placing.is_by_kernel:
                self._waits = self._begin_all(self._lane, placing)
            else:
                self._current = placing

    def place(self, layer_name: str) -> None:
        """Place a layer of all loads of this step, before its attention."""
        if self._current is not None:
            self._current.place(self._layers[layer_name], self._dtype)
        elif (wait := self._waits.pop(layer_name, None)) is not None:
            wait()

    def end(self) -> None:
        """End the step: its blocks may be freed."""
        for wait in self._waits.values():
            wait()
        self._current, self._waits = None, {}
        if self._lane is not None:
            self._lane.drop_done()

    def finished(self) -> set[str]:
        """Return the requests whose asynchronous load has ended since the last call."""
        done = {name for name, future in self._running.items() if future.done()}
        for name in done:
            self._running.pop(name).result()
        return done

    def failed_pages(self) -> set[int]:
        """Return the pages whose load failed since the last call: all pages of a request, so that it is recomputed
        exactly.
        """
        with self._lock:
            failed, self._failed_pages = self._failed_pages, set()
        return failed

    def close(self) -> None:
        for threads in (self._readers, self._placer):
            threads.shutdown(wait=True, cancel_futures=True)

    def _place_all(self, load: Load) -> None:
        try:
            if (opened := self._opened(load)) is None:
                return
            if self._lane is not None:
                self._begin_all(self._lane, self._placing([opened], by_kernel=self._by_kernel))
                self._lane.finish()
                return
            # Triton's interpreter is limited to one thread.
            placing = self._placing([opened], by_kernel=self._by_kernel and not self._locks_memory)
            for paged in self._layers.values():
                placing.place(paged, self._dtype)
        except Exception:  # a thread's error would stop every later step
            log.exception("request %s: its blocks could not be placed", load.request_id)
            self._fail(load)

    def _placing(self, opened: Sequence[Opened], *, by_kernel: bool) -> Placing:
        placing = Placing(opened, self._rope, self._shard, self._page_tokens, by_kernel=by_kernel)
        placing.look_up(self._layers.values())
        return placing

    def _begin_all(self, lane: Lane, placing: Placing) -> dict[str, Wait]:
        """Begin every layer. Return, by vLLM's layer names, functions that make the current stream wait for it."""
        lane.follow()
        return {
            name: lane.run(partial(placing.place, paged, self._dtype), placing) for name, paged in self._layers.items()
        }

    def _opened(self, load: Load) -> Opened | None:
        """Return a load with its blocks; None if a block can no longer be read."""
        keys = list(dict.fromkeys(stretch.key for stretch in load.stretches))
        try:
            found = dict(zip(keys, self._readers.map(self._read, keys), strict=True))
        except RagCacheError as error:
            log.warning("request %s: %s", load.request_id, error)
            found = dict.fromkeys(keys)
        blocks = {key: block for key, block in found.items() if block is not None}
        if len(blocks) < len(keys) or not all(self._fits(blocks[one.key], one) for one in load.stretches):
            self._fail(load)
            return None
        return Opened(load, blocks)

    def _read(self, key: str) -> KVBlock | None:
        """Return a block; in page-locked memory, if the kernel on this device needs that."""
        block = self._fetch(key)
        if block is None or not self._locks_memory:
            return block
        try:
            return block.map(self._locked)
        except RuntimeError as error:  # mostly the system's limit
            with self._lock:
                first, self._by_kernel, self._locks_memory = self._by_kernel, False, False
            if first:
                log.warning("%s: memory could not be page-locked: %s", WITHOUT, first_line(error))
            return block

    def _locked(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_pinned() else private_copy(tensor, pin_memory=self._rope.device.type == "cuda")

    def _fits(self, block: KVBlock, stretch: Stretch) -> bool:
        long_enough = block.num_tokens >= stretch.offset + stretch.tokens.num_tokens
        return long_enough and block.num_layers == len(self._rope.sources)

    def _fail(self, load: Load) -> None:
        with self._lock:
            self._failed_pages |= set(load.page_ids)
