"""Pages of vLLM's cache without vLLM, and a worker that places blocks on them."""

from collections.abc import Sequence
from typing import Any

import torch
from op_counts import PagedAttention
from placed_oracle import AT, angles_at, turned
from torch import Tensor

from ragcache.fusion.layout import Span
from ragcache.fusion.place_check import random_block
from ragcache.kv.block import KVBlock
from ragcache.models.language_model import LanguageModel
from ragcache_vllm.placing import PagedLayer, Shard, WorkerSide, page_views
from ragcache_vllm.plan import Load, Stretch
from ragcache_vllm.probe import is_kernel_right

PAGES, PAGE_TOKENS = 24, 16
# Two requests of one step: parts of blocks, pages in no order.
LOADS = [
    Load("one", [Stretch("a", Span(3, 43), 0), Stretch("b", Span(50, 80), 9)], [7, 2, 9, 4, 1], [], 90, False),
    Load("two", [Stretch("b", Span(0, 20), 0)], [12, 3], [], 30, False),
]
NUM_LAYERS = 3
WHOLE = Shard(0, 1)


class CardAttention(PagedAttention):
    """A layer of vLLM 0.32's on CUDA: a token's key stands before its value, tokens before heads."""

    def __init__(self, num_pages: int, num_kv_heads: int, page_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(num_pages, num_kv_heads, page_tokens, head_dim, dtype)
        self.kv_cache = torch.zeros(num_pages, page_tokens, num_kv_heads, 2 * head_dim, dtype=dtype).transpose(1, 2)

    def do_kv_cache_update(self, layer: object, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        cache.transpose(1, 2)[slots // PAGE_TOKENS, slots % PAGE_TOKENS] = torch.cat([keys, values], -1)


class CardLayer(PagedLayer):
    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        return page_views(self.layer.kv_cache, by_channel=False)


def paged_layers(lm: LanguageModel, ranks: int = 1, *, card: bool = False, pages: int = PAGES) -> dict[str, PagedLayer]:
    """Pages full of numbers; layers in no order."""
    layer_of, attention = (CardLayer, CardAttention) if card else (PagedLayer, PagedAttention)
    found = {}
    for index in (1, 0, 2):
        shape = lm.shape.layers[index]
        made = attention(pages, shape.num_kv_heads // ranks, PAGE_TOKENS, shape.key_dim, lm.dtype)
        made.kv_cache.copy_(torch.randn(made.kv_cache.shape, generator=torch.Generator().manual_seed(index)))
        found[f"layers.{index}"] = layer_of(index, made)
    return found


def worker(
    lm: LanguageModel,
    blocks: dict[str, KVBlock],
    layers: dict[str, PagedLayer],
    shard: Shard = WHOLE,
    lane: object = None,
    *,
    by_kernel: bool = True,
) -> WorkerSide:
    side = WorkerSide(blocks.get, lm.rope, shard, PAGE_TOKENS, lane, by_kernel=by_kernel)  # type: ignore[arg-type]
    side.register(layers, lm.dtype, 128)
    return side


def blocks_of(lm: LanguageModel, codec: str = "raw") -> dict[str, KVBlock]:
    return {key: random_block(lm.shape, codec, count) for key, count in (("a", 40), ("b", 64))}


def is_right(lm: LanguageModel, layers: dict[str, PagedLayer], shard: Shard = WHOLE) -> bool:
    return is_kernel_right(list(layers.values()), lm.rope, shard, PAGE_TOKENS, lm.dtype)


def assert_same(ours: dict[str, PagedLayer], plain: dict[str, PagedLayer]) -> None:
    """All pages, bit for bit."""
    for name, paged in ours.items():
        assert torch.equal(paged.layer.kv_cache, plain[name].layer.kv_cache)


def assert_parts_placed(kernel: Any, blocks, parts_of, pages, slots: Tensor, half: int, rtol: float, atol: float):
    """Place parts of three blocks, heads 1 and 2 of three, on NaN pages: each token is on its slot as float64 turns it,
    and nothing is anywhere else.
    """
    keys, values = pages
    kernel.place(1, angles_at(AT, len(slots), half), keys, values, slots, 1)
    cut = [slice(offset, offset + count) for offset, count in parts_of]
    plain_keys = torch.cat([block.layer_keys(1)[1:, part] for block, part in zip(blocks, cut, strict=True)], 1)
    plain_values = torch.cat([block.layer_values(1)[1:, part] for block, part in zip(blocks, cut, strict=True)], 1)
    page, row = slots // keys.shape[2], slots % keys.shape[2]
    expected = torch.from_numpy(turned(plain_keys.double().numpy(), AT, half))
    torch.testing.assert_close(keys[:, page, row].double(), expected, rtol=rtol, atol=atol)
    assert torch.equal(values[:, page, row], plain_values.to(values.dtype))
    for one in pages:
        one[:, page, row] = torch.nan
        assert one.isnan().all(), "a slot of no token was written to"


def step(side: WorkerSide, loads: Sequence[Load] = LOADS) -> None:
    side.begin(loads)
    for index in range(NUM_LAYERS):
        side.place(f"layers.{index}")
    side.end()


def placed(
    lm: LanguageModel,
    blocks: dict[str, KVBlock],
    loads: Sequence[Load] = LOADS,
    shard: Shard = WHOLE,
    *,
    by_kernel: bool = False,
    card: bool = False,
) -> dict[str, PagedLayer]:
    """Return the layers whose pages a step has filled."""
    layers = paged_layers(lm, shard.num_ranks, card=card)
    side = worker(lm, blocks, layers, shard, by_kernel=by_kernel)
    step(side, loads)
    side.close()
    return layers


def num_changed(lm: LanguageModel, layers: dict[str, PagedLayer], shard: Shard, *, card: bool) -> int:
    """Return the number of slots of a layer whose values are not those that they had before."""
    before = paged_layers(lm, shard.num_ranks, card=card)["layers.1"].pages[1]
    return int((before != layers["layers.1"].pages[1]).any(3).any(0).sum())
