"""Stored blocks on vLLM's pages on a CUDA device: the kernel on its stream against the plain way; needs no vLLM."""

import pytest
import torch
from families import saved_tiny
from torch import Tensor

import ragcache as rc
from ragcache.fusion.layout import Span
from ragcache.fusion.place_check import random_block
from ragcache.kv.lane import Lane
from ragcache_vllm.placing import PagedLayer, Shard, WorkerSide
from ragcache_vllm.plan import Load, Stretch
from ragcache_vllm.probe import is_kernel_right

pytestmark = pytest.mark.gpu
PAGE_TOKENS, PAGES = 16, 64
STRETCHES = [Stretch("a", Span(3, 403), 0), Stretch("b", Span(410, 474), 64)]


class Attention:
    """A layer of vLLM 0.32's: a token's key stands before its value, tokens before heads."""

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        whole = torch.zeros(PAGES, PAGE_TOKENS, num_kv_heads, 2 * head_dim, dtype=dtype, device=device)
        self.kv_cache = whole.transpose(1, 2)
        self.impl = self

    def do_kv_cache_update(self, layer: object, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        cache.transpose(1, 2)[slots // PAGE_TOKENS, slots % PAGE_TOKENS] = torch.cat([keys, values], -1)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_kernel_fills_pages_as_the_plain_way_does(dtype, codec, is_async):
    lm = rc.load_lm(saved_tiny("llama"), dtype=dtype, device="cuda")
    cpu_blocks = {key: random_block(lm.shape, codec, count) for key, count in (("a", 400), ("b", 128))}
    found = []
    for by_kernel in (True, False):
        shapes = enumerate(lm.shape.layers)
        made = [PagedLayer(i, Attention(one.num_kv_heads, one.key_dim, lm.dtype, lm.device)) for i, one in shapes]
        layers = {f"layers.{paged.index}": paged for paged in made}
        whole = Shard(0, 1)
        assert not by_kernel or is_kernel_right(made, lm.rope, whole, PAGE_TOKENS, lm.dtype)
        lane = Lane(lm.device)
        side = WorkerSide(cpu_blocks.get, lm.rope, whole, PAGE_TOKENS, lane, by_kernel=by_kernel)
        side.register(layers, lm.dtype, 512)
        load = Load("one", STRETCHES, list(range(PAGES - 1, PAGES - 31, -1)), [], 480, is_async)
        for _ in range(3):  # at once behind one another: a stream that runs ahead would be seen
            side.begin([load])
            for name in layers:
                side.place(name)
            side.end()
        side.close()
        found.append([paged.layer.kv_cache for paged in made])
    torch.cuda.synchronize()
    for ours, plain in zip(*found, strict=True):
        steps = torch.finfo(lm.dtype).eps * float(plain.float().abs().max())
        assert float(plain.float().abs().max()) > 0
        assert float((ours.float() - plain.float()).abs().max()) <= 2 * steps
