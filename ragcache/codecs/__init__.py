"""How block bytes are stored: codecs by name, and the safetensors file that holds a block."""

from __future__ import annotations

from ragcache.codecs.base import Codec as Codec
from ragcache.codecs.base import RawCodec as RawCodec
from ragcache.codecs.basis import Bases as Bases
from ragcache.codecs.bfloat16 import Bfloat16Codec
from ragcache.codecs.cachegen import CacheGenCodec
from ragcache.codecs.fp8 import Fp8Codec
from ragcache.codecs.kivi import Int4Codec
from ragcache.codecs.kivi import Int8Codec as Int8Codec
from ragcache.codecs.kvtc import KvtcCodec
from ragcache.codecs.mixed_bits import MikvCodec
from ragcache.codecs.qaq import QaqCodec
from ragcache.errors import check_choice

CODECS: dict[str, type[Codec]] = {
    "raw": RawCodec,
    "bfloat16": Bfloat16Codec,
    "int8": Int8Codec,
    "int4": Int4Codec,
    "fp8": Fp8Codec,
    "cachegen": CacheGenCodec,
    "mikv": MikvCodec,
    "qaq": QaqCodec,
    "kvtc": KvtcCodec,
}


def get_codec(name: str, bases: Bases | None = None) -> Codec:
    """The codec called `name`, which finds its bases there. Raises ConfigError that names those there are."""
    check_choice("codec", name, sorted(CODECS))
    return CODECS[name](bases)
