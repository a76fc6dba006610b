"""Finds stored passages that a prompt holds as plain text, by their tokens, so that their KV can be reused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from ragcache.engine.caches.content_index import EDGE, ContentIndex, Found
from ragcache.engine.caches.generation import Generation, Seen
from ragcache.engine.passages import text_field
from ragcache.errors import StoreError, StoreFullError, StoreReadOnlyError
from ragcache.prompt import PromptEnds, encode_text
from ragcache.retrieval.retriever import Hit
from ragcache.store.documents import DocumentStore
from ragcache.store.foreign import FoundPassage, PassageList
from ragcache.store.records import NOT_STORED, Chunk

log = logging.getLogger(__name__)
# Passages found in a text are ignored if together they have fewer characters: a question may well quote a line.
LEAST_CHARACTERS = 100
# An index of fewer passages is rebuilt too fast to be worth a file.
SAVED_FROM = 1000


class Run(NamedTuple):
    """A passage that was found in a row of tokens.

    start: position of its first found token in the row
    chunk: the passage, cut to the found tokens if some of its outermost tokens differ
    """

    start: int
    chunk: Chunk

    @property
    def end(self) -> int:
        return self.start + self.chunk.num_tokens


@dataclass(eq=False, repr=False)
class PassageFinder:
    """Finds the passages of a view in prompts. Thread-safe.

    Its index is built at the first search and follows the documents. Passages are read from the documents, so that a
    deleted passage is never found. Each view has its own index, because a search that met passages of other views would
    take longer and so reveal that they exist.

    _file:    file of the index of all documents, so that a large store's passages need not be indexed again at every
              opening; written again when the number of passages has grown enough
    _foreign: the list of passages that belong to no document; None: there is no list
    _owner:   owner of the listed passages that may be found; see `Listed`
    """

    _documents: DocumentStore
    _generation: Generation
    _tokenizer: PreTrainedTokenizerBase
    _file: Path
    _foreign: PassageList | None
    _owner: str

    def __post_init__(self) -> None:
        self._index, self._foreign_index, self._lock = ContentIndex(), ContentIndex(), threading.Lock()
        self._last: int | None = None
        self._last_foreign = self._saved = 0
        self._has_spoken = False
        self._indexed: Seen | None = None

    def of(self, documents: DocumentStore, owner: str) -> PassageFinder:
        """Return the finder of another view of the documents, whose foreign passages are those of `owner`."""
        return replace(self, _documents=documents, _owner=owner)

    def cut(self, ends: PromptEnds, hits: Sequence[Hit], *, parts: bool) -> tuple[PromptEnds, list[Hit]]:
        """Return the prompt's text and passages anew, after turning stored passages in its text into passages.

        The text before, between and after the given passages is searched. The prompt's ids and their order stay the
        same: text between two passages becomes the second passage's label. If the found passages have fewer than
        LEAST_CHARACTERS, the input is returned.

        Args:
            ends: The prompt's text.
            hits: Passages that come with the prompt.
            parts: Whether a passage may be found without its outermost tokens.
        """
        labels = ends.label_ids or [()] * len(hits)
        between = [list(ends.prefix_ids), *map(list, labels), list(ends.suffix_ids)]
        texts = [between[0] + between[1], *between[2:]]  # the first passage's label continues the prefix
        runs = [[run for run in self._runs(text) if parts or run.chunk.cut_from is None] for text in texts]
        if _is_little([run for own in runs for run in own]):
            return ends, list(hits)
        found: list[tuple[list[int], Hit]] = []
        for text, own, hit in zip_longest(texts, runs, hits):
            start = 0
            for run in own:
                found.append((text[start : run.start], Hit(run.chunk, 0.0, run.chunk.handle)))
                start = run.end
            if hit is not None:
                found.append((text[start:], hit))
        (first, _), *others = found
        return PromptEnds(first, text[start:], [(), *(label for label, _ in others)]), [hit for _, hit in found]

    def stored(self, hit: Hit) -> Hit:
        """Return the store's own passage with the same tokens as the given passage, with the given score.

        If the caller named the given passage by an id, its id, title, source and metadata are kept. If the given
        passage is the store's own, or the store has no such passage, `hit` is returned unchanged.
        """
        given, ids = hit.chunk, hit.chunk.token_ids
        runs = [] if given.is_stored else self._runs([*ids, *ids[-1:]])  # the last token is never part of a passage
        if [run.end - run.start for run in runs] != [len(ids)] or not runs[0].chunk.is_stored:
            return hit
        chunk, named = runs[0].chunk, ("id", "document_id", "metadata", "source", "title")
        if given.id:
            chunk = replace(chunk, **{name: getattr(given, name) for name in named})
        return Hit(chunk, hit.score, chunk.handle)

    def warn(self, texts: Sequence[str]) -> None:
        """Warn once that stored passages come as text although their KV could have been used.

        texts: the caller's text, without the passages given as such
        """
        if self._has_spoken or sum(map(len, texts)) < LEAST_CHARACTERS:
            return
        found = [run for text in texts for run in self._runs(encode_text(self._tokenizer, text))]
        if _is_little(found):
            return
        self._has_spoken = True
        log.warning(
            "a prompt holds %d stored passages as plain text, which the model reads anew: their KV is not used. Ask by "
            "reposition, cacheblend or epic, without context='keep'; or keep passages apart: "
            "create_fused_documents_chain in LangChain, FusedSynthesizer in LlamaIndex, hits or rc.Passage among the "
            "parts of a message or prompt in Python, ragcache.documents in a request. This is said once",
            len(found),
        )

    def _runs(self, ids: Sequence[int]) -> list[Run]:
        """Return the passages found, in order. Of overlapping passages the first and longest is returned.

        The last token of a prompt is never part of a passage, because it has to run.
        """
        self._refresh()
        own = self._index.find(ids)
        chunks = {chunk.vector_id: chunk for chunk in self._documents.chunks_by_vector_ids({one.name for one in own})}
        foreign = self._find_foreign(ids)
        found = [(one, chunks[one.name]) for one in own if one.name in chunks] + foreign
        known: list[tuple[Found, Chunk]] = []  # without overlaps: the first, and of these the longest
        for pair in sorted(found, key=lambda pair: (pair[0].start, -pair[0].end)):
            if not known or pair[0].start >= known[-1][0].end:
                known.append(pair)
        limits = [one.start for one, _ in known[1:]] + [len(ids) - 1] * bool(known)
        runs: list[Run] = []
        for (one, chunk), limit in zip(known, limits, strict=True):
            run = _run(ids, one, chunk, runs[-1].end if runs else 0, limit)
            if run is not None:
                runs.append(run)
        return runs

    def _find_foreign(self, ids: Sequence[int]) -> list[tuple[Found, Chunk]]:
        if self._foreign is None:
            return []
        try:
            with self._lock:
                new = self._foreign.passages(self._owner, after=self._last_foreign)
                self._foreign_index.add(new)
                self._last_foreign = new[-1][0] if new else self._last_foreign
            found = self._foreign_index.find(ids)
            there = self._foreign.found(self._owner, {one.name for one in found}) if found else {}
        except StoreError as error:
            log.warning("passages from elsewhere are not looked for: %s", error)
            return []
        chunks = {name: self._chunk(own) for name, own in there.items()}
        return [(one, chunks[one.name]) for one in found if one.name in chunks]

    def _chunk(self, found: FoundPassage) -> Chunk:
        """Return the passage as a chunk, with the id, title, source and metadata that its collection recorded."""
        ids, name, is_learnt = found
        id, source, title = ("", "", "") if name is None else (name.id, name.source, name.title)
        metadata = {} if name is None else dict(name.metadata)
        document = source or id
        source = text_field(metadata, "source") or source
        text = str(self._tokenizer.decode(ids))
        about = (metadata, NOT_STORED, None, 0.0, source, title)
        return Chunk(id, document, 0, text, ids, *about, is_learnt=is_learnt)

    def _refresh(self) -> None:
        """Index the passages stored since the last search. Deleted names stay until they are half of all names."""
        with self._lock:
            if self._indexed is self._generation.seen:
                return
            self._indexed = self._generation.seen
            is_whole = self._documents.shows_all()
            if self._last is None:
                self._last = (self._index.load(self._file) if is_whole else None) or 0
                self._saved = len(self._index)
            if len(self._index) > 2 * self._documents.counts().chunks:
                self._index.clear()
                self._last = self._saved = 0
            for batch in self._documents.token_ids(after=self._last):
                self._index.add(batch)
                self._last = batch[-1][0]
            has_grown = len(self._index) - self._saved > max(SAVED_FROM, self._saved // 8)
            if is_whole and has_grown and not self._documents.database.read_only:
                self._saved = len(self._index)
                try:
                    self._index.save(self._file, self._last)
                except (StoreReadOnlyError, StoreFullError) as error:
                    log.warning("the index of passages is made anew at the next opening: %s", error)


def _is_little(runs: Sequence[Run]) -> bool:
    return sum(len(run.chunk.text.strip()) for run in runs) < LEAST_CHARACTERS


def _run(ids: Sequence[int], found: Found, chunk: Chunk, least: int, most: int) -> Run | None:
    """Return the passage's tokens that occur around `found`, within the prompt's tokens [least, most).

    Returns None if its inner tokens do not occur there.
    """
    own = chunk.token_ids
    edge = (len(own) - (found.end - found.start)) // 2
    shift = found.start - edge
    start, end = found.start, min(found.end, most)
    if not 0 <= edge <= EDGE or list(ids[start:end]) != own[edge : end - shift]:
        return None
    while start > max(least, shift) and ids[start - 1] == own[start - 1 - shift]:
        start -= 1
    while end < min(most, shift + len(own)) and ids[end] == own[end - shift]:
        end += 1
    return Run(start, chunk.part(start - shift, end - shift)) if start < end else None
