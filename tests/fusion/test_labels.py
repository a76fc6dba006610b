"""Text between passages: it runs and sees everything before it, and the passages' blocks stay what they are."""

import pytest
import torch
from blend_oracle import forward as overridden
from families import METHOD_FAMILIES, assert_same, causal, causal_logits, figure_2, oracle_logits_of, tiny
from kit.makers import each

import ragcache as rc
from ragcache.errors import PromptError
from ragcache.fusion import METHODS, get_method

PREFIX, SUFFIX = (3, 4, 5), (44, 45, 46)
CHUNKS = ((10, 11, 12, 13, 14), (20, 21, 22), (10, 11, 12))
LABELS = ((), (50, 51), (52,))
PROMPT = rc.Prompt(PREFIX, CHUNKS, SUFFIX, LABELS)
PARTS = [("text", PREFIX)]
for label, chunk in zip(LABELS, CHUNKS, strict=True):
    PARTS += [("text", label), ("chunk", chunk)]
PARTS.append(("text", SUFFIX))
IDS, APART = figure_2(PARTS)
"""Its ids, and what sees what where every passage's tokens see that passage alone."""
READ = [name for name in METHODS if name != "link" and get_method(name).keeps_context]


family = each(METHOD_FAMILIES, tiny)


def test_labels_are_part_of_the_prompt():
    assert PROMPT.ids == IDS
    assert (PROMPT.num_tokens, PROMPT.context_tokens) == (len(IDS), len(IDS) - len(SUFFIX))
    assert rc.Prompt(PREFIX, CHUNKS, SUFFIX, [[], [], []]) == rc.Prompt(PREFIX, CHUNKS, SUFFIX)
    with pytest.raises(PromptError, match="2 labels were given for 3 chunks"):
        rc.Prompt(PREFIX, CHUNKS, SUFFIX, LABELS[1:])


def test_labels_run_with_the_question(family):
    lm, oracle = family
    fused = rc.fuse(lm, PROMPT, "reposition")
    assert_same(fused.next_logits, oracle_logits_of(oracle, IDS, APART))
    own = sum(map(len, CHUNKS)) + len(PREFIX)
    assert set(fused.computed_tokens) == {len(IDS) - own}


def test_recompute_methods_run_them_beside_the_tokens_that_they_choose(family):
    """Law 3 with text between passages, and epic as one forward in which all else is a block's."""
    lm, oracle = family
    alone = oracle_logits_of(oracle, IDS, APART)
    assert_same(rc.fuse(lm, PROMPT, "cacheblend", ratio=0.0).next_logits, alone)
    assert_same(rc.fuse(lm, PROMPT, "cacheblend", ratio=1.0).next_logits, causal_logits(oracle, IDS))
    runs = [kind == "text" or place < 2 for kind, ids in PARTS for place in range(len(ids))]
    _, apart, _ = overridden(oracle, IDS, APART)
    chosen = [torch.tensor(runs).nonzero()[:, 0]] * lm.shape.num_layers
    expected = overridden(oracle, IDS, causal(len(IDS)), apart, chosen)[0]
    assert_same(rc.fuse(lm, PROMPT, "epic", first_tokens=2).next_logits, expected)
    assert (expected - alone).abs().max() > 1e-3 * expected.abs().max()


def test_full_prefill_reads_them_in_place(family):
    lm, oracle = family
    assert_same(rc.fuse(lm, PROMPT, "full").next_logits, causal_logits(oracle, IDS))


def test_a_labelled_context_is_shared(family):
    lm, _ = family
    first = rc.fuse(lm, PROMPT, "reposition")
    other = rc.Prompt(PREFIX, CHUNKS, (47, 48), LABELS)
    over = rc.fuse(lm, other, "reposition", base=first.share())
    assert_same(over.next_logits, rc.fuse(lm, other, "reposition").next_logits)


def test_methods_that_take_passages_side_by_side_refuse_them(lm):
    assert {"reposition", "full"} <= set(READ)
    for name in METHODS:
        if not get_method(name).keeps_context and not get_method(name).needs_training:
            with pytest.raises(
                PromptError,
                match=f"method '{name}' reads none there; choose reposition, cacheblend, epic, link or full",
            ):
                rc.fuse(lm, PROMPT, name)
