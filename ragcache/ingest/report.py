"""Progress and report of an ingestion."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ragcache.errors import RagCacheError

if TYPE_CHECKING:
    pass


class ProgressEvent(NamedTuple):
    """stage: "read" (files or documents), "embed" (chunks), "encode" (tokens) or "commit" (documents).

    total is what is known so far: it is final for "read", and grows for the others while documents are being read.
    item names the input at hand.
    """

    stage: str
    done: int
    total: int
    item: str = ""


# Called in the thread that ingests. An exception ends the ingestion; what was committed stays.
Progress = Callable[[ProgressEvent], None]


class Failure(NamedTuple):
    """An input that was not ingested, and why."""

    source: str
    error: RagCacheError


class Moved(NamedTuple):
    """A document that was given another id because its file was renamed."""

    old: str
    new: str


@dataclass
class IngestSeconds:
    """Seconds by phase. Embedding and writing run in threads beside the others, so the phases add up to more than
    the total."""

    read_s: float = 0.0
    chunk_s: float = 0.0
    embed_s: float = 0.0
    encode_s: float = 0.0
    write_s: float = 0.0
    commit_s: float = 0.0
    total_s: float = 0.0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time that the block takes to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, phase, getattr(self, phase) + time.perf_counter() - started)

    def add(self, other: IngestSeconds) -> None:
        for phase in fields(self):
            setattr(self, phase.name, getattr(self, phase.name) + getattr(other, phase.name))


@dataclass
class IngestReport:
    """added, updated, unchanged: document ids. skipped: files in folders that no reader reads, links to folders.

    moved:           documents that have another id now; those with changed content are in `updated`, too
    removed:         ids of documents whose files have vanished (sync=True)
    dry_run:         whether nothing was changed: the others say what would have been
    chunks, tokens:  of added and updated documents
    computed_tokens: that the language model read
    reused_blocks:   KV blocks that were on disk already
    kv_bytes:        that KV blocks of this ingestion take on disk, files as they are
    """

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    skipped: list[Path] = field(default_factory=list)
    chunks: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    reused_blocks: int = 0
    kv_bytes: int = 0
    moved: list[Moved] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    dry_run: bool = False
    seconds: IngestSeconds = field(default_factory=IngestSeconds)

    @property
    def kv_text(self) -> str:
        """kv_bytes in words."""
        return f"the KV that was computed takes {bytes_text(self.kv_bytes)} on disk"


def bytes_text(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
