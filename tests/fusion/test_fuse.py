"""What `rc.fuse` does beyond the laws: concat, low precision, decoding on the cache, refusals, layouts of prompts; full
prefill that goes on from exact KV of a prompt's first tokens, and questions over one shared context."""

from statistics import fmean

import pytest
import torch
from families import (
    assert_same,
    block_diagonal,
    causal,
    causal_logits,
    oracle_logits_of,
    random_prompt,
    saved_tiny,
    tiny,
)

import ragcache as rc
from ragcache.engine.caches.prefix_cache import PrefixCache
from ragcache.errors import ConfigError, ContextTooLongError, PromptError, StaleBlockError
from ragcache.fusion import METHODS, get_method
from ragcache.fusion.fuse import TokenCounts
from ragcache.kv.buffers import BufferPool, KVBuffers
from ragcache.kv.exact import read_cache
from ragcache.kv.fused_cache import FusedCache
from ragcache.models.generate import decode
from ragcache.models.sampler import Sampling
from ragcache.prompt import Passages, Text


@pytest.mark.parametrize("recipe", ["isolated", "prefix"])
def test_concat_is_a_forward_with_overlapping_positions(llama, recipe):
    lm, oracle = llama
    prompt = random_prompt(3)
    prefix, start = len(prompt.prefix_ids), len(prompt.prefix_ids) if recipe == "prefix" else 0
    positions = [*range(prefix)]
    for chunk in prompt.chunk_ids:
        positions += range(start, start + len(chunk))
    positions += range(prompt.context_tokens, prompt.num_tokens)
    allowed = block_diagonal(prompt)
    if recipe == "prefix":
        allowed[:, :prefix] = torch.ones_like(allowed).tril()[:, :prefix]
    expected = oracle_logits_of(oracle, prompt.ids, allowed, positions)
    got = rc.fuse(lm, prompt, method="concat", recipe=recipe).next_logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    moved = rc.fuse(lm, prompt, method="reposition", recipe=recipe).next_logits
    assert (moved - expected).abs().max() > 0.05, "the oracle would not notice a wrong position"


