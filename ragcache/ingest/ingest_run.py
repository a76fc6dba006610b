"""A single ingestion, from its inputs to its report."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ragcache import errors
from ragcache.ingest.changes import DocumentChanges, sync_roots
from ragcache.ingest.chunker import Chunker, TextChunk, headings_above
from ragcache.ingest.document import Document
from ragcache.ingest.encoder import BlockKeys
from ragcache.ingest.read_limits import NO_TOKEN_LIMITS, IngestConfig, TokenLimits
from ragcache.ingest.readers import SourceFile, find_files
from ragcache.ingest.report import Failure, IngestReport, Moved, Progress, ProgressEvent
from ragcache.ingest.sample_basis import calibrate
from ragcache.ingest.whole_chunker import PassthroughSplitter
from ragcache.ingest.worker import ChunkedDocument, EncodeJob, Record, Say, Source, Vectors, Work, Worker
from ragcache.models.deadline import LIMIT
from ragcache.retrieval.deletion import delete_documents, unlearn
from ragcache.retrieval.retriever import Retriever
from ragcache.store.directory import StoreLayout
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore, collect_garbage
from ragcache.store.records import Chunk, NewChunk, NewDocument, StoredVersion

log = logging.getLogger(__name__)
Input = str | os.PathLike[str] | SourceFile | Document


@dataclass
class StoreWriter:
    """The parts of a store that ingestion changes."""

    layout: StoreLayout
    documents: DocumentStore
    kv: KVStore
    retriever: Retriever
    chunker: Chunker
    block_keys: BlockKeys
    config: IngestConfig = field(default_factory=IngestConfig)

    def delete(self, ids: Iterable[str], *, timeout_s: float = 30.0) -> list[str]:
        """Delete documents and return the ids that were found; see `delete_documents`."""
        store = (self.layout, self.documents, self.kv, self.retriever)
        return delete_documents(*store, ids, timeout_s=timeout_s)

    def collect_garbage(self) -> int:
        """Delete the blocks that no chunk refers to, and return their number. The caller holds the writer lock."""
        return collect_garbage(self.documents, self.kv)


@dataclass
class PendingDocument:
    """A document that is being ingested: its chunks, their block keys, and whether it replaces a stored document.

    file: path of the document's file (`SourceFile.place`), or ""
    stored: the chunks, if they are in the store already and only KV blocks are missing
    ids: ids of the chunks; (): the chunker names them
    """

    document: Document
    file: str
    content_hash: str
    chunks: list[TextChunk]
    keys: list[str]
    replaces: bool
    stored: tuple[Chunk, ...] = ()
    ids: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass
class IngestRun:
    """A call of `Ingestor.ingest` or `Ingestor.copy`. A copy skips documents that are stored in the same version.

    to:     the store that is written to
    worker: checks and cuts single documents
    work:   makes the object that reads and computes, from the report to fill and a callback for progress
    eager:  whether to compute KV now
    copied: for a copy, the store whose documents replace the inputs, and the splitter that tokenises their passages for
        this model

    See `Ingestor.ingest` for the other fields.
    """

    to: StoreWriter
    worker: Worker
    work: Callable[[IngestReport, Say], Work]
    eager: bool
    progress: Progress | None
    replace: bool = True
    sync: bool = False
    dry_run: bool = False
    copied: tuple[DocumentStore, PassthroughSplitter] | None = None
    limits: TokenLimits = NO_TOKEN_LIMITS

    def __post_init__(self) -> None:
        self.chunker = self.worker.chunker
        # A chunk's neighbours are known only when all documents are stored: see `_encode_behind_neighbours`.
        self._eager_then = self.eager and self.to.block_keys.neighbourhood is not None
        self.eager = self.eager and not self._eager_then
        self.report = IngestReport(dry_run=self.dry_run)
        self._work = self.work(self.report, self._say)
        self._known = DocumentChanges(self.to.documents.versions())
        self._seen: set[str] = set()
        self._roots: list[str] = []
        self._files: dict[str, str] = {}  # ids of files, by the places where they were found
        self._unread: set[str] = set()  # ids of files with failures
        self._told: set[str] = set()  # ids of documents that the report names already
        self._done = {"embed": 0, "encode": 0, "commit": 0}
        self._total = dict(self._done)
        self._saved_at = time.monotonic()
        self._uncommitted: set[str] = set()  # keys of blocks that no chunk may name yet
        self._new_tokens = 0  # of documents that are not stored yet

    def run(self, inputs: Iterable[Input] | Input) -> IngestReport:
        """Ingest the inputs and return the report. Raises the errors of `Ingestor.ingest`. Call it only once."""
        started = time.perf_counter()
        items = [inputs] if isinstance(inputs, str | os.PathLike | SourceFile | Document) else list(inputs)
        if self.sync:
            self._roots = sync_roots(item for item in items if not isinstance(item, Document | SourceFile))
        if self.dry_run:
            for window in self._windows(items):
                self._foretell(window)
            self._remove_vanished()
        else:
            try:
                # A killed run may have left replaced blocks undeleted, and commits that the index has not seen.
                self.to.collect_garbage()
                self.to.retriever.refresh()
                jobs = ((window, self._job(window)) for window in self._windows(items))
                for window, vectors in self._work.compute(jobs):
                    self._commit_window(window, vectors)
                    self._uncommitted.difference_update(*(pending.keys for pending in window))
                self.to.collect_garbage()  # blocks of documents that a moved document has replaced
                self._save_index(force=True)
                self._remove_vanished()
                self._encode_behind_neighbours()
            except BaseException:
                self._drop_uncommitted()
                raise
        self.report.seconds.total_s = time.perf_counter() - started
        return self.report

    def _drop_uncommitted(self) -> None:
        """Delete the blocks that a failed run has written for documents that it has not stored."""
        try:
            for key in self._uncommitted - self.to.documents.referenced(self._uncommitted):
                self.to.kv.delete(key)
        except (errors.StoreError, OSError) as error:
            log.warning(
                "blocks of documents that were not stored may be left; `ragcache doctor` collects them: %s", error
            )

    # Reading

    def _windows(self, inputs: Sequence[Input]) -> Iterator[list[PendingDocument]]:
        window: list[PendingDocument] = []
        for prepared in self._prepared(inputs):
            window.append(prepared)
            self._total["embed"] += 0 if prepared.stored else len(prepared.chunks)
            self._total["encode"] += prepared.num_tokens if self.eager else 0
            self._total["commit"] += 1
            if sum(pending.num_tokens for pending in window) >= self.to.config.window_tokens:
                yield window
                window = []
        if window:
            yield window

    def _prepared(self, inputs: Sequence[Input]) -> Iterator[PendingDocument]:
        if self.copied is not None:
            yield from self._copies(*self.copied)
            return
        for record, file in self._records(inputs):
            if isinstance(record.found, errors.ReaderError):
                self._fail(record.found.path, record.found, file)
            elif (prepared := self._prepare(record.found, file, record)) is not None:
                yield prepared

    def _records(self, inputs: Sequence[Input]) -> Iterator[tuple[Record, str]]:
        """Yield all records of the inputs, in order, with the places of their files.

        The place is "" for a file with a `source`: `sync` compares only files that go by their own paths.
        """
        sources = self._sources(inputs)
        self._known.look_for_vanished(self._roots, self._files)
        read = self._work.read(sources, self._known.content_hashes)
        for done, (source, records) in enumerate(zip(sources, read, strict=True)):
            name = source.where if isinstance(source, Document) else source.source or str(source.path)
            self._tell(ProgressEvent("read", done, len(sources), name))
            file = None if isinstance(source, Document) or source.source else source
            for record in records:
                id = record.found.id if isinstance(record.found, Document) else ""
                yield record, "" if file is None else self._known.place(id, file)
        self._tell(ProgressEvent("read", len(sources), len(sources)))

    def _sources(self, inputs: Sequence[Input]) -> list[Source]:
        """Return the files and documents to read, each file once, by a path without links if the inputs have such a
        path."""
        sources: list[Source] = []
        rank: dict[str, int] = {}  # among the sources, by id
        for item in inputs:
            if isinstance(item, Document | SourceFile):
                sources.append(item)
                continue
            found = find_files([item])
            self.report.failed += [Failure(error.path, error) for error in found.failed]
            self.report.skipped += found.skipped
            for file in found.files:
                self._files |= {file.id: file.id, file.place: file.id}
                if file.id not in rank:
                    rank[file.id] = len(sources)
                    sources.append(file)
                elif not file.link:
                    sources[rank[file.id]] = file
        return sources

    def _prepare(self, document: Document, file: str, record: Record) -> PendingDocument | None:
        """Return the document's chunks and keys, or None if there is nothing to do or it cannot be ingested."""
        try:
            LIMIT.get().check()
            self.worker.check(document)
            if document.id in self._seen:
                raise errors.DuplicateDocumentError(
                    f"{document.where}: the id {document.id!r} was given before in this call; give every document its "
                    "own id"
                )
            self._seen.add(document.id)
            content_hash = document.content_hash(self.chunker.settings)
            found = self._known.find(document, content_hash, file)
            if found is not None and not found.same and not self.replace:
                raise errors.DocumentExistsError(
                    f"{document.where}: another text is stored under the id {document.id!r}; name this one otherwise, "
                    "or let it replace the other (replace=true)"
                )
            if found is not None:
                self._rename(found.id, document, content_hash if found.same else None, file)
                if found.same:
                    return self._prepare_unchanged(document, content_hash)
            cut = self._cut(document, record)
            tokens = sum(len(chunk.token_ids) for chunk in cut.chunks)
            self.limits.check(tokens, self._new_tokens, document.where)
            self._new_tokens += tokens
        except (errors.IngestError, errors.PromptError) as error:
            self._fail(document.where, error, file)
            return None
        return PendingDocument(document, file, content_hash, cut.chunks, cut.keys, found is not None)

    def _cut(self, document: Document, record: Record) -> ChunkedDocument:
        """Return the document's chunks and keys. Raises IngestError, PromptError."""
        self.limits.check_text(document.text, document.where, self.to.block_keys.card.count_text)
        cut = record.cut or self.worker.cut(document, self.report.seconds)
        if isinstance(cut, Exception):
            raise cut
        return cut

    def _rename(self, id: str, document: Document, content_hash: str | None, file: str) -> None:
        """Give a stored document its current id, source and file.

        content_hash: the document's current hash; None if its content differs, so that it is still to be replaced
        """
        old = self._known.version(id)
        version = StoredVersion(content_hash or old.content_hash, document.where, file)
        if id == document.id and (content_hash is None or version == old):
            return
        if not self.report.dry_run:
            names = [self.chunker.chunk_id(document.id, chunk.ordinal) for chunk in self.to.documents.chunks_of(id)]
            gone = self.to.documents.move_document(id, document.id, version, names)
            self.to.retriever.apply([], np.empty((0, self.to.retriever.index.dimension), np.float32), gone)
        self._known.move(id, document.id, version)
        if id != document.id:
            self.report.moved.append(Moved(id, document.id))
            self._told.add(document.id)
        elif old.source != version.source:
            self.report.updated.append(id)
            self._told.add(id)

    def _prepare_unchanged(self, document: Document, content_hash: str) -> PendingDocument | None:
        """Return the stored document as pending, or None if its KV blocks exist too or are not wanted now."""
        eager = self.eager and not self.report.dry_run
        stored = tuple(self.to.documents.chunks_of(document.id)) if eager else ()
        keys = [self.to.block_keys.key(chunk.token_ids) for chunk in stored]
        there = self.to.kv.lookup(keys, "durable")
        if all(chunk.handle == key and key in there for chunk, key in zip(stored, keys, strict=True)):
            self._tell_unchanged(document.id)
            return None
        chunks = [TextChunk(chunk.text, chunk.token_ids, ()) for chunk in stored]
        return PendingDocument(document, "", content_hash, chunks, keys, replaces=True, stored=stored)

    def _copies(self, source: DocumentStore, whole: PassthroughSplitter) -> Iterator[PendingDocument]:
        there = self.to.documents.versions()
        for document in source.documents():
            LIMIT.get().check()
            made = Document(document.id, "", document.metadata, document.title, document.source)
            if there.get(made.id) == StoredVersion(document.content_hash, document.source, document.file or ""):
                self._tell_unchanged(made.id)
                continue
            stored = source.chunks_of(made.id)
            try:
                rows = whole.encode([chunk.text for chunk in stored])
                for ids in rows:
                    self.to.block_keys.check(ids, made.where)
            except errors.PromptError as error:  # too long for this model
                self._fail(made.where, error, "")
                continue
            chunks = [as_cut(chunk, ids, document.metadata) for chunk, ids in zip(stored, rows, strict=True)]
            names, keys = tuple(chunk.id for chunk in stored), [self.to.block_keys.key(ids) for ids in rows]
            file, replaces = document.file or "", made.id in there
            yield PendingDocument(made, file, document.content_hash, chunks, keys, replaces, ids=names)

    # Computing

    def _job(self, window: list[PendingDocument]) -> EncodeJob:
        texts = [
            chunk.embedded_text(pending.document.title)
            for pending in window
            if not pending.stored
            for chunk in pending.chunks
        ]
        if not self.eager:
            return EncodeJob(texts, {})
        # Chunks with the same text share a block.
        wanted = {key: chunk.token_ids for one in window for key, chunk in zip(one.keys, one.chunks, strict=True)}
        self._say("skip", sum(one.num_tokens for one in window) - sum(map(len, wanted.values())))
        self._calibrate(wanted)
        self._uncommitted |= wanted.keys()
        return EncodeJob(texts, wanted)

    def _calibrate(self, ids_by_key: Mapping[str, list[int]]) -> None:
        if ids_by_key and self.to.kv.lacks_basis:
            with self.report.seconds.timed("encode_s"):
                calibrate(self.to.documents, self.to.kv, self.to.block_keys.encoder, list(ids_by_key.values()))

    def _encode_behind_neighbours(self) -> None:
        """Update the neighbours of all chunks and discard KV that was encoded with other neighbours.

        If the ingestion is eager, compute the KV that is missing in the whole store.
        """
        near = self.to.block_keys.neighbourhood
        if near is None:
            return
        near.update()
        self.to.collect_garbage()
        if self._eager_then:
            self._keep_beginning()
            for chunks in near.without_kv():
                self._encode_chunks(self.to.block_keys.with_neighbours(chunks))

    def _encode_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Compute and commit the KV of stored chunks, which come with their neighbours."""
        keys = [self.to.block_keys.key_of(chunk) for chunk in chunks]
        wanted = {key: chunk.token_ids for key, chunk in zip(keys, chunks, strict=True)}
        behind = {key: chunk.neighbours for key, chunk in zip(keys, chunks, strict=True)}
        self._total["encode"] += sum(map(len, wanted.values()))
        self._calibrate(wanted)
        self._uncommitted |= wanted.keys()
        for done, _ in self._work.compute([(keys, EncodeJob([], wanted, behind))]):
            with self.report.seconds.timed("commit_s"):
                handles = {chunk.vector_id: key for chunk, key in zip(chunks, done, strict=True)}
                self.to.documents.set_handles(handles)

    # Storing

    def _keep_beginning(self) -> None:
        """Store the block of the prompts' beginning if it is missing: other engines (vLLM) load it like a passage's."""
        key = self.to.block_keys.first_key
        if key is None:
            return
        if not self.to.kv.lookup([key], "durable"):
            encoder = self.to.block_keys.encoder
            self.to.kv.put(key, encoder.lm.encode([encoder.first_ids])[0])
        self.to.documents.hold(key)

    def _commit_window(self, window: list[PendingDocument], vectors: list[Vectors]) -> None:
        if self.eager:
            self._keep_beginning()
        start = 0
        for pending in window:
            if pending.stored:
                self._commit_handles(pending)
                continue
            self._commit(pending, vectors[start : start + len(pending.chunks)])
            start += len(pending.chunks)
        if not self._work.is_ahead:
            self.to.collect_garbage()
        self._save_index()

    def _commit(self, pending: PendingDocument, vectors: list[Vectors]) -> None:
        """Commit a document and its chunks, and update the index. A document that the store refuses is reported failed.

        vectors: the vectors of each chunk, as `embed_windows` returns them
        """
        document = pending.document
        ids = pending.ids or [self.chunker.chunk_id(document.id, ordinal) for ordinal in range(len(pending.chunks))]
        chunks = [
            NewChunk(
                id, chunk.text, chunk.token_ids, own[0],
                handle=key if self.eager or self.to.kv.lookup([key], "durable") else None,
                metadata=dict(chunk.metadata),
                windows=list(own[1:]),
            )
            for id, chunk, key, own in zip(ids, pending.chunks, pending.keys, vectors, strict=True)
        ]  # fmt: skip
        new = NewDocument(
            document.id, document.where, pending.content_hash, dict(document.metadata), document.title, pending.file
        )  # fmt: skip
        with self.report.seconds.timed("commit_s"):
            before = list[int]()
            if pending.replaces:  # before text is removed, passages learnt from it are deleted
                before = self.to.documents.vector_ids_of([document.id])
                kept = {tuple(chunk.token_ids) for chunk in chunks}
                old = self.to.documents.chunks_of(document.id)
                unlearn(self.to.documents, self.to.kv, (chunk for chunk in old if tuple(chunk.token_ids) not in kept))
            try:
                added = self.to.documents.replace_document(new, chunks)
            except errors.IngestError as error:
                self._fail(document.where, error, pending.file)
                return
            searched = [own[len(own) > 1 :] for own in vectors]  # windows only, without their mean
            none = np.empty((0, self.to.retriever.index.dimension), np.float32)
            self.to.retriever.apply(added, np.concatenate([none, *searched]), before)
        self._tell_stored(pending)
        self._say("commit", 1, document.id)

    def _commit_handles(self, pending: PendingDocument) -> None:
        with self.report.seconds.timed("commit_s"):
            stored = self.to.documents.chunks_of(pending.document.id)  # ids may have changed: see `free_chunk_ids`
            self.to.documents.set_handles(
                {chunk.vector_id: key for chunk, key in zip(stored, pending.keys, strict=True)}
            )
        self._tell_unchanged(pending.document.id)
        self._say("commit", 1, pending.document.id)

    def _remove_vanished(self) -> None:
        # If a given folder itself has vanished since, its files are not taken for deleted.
        roots = [root for root in self._roots if os.path.exists(root)]
        read = {place: id not in self._unread for place, id in self._files.items()}
        gone = self._known.vanished(roots, read, self._seen)
        if gone:
            self.report.removed += gone if self.report.dry_run else self.to.delete(gone)

    def _save_index(self, *, force: bool = False) -> None:
        now = time.monotonic()
        index, path = self.to.retriever.index, self.to.layout.index
        changed = index.saved_generation != index.generation or not path.exists()
        if changed and (force or now - self._saved_at >= self.to.config.save_every_s):
            self.to.retriever.save(path)
            self._saved_at = now

    # Reporting

    def _foretell(self, window: list[PendingDocument]) -> None:
        """Report a window as `_commit_window` would, without changing anything."""
        for pending in window:
            self._tell_stored(pending)
        tokens_by_key = {
            key: len(chunk.token_ids)
            for pending in window
            for key, chunk in zip(pending.keys, pending.chunks, strict=True)
        }
        if self.eager or self._eager_then:
            stored = self.to.kv.lookup(tokens_by_key, "durable")
            self.report.computed_tokens += sum(tokens for key, tokens in tokens_by_key.items() if key not in stored)

    def _tell_stored(self, pending: PendingDocument) -> None:
        (self.report.updated if pending.replaces else self.report.added).append(pending.document.id)
        self.report.chunks += len(pending.chunks)
        self.report.tokens += pending.num_tokens

    def _tell_unchanged(self, id: str) -> None:
        if id not in self._told:
            self.report.unchanged.append(id)

    def _fail(self, source: str, error: errors.IngestError | errors.PromptError, file: str) -> None:
        """Report a failed input. file: the place of its file; "" if it has no file"""
        self.report.failed.append(Failure(source, error))
        if file:
            self._unread.add(self._files.get(file, file))

    def _say(self, stage: str, step: int, item: str = "") -> None:
        if stage == "skip":
            self._total["encode"] -= step
        else:
            self._done[stage] += step
            self._tell(ProgressEvent(stage, self._done[stage], self._total[stage], item))

    def _tell(self, event: ProgressEvent) -> None:
        if self.progress is not None:
            self.progress(event)


def as_cut(chunk: Chunk, token_ids: list[int], metadata: Mapping[str, Any]) -> TextChunk:
    """Return a stored chunk as the chunker made it, with the ids of another tokenizer.

    metadata: the document's. If it has "headings" itself, the chunk's own headings cannot be recovered and are left out
    """
    own = {name: value for name, value in chunk.metadata.items() if metadata.get(name, ...) != value}
    headings = () if "headings" in metadata else headings_above(own.get("headings", ()), chunk.text)
    return TextChunk(chunk.text, token_ids, headings, own)
