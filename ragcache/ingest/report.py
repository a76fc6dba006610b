"""Progress and report of an ingestion."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from ragcache.errors import RagCacheError


class ProgressEvent(NamedTuple):
    """The progress of a stage of an ingestion.

    stage: "read" (files or documents), "embed" (chunks), "encode" (tokens) or "commit" (documents)
    done:  number of these done
    total: number known so far; final for "read", and growing for the other stages while documents are being read
    item:  name of the current input
    """

    stage: str
    done: int
    total: int
    item: str = ""


# Called in the thread that ingests. An exception ends the ingestion; documents that were committed stay.
Progress = Callable[[ProgressEvent], None]


class Failure(NamedTuple):
    """An input that was not ingested, and the error that prevented it."""

    source: str
    error: RagCacheError


class Moved(NamedTuple):
    """A document whose id changed because its file was renamed."""

    old: str
    new: str


@dataclass
class IngestSeconds:
    """Seconds by phase. Embedding and writing run in threads of their own, so the phases add up to more than the
    total."""

    read_s: float = 0.0
    chunk_s: float = 0.0
    embed_s: float = 0.0
    encode_s: float = 0.0
    write_s: float = 0.0
    commit_s: float = 0.0
    total_s: float = 0.0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time that the `with` block takes to a phase."""
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
    """The result of an ingestion.

    added, updated, unchanged: document ids
    failed:          inputs that were not ingested
    skipped:         files in folders that were not read; see `FileList`
    moved:           documents whose ids changed; those whose content changed too are also in `updated`
    removed:         ids of documents whose files have vanished (sync=True)
    dry_run:         True: nothing was changed, and the other fields state the changes that would have been made
    chunks, tokens:  numbers for added and updated documents
    computed_tokens: tokens that the language model read
    reused_blocks:   number of KV blocks that were on disk already
    kv_bytes:        bytes that this ingestion's KV blocks take on disk, as stored
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

    def extend(self, other: IngestReport) -> None:
        """Add the results of another ingestion to this one's."""
        for name in ("added", "updated", "unchanged", "failed", "skipped", "moved", "removed"):
            getattr(self, name).extend(getattr(other, name))
        for name in ("chunks", "tokens", "computed_tokens", "reused_blocks", "kv_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.seconds.add(other.seconds)

    @property
    def kv_text(self) -> str:
        """Return a sentence that states kv_bytes."""
        return f"the KV that was computed takes {bytes_text(self.kv_bytes)} on disk"


def bytes_text(count: int) -> str:
    """Return a number of bytes in binary units: 1536 becomes "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
