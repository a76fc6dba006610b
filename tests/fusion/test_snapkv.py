"""Decode eviction: what is kept by brute force, and decoding after it against one forward with a mask for each head."""

import pytest
import torch
from covering import covering
from families import METHOD_FAMILIES, assert_same, block_diagonal, masks_of, random_prompt, tiny
from formula_oracle import (
    ANSWER,
    CHUNKS,
    LAYERS,
    Family,
    Plan,
    assert_kept,
    expected,
    step_by_step,
    winners,
    with_answer,
)  # fmt: skip
from kit.makers import each, made_by

import ragcache as rc
from ragcache.errors import ConfigError

SLIDING_ONLY = {"mistral-window", "gemma3"}


family = each(METHOD_FAMILIES, Family)
llama = made_by(lambda: tiny("llama")[0])


CHOICES = [
    rc.SnapKV(9),
    rc.SnapKV(20, window=3),
    rc.SnapKV(14, kernel=1),
    rc.SnapKV(14, kernel=7, pooling="max"),
    rc.SnapKV(1, window=1, kernel=3),
]


@pytest.mark.parametrize(("family", "choice"), covering(METHOD_FAMILIES, CHOICES), indirect=["family"], ids=str)
def test_decoding_is_one_forward_with_a_mask_for_each_head(family, choice):
    prompt = random_prompt(61, prefix=6, chunks=CHUNKS, suffix=5)

    def plan_of(count):
        allowed = with_answer(block_diagonal(prompt), count)
        return Plan(allowed, torch.arange(allowed.shape[0]))

    tokens = list(range(6, prompt.context_tokens))
    logits, kept = expected(family.formula, prompt.ids, plan_of, tokens, 5, choice)
    fused = rc.fuse(family.lm, prompt, "reposition", evict=choice)
    assert_kept(fused, kept, range(6), range(prompt.context_tokens, prompt.num_tokens))
    assert_same(step_by_step(family.lm, fused, ANSWER), logits, atol=3e-5)
    if family.name not in SLIDING_ONLY:  # where few tokens are in the window, all of them are kept
        assert any(kept[layer][0] != kept[layer][-1] for layer in range(LAYERS)), "heads do not differ"


@pytest.mark.parametrize("choice", CHOICES[:4:3], ids=str)
def test_what_is_kept_follows_the_eager_attention_of_plain_transformers(family, choice):
    prompt = random_prompt(62, prefix=0, chunks=CHUNKS, suffix=5)
    mask = masks_of(family.oracle, block_diagonal(prompt))
    with torch.no_grad():
        out = family.oracle(input_ids=torch.tensor([prompt.ids]), attention_mask=mask, output_attentions=True)
    voters = range(prompt.num_tokens - (choice.window or 5), prompt.num_tokens)
    tokens = list(range(prompt.context_tokens))
    kept = [
        winners(weights[0], tokens, voters, choice, shape.num_kv_heads)
        for weights, shape in zip(out.attentions, family.lm.shape.layers, strict=True)
    ]
    fused = rc.fuse(family.lm, prompt, "reposition", evict=choice)
    assert_kept(fused, kept, [], range(prompt.context_tokens, prompt.num_tokens))
    assert_same(fused.next_logits, out.logits[0, -1], atol=3e-5)


def test_link_tokens_are_kept_whole(family):
    prompt = random_prompt(63, prefix=4, chunks=CHUNKS, suffix=5)
    links = [[101, 102], [], [7, 7, 9], [101]]
    ids, owner = list(prompt.prefix_ids), [-1] * 4
    for rank, (chunk, link) in enumerate(zip(prompt.chunk_ids, links, strict=True)):
        ids += [*chunk, *link]
        owner += [rank] * len(chunk) + [-1] * len(link)
    ids, owner = [*ids, *prompt.suffix_ids], torch.tensor(owner + [-1] * 5)
    allowed = ((owner[:, None] == owner) | (owner[:, None] == -1)).tril()

    def plan_of(count):
        wider = with_answer(allowed, count)
        return Plan(wider, torch.arange(wider.shape[0]))

    tokens = (owner >= 0).nonzero()[:, 0].tolist()
    always = (owner < 0).nonzero()[:, 0].tolist()
    logits, kept = expected(family.formula, ids, plan_of, tokens, 5, rc.SnapKV(13))
    fused = rc.fuse(family.lm, prompt, "link", link_ids=links, evict=13)
    assert_kept(fused, kept, always[:4], always[4:])
    assert_same(step_by_step(family.lm, fused, ANSWER), logits, atol=3e-5)


