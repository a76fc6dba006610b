"""Passages given by a caller, matched with the store's own chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragcache.errors import PromptError, UnknownHandleError
from ragcache.ingest.whole_chunker import PassthroughSplitter
from ragcache.retrieval.retriever import Hit
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NOT_STORED, Chunk


@dataclass(frozen=True)
class Passage:
    """A text to answer from.

    text:   may be empty if id or handle names a stored chunk
    id:     of a stored chunk, or any name of the caller's; returned with the answer's sources
    handle: as attached by a retriever. It only helps to find the text: a KV block's key follows from model, recipe,
            collection and text, so a handle from elsewhere, of an altered text or of a deleted block can never supply
            wrong KV
    score:  returned with the answer's sources, as is metadata, whose "title" and "source" name the document
    """

    text: str = ""
    id: str | None = None
    handle: str | None = None
    score: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def find_passages(passages: Sequence[Passage | Hit], documents: DocumentStore, texts: PassthroughSplitter) -> list[Hit]:
    """Return every passage as a hit, in order. A passage that is not the store's own becomes a chunk that is not
    stored.

    Raises PromptError (a passage without text, id or handle), UnknownHandleError (without text, and not found).
    """
    named = [passage for passage in passages if isinstance(passage, Passage)]
    by_id = {chunk.id: chunk for chunk in documents.chunks([passage.id for passage in named if passage.id])}
    rest = [passage for passage in named if passage.handle and not _fits(passage, by_id.get(passage.id or ""))]
    handles = [passage.handle for passage in rest if passage.handle]
    by_handle = {chunk.handle: chunk for chunk in documents.chunks_by_handle(handles)}
    hits = []
    for rank, passage in enumerate(passages):
        if isinstance(passage, Hit):
            hits.append(passage)
            continue
        known = (by_id.get(passage.id or ""), by_handle.get(passage.handle or ""))
        chunk = next((chunk for chunk in known if chunk is not None and _fits(passage, chunk)), None)
        chunk = chunk or _foreign(passage, rank, texts)
        hits.append(Hit(chunk, 0.0 if passage.score is None else passage.score, chunk.handle))
    return hits


def _fits(passage: Passage, chunk: Chunk | None) -> bool:
    """Return whether the chunk has the passage's text unaltered."""
    return chunk is not None and (not passage.text or passage.text.rstrip() == chunk.text.rstrip())


def _foreign(passage: Passage, rank: int, texts: PassthroughSplitter) -> Chunk:
    if not passage.text.strip():
        names = [f"{field} {name!r}" for field, name in (("id", passage.id), ("handle", passage.handle)) if name]
        if not names:
            raise PromptError(f"passage {rank} has no text; leave empty passages out")
        raise UnknownHandleError(
            f"passage {rank} has no text, and this store knows no chunk of {' or '.join(names)}: it was deleted, or "
            "belongs to another store, model or collection; send the text with it"
        )
    ids = texts.encode([passage.text])[0]
    metadata = dict(passage.metadata)
    source, title = text_field(metadata, "source"), text_field(metadata, "title")
    return Chunk(passage.id or "", "", rank, passage.text, ids, metadata, NOT_STORED, None, 0.0, source, title)


def text_field(metadata: Mapping[str, Any], name: str) -> str:
    """Return a field of user metadata if it is a text, else ""."""
    value = metadata.get(name)
    return value if isinstance(value, str) else ""
