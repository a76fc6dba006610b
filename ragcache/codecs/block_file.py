"""A KV block in a container, whose metadata hold the block's key, its codec and the versions of format and codec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ragcache.codecs import Bases, Codec, get_codec
from ragcache.codecs.container import (
    Container,
    Load,
    Reserve,
    pack_container,
    read_container,
    unpack_container,
    write_container,
)
from ragcache.codecs.none import RawCodec
from ragcache.errors import ConfigError, DamagedBlockError, PluginError, SchemaVersionError, UnencodableBlockError
from ragcache.files import Rename
from ragcache.kv.block import KVBlock, MixedBlock
from ragcache.kv.sparse_block import SparseBlock
from ragcache.lazy_torch import Tensor, torch
from ragcache.seal import UNSEALED, Seal

FORMAT_VERSION = 1
_WAY_OUT = "use the version that wrote it, or delete the block's document and ingest it again"


def write_block(
    path: Path,
    key: str,
    block: KVBlock,
    codec: Codec,
    *,
    reserve: Reserve | None = None,
    rename: Rename | None = None,
    seal: Seal = UNSEALED,
) -> KVBlock:
    """Store a block under its key and return it as it will be read back (with other numbers if the codec is lossy).

    reserve, rename: see `write_container`
    seal: the store's; it covers the block's key, so a file that is renamed to another key is refused

    Raises StoreFullError, StoreReadOnlyError, UnencodableBlockError.
    """
    tensors = encode_block(key, block, codec)
    write_container(path, tensors, _metadata(key, block, codec), reserve=reserve, rename=rename, seal=seal.of(key))
    return codec.decode(tensors)


def pack_block(key: str, block: KVBlock, codec: Codec, seal: Seal) -> tuple[bytes, KVBlock]:
    """Return the bytes that `write_block` would write, and the block as it will be read back.

    Raises UnencodableBlockError.
    """
    tensors = encode_block(key, block, codec)
    return b"".join(pack_container(tensors, _metadata(key, block, codec), seal.of(key))), codec.decode(tensors)


def _metadata(key: str, block: KVBlock, codec: Codec) -> dict[str, str]:
    return {
        "format_version": str(FORMAT_VERSION),
        "key": key,
        "codec": codec.name,
        "codec_version": str(codec.version),
        "num_tokens": str(block.num_tokens),
    }


def codec_of(block: KVBlock) -> Codec:
    """Return the codec whose tensors a block holds: encoding the block with this codec changes no bit."""
    if isinstance(codec := getattr(block, "codec", None), Codec):
        return codec
    if isinstance(block, MixedBlock):
        return codec_of(block.parts[0])
    return codec_of(block.held) if isinstance(block, SparseBlock) else RawCodec()


def encode_block(key: str, block: KVBlock, codec: Codec) -> dict[str, Tensor]:
    """Return the codec's tensors for a block.

    Raises UnencodableBlockError, naming the block, if the codec refuses it or if a tensor holds NaN or an infinity.
    """
    try:
        tensors = codec.encode(block)
        if not are_finite(tensors.values()):
            raise UnencodableBlockError(
                "it holds NaN or an infinity; a model in float16 may have overflowed: load it with dtype bfloat16 or "
                "float32"
            )
    except UnencodableBlockError as error:
        raise UnencodableBlockError(f"block {key} cannot be stored with codec {codec.name!r}: {error}") from error
    return tensors


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no tensor holds NaN or an infinity.

    Floats on the CPU are looked at as integers, in pieces that stay in the processor's cache: 8 GB/s, where
    `torch.isfinite` takes 0.1 to 0.2.
    """
    for tensor in tensors:
        if (bits := _EXPONENTS.get(str(tensor.dtype))) is None:
            continue
        if tensor.device.type != "cpu":
            if not bool(tensor.isfinite().all()):
                return False
            continue
        numbers = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().view(f"i{tensor.itemsize}")
        pieces = (numbers[start : start + _PIECE] for start in range(0, len(numbers), _PIECE))
        if any((piece & bits.without_sign).max() >= bits.exponent for piece in pieces):
            return False
    return True


class _Bits(NamedTuple):
    """A float's bits as an integer: all but its sign, and its exponent, whose bits are all set in NaN and infinity."""

    without_sign: int
    exponent: int


_EXPONENTS = {
    "torch.float32": _Bits(0x7FFFFFFF, 0x7F800000),
    "torch.bfloat16": _Bits(0x7FFF, 0x7F80),
    "torch.float16": _Bits(0x7FFF, 0x7C00),
}
_PIECE = 1 << 17


def read_block(
    path: Path, key: str, bases: Bases | None = None, load: Load | None = None, *, seal: Seal = UNSEALED
) -> KVBlock:
    """Return the block of `key`, verified. Its tensors alias the mapped or read file if the codec allows that.

    bases: for codecs that need them
    load:  see `read_container`

    Raises MissingBlockError, DamagedBlockError (also for the file of another key or store) and SchemaVersionError
    (written by a newer version: intact, but this version cannot read it).
    """
    return _block_of(str(path), read_container(path, load, seal.of(key)), bases)


def check_finite(key: str, block: KVBlock) -> None:
    """Raise DamagedBlockError if a stored block holds numbers that `encode_block` would have refused."""
    if not are_finite(block.held_tensors()):
        raise DamagedBlockError(f"block {key} holds NaN or an infinity; it has to be computed again")


def unpack_block(where: str, key: str, data: bytearray, bases: Bases | None, seal: Seal) -> KVBlock:
    """Return the block in bytes from elsewhere, as `read_block` does; its tensors alias the bytes.

    where: name of the source in errors

    Raises DamagedBlockError, SchemaVersionError.
    """
    return _block_of(where, unpack_container(where, data, seal.of(key)), bases)


def _block_of(where: str, container: Container, bases: Bases | None) -> KVBlock:
    tensors, metadata = container
    codec = _codec_of(where, metadata, bases)
    block = codec.decode(tensors)
    if metadata.get("num_tokens") != str(block.num_tokens):
        raise DamagedBlockError(f"{where}: holds {block.num_tokens} tokens, but says {metadata.get('num_tokens')}")
    return block


def _codec_of(where: str, metadata: Mapping[str, str], bases: Bases | None) -> Codec:
    """Return the codec that can decode this file.

    The seal has been checked, so the file is not damaged: an unknown version is a newer version, and an unknown codec
    belongs to another package. Raises SchemaVersionError for these.
    """
    name = metadata.get("codec", "")
    if _number(metadata, "format_version") > FORMAT_VERSION:
        raise SchemaVersionError(
            f"{where}: block format {metadata.get('format_version')}; this version of ragcache reads up to format "
            f"{FORMAT_VERSION}: {_WAY_OUT}"
        )
    try:
        codec = get_codec(name, bases)
    except (ConfigError, PluginError) as error:
        raise SchemaVersionError(
            f"{where}: this block is intact, but codec {name!r} is needed to read it: install the package that brings "
            f"this codec, or the version of ragcache that wrote the block ({error})"
        ) from error
    if _number(metadata, "codec_version") > codec.version:
        raise SchemaVersionError(
            f"{where}: version {metadata.get('codec_version')} of codec {name!r}; this version of ragcache reads up to "
            f"{codec.version}: {_WAY_OUT}"
        )
    return codec


def _number(metadata: Mapping[str, str], name: str) -> int:
    text = metadata.get(name, "")
    if not text.isdecimal() or len(text) > 18:  # Python refuses to read the longest numbers
        raise DamagedBlockError(f"not a block file: {name} is {text!r}")
    return int(text)
