"""Operations that a pass calls, counted: unlike time, a count does not depend on what else the machine does.

Counts are of calls into ATen from Python (not of what those call in turn), on random blocks. A launch of the placing
kernel, in Triton's interpreter, counts as one operation. What vLLM's connector does in the layers of a step is counted
over pages of our own, without what it does once a step (tables of addresses, slots and angles).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.reading import Bench, truncate
from ragcache.fusion import place_check
from ragcache.fusion.fuse import fuse
from ragcache.fusion.layout import Span
from ragcache.models import language_model
from ragcache.models.batch import run_pieces
from ragcache_vllm.placing import PagedLayer, Shard, WorkerSide
from ragcache_vllm.plan import Load, Stretch

PAGE_TOKENS = 16  # vLLM's on CUDA

# They make views or ask for shapes: no bytes move.
FREE = frozenset({
    "_unsafe_view", "alias", "as_strided", "chunk", "detach", "expand", "lift_fresh", "permute", "select", "slice",
    "split", "squeeze", "t", "transpose", "unsqueeze", "view",
})  # fmt: skip


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, calls: Counter[str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter() if calls is None else calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count(run: Callable[[], Any]) -> Counter[str]:
    """Calls by operation, once everything is warm."""
    run()
    calls: Counter[str] = Counter()

    def run_counted(*arguments: Any) -> Any:
        with _Counting(calls):
            return run_pieces(*arguments)

    # A mode is of one thread, and passes run in another one.
    with _Counting(calls), mock.patch.object(language_model, "run_pieces", run_counted):
        run()
    return calls


def working(calls: Counter[str]) -> int:
    """Calls that compute or move bytes."""
    return sum(number for name, number in calls.items() if name not in FREE)


class _Launches:
    """Stands for a kernel, and counts its launches as operations."""

    def __init__(self, kernel: Any, counting: _Counting) -> None:
        self._kernel = kernel
        self._counting = counting

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> None:
            before = Counter(self._counting.calls)
            self._kernel[grid](*args, **options)
            self._counting.calls = before  # what the interpreter itself calls is none of the card's
            self._counting.calls["kernel launch"] += 1

        return launch


@contextmanager
def launches_counted(counting: _Counting) -> Iterator[None]:
    """Within, launches of the placing kernel are counted."""
    from ragcache.fusion import place_kernel

    with mock.patch.object(place_kernel, "_place", _Launches(place_kernel._place, counting)):
        yield


def count_kernel(bench: Bench) -> Counter[str]:
    """Calls of placing by the kernel; none where Triton is absent."""
    if find_spec("triton") is None:
        return Counter()
    with mock.patch.dict(os.environ, {place_check.INTERPRET: "1"}):
        place_check._checked.pop(bench.lm, None)
        bench.place()  # looks whether the kernel is right
        with _Counting() as counting, launches_counted(counting):
            bench.place()
        place_check._checked.pop(bench.lm, None)
    calls: Counter[str] = counting.calls
    return calls


class PagedAttention:
    """A layer of vLLM 0.32's on a CPU, as far as the connector knows it: pages, and what writes them."""

    def __init__(self, num_pages: int, num_kv_heads: int, page_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        self.kv_cache = torch.zeros(num_pages, num_kv_heads, page_tokens, 2 * head_dim, dtype=dtype)
        self.impl = self

    def do_kv_cache_update(self, layer: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        """keys, values: [num_tokens, num_kv_heads, head_dim]"""
        pages, heads, tokens, width = cache.shape
        page, row, half = slots // tokens, slots % tokens, tokens * width // 2
        flat = cache.view(pages, heads, -1)
        flat[:, :, :half].view(pages, heads, width // 2, tokens)[page, :, :, row] = keys
        flat[:, :, half:].view(pages, heads, tokens, width // 2)[page, :, row] = values


class Connector:
    """vLLM's connector in a worker, over the passages of a benchmark and pages of 16 tokens: one load, or several."""

    def __init__(self, bench: Bench, num_loads: int = 1, *, by_kernel: bool = False) -> None:
        lm, blocks = bench.lm, bench.load_memory()
        self.names = [f"layers.{index}" for index in range(lm.shape.num_layers)]
        total = num_loads * sum(block.num_tokens for block in blocks)
        num_pages = -(-total // PAGE_TOKENS) + num_loads
        layers = {
            name: PagedLayer(
                index, PagedAttention(num_pages, layer.num_kv_heads, PAGE_TOKENS, layer.key_dim, lm.shape.dtype)
            )
            for index, (name, layer) in enumerate(zip(self.names, lm.shape.layers, strict=True))
        }
        ends = list(accumulate(block.num_tokens for block in blocks))
        spans = [Span(end - block.num_tokens, end) for end, block in zip(ends, blocks, strict=True)]
        stretches = [Stretch(str(rank), span, 0) for rank, span in enumerate(spans)]
        each = -(-ends[-1] // PAGE_TOKENS)
        self.loads = [
            Load(str(rank), stretches, list(range(rank * each, (rank + 1) * each)), [], ends[-1], False)
            for rank in range(num_loads)
        ]
        self.side = WorkerSide(
            lambda key: blocks[int(key)], lm.rope, Shard(0, 1), PAGE_TOKENS, None, by_kernel=by_kernel
        )
        self.side.register(layers, lm.shape.dtype, ends[-1])

    def step(self, counting: _Counting | None = None) -> None:
        """A step's loads; counts what its layers call."""
        self.side.begin(self.loads)
        with nullcontext() if counting is None else counting:
            for name in self.names:
                self.side.place(name)
        self.side.end()


def count_connector(bench: Bench, num_loads: int = 1, *, by_kernel: bool = False) -> Counter[str]:
    """Calls of placing into vLLM's pages; none by the kernel where Triton is absent."""
    if by_kernel and find_spec("triton") is None:
        return Counter()
    with mock.patch.dict(os.environ, {place_check.INTERPRET: "1"} if by_kernel else {}):
        connector = Connector(bench, num_loads, by_kernel=by_kernel)
        connector.step()
        counting = _Counting()
        with launches_counted(counting) if by_kernel else nullcontext():
            connector.step(counting)
        connector.side.close()
    calls: Counter[str] = counting.calls
    return calls


def profile(bench: Bench) -> dict[str, Counter[str]]:
    """Counts of the floor, of placing, of fused prefill, of one step of decoding, and of transformers' reuse."""
    blocks = bench.load_memory()
    decoded = fuse(bench.lm, bench.prompt, "reposition", blocks, reserve_tokens=8)
    end = bench.prompt.num_tokens

    def step() -> None:
        truncate(decoded.cache, end)
        bench.lm.run([1], end, decoded.cache)

    def reuse() -> None:
        bench.fill_plain_cache()
        bench.plain_reuse()

    return {
        "floor": count(bench.floor),
        "rotate and place": count(bench.place),
        "the same by the kernel": count_kernel(bench),
        "in vLLM's pages": count_connector(bench),
        "the same by kernel": count_connector(bench, by_kernel=True),
        "reposition": count(lambda: bench.reposition(bench.in_hand)),
        "decode a token": count(step),
        "transformers: full caches": count(reuse) - count(bench.fill_plain_cache),
    }
