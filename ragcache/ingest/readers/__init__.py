"""Read files and folders into documents.

A file's id is its absolute path with symbolic links resolved and forward slashes: no two files share it, and it does
not depend on the path by which the file was named. It is also the id of the file's document, unless the file contains
several. Folders are walked in sorted order; names that begin with a dot and stores are left out.
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

# Source code. XML and YAML are left out: they are data, and a folder may hold much of it that no question needs.
CODE = (
    ".c .cc .cpp .cs .cu .go .h .hpp .java .js .jsx .kt .lua .php .pl .proto .py .r .rb .rs .scala .sh .sql .swift .ts "
    ".tsx"
)
_HERE = "ragcache.ingest.readers"
OWN = {
    **dict.fromkeys((".txt", ".text", ".rst"), f"{_HERE}.plain:read_text"),
    **dict.fromkeys((".md", ".markdown"), f"{_HERE}.markdown:read_markdown"),
    **dict.fromkeys((".jsonl", ".ndjson"), f"{_HERE}.jsonl:read_jsonl"),
    **dict.fromkeys(CODE.split(), f"{_HERE}.plain:read_code"),
}


@cache
def readers() -> dict[str, str]:
    """Return, by suffix (".md"), the place of the reader function as "module:attribute".

    This package's readers have priority over those of plug-ins.

    Readers are imported at first use: the parsers take most of a second, and listing files needs none of them.
    """
    return {**{f".{name}": target for name, target in plugins.targets(plugins.READERS).items()}, **OWN}


def kind_problem(suffix: str) -> str | None:
    """Return why files with this suffix cannot be read, or None if they can."""
    known = readers()
    return None if suffix.lower() in known else f"files of kind {suffix!r} cannot be read; known are {' '.join(known)}"


class SourceFile(NamedTuple):
    """A file to read, and its id.

    source: the file's name in documents and errors; "": its path
    link:   the absolute path where the file was found, if it includes a symbolic link; else ""
    """

    path: Path
    id: str
    source: str = ""
    link: str = ""

    @property
    def place(self) -> str:
        """Return the path where the file was found. It may include links; if these change, the file has vanished."""
        return self.link or self.id


class FileList(NamedTuple):
    """The files found at given paths.

    files:   files to read
    failed:  errors of given paths that cannot be read
    skipped: in folders, files of a kind that has no reader, names that begin with a dot, dangling links, and links to
        folders, which are not followed because they may lead anywhere
    """

    files: list[SourceFile]
    failed: list[ReaderError]
    skipped: list[Path]


def find_files(paths: Iterable[str | os.PathLike[str]]) -> FileList:
    """Return the files at these paths, and those in folders among them. No file is opened."""
    found = FileList([], [], [])
    for path in map(Path, paths):
        try:
            _find(path, found)
        except OSError as error:
            found.failed.append(ReaderError(path, unreadable(error)))
    return found


def file_id(path: str | os.PathLike[str]) -> str:
    """Return the id of the file or folder at this path, which need not exist."""
    return printable(Path(os.path.realpath(path)))


def _source_file(path: Path) -> SourceFile:
    id, place = file_id(path), printable(Path(os.path.abspath(path)))
    # abspath takes "link/.." for the folder that contains the link, so its result is checked.
    return SourceFile(path, id, link=place if place != id and file_id(place) == id else "")


def _find(path: Path, found: FileList) -> None:
    if path.is_dir():
        for file in _walk(path, found.failed):
            if file.suffix.lower() in readers() and file.is_file() and not file.name.startswith("."):
                found.files.append(_source_file(file))
            else:
                found.skipped.append(file)
    elif not path.exists():
        found.failed.append(ReaderError(path, "there is no file or folder of this name"))
    elif problem := kind_problem(path.suffix):
        found.failed.append(ReaderError(path, problem))
    else:
        found.files.append(_source_file(path))


def read_file(file: SourceFile) -> Iterator[Document | ReaderError]:
    """Yield the documents in a file. A record that cannot be read is yielded as its error."""
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
    """Return the record with the file's path replaced by its `source`, if it has a source."""
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
        if STORE_MARK in names:  # a store's own files are not documents
            folders.clear()
            continue
        names += [name for name in folders if name.startswith(".")]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (link for name in folders if (link := Path(folder, name)).is_symlink())
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() or path.is_symlink() or name.startswith("."):
                yield path
