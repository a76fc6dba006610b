"""InfLLM, against blocks looked up by loops over plain transformers' own queries and keys (laws 2 and 5)."""

import pytest
import torch
from families import METHOD_FAMILIES, block_diagonal, random_prompt
from formula_oracle import Plan, planned_logits
from kit.makers import each
from paper_oracles import assert_like, with_formula

import ragcache as rc
from ragcache.errors import ConfigError

OPTIONS = {"block_size": 4, "top_blocks": 3, "representative_tokens": 2, "initial_tokens": 3, "local_tokens": 6}
ANSWER = [5, 77, 31]


family = each(METHOD_FAMILIES, with_formula, scope="module")


def looked_up(prompt, query, keys):
    """Context tokens that the best blocks hold, besides those always kept."""
    groups = query.shape[0] // keys.shape[0]
    first = len(prompt.prefix_ids) + OPTIONS["initial_tokens"]
    last = prompt.context_tokens - OPTIONS["local_tokens"]
    size, found = OPTIONS["block_size"], []
    for start in range(first, last, size):
        tokens = list(range(start, min(start + size, last)))
        scores = (query @ keys[:, tokens].repeat_interleave(groups, 0).transpose(1, 2)).sum((0, 1)).tolist()
        best = sorted(scores, reverse=True)[: OPTIONS["representative_tokens"]]
        found.append((sum(best) / len(best), tokens))
    found.sort(key=lambda pair: -pair[0])
    middle = [token for _, tokens in found[: OPTIONS["top_blocks"]] for token in tokens]
    return [*range(first), *middle, *range(last, prompt.context_tokens)]


@pytest.mark.parametrize(("last", "seed"), [(13, 21), (14, 21), (14, 22), (15, 21), (16, 21)])
def test_infllm_keeps_the_blocks_that_the_suffix_asks_for(family, last, seed):
    """The last block is whole, or has one token (fewer than represent a block), two, or three."""
    lm, oracle = family
    prompt = random_prompt(seed, chunks=(9, 14, 5, last), suffix=6)
    n, layers = prompt.num_tokens + len(ANSWER), oracle.config.num_hidden_layers
    ids, positions = [*prompt.ids, *ANSWER], torch.arange(n)
    everything = torch.ones(n, n, dtype=torch.bool).tril()
    everything[: prompt.num_tokens, : prompt.num_tokens] = block_diagonal(prompt)
    by_layer, kept = [], []
    for layer in range(layers):
        plan = Plan([*by_layer, *[everything] * (layers - layer)], positions)
        planned_logits(oracle, ids, plan)
        query = plan.queries[layer][0, :, prompt.context_tokens : prompt.num_tokens]
        seen = looked_up(prompt, query, plan.kv[layer][0][0])
        mask = everything.clone()
        mask[prompt.context_tokens :, : prompt.context_tokens] = False
        mask[prompt.context_tokens :, seen] = True
        by_layer.append(mask)
        kept.append(len(seen) + len(prompt.suffix_ids))
    expected = planned_logits(oracle, ids, Plan(by_layer, positions))[prompt.num_tokens - 1 :]
    fused = rc.fuse(lm, prompt, method="infllm", **OPTIONS)
    steps = [lm.run([token], fused.next_position + i, fused.cache) for i, token in enumerate(ANSWER)]
    assert_like(torch.stack([fused.next_logits, *steps]), expected)
    assert fused.kept_tokens == tuple(kept)
    assert set(fused.computed_tokens) == {len(prompt.suffix_ids)}


def test_enough_blocks_are_reposition(family):
    lm, oracle = family
    prompt = random_prompt(22)
    expected = planned_logits(oracle, prompt.ids, Plan(block_diagonal(prompt), torch.arange(prompt.num_tokens)))[-1]
    for options in ({**OPTIONS, "top_blocks": 99}, {}):
        assert_like(rc.fuse(lm, prompt, method="infllm", **options).next_logits, expected)


def test_one_chunk_behind_the_prefix_is_kept_whole(family):
    lm, oracle = family
    prompt = random_prompt(23, chunks=(40,))
    n = prompt.num_tokens
    expected = planned_logits(oracle, prompt.ids, Plan(torch.ones(n, n, dtype=torch.bool).tril(), torch.arange(n)))[-1]
    assert_like(rc.fuse(lm, prompt, method="infllm", recipe="prefix", **OPTIONS).next_logits, expected)


@pytest.mark.parametrize("method", ["samkv", "infllm", "entropy"])
def test_methods_that_choose_by_keys_of_heads_are_refused_to_models_that_keep_latents(load, method):
    more = {"top_k": 1} if method == "entropy" else {}
    for latent in ("deepseek_v2", "deepseek_v3"):
        with pytest.raises(ConfigError, match="keeps latents"):
            rc.fuse(load(latent)[0], random_prompt(5, chunks=(40, 30, 20)), method, **more)
