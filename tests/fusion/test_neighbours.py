"""Blocks encoded behind other chunks (FusionRAG's offline stage), against plain forwards over [neighbours + chunk]."""

import pytest
import torch
from blocks import same
from families import FAMILIES, METHOD_FAMILIES, assert_same, causal_logits, oracle_logits_of, random_prompt

import ragcache as rc
from ragcache.errors import ConfigError, ContextTooLongError, PromptError, StaleBlockError
from ragcache.fusion import METHODS
from ragcache.kv.block_key import block_key

TWO = rc.Recipe(neighbours=2)
CHUNKS = (7, 13, 4, 9)


def near_of(prompt):
    """By chunk, other texts than the prompt's: two, one, none, two."""
    texts = random_prompt(91, chunks=(6, 3, 8, 5, 4)).chunk_ids
    return [texts[:2], texts[2:3], [], texts[3:]]


def marked(recipe, ids):
    return [*recipe.front, *ids, *recipe.back]


def one_forward(prompt, near, recipe=TWO, prefixed=False):
    """ids, mask and positions of one forward in which each chunk sees its neighbours, and the suffix sees none of them.

    Neighbours stand right before their chunk, so that positions may be taken twice; all are shifted to be above 0.
    """
    shift = max(sum(map(len, some)) for some in near) + 1
    ids, at, owner, kind = list(prompt.prefix_ids), list(range(shift, shift + len(prompt.prefix_ids))), [], []
    owner, kind = [-1] * len(ids), ["prefix"] * len(ids)
    start = shift + len(ids)
    for rank, (chunk, some) in enumerate(zip(prompt.chunk_ids, near, strict=True)):
        before = [id for one in some for id in marked(recipe, one)]
        own = marked(recipe, chunk)
        ids += [*before, *own]
        at += range(start - len(before), start + len(own))
        owner += [rank] * (len(before) + len(own))
        kind += ["near"] * len(before) + ["chunk"] * len(own)
        start += len(own)
    ids += prompt.suffix_ids
    at += range(start, start + len(prompt.suffix_ids))
    owner += [-2] * len(prompt.suffix_ids)
    kind += ["suffix"] * len(prompt.suffix_ids)
    n = len(ids)
    allowed = torch.zeros(n, n, dtype=torch.bool)
    for row in range(n):
        for column in range(row + 1):
            behind_prefix = kind[column] == "prefix" and (prefixed or kind[row] == "prefix")
            seen_by_suffix = kind[row] == "suffix" and kind[column] != "near"
            allowed[row, column] = owner[row] == owner[column] or behind_prefix or seen_by_suffix
    return ids, allowed, at


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_repositioned_blocks_are_one_forward_in_which_chunks_see_their_neighbours(load, family):
    lm, oracle = load(family)
    prompt = random_prompt(90, chunks=CHUNKS)
    near = near_of(prompt)
    fused = rc.fuse(lm, prompt, "reposition", rc.encode(lm, prompt, TWO, neighbours=near))
    assert_same(fused.next_logits, oracle_logits_of(oracle, *one_forward(prompt, near)))
    assert set(fused.computed_tokens) == {len(prompt.suffix_ids)}


@pytest.mark.parametrize("family", ["llama", "llama-yarn", "qwen3"])
def test_a_block_is_the_chunk_cut_out_of_a_plain_forward_and_turned_back(load, family):
    """Keys are stored before RoPE: rotated by transformers' own angles to where they stood, they are the forward's."""
    lm, oracle = load(family)
    (chunk,), near = random_prompt(92, chunks=(8,)).chunk_ids, random_prompt(93, chunks=(6, 5)).chunk_ids
    (block,) = lm.encode([chunk], TWO, neighbours=[near])
    ids = torch.tensor([[*near[0], *near[1], *chunk]])
    at = torch.arange(ids.shape[1])[None, -len(chunk) :]
    with torch.no_grad():
        cache = oracle(input_ids=ids, use_cache=True).past_key_values
        cos, sin = oracle.model.rotary_emb(torch.zeros(1, dtype=torch.float32), at)
    for layer in range(lm.shape.num_layers):
        keys = block.layer_keys(layer)
        half = keys.shape[-1] // 2
        turned = keys * cos + torch.cat([-keys[..., half:], keys[..., :half]], -1) * sin
        assert_same(turned, cache.layers[layer].keys[0, :, -len(chunk) :])
        assert_same(block.layer_values(layer), cache.layers[layer].values[0, :, -len(chunk) :])


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-window"])
def test_behind_the_shared_prefix_neighbours_see_it_too(load, family):
    """The chunk stands as far behind the prefix as it was read."""
    lm, oracle = load(family)
    prompt = random_prompt(94, chunks=(8,))
    near = [random_prompt(95, chunks=(6, 5)).chunk_ids]
    recipe = rc.Recipe("prefix", neighbours=2)
    (block,) = rc.encode(lm, prompt, recipe, neighbours=near)
    with torch.no_grad():
        ids = [*prompt.prefix_ids, *near[0][0], *near[0][1], *prompt.chunk_ids[0]]
        cache = oracle(input_ids=torch.tensor([ids]), use_cache=True).past_key_values
    for layer in range(lm.shape.num_layers):
        assert_same(block.layer_values(layer), cache.layers[layer].values[0, :, -8:])


