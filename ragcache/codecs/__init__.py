"""How block bytes are stored: codecs by name, plug-ins' too, and the safetensors file that holds a block."""

from __future__ import annotations

from ragcache import plugins
from ragcache.codecs.base import Bases as Bases
from ragcache.codecs.base import Codec as Codec
from ragcache.codecs.base import RawCodec as RawCodec
from ragcache.codecs.floats import Bfloat16Codec, Fp8Codec
from ragcache.codecs.kivi import Int4Codec
from ragcache.codecs.kivi import Int8Codec as Int8Codec
from ragcache.errors import check_choice
from ragcache.plugins import Registry

CODECS: Registry[type[Codec]] = Registry(
    plugins.CODECS,
    {"raw": RawCodec, "bfloat16": Bfloat16Codec, "int8": Int8Codec, "int4": Int4Codec, "fp8": Fp8Codec},
)


def get_codec(name: str, bases: Bases | None = None) -> Codec:
    """The codec called `name`, which finds its bases there. Raises ConfigError that names those there are."""
    if name not in CODECS:
        check_choice("codec", name, sorted(CODECS))
    return CODECS[name](bases)
