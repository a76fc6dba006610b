"""Decode eviction: what is kept by brute force, and decoding after it against one forward with a mask for each head."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from covering import covering
from families import METHOD_FAMILIES, block_diagonal, layout, masks_of, random_prompt, saved_tiny, tiny
from formula_oracle import Plan, formula_model, merged, planned_logits, step_by_step, with_answer

import ragcache as rc
from ragcache.errors import ConfigError

ANSWER = [5, 77, 31, 8]
CHUNKS = (17, 3, 20, 12)
LAYERS = 3
SLIDING_ONLY = {"mistral-window", "gemma3"}


class Family:
    def __init__(self, name):
        self.name, (self.lm, self.oracle), self.formula = name, tiny(name), formula_model(saved_tiny(name))


@pytest.fixture(params=METHOD_FAMILIES)
def family(request):
    return Family(request.param)


@pytest.fixture
def llama():
    return tiny("llama")[0]


def assert_same(ours, theirs):
    scale = theirs.abs().max()
    torch.testing.assert_close(ours / scale, theirs / scale, atol=3e-5, rtol=0)


def winners(weights, tokens, voters, choice, kv_heads):
    """Token by token. weights: [num_heads, n, n] of one layer; tokens: the passages', in order. By KV head."""
    kept = []
    groups = weights.shape[0] // kv_heads
    for head in range(kv_heads):
        own = weights[head * groups : (head + 1) * groups]
        votes = [sum(float(one[row, token]) for one in own for row in voters) for token in tokens]
        pooled, reach = [], choice.kernel // 2
        for place in range(len(tokens)):
            near = votes[max(0, place - reach) : place + reach + 1]
            pooled.append(max(near) if choice.pooling == "max" else sum(near) / len(near))
        best = sorted(range(len(tokens)), key=lambda place: (-pooled[place], place))[: choice.budget]
        kept.append(sorted(tokens[place] for place in best))
    return kept


def evicted(allowed, tokens, kept, first_answer):
    """`allowed` for one layer, [n, n], as [num_kv_heads, n, n] in which answer tokens see of `tokens` the kept ones."""
    by_head = allowed.repeat(len(kept), 1, 1)
    for head, winning in enumerate(kept):
        for token in set(tokens) - set(winning):
            by_head[head, first_answer:, token] = False
    return by_head


def expected(formula, ids, plan_of, tokens, suffix_tokens, choice):
    """Logits at the suffix's last token and at each answer token, and what is kept by layer and KV head.

    plan_of: the plan for so many answer tokens and, where given, these masks by layer
    """
    first_answer = len(ids)
    voters = range(first_answer - min(suffix_tokens, choice.window or suffix_tokens), first_answer)
    before = plan_of(0)
    planned_logits(formula, ids, before)
    tokens = tokens if isinstance(tokens[0], list) else [tokens] * LAYERS
    heads = [before.kv[layer][0].shape[1] for layer in range(LAYERS)]
    kept = [winners(before.weights[i][0], tokens[i], voters, choice, heads[i]) for i in range(LAYERS)]
    plan = plan_of(len(ANSWER))
    allowed = plan.allowed if isinstance(plan.allowed, list) else [plan.allowed] * LAYERS
    plan.allowed = [evicted(allowed[i], tokens[i], kept[i], first_answer) for i in range(LAYERS)]
    return planned_logits(formula, [*ids, *ANSWER], plan)[first_answer - 1 :], kept


def held_tokens(fused, layer):
    """By KV head; a token's position is its place in the prompt."""
    keys, _, positions = fused.cache.layer_state(layer)
    return positions.expand(keys.shape[1], -1).tolist()


def assert_kept(fused, kept, always_before, always_behind):
    for layer in range(LAYERS):
        assert held_tokens(fused, layer) == [[*always_before, *winning, *always_behind] for winning in kept[layer]]
    counts = [len(always_before) + len(kept[layer][0]) + len(always_behind) for layer in range(LAYERS)]
    assert fused.kept_tokens == tuple(fused.cache.lengths) == tuple(counts)


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
    assert_same(step_by_step(family.lm, fused, ANSWER), logits)
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
    assert_same(fused.next_logits, out.logits[0, -1])


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
    assert_same(step_by_step(family.lm, fused, ANSWER), logits)


def test_a3_votes_with_what_ran_again(family):
    """Tokens that A3 takes up in layer 1 run through layer 0 after the suffix: they have no vote."""
    prompt = random_prompt(64, prefix=6, chunks=CHUNKS, suffix=5)
    context = prompt.context_tokens
    apart = Plan(block_diagonal(prompt), torch.arange(prompt.num_tokens))
    planned_logits(family.formula, prompt.ids, apart)
    drawn = apart.weights[1][0, :, context:, 6:context].sum((0, 1))
    order = sorted(range(len(drawn)), key=lambda i: (-float(drawn[i]), i))
    again = {6 + place for place in order[: round(0.3 * len(drawn))]}
    old = torch.tensor([token not in again for token in range(context)])

    def change(layer, keys, values):
        def replaced(new, recorded):
            new = new.clone()
            new[:, :, :context][:, :, old] = recorded[:, :, :context][:, :, old]
            return new

        recorded = apart.kv[layer]
        return replaced(keys, recorded[0]), replaced(values, recorded[1])

    def plan_of(count):
        n = prompt.num_tokens + count
        return Plan(torch.ones(n, n, dtype=torch.bool).tril(), torch.arange(n), change=change)

    tokens = list(range(6, context))
    logits, kept = expected(family.formula, prompt.ids, plan_of, tokens, 5, rc.SnapKV(13))
    fused = rc.fuse(family.lm, prompt, "a3", ratio=0.3, evict=13)
    assert_kept(fused, kept, range(6), range(context, prompt.num_tokens))
    assert_same(step_by_step(family.lm, fused, ANSWER), logits)


