"""A store's own passages: under questions of the user's, as retrieval finds them, or under questions made from them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from ragcache.engine.opening import open_embedder
from ragcache.engine.store import Store, StoreConfig, open_store
from ragcache.errors import ConfigError
from ragcache.evaluation.case import Case, CasePassage
from ragcache.evaluation.completion import completion_cases
from ragcache.evaluation.lines import read_entries
from ragcache.retrieval.retriever import Retriever


def opened(path: Path, database: str | None = None) -> closing[Store]:
    """The store for reading. Raises StoreNotFoundError and what else opening raises."""
    return closing(open_store(path, StoreConfig(database=database, read_only=True), create=False))


def made_from(store: Store, *, questions: int, passages: int, seed: int = 0) -> list[Case]:
    """Sentence completions over the store's chunks; see `completion`. Raises ConfigError for an empty store."""
    documents = store.documents
    texts = [chunk.text for one in documents.documents() for chunk in documents.chunks_of(one.id)]
    if not texts:
        raise ConfigError(f"{store.layout.root}: the store is empty; ingest something first")
    return completion_cases(texts, questions=questions, passages=passages, seed=seed)


def asked_of(
    store: Store,
    file: Path,
    *,
    passages: int,
    device: str = "cpu",
    embedder: str | None = None,
    limit: int | None = None,
) -> list[Case]:
    """Questions of a file, each over the passages that the store's retriever finds, best first.

    Lines that bring passages of their own keep them. Raises ConfigError, EmbedderError.
    """
    entries = read_entries(file)[:limit]
    found = open_embedder(store.documents, embedder, device)
    retriever = Retriever.open(store.documents, store.layout.index, found)
    cases = []
    for entry in entries:
        hits = [] if entry.case.passages else retriever.retrieve(entry.case.question, passages)
        own = tuple(CasePassage(hit.chunk.text) for hit in hits)
        cases.append(replace(entry.case, passages=entry.case.passages or own))
    empty = next((case for case in cases if not case.passages), None)
    if empty is not None:
        raise ConfigError(f"{empty.id}: nothing was retrieved; ingest something first")
    return cases
