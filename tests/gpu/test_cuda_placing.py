"""The placing kernel and its stream on a CUDA device, against the plain way."""

from __future__ import annotations

import pytest
import torch
from families import random_prompt

import ragcache as rc
from ragcache.codecs import get_codec
from ragcache.fusion import place_check

pytestmark = pytest.mark.gpu
SOME = ("llama", "qwen3", "gemma2", "gemma3", "smollm3", "phi3-partial")


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", SOME)
def test_the_kernel_places_what_the_plain_way_places(models, family, dtype, codec, monkeypatch):
    """From page-locked memory and from the device."""
    lm, _, _ = models(family, dtype)
    prompt = random_prompt(3, chunks=(32, 16, 40))
    coder = get_codec(codec)
    encoded = [block.map(lambda tensor: tensor.cpu()) for block in rc.encode(lm, prompt, recipe="isolated")]
    held = [coder.decode(coder.encode(block)) for block in encoded]
    lanes = [[block.map(lambda tensor: tensor.pin_memory()) for block in held]]
    lanes.append([block.map(lambda tensor: tensor.to(lm.device)) for block in held])
    assert place_check.place_kernel(lm, lanes[0]) is not None
    found = [rc.fuse(lm, prompt, "reposition", blocks=blocks).next_logits for blocks in lanes]
    monkeypatch.setitem(place_check._checked, lm, False)
    lane, lm.pool.lane = lm.pool.lane, None
    plain = rc.fuse(lm, prompt, "reposition", blocks=lanes[1]).next_logits
    lm.pool.lane = lane
    steps = torch.finfo(lm.dtype).eps * float(plain.float().abs().max())
    for logits in found:
        assert float((logits.float() - plain.float()).abs().max()) <= 16 * steps


def test_buffers_that_are_used_again_at_once_hold_the_right_numbers(models):
    """Answers of one after the other, without a pause: a stream that runs ahead would read or write the last one's."""
    lm, cpu, _ = models("llama")
    for seed in range(20):
        prompt = random_prompt(seed, chunks=(64, 48, 80))
        blocks = [block.map(lambda t: t.cpu().pin_memory()) for block in rc.encode(lm, prompt, recipe="isolated")]
        there = rc.fuse(lm, prompt, "reposition", blocks=blocks).next_logits
        del blocks
        here = rc.fuse(cpu, prompt, "reposition").next_logits
        torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-4)
