"""Prefixes that go on from known ones, against plain transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from families import assert_same, block_diagonal, load_tiny, method_families, oracle_logits, random_prompt, save_tiny

import ragcache as rc
from ragcache.engine.prefixes import Prefixes
from ragcache.fusion.fuse import fuse
from ragcache.kv.block_key import Recipe
from ragcache.kv.prefix_cache import PrefixCache


class NoDocuments:
    """A document store in which nothing is."""

    def chunks_by_vector_ids(self, ids):
        return []


@pytest.fixture(scope="module", params=method_families("deepseek_v2"))
def family(request, tmp_path_factory):
    return load_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return rc.load_lm(save_tiny("llama", str(tmp_path_factory.mktemp("llama"))))


def within(lm, budget_bytes, own_ids=()):
    return Prefixes(lm, NoDocuments(), Recipe.of("isolated"), "", PrefixCache(lm.shape, budget_bytes), own_ids)


def created(prefixes, ids):
    with prefixes.text(ids) as made:
        assert (made.exact.num_tokens if made.exact else 0) == len(ids)
        return made.created_tokens


def test_what_goes_on_from_a_known_prefix_is_what_is_read_at_once(family):
    """Sliding windows of 11 tokens begin before the cut and behind it; the third prefix parts from the second."""
    lm, oracle = family
    prompt = random_prompt(3, prefix=31, chunks=(7, 13))
    prefixes = within(lm, 1 << 24)
    ids = list(prompt.prefix_ids)
    for prefix, ran in ((ids[:14], 14), (ids, 17), ([*ids[:20], 5, 6, 7], 3), (ids[:10], 0), (ids, 0)):
        asked = replace(prompt, prefix_ids=prefix)
        parts = rc.encode(lm, asked, recipe="isolated")
        with prefixes.text(prefix) as made:
            assert made.created_tokens == ran
            fused = fuse(lm, asked, "reposition", parts, exact=made.exact)
        assert_same(fused.next_logits, oracle_logits(oracle, asked, block_diagonal(asked)))


@pytest.mark.parametrize("tokens", [0, 3, 7])
def test_a_prefix_that_does_not_fit_is_read_every_time_and_right(lm, tokens):
    """Budgets of none, some and all but one of its tokens."""
    prompt = random_prompt(4, prefix=8, chunks=(7, 5))
    prefixes = within(lm, tokens * lm.kv_bytes_per_token)
    expected = rc.fuse(lm, prompt, "reposition").next_logits
    for known in (0, tokens):
        with prefixes.text(prompt.prefix_ids) as made:
            assert made.created_tokens == len(prompt.prefix_ids) - known
            assert_same(rc.fuse(lm, prompt, "reposition", exact=made.exact).next_logits, expected)
        assert prefixes.stats().num_bytes <= tokens * lm.kv_bytes_per_token


def test_nothing_is_a_prefix_of_no_tokens(lm):
    with within(lm, 0).text([]) as made:
        assert made == (None, 0, 0.0, 0.0)


def test_a_changed_document_takes_what_may_quote_it(lm):
    """The store's own prefix stays, and what a conversation has in common with it."""
    prefixes = within(lm, 1 << 24, [3, 4, 5, 6])
    talk = [3, 4, 5, 7, 8, 9]
    assert [created(prefixes, ids) for ids in ([3, 4, 5, 6], talk, talk)] == [4, 3, 0]
    prefixes.drop_deleted()
    assert [created(prefixes, ids) for ids in ([3, 4, 5, 6], talk)] == [0, 3]


def test_what_is_dropped_while_it_is_read_is_not_kept(lm, monkeypatch):
    """It may quote a document that was deleted meanwhile."""
    prefixes, read = within(lm, 1 << 24), lm.read

    def read_and_drop(*arguments):
        made = read(*arguments)
        prefixes.drop_deleted()
        return made

    with monkeypatch.context() as patch:
        patch.setattr(lm, "read", read_and_drop)
        assert created(prefixes, [3, 4, 5]) == 3
    assert [created(prefixes, [3, 4, 5]) for _ in range(2)] == [3, 0]
