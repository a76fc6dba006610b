"""CUDA graphs on a CUDA device, against plain passes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from families import random_prompt

import ragcache as rc
from ragcache.models.batch import ForwardRequest, ScheduledTokens, run_pieces
from ragcache.models.generate import decode
from ragcache.models.graphs import use_graphs
from ragcache.models.sampler import Sampling

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "gpt_oss", "smollm3", "deepseek_v2"])
def test_questions_answers_and_joint_passes_are_those_of_plain_passes(models, device, family, dtype):
    lm, _, _ = models(family, dtype)
    use_graphs(lm, 256 << 20)
    passes = getattr(lm.scheduler.forward, "__self__", None)
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    if passes is None:
        pytest.fail("the model was not recorded: its warning says why")
    prompt = random_prompt(3, chunks=(32, 16, 40))
    found = []
    for forward in (passes.forward, partial(run_pieces, lm.model)):
        lm.scheduler.forward = forward
        read = rc.fuse(lm, prompt, "reposition", reserve_tokens=8)
        ids = list(decode(lm, read.cache, read.next_logits, prompt.num_tokens, Sampling(max_tokens=8)))
        rows = []
        for rank in range(8):
            numbers = torch.randint(3, 199, (80,), generator=torch.Generator().manual_seed(rank)).to(device)
            run = ForwardRequest(numbers, torch.arange(80, device=device), lm.new_cache(80), ordered=True)
            for count, way in ((30 + rank, partial(run_pieces, lm.model)), (5 * rank + 1, forward)):
                piece = ScheduledTokens.next(run, count)
                if way is forward:
                    rows.append(piece)
                else:
                    way([piece])
                    piece.end()
        found.append((read.next_logits, torch.stack(forward(rows)), ids))
    lm.scheduler.forward = passes.forward
    steps = 1e-4 if dtype == "float32" else 8 * torch.finfo(lm.dtype).eps
    for ours, plain in zip(found[0][:2], found[1][:2], strict=True):
        assert float((ours - plain).norm()) <= steps * float(plain.norm())
    assert dtype != "float32" or found[0][2] == found[1][2]