def test_ape_weighs_what_is_left(family):
    """Chunks share positions, and the weight of the chunks is taken over those of their tokens that are kept."""
    prompt = random_prompt(65, prefix=4, chunks=CHUNKS, suffix=5)

    def plan_of(count):
        positions, allowed, of_chunks = layout(prompt, ANSWER[:count])
        weigh = partial(merged, of_chunks=of_chunks, context_tokens=prompt.context_tokens, temperature=0.7, scale=0.8)
        return Plan(allowed, positions, weigh)

    tokens = list(range(4, prompt.context_tokens))
    logits, _ = expected(family.formula, prompt.ids, plan_of, tokens, 5, rc.SnapKV(13))
    fused = rc.fuse(family.lm, prompt, "ape", temperature=0.7, scale=0.8, evict=13)
    assert_same(step_by_step(family.lm, fused, ANSWER), logits)
    assert set(fused.kept_tokens) == {4 + 13 + 5}


def test_layers_that_hold_different_tokens(family):
    """What infllm holds in each layer is its own matter (test_infllm.py); eviction chooses among that."""
    prompt = random_prompt(66, prefix=4, chunks=CHUNKS, suffix=5)
    options = {"block_size": 5, "top_blocks": 4, "initial_tokens": 3, "local_tokens": 4}
    context = prompt.context_tokens
    whole = rc.fuse(family.lm, prompt, "infllm", **options)
    held = [[token for token in held_tokens(whole, layer)[0] if token < context] for layer in range(LAYERS)]
    assert held[0] != held[1]

    def plan_of(count):
        allowed = []
        for tokens in held:
            mask = with_answer(block_diagonal(prompt), count)
            mask[context:, [token for token in range(context) if token not in tokens]] = False
            allowed.append(mask)
        return Plan(allowed, torch.arange(prompt.num_tokens + count))

    tokens = [[token for token in layer if token >= 4] for layer in held]
    logits, kept = expected(family.formula, prompt.ids, plan_of, tokens, 5, rc.SnapKV(10))
    fused = rc.fuse(family.lm, prompt, "infllm", evict=10, **options)
    assert_kept(fused, kept, range(4), range(context, prompt.num_tokens))
    assert_same(step_by_step(family.lm, fused, ANSWER), logits)


SMALL_OPTIONS = {
    "link": {"link_ids": [[7], [8, 9], [], [7]]},
    "markers": {"doc_start_id": 150, "doc_end_id": 151},
    "packet": {"header_ids": [150], "trailer_ids": [151]},
    "infllm": {"block_size": 5, "top_blocks": 4, "initial_tokens": 3, "local_tokens": 4},
    "entropy": {"top_k": 2},
    "kvshare": {"decode_tokens": 0},
    "samkv": {"block_size": 4, "local_blocks": 1},
}


@pytest.mark.parametrize(
    ("family", "method"),
    covering(["llama", "gpt_oss", "phi3", "gemma2"], sorted(set(rc.METHODS) - {"cartridge"})),
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
    assert_same(family.lm.run(ANSWER, fused.next_position, fused.cache), one_by_one)


def test_large_buffers_go_back_while_decoding_goes_on(llama):
    """Room for 375 tokens is 384; for the 29 that are kept and 64 more, 128."""
    llama.pool._idle.clear()
    prompt = random_prompt(69, chunks=(150, 150))
    fused = rc.fuse(llama, prompt, evict=18)
    assert fused.cache.capacity == 128
    again = llama.pool.take(320)
    assert again.capacity == 384, "the large ones, which lie idle"
    llama.pool.give(again)
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


@pytest.mark.parametrize("budget", [0, -3, 2.5, "9", True])
def test_bad_budgets_are_refused_before_anything_runs(llama, budget):
    with pytest.raises(ConfigError, match=r"eviction budget is .*at least 1"):
        rc.fuse(llama, random_prompt(72), evict=budget)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"window": 0}, "window is 0"),
        ({"window": 1.5}, "window is 1.5"),
        ({"kernel": 4}, "odd number"),
        ({"kernel": 0}, "kernel is 0"),
        ({"kernel": True}, "kernel is True"),
        ({"pooling": "mean"}, "choose one of avg, max"),
    ],
)
def test_bad_choices_are_named(wrong, named):
    with pytest.raises(ConfigError, match=named):
        rc.SnapKV(8, **wrong)
