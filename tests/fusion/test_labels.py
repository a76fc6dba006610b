"""Text between passages: it runs and sees everything before it, and the passages' blocks stay what they are."""

import pytest
import torch
from blend_oracle import forward as overridden
from families import METHOD_FAMILIES, assert_same, causal, oracle_logits_of, tiny
from kit.makers import each

import ragcache as rc
from ragcache.errors import PromptError
from ragcache.fusion import METHODS, get_method

PREFIX, SUFFIX = (3, 4, 5), (44, 45, 46)
CHUNKS = ((10, 11, 12, 13, 14), (20, 21, 22), (10, 11, 12))
LABELS = ((), (50, 51), (52,))
PROMPT = rc.Prompt(PREFIX, CHUNKS, SUFFIX, LABELS)
# Every token, with the passage that it belongs to.
TOKENS = [
    *((id, None) for id in PREFIX),
    *((id, 0) for id in CHUNKS[0]),
    *((id, None) for id in LABELS[1]),
    *((id, 1) for id in CHUNKS[1]),
    *((id, None) for id in LABELS[2]),
    *((id, 2) for id in CHUNKS[2]),
    *((id, None) for id in SUFFIX),
]
READ = [name for name in METHODS if name != "link" and get_method(name).keeps_context]


family = each(METHOD_FAMILIES, tiny)


def mask(*, apart):
    """What sees what. apart: every passage's tokens see that passage alone"""
    owners = [owner for _, owner in TOKENS]
    n = len(TOKENS)
    seen = causal(n)
    if apart:
        alone = [[owners[row] in (None, owners[column]) for column in range(n)] for row in range(n)]
        seen &= torch.tensor(alone)
    return seen


def forward(oracle, *, apart):
    """One plain forward pass."""
    return oracle_logits_of(oracle, [id for id, _ in TOKENS], mask(apart=apart))


def test_labels_are_part_of_the_prompt():
    assert PROMPT.ids == [id for id, _ in TOKENS]
    assert (PROMPT.num_tokens, PROMPT.context_tokens) == (len(TOKENS), len(TOKENS) - len(SUFFIX))
    assert rc.Prompt(PREFIX, CHUNKS, SUFFIX, [[], [], []]) == rc.Prompt(PREFIX, CHUNKS, SUFFIX)
    with pytest.raises(PromptError, match="2 labels were given for 3 chunks"):
        rc.Prompt(PREFIX, CHUNKS, SUFFIX, LABELS[1:])


def test_labels_run_with_the_question(family):
    lm, oracle = family
    fused = rc.fuse(lm, PROMPT, "reposition")
    assert_same(fused.next_logits, forward(oracle, apart=True))
    own = sum(map(len, CHUNKS)) + len(PREFIX)
    assert set(fused.computed_tokens) == {len(TOKENS) - own}


def test_recompute_methods_run_them_beside_the_tokens_that_they_choose(family):
    """Law 3 with text between passages, and epic as one forward in which all else is a block's."""
    lm, oracle = family
    assert_same(rc.fuse(lm, PROMPT, "cacheblend", ratio=0.0).next_logits, forward(oracle, apart=True))
    assert_same(rc.fuse(lm, PROMPT, "cacheblend", ratio=1.0).next_logits, forward(oracle, apart=False))
    owners, n = [owner for _, owner in TOKENS], len(TOKENS)
    runs = [owner is None or owners[row - 2 : row] != [owner] * 2 for row, owner in enumerate(owners)]
    _, apart, _ = overridden(oracle, PROMPT.ids, mask(apart=True))
    chosen = [torch.tensor(runs).nonzero()[:, 0]] * lm.shape.num_layers
    expected = overridden(oracle, PROMPT.ids, causal(n), apart, chosen)[0]
    assert_same(rc.fuse(lm, PROMPT, "epic", first_tokens=2).next_logits, expected)
    assert (expected - forward(oracle, apart=True)).abs().max() > 1e-3 * expected.abs().max()


def test_full_prefill_reads_them_in_place(family):
    lm, oracle = family
    assert_same(rc.fuse(lm, PROMPT, "full").next_logits, forward(oracle, apart=False))


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
