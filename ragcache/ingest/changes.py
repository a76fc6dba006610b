"""Which stored document an input is, and which files of the store have vanished.

A file's document is found by its id. Three kinds are found otherwise, and take the new id without being made again: the
same content at a path that has vanished (`sync`), and, where a version before schema 3 stored the document under a
relative path, the same source or a path that ends like it and has the same text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ragcache.errors import ConfigError, DuplicateDocumentError, ReaderError
from ragcache.ingest.document import Document, hash_parts
from ragcache.ingest.readers import SourceFile, file_id
from ragcache.ingest.readers.plain import printable
from ragcache.store.records import StoredVersion


class Found(NamedTuple):
    """A stored document: the id that it has, and whether its content is the input's, whatever the places in it."""

    id: str
    same: bool


class DocumentChanges:
    """The documents of the store as an ingestion finds and changes them, without their texts."""

    def __init__(self, versions: dict[str, StoredVersion], settings: Mapping[str, Any]) -> None:
        """settings: the chunker's, which content hashes take in"""
        self._versions = versions
        self._settings = settings
        self._vanished: dict[str, list[str]] = {}  # ids by content hash
        self._claimed: set[str] = set()  # ids of inputs: these are not moved elsewhere

    @cached_property
    def _earlier(self) -> dict[str, str]:
        """Ids of what versions before schema 3 stored from files, by the ids that they get today."""
        earlier = ((id, one.source) for id, one in self._versions.items() if one.file is None)
        return {new: id for id, source in earlier if (new := _id_today(id, source)) is not None}

    @cached_property
    def _earlier_ids(self) -> set[str]:
        return set(self._earlier.values())

    def version(self, id: str) -> StoredVersion:
        return self._versions[id]

    def find(self, document: Document, content_hash: str, file: str, is_text_of: Callable[[str], bool]) -> Found | None:
        """The stored document that this one is; None where it is new.

        file: place of the file that it is from, or ""
        is_text_of: whether the document's text is that of the stored document with an id
        Raises DuplicateDocumentError where its id belongs to a document of another file.
        """
        self._claimed.add(document.id)
        stored = self._versions.get(document.id)
        if stored is not None:
            self._refuse_other_file(document.id, stored, file)
            if self._is_same(document, content_hash, stored):
                return Found(document.id, same=True)
        vanished = [
            id
            for id in self._vanished.get(hash_parts(content_hash).content, ())
            if id in self._versions and id not in self._claimed
        ]
        if file and vanished:
            return Found(vanished[0], same=True)
        if stored is not None:
            return Found(document.id, same=False)
        earlier = self._find_earlier(document.id, is_text_of) if file else None
        if earlier is None:
            return None
        return Found(earlier, self._is_same(document, content_hash, self._versions[earlier]))

    def move(self, id: str, new_id: str, version: StoredVersion) -> None:
        del self._versions[id]
        self._versions[new_id] = version
        if id != new_id and id in self._earlier_ids:
            self._earlier_ids.remove(id)

    def place(self, id: str, file: SourceFile) -> str:
        """Return the place that a document of the file is stored with: one without links, else the one that it was
        found at first, while that leads to the file."""
        stored = self._versions.get(id)
        known = None if stored is None else stored.file
        return known if file.link and known and file_id(known) == file.id else file.place

    def content_hashes(self, source: SourceFile | Document) -> frozenset[str]:
        """The content hashes of what is stored from a file, or under a document's id."""
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
        """Note the documents under the roots whose files are neither found nor there, or that a link leads past now:
        `find` follows their content.

        found: ids of the files that were found, by their places
        """
        linked = {place: file for place, file in found.items() if place != file}
        files = set(found.values())
        for id, stored in self._versions.items():
            if not stored.file:
                continue
            if (file := linked.get(stored.file)) is not None:  # ids of its documents: the file's own, or begin with it
                has_moved = os.path.isabs(id) and id not in files and not id.startswith(f"{file}#")
            else:
                has_moved = stored.file not in found and _is_under(stored.file, roots) and _is_gone(stored.file)
            if has_moved:
                self._vanished.setdefault(hash_parts(stored.content_hash).content, []).append(id)

    def vanished(self, roots: Collection[str], read: Mapping[str, bool], seen: Collection[str]) -> list[str]:
        """Ids of documents from files under the roots that have gone, or from files that do not hold them any more.

        read: whether a file was read without a failure, by its place. seen: ids of the documents in all of them
        """
        return [
            id
            for id, stored in self._versions.items()
            if stored.file
            and id not in seen
            and _is_under(stored.file, roots)
            and (read[stored.file] if stored.file in read else _is_gone(stored.file))
        ]

    def _is_same(self, document: Document, content_hash: str, stored: StoredVersion) -> bool:
        hashes = [content_hash]
        if stored.file is None:
            hashes.append(document.content_hash(self._settings, source=stored.source))
        return hash_parts(stored.content_hash).content in (hash_parts(one).content for one in hashes)

    def _refuse_other_file(self, id: str, stored: StoredVersion, file: str) -> None:
        """Records of two files that state the same id would replace each other at every run."""
        if not file or not stored.file or stored.file == file or _is_gone(stored.file):
            return
        if file_id(stored.file) != file_id(file):
            raise DuplicateDocumentError(
                f"{file}: the id {id!r} belongs to a document of {stored.file}; give the record an id of its own, or "
                f"delete {id!r} first"
            )

    def _find_earlier(self, new_id: str, is_text_of: Callable[[str], bool]) -> str | None:
        candidates = self._earlier_ids - self._claimed
        known = self._earlier.get(new_id)
        if known in candidates:
            return known
        parts = new_id.split("/")
        endings = ("/".join(parts[start:]) for start in range(1, len(parts)))
        return next((end for end in endings if end in candidates and is_text_of(end)), None)


def sync_roots(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The places of folders and files that are to be compared with the store: as they are named, and where links in
    these names lead.

    Raises ConfigError where there are none, ReaderError for one that is not there or cannot be read: what is in it
    would seem to have vanished.
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


def _id_today(id: str, source: str) -> str | None:
    """The id that a document from before schema 3 would get today, by its source as seen from the current directory;
    None where it was from no file: a file's id was an ending of its source."""
    record = re.fullmatch(r"(?P<path>.*):(?P<line>\d+)", source, re.DOTALL)
    path, mark = (record["path"], f"#{record['line']}") if record else (source, "")
    return file_id(path) + mark if f"/{path}{mark}".endswith(f"/{id}") else None


def _is_under(file: str, roots: Collection[str]) -> bool:
    return any(file == root or file.startswith(root.rstrip("/") + "/") for root in roots)


def _is_gone(file: str) -> bool:
    """Whether there is certainly no such file, or nothing where a link leads: one that the system does not let us see
    may be there."""
    try:
        os.lstat(file)
        os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
