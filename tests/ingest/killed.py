"""What the kill tests kill. Imported by the fork server once, so that a child starts in a moment."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from kit import Kit

from ragcache.ingest.document import Document
from ragcache.models.loading import load_lm

SENTENCE = "The river Alna rises near Osby and ends in the lake of Tolvik."


def version_one() -> list[Document]:
    return [Document(f"d{n}", _text(n, 1, 2 + n % 3), {"version": 1}) for n in range(6)]


def version_two() -> list[Document]:
    """Two documents as they were, four changed (most of their chunks stay), four new; two share all their text."""
    changed = [Document(f"d{n}", _text(n, 2, 2 + n % 3), {"version": 2}) for n in range(2, 6)]
    new = [Document(f"n{n}", _text(20 + n // 2, 2, 4), {"version": 2}) for n in range(4)]
    return [*version_one()[:2], *changed, *new]


def _text(n: int, version: int, sentences: int) -> str:
    body = " ".join(f"Town{n} has mill number {i}. {SENTENCE}" for i in range(sentences))
    return f"# Town{n}\n\n{body}\n\n## Register\n\nTown{n} was entered in version {version}. {SENTENCE}\n"


def ingest(root: str, lm_directory: str, started: str) -> None:
    """The child: opens the store, says so, ingests the second version."""
    torch.set_num_threads(1)
    with Kit(Path(root), load_lm(lm_directory)) as kit:
        Path(started).write_text(str(os.getpid()))
        kit.ingestor.ingest(version_two())
