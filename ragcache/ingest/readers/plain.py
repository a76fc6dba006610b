"""Plain text: the decoding and the checks that all readers share, and the reader of text files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document

# Reads a file into documents. The string is the file's id and the source of its documents. A record that cannot be read
# is yielded as its error; if the whole file cannot be read, the error is raised.
Reader = Callable[[Path, str], Iterator[Document | ReaderError]]

ENCODING: ContextVar[str | None] = ContextVar("ragcache_encoding", default=None)
"""Encoding of text that is not UTF-8, as `ReadLimits.encoding` states it."""
STATE = "--encoding, ReadLimits.encoding"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# Characters without width, which split words for tokenizers and searches, and typographic ligatures.
_UNSEEN: dict[int, str | None] = {
    **dict.fromkeys((0xAD, 0x200B, 0x2060, 0xFEFF)),
    **{0xFB00 + rank: letters for rank, letters in enumerate(("ff", "fi", "fl", "ffi", "ffl"))},
}


def read_bytes(path: Path) -> bytes:
    """Return the file's bytes. Raises ReaderError if it cannot be opened or is empty."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ReaderError(path, unreadable(error)) from error
    if not data.strip():
        raise ReaderError(path, "the file is empty")
    return data


def decode(data: bytes, path: str | os.PathLike[str]) -> str:
    """Decode UTF-8, UTF-16 with a byte order mark, or else the stated encoding, into text with "\\n" line ends.

    Encodings are not guessed: charset-normalizer decodes a fifteenth of short texts into letters of another script, and
    more of those in Latin letters into names that do not exist. Raises ReaderError.
    """
    stated = ENCODING.get()
    tried = ["utf-16"] if data.startswith(_UTF16) else ["utf-8-sig"] * (b"\0" not in data) + [stated] * bool(stated)
    if not tried:
        raise ReaderError(path, "the file is binary (it holds NUL bytes), not text")
    text, problems = "", list[str]()
    for encoding in filter(None, tried):
        try:
            text = data.decode(encoding)
            break
        except UnicodeDecodeError as error:
            name, byte = encoding.upper().removesuffix("-SIG"), data[error.start]
            problems.append(f"not {name} (byte {byte:#04x} at offset {error.start})")
    else:
        raise ReaderError(
            path, f"the file is {' and '.join(problems)}; save it as UTF-8, or state its encoding ({STATE})"
        )
    text = text.removeprefix("\ufeff")
    if "\0" in text:
        raise ReaderError(path, "the file is binary (it holds NUL characters), not text")
    if not text.strip():
        raise ReaderError(path, "the file is empty")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def unreadable(error: OSError) -> str:
    return f"the file cannot be read ({error.strerror})"


def printable(path: Path) -> str:
    """Return the path with forward slashes, and with bytes that are not UTF-8 escaped, since no store can hold them."""
    return path.as_posix().encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def storable(text: str) -> str:
    """Return the text without NULs and halves of surrogate pairs: broken files contain them, and no store can hold
    them."""
    return text.replace("\0", "").encode("utf-8", "ignore").decode()


def readable(text: str) -> str:
    """Return the text as it appears: without soft hyphens and other zero-width characters, ligatures as letters."""
    return text if text.isascii() else text.translate(_UNSEEN)


def fenced(code: str, language: str = "") -> str:
    """Return the code as a Markdown block whose fence is longer than any backtick run in the code."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", code)), default=0))
    return f"{fence}{language}\n{code}\n{fence}"


def read_text(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    yield Document(document_id, decode(read_bytes(path), path), source=document_id)
