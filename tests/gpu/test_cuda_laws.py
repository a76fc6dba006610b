"""The laws on a CUDA device, in float32, against plain transformers on the CPU under an explicit mask; CUDA graphs."""

from functools import partial

import pytest
import torch
from families import FAMILIES, assert_same, block_diagonal, causal_logits, load_tiny, oracle_logits, random_prompt

import ragcache as rc
from ragcache.errors import RagCacheError
from ragcache.models.batch import ForwardRequest, ScheduledTokens, run_pieces
from ragcache.models.generate import decode
from ragcache.models.graphs import use_graphs
from ragcache.models.sampler import Sampling

pytestmark = pytest.mark.gpu
SOME = ("llama", "qwen3", "gemma2", "gemma3", "gpt_oss", "mixtral", "smollm3", "mistral-window", "gpt_neox", "cohere2")
RECOMPUTE = ("cacheblend", "epic", "a3", "prophet", "samkv", "ape")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_law_1_on_the_device(models, device, family):
    lm, _, oracle = models(family)
    prompt = random_prompt(1, prefix=4)
    blocks = rc.encode(lm, prompt, recipe="isolated")
    assert {block.layer_keys(0).device.type for block in blocks} == {device.type}
    fused = rc.fuse(lm, prompt, method="reposition", blocks=blocks)
    assert_same(fused.next_logits.cpu(), oracle_logits(oracle, prompt, block_diagonal(prompt)))
    assert_same(rc.fuse(lm, prompt, method="full").next_logits.cpu(), causal_logits(oracle, prompt.ids))


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("method", RECOMPUTE)
def test_every_method_is_what_it_is_on_the_cpu(models, family, method):
    """There it is held to its oracle. Same tokens run, same tokens kept, same logits."""
    lm, on_cpu, _ = models(family)
    prompt = random_prompt(2, prefix=5, chunks=(17, 3, 20, 12))
    try:
        expected = rc.fuse(on_cpu, prompt, method)
    except RagCacheError:
        with pytest.raises(RagCacheError):
            rc.fuse(lm, prompt, method)
        return
    found = rc.fuse(lm, prompt, method)
    assert (found.computed_tokens, found.kept_tokens) == (expected.computed_tokens, expected.kept_tokens)
    assert_same(found.next_logits.cpu(), expected.next_logits)


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("method", ["cacheblend", "a3", "prophet"])
def test_law_3_on_the_device(models, family, method):
    lm, _, oracle = models(family)
    prompt = random_prompt(3, prefix=5)
    whole = rc.fuse(lm, prompt, method, ratio=1.0).next_logits.cpu()
    assert_same(whole, causal_logits(oracle, prompt.ids))
    nothing = rc.fuse(lm, prompt, method, ratio=0.0).next_logits.cpu()
    assert_same(nothing, oracle_logits(oracle, prompt, block_diagonal(prompt)))


@pytest.mark.parametrize("family", SOME)
def test_link_tokens_on_the_device(models, family):
    """Any ids behind any chunk: as on the CPU, where law 4 is proved."""
    lm, on_cpu, _ = models(family)
    prompt = random_prompt(4)
    links = [[20, 21], [], [22], [23, 24, 25]]
    expected = rc.fuse(on_cpu, prompt, "link", link_ids=links).next_logits
    assert_same(rc.fuse(lm, prompt, "link", link_ids=links).next_logits.cpu(), expected)


@pytest.mark.parametrize("family", SOME)
def test_joint_passes_on_the_device(models, device, family):
    """Requests of unlike lengths, two of them over one shared context, in one pass."""
    lm, _, oracle = models(family)
    texts = [random_prompt(seed, prefix=20 + 3 * seed, chunks=(4,), suffix=2).ids for seed in range(3)]
    shared = texts[0][:18]
    owner = lm.new_cache(64)
    lm.run(shared, 0, owner)
    context = owner.share(len(shared))
    texts += [[*shared, 7, 8, 9], [*shared, 11]]
    held = [len(texts[0]) - 1, 5, 0, 18, 18]
    caches = [lm.new_cache(64), lm.new_cache(64), lm.new_cache(64), *(lm.new_cache(8, base=context) for _ in range(2))]
    for ids, count, cache in zip(texts[:2], held, caches, strict=False):
        lm.run(ids[:count], 0, cache)
    pieces = []
    for ids, count, cache in zip(texts, held, caches, strict=True):
        positions = torch.arange(count, len(ids), device=device)
        run = ForwardRequest(torch.tensor(ids[count:], device=device), positions, cache, ordered=True)
        pieces.append(ScheduledTokens.next(run, len(ids) - count))
    for ids, logits in zip(texts, run_pieces(lm.model, pieces), strict=True):
        assert_same(logits.cpu(), causal_logits(oracle, ids))


def test_greedy_decoding_equals_generate(models):
    lm, _, oracle = models("llama")
    prompt = random_prompt(6)
    fused = rc.fuse(lm, prompt, method="full")
    got = list(decode(lm, fused.cache, fused.next_logits, fused.next_position, Sampling(max_tokens=40)))
    expected = oracle.generate(
        torch.tensor([prompt.ids]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, prompt.num_tokens :]
    assert got == expected.tolist()


def test_a_seed_repeats_on_the_device(models):
    lm, _, _ = models("llama")
    prompt = random_prompt(7)

    def answer():
        fused = rc.fuse(lm, prompt)
        sampling = Sampling(max_tokens=12, temperature=1.0, top_p=0.9, seed=5)
        return list(decode(lm, fused.cache, fused.next_logits, fused.next_position, sampling))

    assert answer() == answer()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("method", ["reposition", "full", "epic"])
def test_half_precision_is_near_float32(tmp_path, device, dtype, method):
    """Not further from float32 than four times plain transformers in the same precision is."""
    exact, _ = load_tiny("llama", tmp_path)
    half = rc.load_lm(tmp_path, dtype=dtype, device=str(device))
    plain = half.model
    prompt = random_prompt(8, chunks=(40, 60, 30))
    expected = rc.fuse(exact, prompt, method).next_logits
    with torch.no_grad():
        rough = plain(torch.tensor([prompt.ids], device=device), use_cache=False).logits[0, -1].float().cpu()
    allowed = 4 * (rough - rc.fuse(exact, prompt, "full").next_logits).abs().max()
    assert (rc.fuse(half, prompt, method).next_logits.cpu() - expected).abs().max() <= allowed


# CUDA graphs, against plain passes.


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
