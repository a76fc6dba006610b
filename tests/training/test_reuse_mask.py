"""One rule, three masks: the papers' own words, the dense mask of a CPU, FlexAttention's on a GPU."""

from __future__ import annotations

import random

import pytest
import reuse_oracle as oracle
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.collate import collate
from ragcache_train.layout import Ask, EncodedRow, lay_out
from ragcache_train.mask import PADDING, Visibility

LINK = TrainedTokens("link", "isolated", 2, 8, 50, 90, 91)
ANCHORED = TrainedTokens("link", "isolated", 2, 8, 50, 90, 91, first_anchor_id=92, anchor_tokens=2, anchor_segment=3)
COMPOSITE = TrainedTokens("markers", doc_start_id=80, doc_end_id=81, positions="composite")
WINDOWS = (None, 5)


def random_parts(seed: int) -> tuple[list[int], list[list[int]], list[list[int]]]:
    rng = random.Random(seed)

    def ids(least: int, most: int) -> list[int]:
        return [rng.randrange(100, 200) for _ in range(rng.randint(least, most))]

    return ids(0, 4), [ids(1, 10) for _ in range(rng.randint(0, 5))], [ids(2, 6) for _ in range(rng.randint(1, 3))]


def both(seed: int):
    """A random row laid out by us, and by the oracle."""
    prefix, chunks, questions = random_parts(seed)
    row = EncodedRow("qa", "", prefix, chunks, [Ask(ids[:1], [*ids[1:], 3]) for ids in questions], None, True)
    kind = seed % 5
    if kind == 0:
        return lay_out(row, LINK, False), oracle.together(prefix, chunks, questions)
    if kind == 1:
        spec = TrainedTokens("reposition")
        return lay_out(row, spec, True), oracle.linked(prefix, chunks, questions, [[]] * len(chunks))
    if kind == 2:
        return lay_out(row, COMPOSITE, True), oracle.marked(prefix, chunks, questions, (80, 81), True)
    links = [LINK.link_ids(slot) for slot in range(len(chunks))]
    around = (90, 91) if chunks else (None, None)
    if kind == 3:
        return lay_out(row, ANCHORED, True), oracle.compressed(prefix, chunks, questions, links, (92, 93), 3, *around)
    return lay_out(row, LINK, True), oracle.linked(prefix, chunks, questions, links, *around)


@pytest.fixture(scope="module")
def drawn():
    return [both(seed) for seed in range(30)]


@pytest.mark.parametrize("window", WINDOWS)
def test_the_mask_is_the_papers_for_every_pair(drawn, window):
    batch = collate([layout for layout, _ in drawn])
    mask = Visibility(batch["segments"], batch["position_ids"]).mask(window)
    for row, (_, tokens) in enumerate(drawn):
        n = len(tokens)
        assert torch.equal(mask[row, 0, :n, :n], oracle.allowed(tokens, window))
        assert not mask[row, 0, :n, n:].any()  # padding is never seen


@pytest.mark.parametrize("window", WINDOWS)
def test_no_row_is_empty(drawn, window):
    batch = collate([layout for layout, _ in drawn])
    assert (batch["segments"] == PADDING).any()
    assert Visibility(batch["segments"], batch["position_ids"]).mask(window).any(-1).all()


@pytest.mark.parametrize("window", WINDOWS)
def test_flex_attention_has_the_same_mask(drawn, window):
    batch = collate([layout for layout, _ in drawn], multiple=32)
    visibility = Visibility(batch["segments"], batch["position_ids"])
    size, length = batch["segments"].shape
    flex = create_mask(visibility.rule(window), size, 1, length, length, device="cpu")
    assert torch.equal(flex, visibility.mask(window))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", WINDOWS)
def test_flex_attention_gives_what_dense_attention_gives(drawn, window):
    batch = collate([layout for layout, _ in drawn[:6]], multiple=128)
    visibility = Visibility(batch["segments"], batch["position_ids"])
    size, length = batch["segments"].shape
    query, key, value = torch.randn(3, size, 2, length, 16, generator=torch.Generator().manual_seed(0))
    flex = flex_attention(query, key, value, block_mask=visibility.blocks(window))
    dense = scaled_dot_product_attention(query, key, value, attn_mask=visibility.dense(window, query.dtype))
    torch.testing.assert_close(flex, dense, atol=2e-6, rtol=1e-5)


def test_blocks_that_nobody_sees_are_left_out():
    row = EncodedRow("qa", "", [1], [[5] * 128] * 6, [Ask([7], [8, 3])], None, True)
    batch = collate([lay_out(row, TrainedTokens("reposition"), True)], multiple=128)
    blocks = Visibility(batch["segments"], batch["position_ids"]).blocks(None)
    assert blocks.sparsity() > 50  # per cent of the blocks


def test_masks_are_made_once_for_each_window(drawn):
    batch = collate([layout for layout, _ in drawn])
    visibility = Visibility(batch["segments"], batch["position_ids"])
    assert visibility.dense(None, torch.float32) is visibility.dense(None, torch.float32)
    assert not torch.equal(visibility.dense(None, torch.float32), visibility.dense(5, torch.float32))