@pytest.mark.parametrize("markers", [(150, 151), ((150, 151, 152), (153,))])
def test_neighbours_are_read_with_the_markers_that_passages_have(load, markers):
    lm, oracle = load("llama")
    prompt, recipe = random_prompt(96, chunks=CHUNKS), rc.Recipe(markers=markers, neighbours=2)
    near = near_of(prompt)
    blocks = lm.encode(prompt.chunk_ids, recipe, neighbours=near)
    for block, chunk, some in zip(blocks, prompt.chunk_ids, near, strict=True):
        before = [id for one in some for id in marked(recipe, one)]
        ids = [*before, *marked(recipe, chunk)]
        with torch.no_grad():
            cache = oracle(input_ids=torch.tensor([ids]), use_cache=True).past_key_values
        assert_same(block.layer_values(2), cache.layers[2].values[0, :, len(before) :])


def test_a_bos_of_its_own_stands_before_the_neighbours(load):
    lm, oracle = load("llama")
    (chunk,), near = random_prompt(97, chunks=(8,)).chunk_ids, random_prompt(98, chunks=(6,)).chunk_ids
    (block,) = lm.encode([chunk], rc.Recipe(bos=True, neighbours=1), neighbours=[near])
    with torch.no_grad():
        cache = oracle(input_ids=torch.tensor([[1, *near[0], *chunk]]), use_cache=True).past_key_values
    assert_same(block.layer_values(2), cache.layers[2].values[0, :, -8:])


UNTRAINED = sorted(name for name, m in METHODS.items() if "isolated" in m.recipes and not m.needs_training)


@pytest.mark.parametrize("method", [name for name in UNTRAINED if name != "concat"])  # which moves no block
def test_without_neighbours_the_blocks_are_the_isolated_ones(load, method):
    lm, _ = load("llama")
    prompt = random_prompt(99, chunks=CHUNKS)
    blocks = rc.encode(lm, prompt, TWO, neighbours=[()] * 4)
    assert all(map(same, blocks, rc.encode(lm, prompt)))
    fused = rc.fuse(lm, prompt, method, blocks)
    assert torch.equal(fused.next_logits, rc.fuse(lm, prompt, method).next_logits)


@pytest.mark.parametrize("family", METHOD_FAMILIES)
@pytest.mark.parametrize("method", ["cacheblend", "a3", "prophet"])
def test_all_tokens_run_again_is_full_prefill_whatever_the_neighbours(load, family, method):
    """Law 3 over blocks that hold other chunks' influence: nothing of it is left."""
    lm, oracle = load(family)
    prompt = random_prompt(100, chunks=CHUNKS)
    fused = rc.fuse(lm, prompt, method, rc.encode(lm, prompt, TWO, neighbours=near_of(prompt)), ratio=1)
    assert_same(fused.next_logits, causal_logits(oracle, prompt.ids))


# Keys


def test_the_key_says_which_neighbours_in_which_order(lm):
    """What the keys are is held by test_wire.py."""
    keys = [
        block_key(lm.fingerprint, rc.Recipe(), (), [1, 2, 3]),
        block_key(lm.fingerprint, TWO, (), [1, 2, 3]),
        block_key(lm.fingerprint, TWO, (), [1, 2, 3], neighbours=[[4, 5]]),
        block_key(lm.fingerprint, TWO, (), [1, 2, 3], neighbours=[[4], [5]]),
        block_key(lm.fingerprint, TWO, (), [1, 2, 3], neighbours=[[5], [4]]),
        block_key(lm.fingerprint, rc.Recipe(neighbours=3), (), [1, 2, 3], neighbours=[[5], [4]]),
        block_key(lm.fingerprint, rc.Recipe("prefix", neighbours=2), [9], [1, 2, 3], neighbours=[[5], [4]]),
    ]
    assert len(set(keys)) == len(keys)


# Refusals

ONE_OF_TWO = [[], [[5]]]
REFUSED = [
    *((lambda *_, n=n: rc.Recipe(neighbours=n), ConfigError, "choose 0 or more") for n in (-1, 1.5, True, "2", None)),
    (lambda lm, p: rc.encode(lm, p, TWO), ConfigError, r"up to 2 neighbours.*none were given; pass neighbours="),
    (lambda lm, p: rc.fuse(lm, p, recipe=TWO), ConfigError, "none were given; pass neighbours="),
    (lambda lm, p: rc.encode(lm, p, TWO, neighbours=[[[5]]]), ConfigError, "those of 1 chunks were given"),
    (lambda lm, p: rc.encode(lm, p, TWO, neighbours=[[], [[5]] * 3]), ConfigError, "3 neighbours.*give 2 at most"),
    (lambda lm, p: rc.encode(lm, p, neighbours=ONE_OF_TWO), ConfigError, "a block of recipe 'isolated'; give 0"),
    (lambda lm, p: rc.encode(lm, p, TWO, neighbours=[[], [5, 6]]), ConfigError, "are no chunks; give a list of ids"),
    (lambda lm, p: rc.encode(lm, p, TWO, neighbours=[[], [[5000]]]), PromptError, "token id 5000"),
    (
        lambda lm, p: rc.encode(lm, p, TWO, neighbours=[[], [[5] * 512]]),
        ContextTooLongError,
        "chunk 1 has 512 tokens|chunk 1 has 518 tokens",
    ),
    (
        lambda lm, p: rc.fuse(lm, p, "reposition", rc.encode(lm, p, TWO, neighbours=ONE_OF_TWO), recipe="isolated"),
        StaleBlockError,
        "up to 2 neighbours",
    ),
    (
        lambda lm, p: rc.fuse(lm, p, "concat", rc.encode(lm, p, TWO, neighbours=ONE_OF_TWO)),
        ConfigError,
        "'concat' leaves blocks at the positions.*choose one that moves them",
    ),
]


@pytest.mark.parametrize(("call", "error", "said"), REFUSED)
def test_neighbours_that_are_not_the_recipes_are_refused(llama, call, error, said):
    with pytest.raises(error, match=said):
        call(llama[0], random_prompt(101, chunks=(5, 6)))
