"""What is read from files, for tests of readers."""

from pathlib import Path

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers import find_files, read_file


def read_path(path: Path) -> list[Document | ReaderError]:
    """The documents in a file or folder, behind what cannot be read in it."""
    found = find_files([path])
    return [*found.failed, *(one for file in found.files for one in read_file(file))]


def read_one(path: Path) -> Document:
    (document,) = read_path(path)
    assert isinstance(document, Document), document
    return document


def error_of(path: Path) -> str:
    (error,) = read_path(path)
    assert isinstance(error, ReaderError)
    assert error.path == str(path)
    return error.reason
