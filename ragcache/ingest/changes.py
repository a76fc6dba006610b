"""Match the inputs of an ingestion with stored documents, and find stored documents whose files have vanished.

A file's document is found by its id. With `sync` it is also found by its content, if the stored document's own file has
vanished: the stored document then moves to the new id, and its KV need not be computed again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ragcache.errors import ConfigError, DuplicateDocumentError, ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers import SourceFile, file_id
from ragcache.ingest.readers.plain import printable
from ragcache.store.records import StoredVersion


class Found(NamedTuple):
    """The stored document of an input: its id, and whether it has the input's content."""

    id: str
    same: bool


class DocumentChanges:
    """The documents of the store as an ingestion finds and changes them, without their texts."""

    def __init__(self, versions: dict[str, StoredVersion]) -> None:
        self._versions = versions
        self._vanished: dict[str, list[str]] = {}  # ids by content hash
        self._claimed: set[str] = set()  # ids of inputs: these are not moved elsewhere

    def version(self, id: str) -> StoredVersion:
        return self._versions[id]

    def find(self, document: Document, content_hash: str, file: str) -> Found | None:
        """Return the stored document that `document` corresponds to, or None if it is new.

        In order of preference: a document with its id and content, a document with its content whose file has vanished
        (see `look_for_vanished`), a document with its id and other content.

        file: path of the document's file (`SourceFile.place`), or ""
        Raises DuplicateDocumentError if its id belongs to a document of another file.
        """
        self._claimed.add(document.id)
        stored = self._versions.get(document.id)
        if stored is not None:
            self._refuse_other_file(document.id, stored, file)
            if stored.content_hash == content_hash:
                return Found(document.id, same=True)
        there = self._vanished.get(content_hash, ())
        vanished = [id for id in there if id in self._versions and id not in self._claimed]
        if file and vanished:
            return Found(vanished[0], same=True)
        return None if stored is None else Found(document.id, same=False)

    def move(self, id: str, new_id: str, version: StoredVersion) -> None:
        del self._versions[id]
        self._versions[new_id] = version

    def place(self, id: str, file: SourceFile) -> str:
        """Return the path to store with a document of the file, as its place.

        The file's path replaces the stored one, except if the file was found through a link: then the stored path is
        kept as long as it leads to the same file.
        """
        stored = self._versions.get(id)
        known = None if stored is None else stored.file
        return known if file.link and known and file_id(known) == file.id else file.place

    def content_hashes(self, source: SourceFile | Document) -> frozenset[str]:
        """Return the content hashes of the documents stored from a file, or under a document's id."""
        if isinstance(source, Document):
            stored = self._versions.get(source.id)
            return frozenset() if stored is None else frozenset([stored.content_hash])
        return frozenset().union(*(self._hashes_by_file.get(name, ()) for name in (source.id, source.place)))

    @cached_property
    def _hashes_by_file(self) -> dict[str, frozenset[str]]:
        found: dict[str, list[str]] = {}
        for version in self._versions.values():
            if version.file:
                found.setdefault(version.file, []).append(version.content_hash)
        return {file: frozenset(hashes) for file, hashes in found.items()}

    # Files that have vanished

    def look_for_vanished(self, roots: Collection[str], found: Mapping[str, str]) -> None:
        """Note the documents under the roots whose files have vanished, or whose path is now a link to another file.

        `find` then recognises their content at other paths.

        found: ids of the files that were found, by the paths where they were found
        """
        linked = {place: file for place, file in found.items() if place != file}
        files = set(found.values())
        for id, stored in self._versions.items():
            if not stored.file:
                continue
            if (file := linked.get(stored.file)) is not None:  # a file's documents have its id, or its id, # and more
                has_moved = os.path.isabs(id) and id not in files and not id.startswith(f"{file}#")
            else:
                has_moved = stored.file not in found and _is_under(stored.file, roots) and _is_gone(stored.file)
            if has_moved:
                self._vanished.setdefault(stored.content_hash, []).append(id)

    def vanished(self, roots: Collection[str], read: Mapping[str, bool], seen: Collection[str]) -> list[str]:
        """Return the ids of documents under the roots whose files have vanished or no longer contain them.

        read: whether a file was read without a failure, by the path where it was found
        seen: ids of the documents in all files that were read
        """
        return [
            id
            for id, stored in self._versions.items()
            if stored.file
            and id not in seen
            and _is_under(stored.file, roots)
            and (read[stored.file] if stored.file in read else _is_gone(stored.file))
        ]

    def _refuse_other_file(self, id: str, stored: StoredVersion, file: str) -> None:
        """Raise DuplicateDocumentError if the stored document is from another file that still exists.

        Otherwise records of two files with the same id would replace each other at every run.
        """
        if not file or not stored.file or stored.file == file or _is_gone(stored.file):
            return
        if file_id(stored.file) != file_id(file):
            raise DuplicateDocumentError(
                f"{file}: the id {id!r} belongs to a document of {stored.file}; give the record an id of its own, or "
                f"delete {id!r} first"
            )


def sync_roots(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the places of the folders and files to compare with the store: each path as given and with links resolved.

    Raises ConfigError if no paths are given, and ReaderError for a path that does not exist or cannot be read, because
    its documents would seem to have vanished.
    """
    roots = list[str]()
    for path in map(Path, paths):
        try:
            if path.is_dir():
                os.scandir(path).close()
            else:
                path.stat()
        except OSError as error:
            raise ReaderError(
                path,
                f"it cannot be read ({error.strerror}); nothing was changed, since all of it would count as vanished",
            ) from error
        roots += dict.fromkeys([printable(Path(os.path.abspath(path))), file_id(path)])
    if not roots:
        raise ConfigError("sync=True compares files and folders with the store; give it one")
    return roots


def _is_under(file: str, roots: Collection[str]) -> bool:
    return any(file == root or file.startswith(root.rstrip("/") + "/") for root in roots)


def _is_gone(file: str) -> bool:
    """Return whether the file, or the target of a link, certainly does not exist. A file that the system does not let
    us see may exist."""
    try:
        os.lstat(file)
        os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
