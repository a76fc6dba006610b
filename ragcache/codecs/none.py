"""The codec that changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ragcache.codecs.base import Codec
from ragcache.errors import DamagedBlockError
from ragcache.kv.block import KVBlock
from ragcache.kv.cache_shape import LayerShape
from ragcache.lazy_torch import Tensor


class RawCodec(Codec):
    """Keys and values unchanged, in their own dtype. Decoding copies nothing."""

    name: ClassVar[str] = "raw"
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = True

    def encode_alike(self, block: KVBlock) -> dict[str, Tensor]:
        return {"keys": block.keys, "values": block.values}

    def decode_alike(self, tensors: Mapping[str, Tensor]) -> KVBlock:
        if tensors.keys() != {"keys", "values"}:
            raise DamagedBlockError(f"a raw block holds the tensors keys and values, not {sorted(tensors)}")
        return KVBlock(tensors["keys"], tensors["values"])

    def bound_alike(self, block: KVBlock) -> float:
        return 0.0

    def expected_bytes_alike(self, num_layers: int, layer: LayerShape, num_tokens: int, itemsize: int) -> float:
        return num_layers * num_tokens * layer.numbers * itemsize