def test_a_batch_encodes_like_one_by_one(lm):
    chunks = [list(range(3, 3 + n)) for n in (5, 31, 1, 12, 31, 2)]
    together = lm.encode(chunks, batch_tokens=64)
    for chunk, block in zip(chunks, together, strict=True):
        alone = lm.encode([chunk])[0]
        torch.testing.assert_close(block.keys, alone.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(block.values, alone.values, atol=1e-5, rtol=1e-5)


def test_decoding_goes_on_as_one_growing_forward(llama):
    """Each step's logits equal a plain forward over everything so far, in a cache that has to grow on the way."""
    lm, oracle = llama
    prompt = random_prompt(0)
    fused = rc.fuse(lm, prompt, reserve_tokens=0)
    room = fused.cache.capacity
    ids, logits = prompt.ids, fused.next_logits
    while len(ids) < room + 5:
        ids = [*ids, int(logits.argmax())]
        logits = lm.run([ids[-1]], len(ids) - 1, fused.cache)
    allowed = causal(len(ids))
    n = prompt.context_tokens
    allowed[:n, :n] = block_diagonal(prompt)[:n, :n]
    expected = oracle_logits_of(oracle, ids, allowed)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    assert fused.cache.capacity > room


@pytest.mark.parametrize(("method", "most"), [("cacheblend", 33 + 6), ("full", 5 + 33 + 6)])
def test_tokens_are_cached_in_the_layers_that_did_not_run_them(lm, method, most):
    """CacheBlend runs all chunks in its first layer, and few tokens above."""
    prompt = random_prompt(9, prefix=5, chunks=(7, 13, 4, 9), suffix=6)
    blocks, prefix = (None, None) if method == "full" else (rc.encode(lm, prompt), lm.read(prompt.prefix_ids))
    options = {} if method == "full" else {"ratio": 0.5}
    fused = rc.fuse(lm, prompt, method, blocks, exact=prefix, **options)
    assert max(fused.computed_tokens) == most
    assert fused.cached_tokens == prompt.num_tokens - round(fmean(fused.computed_tokens))
    assert (fused.cached_tokens > 0) == (method == "cacheblend")
    encoded = rc.fuse(lm, prompt, method, **options)
    assert encoded.cached_tokens == 0, "its KV was made for this call, or not at all"


@pytest.mark.parametrize(
    ("ran", "created", "counts"),
    [
        ((40, 13, 13), 0, (22, 0, 18)),
        ((40, 13, 13), 10, (22, 10, 8)),
        ((40, 40, 40), 30, (10, 30, 0)),  # encoded and run again
        ((55, 60, 65), 0, (40, 0, 0)),  # a suffix that ran twice
        ((1, 1, 1), 50, (0, 40, 0)),
    ],
)
def test_counts_of_tokens_add_up(ran, created, counts):
    assert TokenCounts.of(40, ran, created) == counts


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_token_of_a_suffix_sees_those_behind_it(dtype):
    """In half precision too, where few rows over many keys go another way: what comes later changes not a bit."""
    lm = rc.load_lm(saved_tiny("llama"), dtype=dtype)
    ids, rows = list(random_prompt(12, chunks=(40,), suffix=5).ids), 5

    def logits(ids):
        cache = lm.new_cache(len(ids))
        lm.run(ids[:-rows], 0, cache)
        return lm.run(ids[-rows:], len(ids) - rows, cache, num_logits=rows)

    expected = logits(ids)
    for place in range(1, rows):
        changed = [*ids]
        changed[place - rows] = 3 + (ids[place - rows] + 1) % 100
        found = logits(changed)
        assert torch.equal(found[:place], expected[:place])
        assert not torch.equal(found[place:], expected[place:])


@pytest.mark.parametrize("missing", [0, 1])
def test_idle_buffers_stay_within_their_bytes(lm, missing):
    """Two fit exactly; with one byte less the older one is let go of."""
    one = KVBuffers.allocate(lm.shape, 256)
    pool = BufferPool(lm.shape, 2 * one.num_bytes - missing)
    given = [KVBuffers.allocate(lm.shape, 256) for _ in range(2)]
    for buffers in given:
        pool.release(buffers)
    taken = [pool.acquire(256) for _ in range(2)]
    assert sum(any(buffers is other for other in given) for buffers in taken) == 2 - missing


def test_buffers_are_reused_and_do_not_leak_between_prompts(lm):
    prompts = [random_prompt(seed, chunks=(9, 4 + seed)) for seed in range(4)]
    first = [rc.fuse(lm, prompt).next_logits for prompt in prompts]
    again = [rc.fuse(lm, prompt).next_logits for prompt in reversed(prompts)]
    for a, b in zip(first, reversed(again), strict=True):
        assert torch.equal(a, b)


def test_a_prompt_without_chunks_or_prefix(llama):
    lm, oracle = llama
    prompt = rc.Prompt([], [], [5, 6, 7])
    expected = causal_logits(oracle, [5, 6, 7])
    for method in rc.METHODS:
        torch.testing.assert_close(rc.fuse(lm, prompt, method=method).next_logits, expected, atol=1e-5, rtol=1e-5)


def test_blocks_say_how_they_were_encoded(lm):
    prompt = random_prompt(2)
    blocks = behind(lm, prompt)
    told = rc.fuse(lm, prompt, method="concat", blocks=blocks, recipe="prefix").next_logits
    assert torch.equal(rc.fuse(lm, prompt, method="concat", blocks=blocks).next_logits, told)


def behind(lm, prompt):
    return rc.encode(lm, prompt, recipe="prefix")


REFUSED = [
    (lambda lm, p, b: rc.fuse(lm, p, method="telepathy"), ConfigError, r"telepathy.*reposition"),
    (lambda lm, p, b: rc.fuse(lm, p, ratio=0.5), ConfigError, "ratio"),
    (lambda lm, p, b: rc.encode(lm, p, recipe="lonely"), ConfigError, "lonely"),
    (lambda lm, p, b: rc.fuse(lm, p, blocks=b[:3]), StaleBlockError, "3 blocks"),
    (lambda lm, p, b: rc.fuse(lm, p, blocks=b[::-1]), StaleBlockError, "chunk 0"),
    (lambda lm, p, b: rc.fuse(lm, p, blocks=rc.encode(tiny("qwen3")[0], p)), StaleBlockError, "another model"),
    (lambda lm, p, b: rc.fuse(lm, p, blocks=b, recipe="prefix"), StaleBlockError, "isolated"),
    (lambda lm, p, b: rc.fuse(lm, p, blocks=[*b[:2], *behind(lm, p)[2:]]), StaleBlockError, "alike"),
    (lambda lm, p, b: rc.Prompt([1], [[2]], []), PromptError, "suffix"),
    (lambda lm, p, b: rc.Prompt([1], [[2], []], [3]), PromptError, "chunk 1"),
    (lambda lm, p, b: rc.fuse(lm, rc.Prompt([1], [[100000]], [3])), PromptError, "100000"),
    (lambda lm, p, b: rc.fuse(lm, rc.Prompt([], [[5] * 300, [6] * 300], [7])), ContextTooLongError, "512"),
]


@pytest.mark.parametrize(("call", "error", "said"), REFUSED)
def test_bad_input_is_named(llama, call, error, said):
    prompt = random_prompt(0)
    with pytest.raises(error, match=said):
        call(llama[0], prompt, rc.encode(llama[0], prompt))


def test_the_table_of_methods():
    table = {row.name: row for row in rc.methods()}
    assert set(table) == set(rc.METHODS) >= {"full", "reposition", "concat"}
    assert all(row.paper and row.summary for row in table.values())


# Layouts of prompts; those that papers draw are in extras/train/tests/test_reuse_layout.py.


PREFIX, CHUNKS, SUFFIX = [1, 2], [[10, 11, 12], [13], [14, 15]], [20, 21]
PROMPT = rc.Prompt(PREFIX, CHUNKS, SUFFIX)


def test_text_between_passages_runs_and_sees_what_stands_before_it(lm):
    parts = [Text((1, 2)), Passages(((10, 11),)), Text((5,)), Text((6,)), Passages(((12,), (13, 14))), Text((7, 8))]
    layout = get_method("reposition").layout(lm, parts, rc.Recipe())
    assert [(p.start, p.ids, p.passage) for p in layout.pieces] == [
        (0, (1, 2), None),
        (2, (10, 11), 0),
        (4, (5, 6), None),
        (6, (12,), 1),
        (7, (13, 14), 2),
        (9, (7, 8), None),
    ]
    assert layout.running(0) == ([1, 2, 5, 6, 7, 8], [0, 1, 4, 5, 9, 10], False)
    assert layout.running(5) == ([6, 7, 8], [5, 9, 10], False)
    assert [layout.usable(n) for n in range(12)] == [0, 1, 2, 2, 4, 5, 6, 7, 7, 9, 10, 11]
    assert [p.passage for p in layout.placed(7)] == [2]


def test_full_prefill_reads_passages_as_text_and_no_marker(lm):
    layout = get_method("full").layout(lm, PROMPT.parts, rc.Recipe(markers=(180, 181)))
    assert layout.ids == layout.elements == layout.running().ids == PROMPT.ids
    assert layout.placed() == []
    assert layout.usable(4) == 4
    assert [piece.ids for piece in layout.passages] == [tuple(chunk) for chunk in CHUNKS]


def test_a_prefix_that_cannot_be_used_is_named(lm):
    first, tree = random_prompt(1), PrefixCache(lm.shape, 1 << 24)
    tree.insert("full", first.ids, read_cache(rc.fuse(lm, first, "full").cache))
    with tree.match("full", first.ids) as exact:
        with pytest.raises(ConfigError, match=f"the last token has to run; give that of {first.num_tokens - 1} at"):
            rc.fuse(lm, first, "full", exact=exact)
        exact.cut(3)
        with pytest.raises(ConfigError, match="'reposition' reads blocks"):
            rc.fuse(lm, first, "reposition", exact=exact)


# Questions over one shared context: every method that shares reads them as it reads each by itself.


LINKS = [[20, 21], [], [22], [23, 24, 25]]
SHARING = {
    "reposition": {},
    "concat": {},
    "full": {},
    "link": {"link_ids": LINKS},
    "markers": {"doc_start_id": 7, "doc_end_id": 8},
}


def another(prompt, *suffix):
    return rc.Prompt(prompt.prefix_ids, prompt.chunk_ids, list(suffix))


@pytest.mark.parametrize("method", sorted(SHARING))
def test_a_method_answers_alike_over_a_shared_context(family, method):
    """Logits and further tokens, of the question that shared its context too. Law 1 over one: test_laws.py and this."""
    lm, _ = family
    options = SHARING[method]
    first = random_prompt(5, prefix=4)
    second = another(first, 7, 9, 11)

    def answer(fused):
        steps = decode(lm, fused.cache, fused.next_logits, fused.next_position, Sampling(max_tokens=5))
        return fused.next_logits, list(steps)

    expected = [answer(rc.fuse(lm, prompt, method, **options)) for prompt in (first, second)]
    owner = rc.fuse(lm, first, method, **options)
    over = rc.fuse(lm, second, method, base=owner.share(), **options)
    if method == "reposition":
        assert set(over.computed_tokens) == {3}
        assert set(over.kept_tokens) == {second.num_tokens}
        assert over.cached_tokens == second.context_tokens
    for (logits, ids), (wanted, wanted_ids) in zip((answer(owner), answer(over)), expected, strict=True):
        assert_same(logits, wanted)
        assert ids == wanted_ids


def test_which_methods_share():
    """Methods whose context does not depend on the question share it; one that chooses by it reads by itself."""
    sharing = {name for name in METHODS if get_method(name).shares_context}
    assert sharing == {"reposition", "concat", "link", "markers", "full"}
    assert not get_method("full", reuse=False).shares_context


def test_a_context_of_something_else_is_refused(lm):
    prompt = random_prompt(1)
    base = rc.fuse(lm, prompt).share()
    other = rc.Prompt(prompt.prefix_ids, prompt.chunk_ids[:-1], prompt.suffix_ids)
    with pytest.raises(ConfigError, match=r"a context of \d+ tokens was given for a prompt with \d+ before its suffix"):
        rc.fuse(lm, other, base=base)
    with pytest.raises(ConfigError, match="'a3' reads every prompt by itself"):
        rc.fuse(lm, prompt, "a3", base=base)
    dropped = rc.fuse(lm, random_prompt(2, chunks=(60, 50)), "samkv")
    if len(set(dropped.kept_tokens)) > 1 or min(dropped.kept_tokens) < dropped.prompt_tokens:
        with pytest.raises(ConfigError, match=r"can be shared.*by a method that drops no token"):
            dropped.share()
    assert torch.isfinite(rc.fuse(lm, prompt, base=base).next_logits).all()


@torch.inference_mode()  # as passes write: the pool lends buffers that were made in one
def test_the_tree_reads_a_base_where_it_is(family, monkeypatch):
    """What `full` computed over a shared context is kept page by page, and nothing of the context is joined."""
    lm, _ = family
    first = random_prompt(5, prefix=4)
    second = another(first, 7, 9, 11)
    wanted = rc.fuse(lm, second, "full").cache
    cache = rc.fuse(lm, second, "full", base=rc.fuse(lm, first, "full").share()).cache
    tree = PrefixCache(lm.shape, 1 << 24, page_tokens=5)
    with monkeypatch.context() as patch:
        patch.setattr(FusedCache, "layer_state", None)
        assert tree.insert("full", second.ids, read_cache(cache)) == second.num_tokens
    held = lm.new_cache(second.num_tokens)
    with tree.match("full", second.ids) as lease:
        for layer in range(lm.shape.num_layers):
            keys, values = held.reserve(layer, torch.arange(second.num_tokens))
            lease.copy_layer(layer, keys[0], values[0])
            expected = wanted.layer_state(layer)
            torch.testing.assert_close(keys, expected[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(values, expected[1], atol=1e-4, rtol=1e-4)
