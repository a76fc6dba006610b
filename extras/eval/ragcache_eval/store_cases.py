"""A store's own passages: under questions of the user's, as retrieval finds them, or under questions made from them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from ragcache.engine.assemble import open_retriever
from ragcache.engine.options import StoreConfig
from ragcache.engine.store_config import StoreParts, open_store
from ragcache.errors import ConfigError
from ragcache.store.neighbours import NEIGHBOURS, NeighbourChoice, NeighbourTable
from ragcache.store.records import Chunk
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.completion import completion_cases
from ragcache_eval.lines import read_entries


def opened(path: Path, database: str | None = None) -> closing[StoreParts]:
    """The store for reading. Raises StoreNotFoundError and what else opening raises."""
    return closing(open_store(path, StoreConfig(database=database, read_only=True), create=False))


def made_from(store: StoreParts, *, questions: int, passages: int, seed: int = 0) -> list[Case]:
    """Sentence completions over the store's chunks; see `completion`. Raises ConfigError for an empty store."""
    documents = store.documents
    chunks = [chunk for one in documents.documents() for chunk in documents.chunks_of(one.id)]
    if not chunks:
        raise ConfigError(f"{store.layout.root}: the store is empty; ingest something first")
    texts, behind = [chunk.text for chunk in chunks], neighbour_texts(store, chunks)
    return completion_cases(texts, questions=questions, passages=passages, seed=seed, behind=behind)


def neighbours_of(store: StoreParts) -> NeighbourChoice:
    """What the store's passages are read behind."""
    return NeighbourChoice.of(store.documents.properties().get(NEIGHBOURS))


def neighbour_texts(store: StoreParts, chunks: Sequence[Chunk]) -> list[tuple[str, ...]]:
    """By chunk, the texts that it is read behind, in the order of reading, as the last ingestion found them."""
    near = NeighbourTable(store.documents.database).of(chunk.vector_id for chunk in chunks)
    there = store.documents.chunks_by_vector_ids({id for found in near.values() for id in found})
    texts = {chunk.vector_id: chunk.text for chunk in there}
    in_order = neighbours_of(store).in_order
    return [tuple(texts[id] for id in in_order(near.get(chunk.vector_id, [])) if id in texts) for chunk in chunks]


def asked_of(
    store: StoreParts,
    file: Path,
    *,
    passages: int,
    device: str = "auto",
    embedder: str | None = None,
    limit: int | None = None,
) -> list[Case]:
    """Questions of a file, each over the passages that the store's retriever finds, best first.

    Lines that bring passages of their own keep them. Raises ConfigError, EmbedderError.
    """
    entries = read_entries(file)[:limit]
    retriever = open_retriever(store, StoreConfig(read_only=True), embedder, None, device)
    cases = []
    for entry in entries:
        hits = [] if entry.case.passages else retriever.retrieve(entry.case.question, passages)
        behind = neighbour_texts(store, [hit.chunk for hit in hits])
        own = tuple(CasePassage(hit.chunk.text, behind=near) for hit, near in zip(hits, behind, strict=True))
        cases.append(replace(entry.case, passages=entry.case.passages or own))
    empty = next((case for case in cases if not case.passages), None)
    if empty is not None:
        raise ConfigError(f"{empty.id}: nothing was retrieved; ingest something first")
    return cases
