"""A checkpoint's files, by a digest that needs no model: what another engine loads is compared with what a store was
made with."""

from __future__ import annotations

import hashlib
from pathlib import Path

import xxhash

from ragcache.errors import ModelMismatchError
from ragcache.kv.block_key import digest
from ragcache.models.adapter import ROWS_FILE, Adapter
from ragcache.models.hub import split_file
from ragcache.models.lora import Lora

FILES = ("*.safetensors", "*.bin", "config.json")
CHUNK_BYTES = 16 << 20


def checkpoint_digest(name: str) -> str | None:
    """SHA-256 over the weights' and the configuration's bytes (an adapter's: its base's, and the rows); None where the
    model is no directory here and not in the hub's cache either, or merged as it is loaded.

    name: a directory or hub id, or a GGUF file of one

    Raises AdapterError for an adapter that cannot be read.
    """
    place, file = split_file(name)
    directory = find_directory(place)
    if directory is None:
        return None
    if file:
        return _file_digest(directory / file["gguf_file"]).hex()
    if Lora.find(directory) is not None:  # its weights are in no file
        return None
    if (adapter := Adapter.find(directory)) is not None:  # wherever its base is: loading compares that
        rows = _file_digest(directory / ROWS_FILE).hex()
        return digest([adapter.base.checkpoint, adapter.spec.section(), rows])
    whole = hashlib.sha256()
    for path in sorted({path for pattern in FILES for path in directory.glob(pattern)}):
        whole.update(path.name.encode())
        whole.update(_file_digest(path))
    return whole.hexdigest()


def refuse_other_checkpoint(name: str, expected: str) -> None:
    """Raises ModelMismatchError where a model's files are not those that a store's blocks were computed with."""
    if checkpoint_digest(name) != expected:
        raise ModelMismatchError(
            f"{name}: its weights or config.json are not those that the store's blocks were computed with; serve the "
            "model that the store was made with, or make a new store with this one"
        )


def find_directory(name: str) -> Path | None:
    """Where a model's files are on this machine; None where they are not. name: a directory or hub id"""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # the hub's client raises its own errors, httpx's and the system's: all say that it is not here
        return None


def _file_digest(path: Path) -> bytes:
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(CHUNK_BYTES):
            found.update(part)
    return bytes(found.digest())
