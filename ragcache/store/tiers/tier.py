"""The tier contracts: a place where block bytes live, and one where they outlive the process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ragcache.codecs import Codec
from ragcache.codecs.block_file import codec_of, encode_block
from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import torch
from ragcache.store.tiers.block_names import check_key

if TYPE_CHECKING:
    from torch import Tensor


class Room(ABC):
    """Memory of a faster tier for a block that is about to come.

    is_spare: nothing had to go for it
    buffer:   what was taken: where the block may be read to
    """

    is_spare: bool
    buffer: Tensor | None

    @abstractmethod
    def take(self, num_bytes: int) -> Tensor | None:
        """uint8 [num_bytes]; None where no room can be made."""


class TierUsage(NamedTuple):
    blocks: int
    num_bytes: int


class Tier(ABC):
    """Holds blocks by key. Safe to call from several threads.

    name: what statistics and `locate` call it
    """

    name: str

    @property
    @abstractmethod
    def budget_bytes(self) -> int | None:
        """The most bytes that this tier holds; None: it keeps every block."""

    @property
    def evictions(self) -> int:
        """Blocks given up so far to make room."""
        return 0

    @abstractmethod
    def put(self, key: str, block: KVBlock) -> KVBlock | None:
        """Hold a block, in place of one of the same key; None when the budget has no room for it.

        Returns the block as `get` would: with a lossy codec not the one given. It stays valid after eviction.
        """

    @abstractmethod
    def get(self, key: str) -> KVBlock | None:
        """The block, marked as used, or None. It stays valid when it is evicted or deleted later.

        Raises DamagedBlockError: the block is still there, but nobody gets it.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Forget a block; an absent one is fine."""

    def __contains__(self, key: object) -> bool:
        """Whether the block is here. Changes nothing, not even what is evicted next."""
        return isinstance(key, str) and self.size(key) is not None

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Bytes that reading the block moves, or None when it is not here. Changes and reads nothing."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """The keys held when asked; deletions during the iteration are fine."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """Blocks and bytes held now."""

    def on_device(self, device: torch.device) -> None:
        """Say where the model runs, for a tier that can prepare its blocks for the way there."""
        return

    def close(self) -> None:
        """Let go of what is held in this process."""
        return


class DurableTier(Tier):
    """Keeps blocks beyond the process, encoded by a codec: files on a disk, or a service that several machines share.

    Several processes, each with an instance of its own, may work on the same blocks at once. All methods are safe to
    call from several threads; two calls for one key at once leave one of the two results, never a mixture. Paths,
    connections, locks between processes and the books of a budget are the tier's own affair.

    What is damaged is reported, never removed: the caller decides. A key that is no block key is refused with
    ConfigError before anything is touched. `delete` and all that writes raise StoreReadOnlyError, and StoreFullError
    where there is no room; `put` leaves no part of a block behind when it raises, or returns None.

    codec: how new blocks are encoded
    """

    codec: Codec

    @property
    def caches(self) -> tuple[DurableTier, ...]:
        """Tiers of copies that `get` asks first, fastest first: whoever asks them before knows where a block was."""
        return ()

    @abstractmethod
    def get(self, key: str, room: Room | None = None) -> KVBlock | None:
        """room: where the block may be read to, so that nobody has to copy it"""

    @abstractmethod
    def put(self, key: str, block: KVBlock, *, encoded: bool = False) -> KVBlock | None:
        """Keep a block: a kill or a power cut after the return loses nothing of it.

        encoded: `get`, `put` or `roundtrip` gave the block out: its bits stay, whatever codec it was kept by

        Raises StoreFullError, StoreReadOnlyError, UnencodableBlockError.
        """

    def roundtrip(self, key: str, block: KVBlock) -> KVBlock:
        """The block as `put` would return it, with nothing kept. Raises UnencodableBlockError."""
        check_key(key)
        codec = self.codec.now
        return codec.decode(encode_block(key, block, codec))

    def codec_for(self, block: KVBlock, encoded: bool) -> Codec:
        """The codec that `put` writes a block by."""
        return codec_of(block) if encoded else self.codec.now

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        """`size` of several blocks, asked together; those that are not here are left out."""
        return {key: size for key in keys if (size := self.size(key)) is not None}

    @abstractmethod
    def verify(self, key: str) -> None:
        """Read the kept block whole and give it to nobody; it is not marked as used.

        Raises MissingBlockError, DamagedBlockError, SchemaVersionError when it cannot be served.
        """

    @abstractmethod
    def sweep(self, older_than_s: float) -> int:
        """Remove what killed writers left half done; returns how many. What a running writer has begun stays.

        Raises StoreReadOnlyError.
        """

    @property
    @abstractmethod
    def has_been_bounded(self) -> bool:
        """Whether this or another process has given these blocks a budget, so that one may be gone unasked."""

    @abstractmethod
    def used_at(self, key: str) -> float | None:
        """Unix seconds at which any process last marked the block as used; None where it is not known."""

    @abstractmethod
    def mark_used(self, key: str, at: float) -> None:
        """Note for all processes that the block was used at this time, in Unix seconds.

        Raises nothing where that is not possible or there is no block: an order of use is lost, no block.
        """
