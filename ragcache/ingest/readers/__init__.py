"""Files and folders to documents.

A file's id is its absolute path, symbolic links resolved, with forward slashes: no two files share it, and it is the
same however the file was named. It is the id of the file's document too, unless the file holds several. Folders are
walked in sorted order; names that begin with a dot and stores are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ragcache import plugins
from ragcache.errors import ReaderError
from ragcache.files import STORE_MARK
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import Reader, printable, readable, unreadable
from ragcache.plugins import load
from ragcache.store.places import edited

# Source code. XML and YAML are data, of which a folder may hold much that nobody asks for.
CODE = (
    ".c .cc .cpp .cs .cu .go .h .hpp .java .js .jsx .kt .lua .php .pl .proto .py .r .rb .rs .scala .sh .sql .swift .ts "
    ".tsx"
)
_HERE = "ragcache.ingest.readers"
OWN = {
    **dict.fromkeys((".txt", ".text", ".rst"), f"{_HERE}.plain:read_text"),
    **dict.fromkeys((".md", ".markdown"), f"{_HERE}.markdown:read_markdown"),
    **dict.fromkeys((".jsonl", ".ndjson"), f"{_HERE}.jsonl:read_jsonl"),
    **dict.fromkeys(CODE.split(), f"{_HERE}.source_code:read_code"),
}


@cache
def readers() -> dict[str, str]:
    """Which function reads a kind of file, by its suffix: this package's, then those of plug-ins.

    Imported at first use: the parsers take most of a second, and whoever only lists files needs none.
    """
    return {**{f".{name}": target for name, target in plugins.targets(plugins.READERS).items()}, **OWN}


class SourceFile(NamedTuple):
    """A file to read, and its id.

    source: what documents and errors call it, where that is not its path
    link:   the absolute path that it was found at, where a symbolic link in it leads to the file; else ""
    """

    path: Path
    id: str
    source: str = ""
    link: str = ""

    @property
    def place(self) -> str:
        """Where the file was found: when a link in this path goes or moves, the file is not there any more."""
        return self.link or self.id


class FileList(NamedTuple):
    """files: to be read. failed: given paths that cannot be. skipped: in folders, files of a kind that has no reader,
    and links to folders, which are not followed (they may lead anywhere), or to nothing."""

    files: list[SourceFile]
    failed: list[ReaderError]
    skipped: list[Path]


def find_files(paths: Iterable[str | os.PathLike[str]]) -> FileList:
    """The files at these paths, folders walked. Nothing is opened."""
    found = FileList([], [], [])
    for path in map(Path, paths):
        try:
            _find(path, found)
        except OSError as error:
            found.failed.append(ReaderError(path, unreadable(error)))
    return found


def file_id(path: str | os.PathLike[str]) -> str:
    """The id of the file or folder at this path, whether it is there or not."""
    return printable(Path(os.path.realpath(path)))


def _source_file(path: Path) -> SourceFile:
    id, place = file_id(path), printable(Path(os.path.abspath(path)))
    # abspath takes "link/.." for the folder that the link is in.
    return SourceFile(path, id, link=place if place != id and file_id(place) == id else "")


def _find(path: Path, found: FileList) -> None:
    if path.is_dir():
        for file in _walk(path, found.failed):
            if file.suffix.lower() in readers() and file.is_file():
                found.files.append(_source_file(file))
            else:
                found.skipped.append(file)
    elif not path.exists():
        found.failed.append(ReaderError(path, "there is no file or folder of this name"))
    elif path.suffix.lower() not in readers():
        known = " ".join(readers())
        found.failed.append(ReaderError(path, f"files of kind {path.suffix!r} cannot be read; known are {known}"))
    else:
        found.files.append(_source_file(path))


def read_file(file: SourceFile) -> Iterator[Document | ReaderError]:
    """The documents in a file; what cannot be read is yielded as its error."""
    try:
        for record in reader_of(file.path)(file.path, file.id):
            if isinstance(record, Document):
                text, places = edited(record.text, record.places, readable)
                record = replace(record, text=text, title=readable(record.title), places=places)
                if not record.text.strip():
                    record = ReaderError(file.path, "there is no text in it")
            yield _renamed(record, file)
    except ReaderError as error:
        yield _renamed(error, file)


def reader_of(path: Path) -> Reader:
    """Return the reader of this kind of file, imported at its first use. Raises ConfigError, PluginError."""
    objects: Mapping[str, Reader | str] = readers()
    return load("kind of file", path.suffix.lower(), objects)


def _renamed(record: Document | ReaderError, file: SourceFile) -> Document | ReaderError:
    """The record with the file's `source` in place of its path."""
    if not file.source:
        return record
    if isinstance(record, Document):
        return replace(record, source=record.source.replace(printable(file.path), file.source))
    path, reason = (part.replace(str(file.path), file.source) for part in (record.path, record.reason))
    return type(record)(path, reason)


def _walk(root: Path, failed: list[ReaderError]) -> Iterator[Path]:
    def report(error: OSError) -> None:
        failed.append(ReaderError(error.filename or root, f"the folder cannot be read ({error.strerror})"))

    for folder, folders, names in os.walk(root, onerror=report):
        if STORE_MARK in names:  # a store's own files are no documents
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (link for name in folders if (link := Path(folder, name)).is_symlink())
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and (path.is_file() or path.is_symlink()):
                yield path
