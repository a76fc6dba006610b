"""Limits on the reading of a document, and the settings of an ingestion."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from ragcache.errors import Config, ConfigError, ReaderLimitError, check_least
from ragcache.prompt import exceeds

MIB = 1 << 20
# Memory that a reading process needs before it reads anything.
LEAST_MEMORY = 128 * MIB


@dataclass(frozen=True)
class ReadLimits(Config):
    """Limits for each document. A document that exceeds a limit fails by name, and the others are still ingested.

    seconds:      time to read a file, or a record of JSON lines
    memory_bytes: memory of the process that reads. On Linux the kernel enforces the limit (RLIMIT_DATA). Elsewhere the
                  process checks its own size five times a second, so it can exceed the limit for that long
    text_bytes:   size of the document's text as UTF-8, also for documents that are given as text
    chunks:       number of chunks of the document; only a text made almost entirely of headings has so many
    encoding:     encoding of text files that are not UTF-8 and do not state theirs; None: refuse them

    Raises ConfigError.
    """

    seconds: float = 120.0
    memory_bytes: int = 512 * MIB
    text_bytes: int = 8 * MIB
    chunks: int = 65_536
    encoding: str | None = None

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"seconds is {self.seconds}; reading a file takes some time: allow more than 0")
        check_least("memory_bytes", self.memory_bytes, LEAST_MEMORY)
        check_least("text_bytes", self.text_bytes, 1)
        check_least("chunks", self.chunks, 1)
        try:
            "".encode(self.encoding or "utf-8")
        except LookupError as error:
            raise ConfigError(
                f"encoding is {self.encoding!r}, which Python does not know; name one, as cp1252"
            ) from error

    def check_text(self, text: str, where: str | os.PathLike[str]) -> None:
        """Raise ReaderLimitError if the text is too long. where: names the document"""
        # A character takes one to four bytes, so the size of most texts need not be computed.
        if 4 * len(text) <= self.text_bytes:
            return
        size = len(text) if len(text) > self.text_bytes else len(text.encode("utf-8", "surrogatepass"))
        if size > self.text_bytes:
            raise ReaderLimitError(
                where,
                f"its text takes {size:,} bytes or more, and {self.text_bytes:,} are allowed; cut it into several "
                "documents, or raise the limit (--max-text, ReadLimits.text_bytes)",
            )

    def check_chunks(self, count: int, where: str | os.PathLike[str]) -> None:
        """Raise ReaderLimitError if the document has too many chunks. where: names the document"""
        if count > self.chunks:
            raise ReaderLimitError(
                where,
                f"it is cut into {count:,} passages, and {self.chunks:,} are allowed; cut it into several documents, "
                "or raise the limit (ReadLimits.chunks)",
            )

    def too_slow(self, where: str | os.PathLike[str]) -> ReaderLimitError:
        return ReaderLimitError(
            where,
            f"reading it takes longer than {self.seconds:g} s; simplify or cut the file, or raise the limit "
            "(--read-time, ReadLimits.seconds)",
        )

    def too_large(self, where: str | os.PathLike[str]) -> ReaderLimitError:
        return ReaderLimitError(
            where,
            f"reading it takes more than {self.memory_bytes:,} bytes of memory; simplify or cut the file, or raise the "
            "limit (--read-memory, ReadLimits.memory_bytes)",
        )


@dataclass(frozen=True)
class TokenLimits:
    """Limits on the tokens of new and changed documents, checked before any KV is computed; None: no limit.

    document: tokens of a document
    call:     tokens of all documents of a call
    reason:   completes the error "..., and 500 are": where the limit `call` comes from
    """

    document: int | None = None
    call: int | None = None
    reason: str = "allowed in a call"

    def check_text(self, text: str, where: str, count: Callable[[str], int]) -> None:
        """Raise ReaderLimitError if a document has far too many tokens, without tokenising all of it. count: counts the
        tokens of a part."""
        most = min((one for one in (self.document, self.call) if one is not None), default=None)
        if most is not None and exceeds(text, most, count):
            raise ReaderLimitError(where, f"its text has more than {2 * most:,} tokens, and {most:,} are {SPLIT}")

    def check(self, tokens: int, before: int, where: str) -> None:
        """Raise ReaderLimitError if a document is too long.

        tokens: of the document. before: of the documents before it in the same call. where: names the document
        """
        if self.document is not None and tokens > self.document:
            raise ReaderLimitError(where, f"its text has {tokens:,} tokens, and {self.document:,} are {SPLIT}")
        if self.call is not None and before + tokens > self.call:
            raise ReaderLimitError(
                where,
                f"its {tokens:,} tokens come after {before:,} others, and {self.call:,} are {self.reason}; send it in "
                "another call, or less of it",
            )


NO_TOKEN_LIMITS = TokenLimits()
SPLIT = "allowed in a document; cut it into several, or raise the limit (--max-document-tokens)"


@dataclass(frozen=True)
class IngestConfig(Config):
    """Settings of an ingestion.

    window_tokens: documents are committed whenever their chunks add up to this many tokens
    batch_tokens:  padded tokens that the language model reads at once; None: a number that suits its device
    save_every_s:  seconds between two saves of the index, which is saved at the end in any case
    reading:       limits on the reading of a document
    """

    window_tokens: int = 8192
    batch_tokens: int | None = None
    save_every_s: float = 60.0
    reading: ReadLimits = field(default_factory=ReadLimits)
