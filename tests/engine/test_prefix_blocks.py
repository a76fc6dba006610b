"""Prefixes that go on from known ones, against plain transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import FAMILIES, assert_same, block_diagonal, load_tiny, oracle_logits, random_prompt, save_tiny

import ragcache as rc
from ragcache.engine.prefix_blocks import PrefixBlocks
from ragcache.fusion.fuse import fuse


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, tmp_path_factory):
    return load_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return rc.load_lm(save_tiny("llama", str(tmp_path_factory.mktemp("llama"))))


def test_what_goes_on_from_a_known_prefix_is_what_is_read_at_once(family):
    """Sliding windows of 11 tokens begin before the cut and behind it; the third prefix parts from the second."""
    lm, oracle = family
    prompt = random_prompt(3, prefix=31, chunks=(7, 13))
    blocks = PrefixBlocks(lm, 1 << 24)
    ids = list(prompt.prefix_ids)
    for prefix, created in ((ids[:14], 14), (ids, 17), ([*ids[:20], 5, 6, 7], 3), (ids[:10], 0), (ids, 0)):
        made = blocks.get(prefix)
        assert made.created_tokens == created
        asked = replace(prompt, prefix_ids=prefix)
        parts = rc.encode(lm, asked, recipe="isolated")
        fused = fuse(lm, asked, "reposition", parts, prefix_block=made.block)
        assert_same(fused.next_logits, oracle_logits(oracle, asked, block_diagonal(asked)))


def test_nothing_is_a_prefix_of_no_tokens(lm):
    assert PrefixBlocks(lm, 0).get([]) == (None, 0, 0.0)


def test_the_least_recently_used_go_and_the_last_one_stays(lm):
    one = lm.encode([[5, 6, 7, 8]])[0].num_bytes
    blocks = PrefixBlocks(lm, 2 * one)
    first, second, third = [3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14]
    for ids in (first, second, first, third):
        blocks.get(ids)
    assert [blocks.get(ids).created_tokens for ids in (first, third)] == [0, 0]
    assert blocks.get(second).created_tokens == 4
    small = PrefixBlocks(lm, 1)
    assert [small.get(ids).created_tokens for ids in (first, first, second, first)] == [4, 0, 4, 4]


def test_a_longer_prefix_takes_the_place_of_what_it_goes_on_from(lm):
    one = lm.encode([[5, 6, 7, 8]])[0].num_bytes
    blocks = PrefixBlocks(lm, 3 * one)
    blocks.get([20, 21, 22, 23])
    for end in range(1, 9):
        blocks.get(range(3, 3 + end))
    assert blocks.get([20, 21, 22, 23]).created_tokens == 0


def test_what_is_cleared_while_it_is_read_is_not_kept(lm, monkeypatch):
    """It may quote a document that was deleted meanwhile."""
    blocks, encode = PrefixBlocks(lm, 1 << 24), lm.encode

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
