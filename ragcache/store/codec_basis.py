"""The basis of a store's codec, where it needs one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ragcache.codecs import Codec
from ragcache.codecs.basis import basis_name
from ragcache.errors import BasisError, StoreReadOnlyError
from ragcache.kv.block import KVBlock
from ragcache.store.tiers import DurableTier

if TYPE_CHECKING:
    from ragcache.store.documents import DocumentStore

PROPERTY = "basis"


class CodecBasis:
    """The basis that new blocks are encoded with. It is a block of the durable tier, and pinned: what it encoded cannot
    be read without it."""

    def __init__(self, codec: Codec, durable: DurableTier, pin: Callable[[Iterable[str]], None] | None) -> None:
        """pin: None for a store that is not to be written"""
        self._codec = codec
        self._durable = durable
        self._pin = pin

    @property
    def codec(self) -> Codec:
        """The codec of new blocks: another one than the store's as long as that lacks its basis."""
        return self._codec.now

    @property
    def is_lacking(self) -> bool:
        return self._codec.needs_basis and self._codec.bases.name is None

    def use(self, name: str) -> None:
        """Encode new blocks with this basis, which is stored."""
        self._codec.bases.name = name

    def fit(self, blocks: Sequence[KVBlock]) -> KVBlock:
        """A basis that is made from these passages' blocks. Raises BasisError when there are too few."""
        return self._codec.fit_basis(blocks)

    def add(self, basis: KVBlock) -> str:
        """Store a basis and encode new blocks with it; returns its name, by which it is to be held.

        Raises BasisError where there is no room for it, PinError, StoreFullError, StoreReadOnlyError.
        """
        if self._pin is None:
            raise StoreReadOnlyError("a store that is opened read-only takes no basis; open it for writing")
        name = basis_name(basis)
        if self._durable.put_as_held(name, basis) is None:
            raise BasisError(
                f"the {self._durable.name} tier has no room for a basis of {basis.num_bytes:,} bytes; give it more"
            )
        self._durable.flush([name])
        self._pin([name])
        self.use(name)
        return name


def known_basis(documents: DocumentStore) -> str | None:
    """The name of the store's basis, if it has one."""
    name = documents.properties().get(PROPERTY)
    return None if name is None else str(name)


def hold_basis(documents: DocumentStore, name: str) -> None:
    """Record the store's basis, and that it is referenced though no chunk has it."""
    documents.hold(name)
    documents.bind(PROPERTY, name)
