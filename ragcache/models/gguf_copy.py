"""Copies of GGUF files in float32, which load like any other directory."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ragcache.errors import ConfigError, StoreError, first_line, translate_os_errors
from ragcache.files import atomic_write, file_digest
from ragcache.models.machine import machine_bytes
from ragcache.models.named import MANIFEST, WEIGHTS, is_whole, models_home

log = logging.getLogger(__name__)
LOCK_S = 1200.0
READERS = ("gguf", "accelerate")  # packages that transformers needs to read a GGUF file
CONVERSION = 1  # to be increased when the copy of a GGUF file changes
DIGESTS, MOST_DIGESTS = "digests.json", 100
Say = Callable[[str], None]


def refuse_without_readers() -> None:
    """Raise ConfigError if a package that reads GGUF files is not installed."""
    for package in READERS:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f'reading GGUF files takes the package {package}; run: pip install "ragcache-kv[gguf]"')


def make(place: Path, fill: Callable[[Path], None]) -> None:
    """Make a model's directory, under a lock, unless another process has made it meanwhile.

    fill: writes the files into the directory that it gets, which replaces `place` once it has returned

    Raises filelock's Timeout if another process holds the lock for LOCK_S seconds, OSError, and the errors of `fill`.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock", timeout=LOCK_S):
        if not is_sound(place):
            _replace(place, fill)


def _replace(place: Path, fill: Callable[[Path], None]) -> None:
    aside, old = place.with_name(f"{place.name}.new"), place.with_name(f"{place.name}.old")
    try:
        for left in (aside, old):  # left by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir()
        fill(aside)
        files = {path.name: (path.stat().st_size, file_digest(path).hex()) for path in sorted(aside.iterdir())}
        (aside / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")
        if place.exists():
            place.rename(old)
        aside.rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def convert(gguf: Path, into: Path) -> None:
    """Write a GGUF file of a causal language model as a directory in float32.

    Raises the errors of `load_config` and `load_weights` for the file.
    """
    import torch
    from safetensors.torch import save_file

    from ragcache.models.attention import register
    from ragcache.models.checkpoint import load_config, load_tokenizer, load_weights
    from ragcache.models.support import refuse_by_config

    register()
    config = load_config(str(gguf), gguf)
    refuse_by_config(config, str(gguf))
    model = load_weights(str(gguf), config, torch.float32, torch.device("cpu"))
    # Every parameter once: an output head that is the embedding is saved only by its first name.
    save_file(
        {name: tensor.contiguous() for name, tensor in model.named_parameters()}, into / WEIGHTS, {"format": "pt"}
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the file's; transformers would look for quantised weights
    model.config.dtype = torch.float32
    model.config.save_pretrained(into)
    model.generation_config.save_pretrained(into)
    tokenizer = load_tokenizer(str(gguf))
    if tokenizer is not None:
        tokenizer.save_pretrained(into)


def copy_of(file: Path, say: Say) -> str:
    """Return the directory of a GGUF file's copy, made if absent; the file itself if no copy can be kept.

    say: called with a message before the file is converted

    Raises ConfigError if a package that reads GGUF files is missing, and the errors of `convert`.
    """
    refuse_without_readers()
    place = models_home()
    try:
        with translate_os_errors(place):
            place = models_home() / f"gguf-{CONVERSION}-{known_sha256(file)[:16]}"
            if not is_sound(place):
                _refuse_without_room(file, place)
                say(f"Converting {file}, once; the copy is kept in {place} ...")
                make(place, partial(convert, file))
        return str(place)
    except (OSError, SafetensorError, StoreError, Timeout) as error:
        log.warning("%s is converted anew at each opening, as no copy can be kept: %s", file, first_line(error))
        return str(file)


def _refuse_without_room(file: Path, place: Path) -> None:
    """Raise OSError if a copy in float32 does not fit on the disk, or in the memory that it is made in."""
    from ragcache.models.gguf_header import read_header

    try:
        num_bytes = 4 * read_header(file).num_values
    except ValueError:
        return  # `convert` says what is wrong with the file
    free = shutil.disk_usage(next(parent for parent in place.parents if parent.exists())).free
    if num_bytes > min(free, machine_bytes()):
        raise OSError(errno.ENOSPC, "no room")


def known_sha256(file: Path) -> str:
    """Return the SHA-256 of a file, in hex. The file is read again only if its size, inode or times have changed."""
    stat, path = file.stat(), str(file.resolve())
    mark = [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
    memory = models_home() / DIGESTS
    try:
        known = dict(json.loads(memory.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        known = {}
    if path in known and known[path][0] == mark:
        return str(known[path][1])
    known.pop(path, None)
    known[path] = [mark, sha256_of(file)]
    with suppress(OSError, StoreError), atomic_write(memory) as out:
        out.write(json.dumps(dict(list(known.items())[-MOST_DIGESTS:])).encode())
    return str(known[path][1])


def sha256_of(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def is_sound(place: Path) -> bool:
    """Return whether `is_whole` holds and every byte is as it was written."""
    if not is_whole(place):
        return False
    files = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    return all(file_digest(place / name).hex() == digest for name, (_, digest) in files.items())
