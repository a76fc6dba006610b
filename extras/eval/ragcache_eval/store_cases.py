"""Cases over a store's passages: the user's questions, with passages by retrieval, or questions made from passages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from ragcache.engine.assemble import open_retriever
from ragcache.engine.contract import EmbeddedModel
from ragcache.engine.options import StoreConfig
from ragcache.engine.store_config import StoreParts, open_store
from ragcache.errors import ConfigError
from ragcache.models.card import ModelCard
from ragcache.store.neighbours import NEIGHBOURS, NeighbourChoice, NeighbourTable
from ragcache.store.records import Chunk
from ragcache_eval.bm25 import BM25
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.halves import completion_cases
from ragcache_eval.question_files import read_entries


def opened(path: Path, database: str | None = None) -> closing[StoreParts]:
    """Open the store for reading. Raises StoreNotFoundError and the other errors of opening a store."""
    return closing(open_store(path, StoreConfig(database=database, read_only=True), create=False))


def made_from(store: StoreParts, *, questions: int, passages: int, lm: ModelCard, seed: int = 0) -> list[Case]:
    """Return sentence completions over the store's chunks, or over its passages if it has no documents.

    See `completion_cases`. Raises ConfigError for a store without chunks and passages.
    """
    documents = store.documents
    chunks = [chunk for one in documents.documents() for chunk in documents.chunks_of(one.id, one.collection)]
    texts = [chunk.text for chunk in chunks] or foreign_texts(store, lm)
    behind = neighbour_texts(store, chunks) if chunks else None
    return completion_cases(texts, questions=questions, passages=passages, seed=seed, behind=behind)


def foreign_texts(store: StoreParts, lm: ModelCard) -> list[str]:
    """Decode the passages that belong to no document of the store.

    Raises ConfigError if there are no such passages, or if their tokens belong to another model.
    """
    found = store.kv.passages.contents() if store.kv.passages is not None else []
    if not found:
        raise ConfigError(
            f"{store.layout.root}: the store holds neither documents nor passages; ingest or precompute some first, or "
            "give questions with passages of their own (--data)"
        )
    bound = store.documents.properties()
    if bound.get("fingerprint") != (lm.weights if isinstance(lm, EmbeddedModel) else lm.fingerprint):
        raise ConfigError(
            f"{store.layout.root}: its passages are kept as tokens of {bound.get('model_name')!r}, not of {lm.name!r}; "
            "leave --model out, or give questions with passages of their own (--data)"
        )
    return [str(lm.tokenizer.decode(ids)) for ids in found]


def neighbours_of(store: StoreParts) -> NeighbourChoice:
    """Return the store's choice of neighbours, which precede its passages when they are read."""
    return NeighbourChoice.of(store.documents.properties().get(NEIGHBOURS))


def neighbour_texts(store: StoreParts, chunks: Sequence[Chunk]) -> list[tuple[str, ...]]:
    """Return, for each chunk, the texts that precede it, in reading order, as the last ingestion found them."""
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
    lm: ModelCard,
    device: str = "auto",
    embedder: str | None = None,
    limit: int | None = None,
) -> list[Case]:
    """Return the questions of a file, each with the passages that the store's retriever finds, best first.

    In a store without documents the passages are ranked by BM25. Lines that have passages keep these. Raises
    ConfigError if nothing is retrieved for a question, and EmbedderError.
    """
    entries = read_entries(file)[:limit]
    if not store.documents.documents(limit=1):
        cases = [entry.case for entry in entries]
        if all(case.passages for case in cases):
            return cases
        texts = foreign_texts(store, lm)
        words = BM25(texts)
        nearest = [[CasePassage(texts[rank]) for rank in words.ranked(case.question)[:passages]] for case in cases]
        return [replace(case, passages=case.passages or tuple(near)) for case, near in zip(cases, nearest, strict=True)]
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
