"""Bases for codecs that need one, in tests that are about something else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragcache.codecs import Bases, Codec
from ragcache.kv.block import KVBlock
from ragcache.store.kv_store import KVStore
from ragcache_papers.kvtc_basis import RECENT_BYTES, Basis, Recent
from ragcache_papers.kvtc_fit import stand_in
from ragcache_papers.kvtc_transform import Group


class SeveralBases(Bases):
    """One name for bases of blocks of several kinds."""

    def __init__(self, examples: Sequence[KVBlock]) -> None:
        super().__init__()
        self.recent = Recent(RECENT_BYTES)
        self._all = [Basis(stand_in(example)) for example in examples]
        self.add(stand_in(examples[0]))

    def get(self, name: str, read: Any = None) -> Any:
        return self

    def groups(self, *place: Any) -> tuple[Group, ...] | None:
        return next((found for one in self._all if (found := one.groups(*place)) is not None), None)


def ready(codec: Codec, *examples: KVBlock) -> Codec:
    """The codec, with a basis for blocks of all these shapes."""
    return type(codec)(SeveralBases(examples)) if codec.needs_basis else codec


def keep_basis(root: Path, codec: str, example: KVBlock) -> str | None:
    """Store a basis for blocks like this one; None where the codec needs none."""
    with KVStore(root, codec=codec) as store:
        return store.add_basis(stand_in(example)) if store.lacks_basis else None
