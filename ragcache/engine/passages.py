"""Passages that a caller hands over, found in the store where they are its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ragcache.errors import PromptError, UnknownHandleError
from ragcache.ingest.chunker import PassthroughSplitter
from ragcache.prompt import PromptEnds
from ragcache.retrieval.retriever import Hit
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NOT_STORED, Chunk


@dataclass(frozen=True)
class Passage:
    """A text to answer from.

    text:   may be empty where id or handle names a stored chunk
    id:     of a stored chunk, or any name of the caller's; given back with the answer's sources
    handle: what a retriever attached. It only helps to find the text: the name of a KV block follows from model,
            recipe, tenant and text, so a handle from elsewhere, of an altered text or of a deleted block serves nothing
            wrong
    score:  given back with the answer's sources, as is metadata
    """

    text: str = ""
    id: str | None = None
    handle: str | None = None
    score: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def find_passages(passages: Sequence[Passage | Hit], documents: DocumentStore, texts: PassthroughSplitter) -> list[Hit]:
    """Every passage as a hit, in order. One that is not the store's own becomes a chunk that is stored nowhere.

    Raises PromptError (a passage without text, id or handle), UnknownHandleError (without text, and not found).
    """
    given = [one for one in passages if isinstance(one, Passage)]
    by_id = {chunk.id: chunk for chunk in documents.chunks([one.id for one in given if one.id])}
    rest = [one for one in given if one.handle and not _fits(one, by_id.get(one.id or ""))]
    handles = [one.handle for one in rest if one.handle]
    by_handle = {chunk.handle: chunk for chunk in documents.chunks_by_handle(handles)}
    hits = []
    for rank, one in enumerate(passages):
        if isinstance(one, Hit):
            hits.append(one)
            continue
        known = (by_id.get(one.id or ""), by_handle.get(one.handle or ""))
        chunk = next((chunk for chunk in known if chunk is not None and _fits(one, chunk)), None)
        chunk = chunk or _foreign(one, rank, texts)
        hits.append(Hit(chunk, 0.0 if one.score is None else one.score, chunk.handle))
    return hits


def _fits(passage: Passage, chunk: Chunk | None) -> bool:
    """Whether the chunk is what the passage names, its text unaltered."""
    return chunk is not None and (not passage.text or passage.text.rstrip() == chunk.text.rstrip())


def _foreign(passage: Passage, rank: int, texts: PassthroughSplitter) -> Chunk:
    if not passage.text.strip():
        names = [f"{what} {name!r}" for what, name in (("id", passage.id), ("handle", passage.handle)) if name]
        if not names:
            raise PromptError(f"passage {rank} has no text; leave empty passages out")
        raise UnknownHandleError(
            f"passage {rank} has no text, and this store knows no chunk of {' or '.join(names)}: it was deleted, or "
            "belongs to another store, model or salt (tenant); send the text with it"
        )
    ids = texts.encode([passage.text])[0]
    metadata = dict(passage.metadata)
    return Chunk(passage.id or "", "", rank, passage.text, ids, metadata, NOT_STORED, None, 0.0, "", "")


# Stored passages that come back as plain text: they are found by their tokens, and read from their KV.


log = logging.getLogger(__name__)
# What the store handed out last is what a chain joins into its next prompts: enough for many of them side by side.
REMEMBERED = 256
# A question may well quote a line: of all that is found in a text, and of each.
LEAST_CHARACTERS, LEAST_EACH = 100, 20


class Run(NamedTuple):
    """A passage's tokens in a row of tokens, from `start` on."""

    start: int
    chunk: Chunk

    @property
    def end(self) -> int:
        return self.start + self.chunk.num_tokens


class RecentPassages:
    """Remembers the passages that were handed out last, and finds them in prompts.

    The look is exact and bounded: it searches a prompt for REMEMBERED passages. A passage that was changed, or came
    from elsewhere, is no stored one. Thread-safe.
    """

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque(maxlen=REMEMBERED)
        self._lock = threading.Lock()
        self._has_spoken = False

    def add(self, chunks: Iterable[Chunk]) -> None:
        with self._lock:
            self._chunks.extend(chunks)

    def forget(self) -> None:
        """Let go of every text: documents were deleted."""
        with self._lock:
            self._chunks.clear()

    def cut(self, ids: Sequence[int], texts: Sequence[str], breaks: Collection[int]) -> tuple[PromptEnds, list[Hit]]:
        """The same ids in the same order, around the stored passages among them; no passages where too few are found.

        A passage is found where its own ids stand in a row. Where a tokenizer reads its first or last characters
        together with what is beside them, it is not.

        ids:    a prompt's, as it is read without any passage
        texts:  what the caller wrote of it
        breaks: ids that stand in no message: of several messages with passages, those of the last one are found
        """
        runs = _in_one_message(self._runs(ids, texts), ids, breaks)
        if sum(len(run.chunk.text.strip()) for run in runs) < LEAST_CHARACTERS:
            return PromptEnds((), ids), []
        between = [ids[before.end : run.start] for before, run in pairwise(runs)]
        ends = PromptEnds(ids[: runs[0].start], ids[runs[-1].end :], [(), *between])
        return ends, [Hit(run.chunk, 0.0, run.chunk.handle) for run in runs]

    def warn(self, texts: Sequence[str]) -> None:
        """Say once that stored passages come as text, where their KV could have been used.

        texts: of a call, without the passages that it gives as such
        """
        if self._has_spoken:
            return
        found = self._quoted(texts)
        if sum(len(chunk.text.strip()) for chunk in found) < LEAST_CHARACTERS:
            return
        self._has_spoken = True
        log.warning(
            "a prompt holds %d stored passages as plain text, which the model reads anew: their KV is not used. Keep "
            "passages apart: create_fused_documents_chain in LangChain, FusedSynthesizer in LlamaIndex, hits or "
            "rc.Passage among the parts of a message or prompt in Python, ragcache.documents in a request. This is "
            "said once",
            len(found),
        )

    def _quoted(self, texts: Sequence[str]) -> list[Chunk]:
        """Passages whose characters are in one of the texts."""
        if sum(map(len, texts)) < LEAST_CHARACTERS:
            return []
        with self._lock:
            chunks = {chunk.text.strip(): chunk for chunk in self._chunks}
        return [
            chunk
            for passage, chunk in chunks.items()
            if len(passage) >= LEAST_EACH and any(passage in text for text in texts)
        ]

    def _runs(self, ids: Sequence[int], texts: Sequence[str]) -> list[Run]:
        """Passages in order, of those that overlap the first and longest. What a prompt ends with runs, in any case."""
        row = _bytes(ids)
        found = [Run(start, chunk) for chunk in self._quoted(texts) for start in _places(row, _bytes(chunk.token_ids))]
        runs: list[Run] = []
        for run in sorted(found, key=lambda run: (run.start, -run.end)):
            if run.start >= (runs[-1].end if runs else 0) and run.end < len(ids):
                runs.append(run)
        return runs


def _in_one_message(runs: Sequence[Run], ids: Sequence[int], breaks: Collection[int]) -> list[Run]:
    """The last of these runs, as far back as no break stands between them."""
    kept = list(runs[-1:])
    for run in reversed(runs[:-1]):
        if not set(ids[run.end : kept[0].start]).isdisjoint(breaks):
            break
        kept.insert(0, run)
    return kept


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()


def _places(row: bytes, part: bytes) -> Iterator[int]:
    """Where a row of ids holds another one."""
    size = np.dtype(np.int32).itemsize
    at = row.find(part) if part else -1
    while at >= 0:
        if at % size == 0:
            yield at // size
        at = row.find(part, at + 1)