SMALL_OPTIONS = {
    "link": {"link_ids": [[7], [8, 9], [], [7]]},
    "markers": {"doc_start_id": 150, "doc_end_id": 151},
    "samkv": {"block_size": 4, "local_blocks": 1},
}


@pytest.mark.parametrize(
    ("family", "method"),
    covering(["llama", "gpt_oss", "phi3", "gemma2"], sorted(rc.METHODS)),
    indirect=["family"],
)
def test_room_for_all_changes_nothing_and_little_room_only_what_is_decoded(family, method):
    prompt = random_prompt(67, prefix=4, chunks=CHUNKS, suffix=5)
    options = SMALL_OPTIONS.get(method, {})
    whole = rc.fuse(family.lm, prompt, method, **options)
    roomy = rc.fuse(family.lm, prompt, method, evict=sum(CHUNKS) + 2 * len(CHUNKS), **options)
    assert roomy.kept_tokens == whole.kept_tokens
    tight = rc.fuse(family.lm, prompt, method, evict=7, **options)
    behind = 5 + sum(len(ids) for ids in options.get("link_ids", []))
    assert set(tight.kept_tokens) == {4 + 7 + behind}
    assert tight.computed_tokens == whole.computed_tokens
    assert torch.equal(tight.next_logits, whole.next_logits)
    decoded = step_by_step(family.lm, whole, ANSWER)
    assert torch.equal(step_by_step(family.lm, roomy, ANSWER), decoded)
    assert not torch.equal(step_by_step(family.lm, tight, ANSWER), decoded)


def test_tokens_that_run_together_see_what_those_do_that_run_one_by_one(family):
    prompt = random_prompt(68, prefix=4, chunks=CHUNKS, suffix=5)
    one_by_one = step_by_step(family.lm, rc.fuse(family.lm, prompt, evict=9), ANSWER)[-1]
    fused = rc.fuse(family.lm, prompt, evict=9)
    assert_same(family.lm.run(ANSWER, fused.next_position, fused.cache), one_by_one, atol=3e-5)


def test_large_buffers_go_back_while_decoding_goes_on(llama):
    """Room for 375 tokens is 384; for the 29 that are kept and 64 more, 128."""
    llama.pool._idle.clear()
    prompt = random_prompt(69, chunks=(150, 150))
    fused = rc.fuse(llama, prompt, evict=18)
    assert fused.cache.capacity == 128
    again = llama.pool.acquire(320)
    assert again.capacity == 384, "the large ones, which lie idle"
    llama.pool.release(again)
    fused.cache.release()


def test_a_shrunken_cache_grows_again(llama):
    llama.pool._idle.clear()
    prompt = random_prompt(70, chunks=(150, 150))
    kept = rc.fuse(llama, prompt, evict=244, reserve_tokens=200)
    grown = rc.fuse(llama, prompt, evict=244, reserve_tokens=0)
    assert kept.kept_tokens == grown.kept_tokens == (255,) * LAYERS
    assert (kept.cache.capacity, grown.cache.capacity) == (512, 256)
    assert torch.equal(step_by_step(llama, grown, ANSWER), step_by_step(llama, kept, ANSWER))
    assert grown.cache.capacity > 256


@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_never_more_than_the_budget_stays(llama, more):
    """Passages of one token less than the budget, of as many, and of more."""
    prompt, budget = random_prompt(77, chunks=(9, 4)), 13 - more
    fused = rc.fuse(llama, prompt, evict=budget)
    assert set(fused.kept_tokens) == {prompt.num_tokens - max(0, more)}


def test_a_prompt_without_passages_has_nothing_to_evict(llama):
    prompt = random_prompt(71, chunks=())
    assert set(rc.fuse(llama, prompt, evict=1).kept_tokens) == {prompt.num_tokens}


REFUSED = [
    *((lambda budget=budget: budget, "eviction budget is .*at least 1") for budget in (0, -3, 2.5, "9", True)),
    (lambda: rc.SnapKV(8, window=0), "window is 0"),
    (lambda: rc.SnapKV(8, window=1.5), "window is 1.5"),
    (lambda: rc.SnapKV(8, kernel=4), "odd number"),
    (lambda: rc.SnapKV(8, kernel=0), "kernel is 0"),
    (lambda: rc.SnapKV(8, kernel=True), "kernel is True"),
    (lambda: rc.SnapKV(8, pooling="mean"), "choose one of avg, max"),
]


@pytest.mark.parametrize(("choice", "named"), REFUSED)
def test_bad_choices_are_refused_before_anything_runs(llama, choice, named):
    with pytest.raises(ConfigError, match=named):
        rc.fuse(llama, random_prompt(72), evict=choice())
