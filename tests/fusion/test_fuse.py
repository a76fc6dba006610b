"""What `rc.fuse` does beyond the laws: concat, low precision, decoding on the cache, refusals."""

from __future__ import annotations

import pytest
import torch
from families import block_diagonal, random_prompt, saved_tiny, tiny

import ragcache as rc
from ragcache.errors import ConfigError, ContextTooLongError, PromptError, StaleBlockError
from ragcache.kv.buffers import BufferPool, KVBuffers


def _additive(allowed):
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[None, None]


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
    with torch.no_grad():
        expected = oracle(
            input_ids=torch.tensor([prompt.ids]),
            position_ids=torch.tensor([positions]),
            attention_mask=_additive(allowed),
        ).logits[0, -1]
    got = rc.fuse(lm, prompt, method="concat", recipe=recipe).next_logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    moved = rc.fuse(lm, prompt, method="reposition", recipe=recipe).next_logits
    assert (moved - expected).abs().max() > 0.05, "the oracle would not notice a wrong position"


def test_blocks_are_keys_before_rope(llama):
    """The first layer's keys are its key projection of the normalised embeddings, computed here by hand."""
    lm, oracle = llama
    prompt = random_prompt(4)
    layer = oracle.model.layers[0]
    for chunk, block in zip(prompt.chunk_ids, rc.encode(lm, prompt), strict=True):
        with torch.no_grad():
            hidden = layer.input_layernorm(oracle.model.embed_tokens(torch.tensor(chunk)))
            keys = layer.self_attn.k_proj(hidden).view(len(chunk), 2, -1).transpose(0, 1)
            values = layer.self_attn.v_proj(hidden).view(len(chunk), 2, -1).transpose(0, 1)
        torch.testing.assert_close(block.keys[0], keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(block.values[0], values, atol=1e-5, rtol=1e-5)


def test_a_batch_encodes_like_one_by_one(llama):
    lm, _ = llama
    chunks = [list(range(3, 3 + n)) for n in (5, 31, 1, 12, 31, 2)]
    together = lm.encode(chunks, batch_tokens=64)
    for chunk, block in zip(chunks, together, strict=True):
        alone = lm.encode([chunk])[0]
        torch.testing.assert_close(block.keys, alone.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(block.values, alone.values, atol=1e-5, rtol=1e-5)


def test_a_bos_recipe_drops_the_bos(llama):
    lm, _ = llama
    chunk = [7, 8, 9]
    block = lm.encode([chunk], rc.Recipe("isolated", bos=True))[0]
    behind = lm.encode([[1, *chunk]])[0]
    torch.testing.assert_close(block.keys, behind.keys[:, :, 1:])
    assert not torch.allclose(block.keys[-1], lm.encode([chunk])[0].keys[-1], atol=1e-3)


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
    allowed = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    n = prompt.context_tokens
    allowed[:n, :n] = block_diagonal(prompt)[:n, :n]
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([ids]), attention_mask=_additive(allowed)).logits[0, -1]
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    assert fused.cache.capacity > room


def test_replacing_entries_in_place_is_a_plain_forward(llama):
    """Recomputing every context token over its own slot turns `reposition` into full prefill (law 3's limit)."""
    lm, oracle = llama
    prompt = random_prompt(8)
    fused = rc.fuse(lm, prompt)
    everything = torch.arange(prompt.num_tokens)
    logits = lm.run(prompt.ids, everything, fused.cache, slots=everything)
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([prompt.ids])).logits[0, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_only_the_suffix_is_computed_and_counted(llama):
    lm, _ = llama
    prompt = random_prompt(9)
    fused = rc.fuse(lm, prompt, blocks=rc.encode(lm, prompt), prefix_block=lm.encode([prompt.prefix_ids])[0])
    assert fused.computed_tokens == (len(prompt.suffix_ids),) * lm.shape.num_layers
    assert fused.encoded_tokens == 0
    assert fused.cached_tokens == prompt.context_tokens


@pytest.mark.parametrize(("method", "most"), [("cacheblend", 33 + 6), ("full", 5 + 33 + 6)])
def test_what_ran_in_any_layer_is_not_cached(llama, method, most):
    """CacheBlend runs all chunks in its first layer, and few tokens above."""
    lm, _ = llama
    prompt = random_prompt(9, prefix=5, chunks=(7, 13, 4, 9), suffix=6)
    blocks, prefix_block = rc.encode(lm, prompt), lm.encode([prompt.prefix_ids])[0]
    options = {} if method == "full" else {"ratio": 0.5}
    fused = rc.fuse(lm, prompt, method, blocks, prefix_block=prefix_block, **options)
    assert max(fused.computed_tokens) == most
    assert fused.cached_tokens == prompt.num_tokens - most
    if method == "cacheblend":
        assert min(fused.computed_tokens) < most


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
def test_idle_buffers_stay_within_their_bytes(llama, missing):
    """Two fit exactly; with one byte less the older one is let go of."""
    lm, _ = llama
    one = KVBuffers.allocate(lm.shape, 256)
    pool = BufferPool(lm.shape, 2 * one.num_bytes - missing)
    given = [KVBuffers.allocate(lm.shape, 256) for _ in range(2)]
    for buffers in given:
        pool.give(buffers)
    taken = [pool.take(256) for _ in range(2)]
    assert sum(any(buffers is other for other in given) for buffers in taken) == 2 - missing


def test_buffers_are_reused_and_do_not_leak_between_prompts(llama):
    lm, _ = llama
    prompts = [random_prompt(seed, chunks=(9, 4 + seed)) for seed in range(4)]
    first = [rc.fuse(lm, prompt).next_logits for prompt in prompts]
    again = [rc.fuse(lm, prompt).next_logits for prompt in reversed(prompts)]
    for a, b in zip(first, reversed(again), strict=True):
        assert torch.equal(a, b)


def test_a_prompt_without_chunks_or_prefix(llama):
    lm, oracle = llama
    prompt = rc.Prompt([], [], [5, 6, 7])
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    for method in set(rc.METHODS) - {"cartridge"}:  # which needs a trained one
        torch.testing.assert_close(rc.fuse(lm, prompt, method=method).next_logits, expected, atol=1e-5, rtol=1e-5)


def test_bad_input_is_named(llama):
    lm, _ = llama
    prompt = random_prompt(0)
    blocks = rc.encode(lm, prompt)
    with pytest.raises(ConfigError, match=r"telepathy.*reposition"):
        rc.fuse(lm, prompt, method="telepathy")
    with pytest.raises(ConfigError, match="ratio"):
        rc.fuse(lm, prompt, ratio=0.5)
    with pytest.raises(ConfigError, match="lonely"):
        rc.encode(lm, prompt, recipe="lonely")
    with pytest.raises(StaleBlockError, match="3 blocks"):
        rc.fuse(lm, prompt, blocks=blocks[:3])
    with pytest.raises(StaleBlockError, match="chunk 0"):
        rc.fuse(lm, prompt, blocks=blocks[::-1])
    with pytest.raises(StaleBlockError, match="another model"):
        rc.fuse(lm, prompt, blocks=rc.encode(tiny("qwen3")[0], prompt))
    with pytest.raises(PromptError, match="suffix"):
        rc.Prompt([1], [[2]], [])
    with pytest.raises(PromptError, match="chunk 1"):
        rc.Prompt([1], [[2], []], [3])
    with pytest.raises(PromptError, match="100000"):
        rc.fuse(lm, rc.Prompt([1], [[100000]], [3]))
    with pytest.raises(ContextTooLongError, match="512"):
        rc.fuse(lm, rc.Prompt([], [[5] * 300, [6] * 300], [7]))


def test_blocks_say_how_they_were_encoded(llama):
    lm, _ = llama
    prompt = random_prompt(2)
    isolated, behind = rc.encode(lm, prompt), rc.encode(lm, prompt, recipe="prefix")
    told = rc.fuse(lm, prompt, method="concat", blocks=behind, recipe="prefix").next_logits
    assert torch.equal(rc.fuse(lm, prompt, method="concat", blocks=behind).next_logits, told)
    with pytest.raises(StaleBlockError, match="isolated"):
        rc.fuse(lm, prompt, blocks=isolated, recipe="prefix")
    with pytest.raises(StaleBlockError, match="alike"):
        rc.fuse(lm, prompt, blocks=[*isolated[:2], *behind[2:]])


def test_the_table_of_methods():
    table = {row.name: row for row in rc.methods()}
    assert set(table) == set(rc.METHODS) >= {"full", "reposition", "concat"}
    assert all(row.paper and row.summary for row in table.values())
