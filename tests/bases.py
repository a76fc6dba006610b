"""Bases for codecs that need one, in tests that are about something else."""

from __future__ import annotations

from pathlib import Path

import torch

from ragcache.codecs import Bases, Codec
from ragcache.codecs.fitting import stand_in
from ragcache.kv.block import KVBlock, MixedBlock
from ragcache.store.kv_store import KVStore


def ready(codec: Codec, *examples: KVBlock) -> Codec:
    """The codec, with a basis for blocks of all these shapes."""
    if not codec.needs_basis:
        return codec
    made = [stand_in(example) for example in examples]
    parts = [part for one in made for part in (one.parts if isinstance(one, MixedBlock) else (one,))]
    most = max(part.num_tokens for part in parts)
    padded = [part.map(lambda rows: torch.nn.functional.pad(rows, (0, 0, 0, most - rows.shape[2]))) for part in parts]
    bases = Bases()
    bases.add(MixedBlock(padded, [number for number, part in enumerate(parts) for _ in range(part.num_layers)]))
    return type(codec)(bases)


def keep_basis(root: Path, codec: str, example: KVBlock) -> str | None:
    """Store a basis for blocks like this one; None where the codec needs none."""
    with KVStore(root, codec=codec) as store:
        return store.basis.add(stand_in(example)) if store.basis.is_lacking else None
