"""A digest of a checkpoint's files, which needs no loaded model.

It shows whether another engine loads the model that a store was made with, and whether an adapter has its own base.
"""

from __future__ import annotations

import hashlib

from ragcache.files import file_digest
from ragcache.kv.block_key import digest
from ragcache.models.adapter import Adapter
from ragcache.models.checkpoint import find_directory
from ragcache.models.hub import split_file
from ragcache.models.lora import LORA_FILE, Lora

FILES = ("*.safetensors", "*.bin", "config.json")


def checkpoint_digest(name: str) -> str | None:
    """Return the SHA-256 over the weights' and the configuration's bytes.

    The digest of an adapter that acts on passages alone covers its base's digest, its matrices and its rows. Returns
    None if the model is neither a directory here nor in the hub's cache, or is an adapter that is merged into its base
    when it is loaded, since its weights are in no file.

    name: a directory or hub id, or a GGUF file in one of these

    Raises AdapterError for an adapter that cannot be read.
    """
    place, file = split_file(name)
    directory = find_directory(place)
    if directory is None:
        return None
    if file:
        return file_digest(directory / file["gguf_file"]).hex()
    adapter = Adapter.find(directory)
    if adapter is not None and adapter.on_passages:  # the base's files are compared when they are loaded
        own = file_digest(directory / LORA_FILE).hex()
        return digest([adapter.base.checkpoint, adapter.spec.section(), own])
    if Lora.find(directory) is not None:  # its weights are in no file
        return None
    whole = hashlib.sha256()
    for path in sorted({path for pattern in FILES for path in directory.glob(pattern)}):
        whole.update(path.name.encode())
        whole.update(file_digest(path))
    return whole.hexdigest()
