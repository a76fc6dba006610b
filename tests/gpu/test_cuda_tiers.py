"""Blocks on a CUDA device and in page-locked memory: bit for bit what was put, within budgets; and their placing."""

import pytest
import torch
from bases import keep_basis
from blocks import DTYPES, make_block, make_key, same
from families import assert_same, random_prompt

import ragcache as rc
from ragcache.codecs import CODECS, get_codec
from ragcache.fusion import place_check
from ragcache.kv.block import KVBlock
from ragcache.store.eviction import LRU
from ragcache.store.kv_store import KVStore
from ragcache.store.tiers import DeviceTier, MemoryTier
from ragcache_demo.bag_of_words import BagOfWords

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_device_tier_gives_back_what_was_put(device, dtype):
    tier = DeviceTier(device, 1 << 20, LRU())
    block = make_block(1, num_tokens=50, dtype=dtype)
    held = tier.put(make_key(1), block)
    got = tier.get(make_key(1))
    assert held is not None
    assert got is not None
    assert got.keys.device.type == device.type
    assert same(KVBlock(got.keys.cpu(), got.values.cpu()), block)


def test_the_device_tier_keeps_its_budget(device):
    size = make_block(0, num_tokens=64).num_bytes
    tier = DeviceTier(device, 3 * size, LRU())
    for number in range(10):
        tier.put(make_key(number), make_block(number, num_tokens=64))
        assert tier.usage().num_bytes <= 3 * size
    assert sorted(tier.keys()) == sorted(make_key(number) for number in (7, 8, 9))


def test_host_memory_is_page_locked_and_exact(device):
    tier = MemoryTier(1 << 20, LRU())
    tier.page_locked = device.type == "cuda"
    block = make_block(2, num_tokens=33)
    tier.put(make_key(2), block)
    got = tier.get(make_key(2))
    assert got is not None
    assert got.keys.is_pinned() == tier.page_locked
    assert same(got, block)
    there = got.keys.to(device, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert torch.equal(there.cpu(), block.keys)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_blocks_of_every_tier_give_the_same_answer(models, device, tmp_path, codec):
    """Law 6: computed on the device, then read from it, from page-locked memory and from disk."""
    lm, _, _ = models("llama")
    prompt = random_prompt(3, chunks=(33, 70))
    blocks = rc.encode(lm, prompt)
    basis = keep_basis(tmp_path / "kv", codec, blocks[0].map(torch.Tensor.cpu))
    store = KVStore(tmp_path / "kv", codec=codec, basis=basis, memory_bytes=1 << 24, device_bytes=1 << 24)
    store.use_device(lm.device)
    keys = [make_key(number) for number in range(2)]
    kept = [store.put(key, block) for key, block in zip(keys, blocks, strict=True)]
    expected = rc.fuse(lm, prompt, blocks=kept).next_logits.cpu()
    found = [store.get(key) for key in keys]
    assert [one.tier for one in found] == ["device", "device"]
    assert torch.equal(rc.fuse(lm, prompt, blocks=[one.block for one in found]).next_logits.cpu(), expected)
    store.close()
    cold = KVStore(tmp_path / "kv", codec=codec, memory_bytes=1 << 24)
    cold.use_device(lm.device)
    for tier in ("disk", "memory"):
        found = [cold.get(key) for key in keys]
        assert {one.tier for one in found} == {tier}
        assert_same(rc.fuse(lm, prompt, blocks=[one.block for one in found]).next_logits.cpu(), expected)
    cold.close()


def test_a_store_answers_on_the_device_as_on_the_cpu(device, tmp_path):
    """From ingestion to the last token, with the bundled model."""
    texts = {"club": "The rowing club meets at the old mill.", "river": "The river Ilva rises at Mount Thornmere."}
    answers = []
    for where in ("cpu", str(device)):
        with rc.RagCache.open(
            tmp_path / where.replace(":", "-"),
            model="mini",
            embedder=BagOfWords(),
            device=where,
            store=rc.StoreConfig(device_bytes=1 << 24 if where != "cpu" else 0),
        ) as kb:
            kb.ingest(rc.Document(id, text) for id, text in texts.items())
            sampling = rc.Sampling(max_tokens=12)
            answers.append([kb.ask("Where does the rowing club meet?", k=2, sampling=sampling).text for _ in range(2)])
    assert answers[0] == answers[1]


# The placing kernel and its stream, against the plain way.


SOME = ("llama", "qwen3", "gemma2", "gemma3", "smollm3", "phi3-partial")


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", SOME)
def test_the_kernel_places_what_the_plain_way_places(models, family, dtype, codec, monkeypatch):
    """From page-locked memory and from the device."""
    lm, _, _ = models(family, dtype)
    prompt = random_prompt(3, chunks=(32, 16, 40))
    coder = get_codec(codec)
    encoded = [block.map(lambda tensor: tensor.cpu()) for block in rc.encode(lm, prompt, recipe="isolated")]
    held = [coder.decode(coder.encode(block)) for block in encoded]
    lanes = [[block.map(lambda tensor: tensor.pin_memory()) for block in held]]
    lanes.append([block.map(lambda tensor: tensor.to(lm.device)) for block in held])
    assert place_check.place_kernel(lm, lanes[0]) is not None
    found = [rc.fuse(lm, prompt, "reposition", blocks=blocks).next_logits for blocks in lanes]
    monkeypatch.setitem(place_check._checked, lm, False)
    lane, lm.pool.lane = lm.pool.lane, None
    plain = rc.fuse(lm, prompt, "reposition", blocks=lanes[1]).next_logits
    lm.pool.lane = lane
    steps = torch.finfo(lm.dtype).eps * float(plain.float().abs().max())
    for logits in found:
        assert float((logits.float() - plain.float()).abs().max()) <= 16 * steps


def test_buffers_that_are_used_again_at_once_hold_the_right_numbers(models):
    """Answers of one after the other, without a pause: a stream that runs ahead would read or write the last one's."""
    lm, cpu, _ = models("llama")
    for seed in range(20):
        prompt = random_prompt(seed, chunks=(64, 48, 80))
        blocks = [block.map(lambda t: t.cpu().pin_memory()) for block in rc.encode(lm, prompt, recipe="isolated")]
        there = rc.fuse(lm, prompt, "reposition", blocks=blocks).next_logits
        del blocks
        here = rc.fuse(cpu, prompt, "reposition").next_logits
        torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-4)
