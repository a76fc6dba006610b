"""One KV block in one container: key, codec and versions in the metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ragcache.codecs import CODECS, Codec, get_codec
from ragcache.codecs.container import Claim, read_container, write_container
from ragcache.codecs.layered import EncodedBlock
from ragcache.codecs.raw import RawCodec
from ragcache.errors import DamagedBlockError, SchemaVersionError, UnencodableBlockError
from ragcache.kv.block import KVBlock, MixedBlock

FORMAT_VERSION = 2  # of blocks whose layers differ; all others are written in 1, which older versions read
_WAY_OUT = "use the version that wrote it, or delete the block's document and ingest it again"


def write_block(path: Path, key: str, block: KVBlock, codec: Codec, *, claim: Claim | None = None) -> KVBlock:
    """Store a block under its key and return it as it will be read back (another one where the codec is lossy).

    claim: see `write_container`
    Raises StoreFullError, StoreReadOnlyError, UnencodableBlockError.
    """
    tensors = encode_block(key, block, codec)
    metadata = {
        "format_version": str(FORMAT_VERSION if isinstance(block, MixedBlock) else 1),
        "key": key,
        "codec": codec.name,
        "codec_version": str(codec.version),
        "num_tokens": str(block.num_tokens),
    }
    write_container(path, tensors, metadata, claim=claim)
    return codec.decode(tensors)


def codec_of(block: KVBlock) -> Codec:
    """The codec in whose tensors a block that was stored is held: encoding with it changes no bit."""
    if isinstance(block, MixedBlock):
        return codec_of(block.parts[0])
    return block.codec if isinstance(block, EncodedBlock) else RawCodec()


def encode_block(key: str, block: KVBlock, codec: Codec) -> dict[str, Tensor]:
    """The codec's tensors of a block. Raises UnencodableBlockError that names the block."""
    try:
        return codec.encode(block)
    except UnencodableBlockError as error:
        raise UnencodableBlockError(f"block {key} cannot be stored with codec {codec.name!r}: {error}") from error


def read_block(path: Path, key: str) -> KVBlock:
    """The block of `key`, verified; its tensors alias the mapped file where the codec lets them.

    Raises MissingBlockError, DamagedBlockError (another block's file included) and SchemaVersionError (written by a
    newer version: intact, but not ours to read).
    """
    tensors, metadata = read_container(path)
    codec = _codec_of(path, metadata)
    if metadata.get("key") != key:
        raise DamagedBlockError(f"{path}: holds block {metadata.get('key')}, not {key}")
    block = codec.decode(tensors)
    if metadata.get("num_tokens") != str(block.num_tokens):
        raise DamagedBlockError(f"{path}: holds {block.num_tokens} tokens, but says {metadata.get('num_tokens')}")
    return block


def _codec_of(path: Path, metadata: Mapping[str, str]) -> Codec:
    """The codec that can decode this file. The checksum was right: an unknown version is a newer one, no damage."""
    name = metadata.get("codec", "")
    if _number(metadata, "format_version") > FORMAT_VERSION or name not in CODECS:
        raise SchemaVersionError(
            f"{path}: block format {metadata.get('format_version')}, codec {name!r}; this version of ragcache reads "
            f"format {FORMAT_VERSION} with codecs {', '.join(sorted(CODECS))}: {_WAY_OUT}"
        )
    codec = get_codec(name)
    if _number(metadata, "codec_version") > codec.version:
        raise SchemaVersionError(
            f"{path}: version {metadata.get('codec_version')} of codec {name!r}; this version of ragcache reads up to "
            f"{codec.version}: {_WAY_OUT}"
        )
    return codec


def _number(metadata: Mapping[str, str], name: str) -> int:
    text = metadata.get(name, "")
    if not text.isdecimal():
        raise DamagedBlockError(f"not a block file: {name} is {text!r}")
    return int(text)
