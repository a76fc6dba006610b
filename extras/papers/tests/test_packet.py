"""`packet`: vectors in each block, against plain forwards over the ids with the packet's ids in them."""

import pytest
import torch
from families import (
    METHOD_FAMILIES,
    VOCAB,
    assert_same,
    block_diagonal,
    causal,
    causal_logits,
    linked,
    oracle_logits_of,
    random_prompt,
    tiny,
)
from kit.makers import each, made_by

import ragcache as rc
from ragcache.errors import ConfigError, StaleBlockError
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.prompt import Passages, Text

HEADER, TRAILER = [170, 171, 172], [173, 174]
GIVEN = {"header_ids": HEADER, "trailer_ids": TRAILER}
SPEC = TrainedTokens("packet", first_packet_id=170, header_tokens=3, trailer_tokens=2)


family = each(METHOD_FAMILIES, tiny)


trained = made_by(tiny, "llama", SPEC)


def with_packets(prompt):
    chunks = [[*HEADER, *chunk, *TRAILER] for chunk in prompt.chunk_ids]
    return rc.Prompt(prompt.prefix_ids, chunks, prompt.suffix_ids)


@pytest.mark.parametrize("seed", range(2))
def test_packets_are_one_block_diagonal_forward(family, seed):
    lm, model = family
    prompt = random_prompt(seed, prefix=seed * 4)
    spelt = with_packets(prompt)
    blocks = rc.encode(lm, prompt, recipe=rc.Recipe(markers=(tuple(HEADER), tuple(TRAILER))))
    fused = rc.fuse(lm, prompt, "packet", blocks, **GIVEN)
    assert_same(fused.next_logits, oracle_logits_of(model, spelt.ids, block_diagonal(spelt)))
    assert set(fused.computed_tokens) == {len(prompt.suffix_ids)}
    assert fused.added_tokens == 5 * len(prompt.chunk_ids)
    assert set(fused.kept_tokens) == {spelt.num_tokens} == {fused.prompt_tokens}


def test_one_chunk_behind_the_prefix_is_full_prefill(family):
    lm, model = family
    prompt = random_prompt(7, prefix=6, chunks=(17,))
    spelt = with_packets(prompt)
    fused = rc.fuse(lm, prompt, "packet", recipe="prefix", **GIVEN)
    assert_same(fused.next_logits, causal_logits(model, spelt.ids))


def test_none_at_all_is_reposition(family):
    lm, _ = family
    prompt = random_prompt(3)
    ours = rc.fuse(lm, prompt, "packet", header_ids=[], trailer_ids=[]).next_logits
    assert torch.equal(ours, rc.fuse(lm, prompt, "reposition").next_logits)


def test_a_model_that_was_trained_with_none_is_read_by_reposition():
    lm, _ = tiny("llama", TrainedTokens("packet"))
    prompt = random_prompt(3)
    assert lm.default_method == "packet"
    ours = rc.fuse(lm, prompt, "packet", blocks=rc.encode(lm, prompt)).next_logits
    assert torch.equal(ours, rc.fuse(lm, prompt, "reposition").next_logits)


def test_a_trained_checkpoint_needs_no_options(trained):
    lm, model = trained
    prompt = random_prompt(4)
    spelt = with_packets(prompt)
    fused = rc.fuse(lm, prompt, lm.default_method)
    assert_same(fused.next_logits, oracle_logits_of(model, spelt.ids, block_diagonal(spelt)))
    assert lm.suppress_tokens == {*HEADER, *TRAILER}
    plain = rc.fuse(lm, prompt, "full").next_logits  # full prefill reads the text alone
    assert_same(plain, causal_logits(model, prompt.ids))


@pytest.mark.parametrize("method", ["cacheblend", "a3"])
def test_recompute_methods_read_its_blocks(trained, method):
    lm, model = trained
    prompt = random_prompt(5)
    spelt = with_packets(prompt)
    blocks = rc.encode(lm, prompt, rc.Recipe(markers=(HEADER, TRAILER)))
    whole = rc.fuse(lm, prompt, method, blocks, ratio=1.0).next_logits
    assert_same(whole, causal_logits(model, spelt.ids))
    none = rc.fuse(lm, prompt, method, blocks, ratio=0.0).next_logits
    assert_same(none, oracle_logits_of(model, spelt.ids, block_diagonal(spelt)))


def test_so_do_epic_reposition_and_link(trained):
    lm, model = trained
    prompt = random_prompt(6)
    spelt = with_packets(prompt)
    blocks = rc.encode(lm, prompt, rc.Recipe(markers=(HEADER, TRAILER)))
    expected = oracle_logits_of(model, spelt.ids, block_diagonal(spelt))
    assert_same(rc.fuse(lm, prompt, "reposition", blocks).next_logits, expected)
    assert_same(rc.fuse(lm, prompt, "epic", blocks, first_tokens=0).next_logits, expected)
    whole = rc.fuse(lm, prompt, "epic", blocks, first_tokens=100).next_logits
    assert_same(whole, oracle_logits_of(model, spelt.ids, causal(spelt.num_tokens)))
    links = [[20 + rank] for rank in range(len(prompt.chunk_ids))]
    ids, allowed = linked(spelt, links)
    assert_same(rc.fuse(lm, prompt, "link", blocks, link_ids=links).next_logits, oracle_logits_of(model, ids, allowed))


def test_every_method_that_reads_blocks_reads_the_models_own(trained):
    lm, _ = trained
    prompt = random_prompt(8, prefix=4, chunks=(30, 40))
    for method, recipe in (("concat", "isolated"), ("ape", "prefix"), ("samkv", "isolated")):
        blocks = rc.encode(lm, prompt, rc.Recipe(recipe, markers=(HEADER, TRAILER)))
        assert rc.fuse(lm, prompt, method, blocks).added_tokens == 2 * 5
    with pytest.raises(StaleBlockError, match="170 to 172 and 173 to 174"):
        rc.fuse(lm, prompt, "reposition", rc.encode(lm, prompt))


def test_several_groups_of_passages(trained):
    """A conversation: each passage sees itself with its packet, text all before it."""
    lm, model = trained
    parts = [Text((3, 4)), Passages(((5, 6, 7), (8, 9))), Text((10, 11)), Passages(((12, 13),)), Text((14, 15, 16))]
    tokens, number = [], 0
    for part in parts:
        if isinstance(part, Text):
            tokens += [(id, -1) for id in part.ids]
            continue
        for chunk in part.chunk_ids:
            tokens += [(id, number) for id in [*HEADER, *chunk, *TRAILER]]
            number += 1
    owner = torch.tensor([own for _, own in tokens])
    allowed = ((owner[:, None] == owner) | (owner[:, None] == -1)) & causal(len(tokens))
    ours = rc.fuse(lm, parts, "packet").next_logits
    assert_same(ours, oracle_logits_of(model, [id for id, _ in tokens], allowed))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, r"no trained packet.*ragcache train --reuse packet"),
        ({"header_ids": [5]}, "both or neither"),
        ({"header_ids": [5], "trailer_ids": [VOCAB]}, f"{VOCAB}.*0 to {VOCAB - 1}"),
        ({"header_ids": 5, "trailer_ids": []}, "list of token ids"),
        ({"header_ids": ["5"], "trailer_ids": []}, "no pair"),
    ],
)
def test_what_cannot_be_is_named(llama, options, named):
    with pytest.raises(ConfigError, match=named):
        rc.fuse(llama[0], random_prompt(0), "packet", **options)
