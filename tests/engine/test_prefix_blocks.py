"""Prefixes that go on from known ones, against plain transformers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, assert_same, block_diagonal, load_tiny, oracle_logits, random_prompt, save_tiny
from live_bytes import LiveBytes

import ragcache as rc
from ragcache.engine.asking.prefix_blocks import PrefixBlocks
from ragcache.fusion.fuse import fuse
from ragcache.kv.prefix_tree import PrefixTree, read_cache


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, tmp_path_factory):
    return load_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return rc.load_lm(save_tiny("llama", str(tmp_path_factory.mktemp("llama"))))


def within(lm, budget_bytes):
    return PrefixBlocks(lm, PrefixTree(lm.shape, budget_bytes))


def test_what_goes_on_from_a_known_prefix_is_what_is_read_at_once(family):
    """Sliding windows of 11 tokens begin before the cut and behind it; the third prefix parts from the second."""
    lm, oracle = family
    prompt = random_prompt(3, prefix=31, chunks=(7, 13))
    blocks = within(lm, 1 << 24)
    ids = list(prompt.prefix_ids)
    for prefix, created in ((ids[:14], 14), (ids, 17), ([*ids[:20], 5, 6, 7], 3), (ids[:10], 0), (ids, 0)):
        made = blocks.get(prefix)
        assert made.created_tokens == created
        asked = replace(prompt, prefix_ids=prefix)
        parts = rc.encode(lm, asked, recipe="isolated")
        fused = fuse(lm, asked, "reposition", parts, prefix_block=made.block)
        assert_same(fused.next_logits, oracle_logits(oracle, asked, block_diagonal(asked)))


def test_nothing_is_a_prefix_of_no_tokens(lm):
    assert within(lm, 0).get([]) == (None, 0, 0.0)


def test_the_least_recently_used_go(lm):
    one = lm.encode([[5, 6, 7, 8]])[0].num_bytes
    blocks = within(lm, 4 * one)
    first, second, third = [3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14]
    for ids in (first, second, first, third):
        blocks.get(ids)
    assert [blocks.get(ids).created_tokens for ids in (first, third)] == [0, 0]
    assert blocks.get(second).created_tokens == 4


@pytest.mark.parametrize("spare", [-1, 0])
def test_one_prefix_may_take_the_whole_budget_and_no_more(lm, spare):
    ids = [3, 4, 5, 6]
    tree = PrefixTree(lm.shape, lm.encode([ids])[0].num_bytes + spare)
    blocks = PrefixBlocks(lm, tree)
    assert [blocks.get(ids).created_tokens for _ in range(2)] == [4, 4 if spare < 0 else 0]
    assert tree.stats().lent_bytes == tree.stats().num_bytes == (0 if spare < 0 else tree.budget_bytes)
    assert torch.equal(blocks.get(ids).block.keys, lm.encode([ids])[0].keys)


def test_blocks_and_tree_keep_one_budget(lm, monkeypatch):
    """Real tensors are counted, as they come and go."""
    live, token = LiveBytes(), lm.kv_bytes_per_token
    tree = PrefixTree(lm.shape, 40 * token, page_tokens=4)
    blocks = PrefixBlocks(lm, tree)
    read, empty = blocks._read_on, tree._empty
    monkeypatch.setattr(blocks, "_read_on", lambda *known: read(*known).map(live.copy))
    monkeypatch.setattr(tree, "_empty", lambda *size: live.copy(empty(*size)))
    generator = random.Random(0)
    lent, held = set(), set()
    for _ in range(200):
        ids = [generator.randrange(3, 9) for _ in range(generator.randint(1, 30))]
        if generator.random() < 0.5:
            blocks.get(ids)
        else:
            tree.insert("full", ids, read_cache(rc.fuse(lm, rc.Prompt(ids, [], [3]), method="full").cache))
        stats = tree.stats()
        assert live.now == stats.num_bytes <= 40 * token
        assert stats.num_bytes >= stats.lent_bytes
        lent.add(stats.lent_bytes)
        held.add(stats.num_bytes)
    assert len(lent) > 5
    assert max(held) == 40 * token
    blocks.clear()
    tree.clear()
    assert live.now == tree.stats().num_bytes == tree.stats().lent_bytes == 0


def test_a_longer_prefix_takes_the_place_of_what_it_goes_on_from(lm):
    one = lm.encode([[5, 6, 7, 8]])[0].num_bytes
    blocks = within(lm, 6 * one)
    blocks.get([20, 21, 22, 23])
    for end in range(1, 9):
        blocks.get(range(3, 3 + end))
    assert blocks.get([20, 21, 22, 23]).created_tokens == 0


def test_what_is_cleared_while_it_is_read_is_not_kept(lm, monkeypatch):
    """It may quote a document that was deleted meanwhile."""
    blocks, encode = within(lm, 1 << 24), lm.encode

    def encode_and_clear(*arguments, **options):
        made = encode(*arguments, **options)
        blocks.clear()
        return made

    with monkeypatch.context() as patch:
        patch.setattr(lm, "encode", encode_and_clear)
        assert blocks.get([3, 4, 5]).created_tokens == 3
    again = blocks.get([3, 4, 5])
    assert again.created_tokens == 3
    assert torch.equal(again.block.keys, blocks.get([3, 4, 5]).block.keys)
