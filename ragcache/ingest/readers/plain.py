"""Plain text: the decoding and the checks that all readers share, and the readers of text files and source code."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document

# Reads a file into documents. The string is the file's id and the source of its documents. A record that cannot be read
# is yielded as its error; if the whole file cannot be read, the error is raised.
Reader = Callable[[Path, str], Iterator[Document | ReaderError]]

ENCODING: ContextVar[str | None] = ContextVar("ragcache_encoding", default=None)
"""Encoding of text that is not UTF-8, as `ReadLimits.encoding` states it."""
STATE = "--encoding, ReadLimits.encoding"  # where users state it, for messages
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# What programs mean by an encoding's name (WHATWG, Encoding): a larger set than Python's of the same name.
_MEANT = {
    **dict.fromkeys(("ascii", "iso8859-1"), "cp1252"),
    **dict.fromkeys(("tis-620", "iso8859-11", "windows-874"), "cp874"),
    **dict.fromkeys(("gb2312", "gbk", "x-gbk"), "gb18030"),
    **dict.fromkeys(("shift_jis", "x-sjis"), "cp932"),
    "iso8859-9": "cp1254",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
    "iso-8859-8-i": "iso8859-8",
}
_OF_ONE_BYTE = re.compile(r"ascii|iso8859|cp125|cp874|koi8|mac")
# Characters without width, which split words for tokenizers and searches, and typographic ligatures.
_UNSEEN: dict[int, str | None] = {
    **dict.fromkeys((0xAD, 0x200B, 0x2060, 0xFEFF)),
    **{0xFB00 + rank: letters for rank, letters in enumerate(("ff", "fi", "fl", "ffi", "ffl"))},
}
_DATA_URI = re.compile(r"""(\bdata:[\w.+-]+/[\w.+-]+)[;,][^\s"'()<>\\]{100,}""")


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

    Encodings are not guessed: charset-normalizer decodes one short text in fifteen into letters of another script, and
    even more texts in Latin letters so that names come out misspelt. Raises ReaderError.
    """
    stated = ENCODING.get() or ""
    stated = _MEANT.get(codecs.lookup(stated).name, stated) if stated else ""
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
    return _with_line_feeds(text)


def decode_stated(data: bytes, stated: str, path: str | os.PathLike[str]) -> str:
    """Decode text in the encoding that its file states, with "\\n" line ends.

    The bytes have priority over the stated encoding. A byte order mark decides. If an encoding of single bytes is
    stated, bytes that are valid UTF-8 are read as UTF-8: text in such an encoding hardly ever is valid UTF-8.

    Raises LookupError for an encoding that Python does not know, UnicodeDecodeError and ReaderError.
    """
    if data.startswith((*_UTF16, codecs.BOM_UTF8)):
        return decode(data, path)
    name = stated.strip().lower()
    with suppress(LookupError):
        name = codecs.lookup(name).name
    for encoding in (*["utf-8"] * bool(_OF_ONE_BYTE.match(name)), _MEANT.get(name, name)):
        with suppress(UnicodeDecodeError):
            return _with_line_feeds(data.decode(encoding))
    return _with_line_feeds(data.decode("iso8859-1" if name == "ascii" else name))


def _with_line_feeds(text: str) -> str:
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
    """Return the text as it appears: without soft hyphens and other zero-width characters, ligatures as letters, and
    without the data of images and fonts that are written into it."""
    text = _DATA_URI.sub(r"\1", text) if "data:" in text else text
    return text if text.isascii() else text.translate(_UNSEEN)


def fenced(code: str, language: str = "") -> str:
    """Return the code as a Markdown block whose fence is longer than any backtick run in the code."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", code)), default=0))
    return f"{fence}{language}\n{code}\n{fence}"


def read_text(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    yield Document(document_id, decode(read_bytes(path), path), source=document_id)


def read_code(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    """Read source code: the text becomes a code block, and the file's name its title."""
    # Fenced, since otherwise a comment that begins with # would be a heading.
    text = fenced(decode(read_bytes(path), path).strip("\n"), path.suffix[1:].lower())
    yield Document(document_id, text + "\n", title=document_id.rpartition("/")[2], source=document_id)
