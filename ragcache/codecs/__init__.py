"""How block bytes are stored: codecs by name, and the safetensors file that holds a block."""

from __future__ import annotations

from ragcache.codecs.base import Codec
from ragcache.codecs.raw import RawCodec
from ragcache.errors import ConfigError

CODECS: dict[str, type[Codec]] = {"raw": RawCodec}


def get_codec(name: str) -> Codec:
    """The codec called `name`. Raises ConfigError that names those there are."""
    if name not in CODECS:
        raise ConfigError(f"codec {name!r} is unknown; choose one of {', '.join(sorted(CODECS))}")
    return CODECS[name]()


__all__ = ["CODECS", "Codec", "RawCodec", "get_codec"]
