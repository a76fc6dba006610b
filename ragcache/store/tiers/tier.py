"""The tier contracts: `Tier` holds blocks by key, and `DurableTier` keeps them after the process ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ragcache.codecs import Codec
from ragcache.codecs.block_file import codec_of, encode_block
from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import Tensor, torch
from ragcache.store.tiers.block_names import check_key


class Room(ABC):
    """Memory of a faster tier, reserved for a block that is about to be read.

    is_spare: no block had to be evicted for it
    buffer:   the memory that `take` returned, into which the block may be read
    """

    is_spare: bool
    buffer: Tensor | None

    @abstractmethod
    def take(self, num_bytes: int) -> Tensor | None:
        """Reserve a buffer, uint8 [num_bytes]; return None if there is no room for it."""


class TierUsage(NamedTuple):
    blocks: int
    num_bytes: int


class Tier(ABC):
    """A holder of blocks by key. Safe to call from several threads.

    name: the tier's name in statistics and in `lookup`
    """

    name: str

    @property
    @abstractmethod
    def budget_bytes(self) -> int | None:
        """Return the most bytes that this tier holds; None: it keeps every block."""

    @property
    def evictions(self) -> int:
        """Return how many blocks were evicted so far."""
        return 0

    @abstractmethod
    def put(self, key: str, block: KVBlock) -> KVBlock | None:
        """Store a block, replacing a block with the same key; return None if the budget has no room for it.

        Returns the block as `get` would: with a lossy codec that is not the given block. It stays valid after eviction.
        """

    @abstractmethod
    def get(self, key: str) -> KVBlock | None:
        """Return the block and mark it as used; None if it is absent. It stays valid when it is evicted or deleted
        later.

        Raises DamagedBlockError if the block is damaged; it stays in the tier, but is not returned.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a block; an absent block is fine."""

    def __contains__(self, key: object) -> bool:
        """Return whether the block is here. Change nothing, not even the order of eviction."""
        return isinstance(key, str) and self.size(key) is not None

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Return the bytes that reading the block moves, or None if it is absent. Change and read nothing."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """Return the keys held at the time of the call; deletions during the iteration are fine."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """Count the blocks and bytes held now."""

    def on_device(self, device: torch.device) -> None:
        """Prepare blocks for transfer to the model's device, if the tier can."""
        return

    def close(self) -> None:
        """Release memory, files and connections that this process holds."""
        return


class DurableTier(Tier):
    """A tier whose blocks outlive the process, encoded by a codec: files on a disk, or a service shared by several
    machines.

    Several processes, each with its own instance, may work on the same blocks at once. All methods are safe to call
    from several threads; of two concurrent calls for one key, one result remains, never a mixture. Paths, connections,
    locks between processes and the accounting of a budget are internal to the tier.

    Damaged blocks are reported, never removed: the caller decides. A malformed key is refused with ConfigError before
    anything is touched. `delete` and all writing methods raise StoreReadOnlyError, and StoreFullError when space runs
    out; `put` leaves no partial block when it raises or returns None.

    codec: how new blocks are encoded
    """

    codec: Codec

    @property
    def caches(self) -> tuple[DurableTier, ...]:
        """Return the tiers of copies that `get` reads first, fastest first, so that a caller can read them itself and
        report which tier had the block."""
        return ()

    @abstractmethod
    def get(self, key: str, room: Room | None = None) -> KVBlock | None:
        """Return the block as `Tier.get` does. room: memory to read the block into, which saves a copy"""

    @abstractmethod
    def put(self, key: str, block: KVBlock, *, encoded: bool = False) -> KVBlock | None:
        """Store a block durably: after `put` returns, a kill or a power cut loses nothing.

        encoded: `get`, `put` or `roundtrip` returned the block: write its bits unchanged, by the codec that made them

        Raises StoreFullError, StoreReadOnlyError, UnencodableBlockError.
        """

    def roundtrip(self, key: str, block: KVBlock) -> KVBlock:
        """Return the block as `put` would return it, and store nothing. Raises UnencodableBlockError."""
        check_key(key)
        codec = self.codec.now
        return codec.decode(encode_block(key, block, codec))

    def codec_for(self, block: KVBlock, encoded: bool) -> Codec:
        """Return the codec that `put` encodes a block with. encoded: see `put`"""
        return codec_of(block) if encoded else self.codec.now

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        """Return the `size` of each of these blocks, looked up together; absent blocks are left out."""
        return {key: size for key in keys if (size := self.size(key)) is not None}

    @abstractmethod
    def verify(self, key: str) -> None:
        """Read and check the whole stored block without returning it or marking it as used.

        Raises MissingBlockError, DamagedBlockError, SchemaVersionError when it cannot be served.
        """

    @abstractmethod
    def sweep(self, older_than_s: float) -> int:
        """Remove unfinished files of killed writers and return how many. Files that a running writer has begun stay.

        Raises StoreReadOnlyError.
        """

    @property
    @abstractmethod
    def has_been_bounded(self) -> bool:
        """Return whether any process has given these blocks a budget, so that any of them may have been evicted."""

    @abstractmethod
    def used_at(self, key: str) -> float | None:
        """Return the Unix time in seconds at which any process last marked the block as used; None if unknown."""

    @abstractmethod
    def mark_used(self, key: str, at: float) -> None:
        """Record for all processes that the block was used at this Unix time in seconds.

        Raises nothing if that is impossible or the block is absent: the order of eviction suffers, but no block is
        lost.
        """
