"""The codec contract: how a block's tensors become the tensors of a file, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from ragcache.kv.block import KVBlock


class Codec(ABC):
    """Encodes a KV block as named tensors, and decodes them.

    name:    what the registry and every file call it
    version: counts up whenever files written before could no longer be decoded by the code; a file of a higher
             version than the code's is refused, one of a lower version has to be decoded still

    A codec is stateless: what `decode` needs beside the tensors has to be one of the tensors. `decode` may return views
    of its input and never writes to it: the tensors may alias a mapped file.
    """

    name: ClassVar[str]
    version: ClassVar[int]

    @abstractmethod
    def encode(self, block: KVBlock) -> dict[str, Tensor]:
        """The tensors to store. They may be views of the block's."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor]) -> KVBlock:
        """The block that `encode`'s tensors stand for, in the dtype it had. Raises DamagedBlockError when it can't."""

    @abstractmethod
    def error_bound(self, block: KVBlock) -> float:
        """The largest absolute difference that decode(encode(block)) may have from block (law 6); 0.0 if lossless."""
