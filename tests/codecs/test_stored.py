"""Encoded blocks through tiers and fusion."""

from pathlib import Path

import pytest
import torch
from bases import keep_basis, ready
from blocks import DTYPES, make_block, make_key, same, tier_of
from covering import covering

import ragcache as rc
from ragcache.codecs import CODECS, get_codec
from ragcache.errors import UnencodableBlockError
from ragcache.fusion import METHODS
from ragcache.kv.block import KVBlock
from ragcache.store.kv_store import KVStore

KEY = make_key(1)
LOSSY = sorted(name for name, codec in CODECS.items() if not codec.lossless)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_block_is_bit_identical_from_every_tier(codec: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Law 6: as returned by `put` and `remember`, from memory, from disk, and promoted."""
    block = make_block(1, num_tokens=40, dtype=dtype)
    basis = keep_basis(tmp_path / "kv", codec, block)
    assert keep_basis(tmp_path / "other", codec, block) == basis
    with (
        KVStore(tmp_path / "kv", codec=codec, basis=basis) as store,
        KVStore(tmp_path / "other", codec=codec, basis=basis) as other,
    ):
        loads = [store.put(KEY, block), other.put(KEY, block, "memory")]
        loads += [found.block for found in (store.get(KEY), other.get(KEY)) if found]
        assert tier_of(store, KEY) == tier_of(other, KEY) == "memory"
    with KVStore(tmp_path / "kv", memory_bytes=0) as mapped, KVStore(tmp_path / "kv") as promoting:
        read = [mapped.get(KEY), mapped.get(KEY), promoting.get(KEY), promoting.get(KEY)]
    assert [found.tier for found in read if found] == ["disk", "disk", "disk", "memory"]
    loads += [found.block for found in read if found]
    coder = get_codec(codec).for_trial(block)
    expected = coder.decode(coder.encode(block))
    assert len(loads) == 8
    assert all(same(one, expected) for one in loads)


@pytest.mark.parametrize("codec", LOSSY)
def test_memory_holds_the_codecs_bytes(codec: str, tmp_path: Path) -> None:
    block = make_block(1, num_tokens=400, layers=8)
    coder = get_codec(codec).for_trial(block)
    encoded = coder.decode(coder.encode(block)).num_bytes
    basis = keep_basis(tmp_path / "kv", codec, block)
    assert encoded < 0.75 * block.num_bytes
    with KVStore(tmp_path / "kv", codec=codec, basis=basis, memory_bytes=3 * encoded) as store:
        for number in range(4):
            store.put(make_key(number), make_block(1, num_tokens=400, layers=8))
        assert store.stats().bytes_by_tier["memory"] == 3 * encoded
        assert store.stats().evictions == 1


@pytest.mark.parametrize("codec", LOSSY)
def test_what_cannot_be_kept_is_in_no_tier(codec: str, tmp_path: Path) -> None:
    block = make_block(1)
    basis = keep_basis(tmp_path / "kv", codec, block)
    block.values[0, 0, 0, 0] = float("nan")
    with KVStore(tmp_path / "kv", codec=codec, basis=basis) as store:
        for where in ("durable", "memory", "again", "nowhere"):
            with pytest.raises(UnencodableBlockError, match=KEY):
                store.put(KEY, block, where)
        assert tier_of(store, KEY) is None


READERS = [
    "reposition", "concat", "cacheblend", "a3", "prophet", "epic", "samkv", "ape",
    "link",
]  # fmt: skip
OPTIONS = {"cacheblend": {"ratio": 0.3}, "link": {"link_ids": [[3, 4], [5, 6], [7, 8]]}}


@pytest.mark.parametrize(("codec", "method"), covering(LOSSY, READERS))
def test_fusing_encoded_blocks_is_fusing_the_decoded(lm: rc.LanguageModel, codec: str, method: str) -> None:
    """To the last bit, though each layer is decoded into its place only when it is needed."""
    generator = torch.Generator().manual_seed(0)
    chunks = [torch.randint(250, (count,), generator=generator).tolist() for count in (40, 1, 25)]
    prompt = rc.Prompt(prefix_ids=[1, 2], chunk_ids=chunks, suffix_ids=[9, 10, 11])
    recipe = METHODS[method].recipes[0]
    blocks = lm.encode(chunks, recipe, prompt.prefix_ids)
    coder = ready(get_codec(codec), blocks[0])
    encoded = [coder.decode(coder.encode(block)) for block in blocks]
    decoded = [KVBlock(block.keys, block.values) for block in encoded]
    one = rc.fuse(lm, prompt, method=method, blocks=encoded, recipe=recipe, **OPTIONS.get(method, {}))
    other = rc.fuse(lm, prompt, method=method, blocks=decoded, recipe=recipe, **OPTIONS.get(method, {}))
    assert torch.equal(one.next_logits, other.next_logits)
    assert one.kept_tokens == other.kept_tokens
