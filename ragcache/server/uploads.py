"""Uploaded files as documents."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from ragcache import Document
from ragcache.errors import ReaderError
from ragcache.ingest.readers import READERS, SourceFile, read_file
from ragcache.ingest.report import Failure

Read = Document | Failure


class Upload(NamedTuple):
    """A file as it came: the name that the client gave it, and its bytes."""

    name: str
    file: BinaryIO


def read_uploads(uploads: Sequence[Upload]) -> list[Read]:
    """The documents in the files; what cannot be read as its failure.

    A file becomes the document that `ragcache ingest` would make of it: its id is its name. Readers want a path, so
    bytes go to a temporary one, which is nowhere named afterwards.
    """
    found: list[Read] = []
    with tempfile.TemporaryDirectory(prefix="ragcache-upload-") as folder:
        for rank, upload in enumerate(uploads):
            found += _read(upload, Path(folder, str(rank)))
    return found


def _read(upload: Upload, place: Path) -> list[Read]:
    name = plain_name(upload.name)
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in READERS:
        known = " ".join(READERS)
        return [_failure(name, f"files of kind {suffix!r} cannot be read; known are {known}")]
    path = place.with_suffix(suffix)
    with open(path, "wb") as file:
        shutil.copyfileobj(upload.file, file)
    read: list[Read] = []
    for one in read_file(SourceFile(path, name)):
        if isinstance(one, Document):
            read.append(replace(one, source=one.source.replace(path.as_posix(), name)))
        else:
            read.append(_failure(one.path.replace(str(path), name), one.reason.replace(str(path), name)))
    return read


def _failure(source: str, reason: str) -> Failure:
    return Failure(source, ReaderError(source, reason))


def plain_name(given: str) -> str:
    """A relative path with forward slashes, without steps upwards: an id, never a place on this machine."""
    parts = [part for part in given.replace("\\", "/").replace("\0", "").split("/") if part not in ("", ".", "..")]
    name = "/".join(parts)[-512:]
    return name.encode("utf-8", "backslashreplace").decode("utf-8") or "unnamed"
