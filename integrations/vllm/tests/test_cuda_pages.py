"""Stored blocks on vLLM's pages on a CUDA device: the kernel on its stream against the plain way; needs no vLLM."""

import pytest
import torch
from families import saved_tiny
from paged import PAGE_TOKENS, CardAttention

import ragcache as rc
from ragcache.fusion.layout import Span
from ragcache.fusion.place_check import random_block
from ragcache.kv.lane import Lane
from ragcache_vllm.placing import PagedLayer, Shard, WorkerSide
from ragcache_vllm.plan import Load, Stretch
from ragcache_vllm.probe import is_kernel_right

pytestmark = pytest.mark.gpu
PAGES = 64
STRETCHES = [Stretch("a", Span(3, 403), 0), Stretch("b", Span(410, 474), 64)]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_kernel_fills_pages_as_the_plain_way_does(dtype, codec, is_async):
    lm = rc.load_lm(saved_tiny("llama"), dtype=dtype, device="cuda")
    cpu_blocks = {key: random_block(lm.shape, codec, count) for key, count in (("a", 400), ("b", 128))}
    found = []
    for by_kernel in (True, False):
        layers = {}
        for index, one in enumerate(lm.shape.layers):
            attention = CardAttention(PAGES, one.num_kv_heads, PAGE_TOKENS, one.key_dim, lm.dtype)
            attention.kv_cache = attention.kv_cache.to(lm.device)
            layers[f"layers.{index}"] = PagedLayer(index, attention)
        made = list(layers.values())
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
