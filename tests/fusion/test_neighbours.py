"""Blocks encoded behind other chunks (FusionRAG's offline stage), against plain forwards over [neighbours + chunk]."""

import pytest
import torch
from blocks import same
from families import FAMILIES, METHOD_FAMILIES, assert_same, causal_logits, oracle_logits_of, random_prompt
from plain_oracle import assert_read_behind

import ragcache as rc
from ragcache.errors import ConfigError, ContextTooLongError, PromptError, StaleBlockError
from ragcache.kv.block_key import block_key

TWO = rc.Recipe(neighbours=2)
CHUNKS = (7, 13, 4, 9)
PRIMER = (11, 12, 13, 14, 15)


def near_of(prompt):
    """By chunk, other texts than the prompt's: two, one, none, two."""
    texts = random_prompt(91, chunks=(6, 3, 8, 5, 4)).chunk_ids
    return [texts[:2], texts[2:3], [], texts[3:]]


def marked(recipe, ids):
    return [*recipe.front, *ids, *recipe.back]


def one_forward(prompt, near, recipe=TWO):
    """ids, mask and positions of one forward in which each chunk sees its neighbours, and the suffix sees none of them.

    Neighbours stand right before their chunk, so that positions may be taken twice; all are shifted to be above 0.
    """
    shift = max(sum(map(len, some)) for some in near) + 1
    tokens = [(id, shift + at, "prefix", -1) for at, id in enumerate(prompt.prefix_ids)]
    start = shift + len(prompt.prefix_ids)
    for rank, (chunk, some) in enumerate(zip(prompt.chunk_ids, near, strict=True)):
        before, own = [id for one in some for id in marked(recipe, one)], marked(recipe, chunk)
        tokens += [(id, start - len(before) + at, "near", rank) for at, id in enumerate(before)]
        tokens += [(id, start + at, "chunk", rank) for at, id in enumerate(own)]
        start += len(own)
    tokens += [(id, start + at, "suffix", -2) for at, id in enumerate(prompt.suffix_ids)]
    ids, positions, kinds, owners = map(list, zip(*tokens, strict=True))
    allowed = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for row in range(len(ids)):
        for column in range(row + 1):
            seen_by_suffix = kinds[row] == "suffix" and kinds[column] != "near"
            allowed[row, column] = owners[row] == owners[column] or seen_by_suffix
    return ids, allowed, positions


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_repositioned_blocks_are_one_forward_in_which_chunks_see_their_neighbours(load, family):
    lm, oracle = load(family)
    prompt = random_prompt(90, chunks=CHUNKS)
    near = near_of(prompt)
    fused = rc.fuse(lm, prompt, "reposition", rc.encode(lm, prompt, TWO, neighbours=near))
    assert_same(fused.next_logits, oracle_logits_of(oracle, *one_forward(prompt, near)))
    assert set(fused.computed_tokens) == {len(prompt.suffix_ids)}


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        *((family, rc.Recipe("prefix", neighbours=2)) for family in ("llama", "gemma2", "mistral-window")),
        ("llama", rc.Recipe(markers=(150, 151), neighbours=2)),
        ("llama", rc.Recipe(markers=((150, 151, 152), (153,)), neighbours=2)),
        ("llama", rc.Recipe(bos=True, neighbours=2)),
        ("llama", rc.Recipe("primer", primer=PRIMER, neighbours=2)),
    ],
    ids=str,
)
def test_neighbours_stand_behind_the_prefix_and_have_the_markers_of_passages(load, family, recipe):
    lm, oracle = load(family)
    prompt = random_prompt(94, chunks=(7, 8, 4, 6))  # no longer than the windows, of which a cache holds no more
    near = near_of(prompt)
    front = [*prompt.prefix_ids, *(recipe.primer or ())] if recipe.name != "isolated" else [1] * recipe.bos
    for block, chunk, some in zip(rc.encode(lm, prompt, recipe, neighbours=near), prompt.chunk_ids, near, strict=True):
        before = [front, *(marked(recipe, one) for one in some)]
        assert_read_behind(block, oracle, before, marked(recipe, chunk))


def test_without_neighbours_the_blocks_are_the_isolated_ones(lm):
    prompt = random_prompt(99, chunks=CHUNKS)
    blocks = rc.encode(lm, prompt, TWO, neighbours=[()] * 4)
    assert all(map(same, blocks, rc.encode(lm, prompt)))
    for method in ("reposition", "epic"):
        assert torch.equal(rc.fuse(lm, prompt, method, blocks).next_logits, rc.fuse(lm, prompt, method).next_logits)


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
