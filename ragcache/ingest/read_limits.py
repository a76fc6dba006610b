"""Limits of reading one document."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ragcache.errors import Config, ConfigError, ReaderLimitError, check_least

MIB = 1 << 20
# A reading process needs as much before it reads anything.
LEAST_MEMORY = 128 * MIB


@dataclass(frozen=True)
class ReadLimits(Config):
    """Limits for one document; what exceeds one fails by name, and the others go on.

    seconds:      for one file, or one record of JSON lines
    memory_bytes: of the process that reads. The kernel holds it on Linux (RLIMIT_DATA); elsewhere the process looks at
                  its own size five times a second, so that it can be exceeded for that long
    text_bytes:   of the text that comes out, as UTF-8; documents that are given as text too
    chunks:       that it is cut into; only a text of hardly anything but headings has so many
    encoding:     of text files that are not UTF-8 and do not say what they are; None refuses them

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
        """Raises ReaderLimitError when the text is too long."""
        # Every character takes at least one byte and at most four: most texts need not be encoded to know.
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
        """Raises ReaderLimitError when the text is cut into too many."""
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
