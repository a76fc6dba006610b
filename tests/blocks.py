"""KV blocks with known content."""

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sqlalchemy import select

from ragcache.kv.block import KVBlock, MixedBlock
from ragcache.kv.opaque_block import OpaqueBlock
from ragcache.kv.sparse_block import keep
from ragcache.seal import MARK_LENGTH, UNSEALED
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore
from ragcache.store.schema import garbage
from ragcache.store.tiers import Tier

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def make_block(seed: int, *, num_tokens: int = 5, dtype: torch.dtype = torch.float32, layers: int = 2) -> KVBlock:
    """Random keys and values, [layers, 2 heads, num_tokens, 4]; the same seed gives the same block in every process."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, 2, num_tokens, 4)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return KVBlock(keys, values)


# Layers 0, 2 and 4 are of the first part, [3 layers, 2 heads, n, 6 and 4]; 1 and 3 of the second, [2, 1, n, 10 and 10].
PART_OF = (0, 1, 0, 1, 0)


def make_mixed_block(seed: int, *, num_tokens: int = 5, dtype: torch.dtype = torch.float32) -> MixedBlock:
    """Random keys and values in layers that differ in heads and in widths."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    parts = [
        KVBlock(numbers(3, 2, num_tokens, 6), numbers(3, 2, num_tokens, 4)),
        KVBlock(numbers(2, 1, num_tokens, 10), numbers(2, 1, num_tokens, 10)),
    ]
    return MixedBlock(parts, PART_OF)


def make_masks(block: KVBlock, count: int, seed: int = 0) -> list[torch.Tensor]:
    """By layer, bool [num_kv_heads, num_tokens]: `count` random tokens of each head."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in block.layers:
        order = torch.rand(shape.num_kv_heads, block.num_tokens, generator=generator).argsort(1)
        found.append(order < count)
    return found


def make_sparse(block: KVBlock, count: int | None = None) -> KVBlock:
    """The block with `count` random tokens in each head; None: half of them."""
    return keep(block, make_masks(block, block.num_tokens // 2 if count is None else count))


def with_first(block: KVBlock, share: float) -> KVBlock:
    """The block with this share of its tokens, the first ones, in each head; itself where that is all."""
    count = math.ceil(share * block.num_tokens)
    held = torch.arange(block.num_tokens) < count
    masks = [held.expand(layer.num_kv_heads, -1) for layer in block.layers]
    return block if share == 1 else keep(block, masks)


def make_unequal(block: KVBlock, seed: int = 0) -> KVBlock:
    """The block with random tokens in each head, in each layer another number of them: none, all, or some."""
    counts = torch.linspace(0, block.num_tokens, block.num_layers).int().tolist()
    masks = [make_masks(block, count, seed)[layer] for layer, count in enumerate(counts)]
    return keep(block, masks)


def same(found: KVBlock | None, block: KVBlock) -> bool:
    """Whether a block was found that is this one bit for bit."""
    if found is None or (found.layers, found.num_tokens) != (block.layers, block.num_tokens):
        return False
    own, other = list(_numbers(found)), list(_numbers(block))
    pairs = zip(own, other, strict=False)
    return len(own) == len(other) and all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def _numbers(block: KVBlock) -> Iterator[torch.Tensor | None]:
    for layer in range(block.num_layers):
        yield from (block.layer_keys(layer), block.layer_values(layer), block.places(layer))
    for state in block.states:
        yield from state.tensors.values()
    if isinstance(block, OpaqueBlock):
        yield from block.tensors.values()


def put_all(store: KVStore | Tier, numbers: Iterable[int]) -> None:
    """Put the block of each number under its key."""
    for number in numbers:
        store.put(make_key(number), make_block(number))


def served_from(store: KVStore, key: str, block: KVBlock) -> str | None:
    """The tier that gives the block, after a look at its bits; None where none does."""
    loaded = store.get(key)
    assert loaded is None or same(loaded.block, block)
    return None if loaded is None else loaded.tier


def tier_of(store: KVStore, key: str) -> str | None:
    """The fastest tier that has the block."""
    stored = store.lookup([key]).get(key)
    return None if stored is None else stored.tier


def size_of(store: KVStore, key: str) -> int | None:
    """Bytes that reading the block from there moves."""
    stored = store.lookup([key]).get(key)
    return None if stored is None else stored.num_bytes


def garbage_of(documents: DocumentStore) -> set[str]:
    """The dropped handles whose KV bytes may still exist."""
    with documents.database.read() as connection:
        return set(connection.scalars(select(garbage.c.handle)))


def unpacked(file: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a block's file and the bytes that follow."""
    (length,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def packed(header: dict[str, Any], rest: bytes, key: str) -> bytes:
    """Return a file of this header with a whole seal, as a writer with a bug would leave it."""
    about = header.get("__metadata__")
    if isinstance(about, dict):
        about = {"seal": "0" * MARK_LENGTH, **{name: value for name, value in about.items() if name != "seal"}}
    parts = {name: part for name, part in header.items() if name != "__metadata__"}
    text = json.dumps({"__metadata__": about, **parts}, separators=(",", ":")).encode()
    head = struct.pack("<Q", len(text)) + text
    mark, _ = UNSEALED.of(key).close(head, [memoryview(rest)])
    return head.replace(b"0" * MARK_LENGTH, mark, 1) + rest
