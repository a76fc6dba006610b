"""Codecs by name, with those of plug-ins. A codec determines how a block's bytes are stored."""

from __future__ import annotations

from ragcache import plugins
from ragcache.codecs.base import Codec as Codec
from ragcache.codecs.basis import Bases as Bases
from ragcache.codecs.floats import Bfloat16Codec
from ragcache.codecs.kivi import Int4Codec
from ragcache.codecs.kivi import Int8Codec as Int8Codec
from ragcache.codecs.none import RawCodec as RawCodec
from ragcache.plugins import Registry, load

CODECS: Registry[type[Codec]] = Registry(
    plugins.CODECS, {"raw": RawCodec, "bfloat16": Bfloat16Codec, "int8": Int8Codec, "int4": Int4Codec}
)


def get_codec(name: str, bases: Bases | None = None) -> Codec:
    """Return the codec called `name`, which finds its bases in `bases`.

    Raises ConfigError that lists the codecs, and PluginError if a plug-in's codec cannot be loaded.
    """
    return load("codec", name, CODECS)(bases)
