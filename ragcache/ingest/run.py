"""One ingestion, from its inputs to its report."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import DuplicateDocumentError, IngestError, PromptError, ReaderError
from ragcache.ingest.chunker import Chunker, TextChunk
from ragcache.ingest.document import Document
from ragcache.ingest.known import KnownDocuments, sync_roots
from ragcache.ingest.readers import SourceFile, find_files
from ragcache.ingest.report import Failure, IngestReport, Moved, Progress, ProgressEvent
from ragcache.ingest.whole import WholeTexts
from ragcache.kv.block import KVBlock
from ragcache.models.batches import plan_batches
from ragcache.models.encoding import AbandonedSignal
from ragcache.models.limits import LIMIT, POLL_S, Limit, limited
from ragcache.openmp import work_alone
from ragcache.store.records import Chunk, NewChunk, NewDocument, StoredVersion

if TYPE_CHECKING:
    from ragcache.ingest.pipeline import Ingestor

Input = str | os.PathLike[str] | SourceFile | Document
# Texts that the embedder is given together: cancelling takes effect behind them where it has no say of its own.
EMBED_TEXTS = 1024


@dataclass
class Prepared:
    """A document on its way: its chunks, the keys of their blocks, and whether it replaces one.

    file: id of the file that it is from, or ""
    stored: the chunks are in the store already; only KV blocks are missing.
    """

    document: Document
    file: str
    content_hash: str
    chunks: list[TextChunk]
    keys: list[str]
    replaces: bool
    stored: tuple[Chunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class IngestRun:
    """One call of `Ingestor.ingest`."""

    def __init__(
        self,
        ingestor: Ingestor,
        chunker: Chunker | WholeTexts,
        *,
        eager: bool,
        uses: int = 0,
        sync: bool = False,
        dry_run: bool = False,
        progress: Progress | None,
    ) -> None:
        """uses: times that a chunk without KV is to be retrieved before its KV is kept"""
        self.to = ingestor
        self.chunker = chunker
        self.eager = eager
        self.uses = uses
        self.progress: Progress = progress or (lambda _event: None)
        self.sync = sync
        self.report = IngestReport(dry_run=dry_run)
        self._known = KnownDocuments(ingestor.documents.versions(), chunker.settings)
        self._seen: set[str] = set()
        self._roots: list[str] = []
        self._files: dict[str, bool] = {}  # whether it was read without a failure, by id
        self._told: set[str] = set()  # documents that the report names already
        self._done = {"embed": 0, "encode": 0, "commit": 0}
        self._total = dict(self._done)
        self._saved_at = time.monotonic()
        self._over = threading.Event()
        self._embedding = ThreadPoolExecutor(1, thread_name_prefix="ragcache-embed")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="ragcache-write", initializer=work_alone)

    def __call__(self, inputs: Iterable[Input] | Input) -> IngestReport:
        started = time.perf_counter()
        try:
            given = [inputs] if isinstance(inputs, str | os.PathLike | SourceFile | Document) else list(inputs)
            if self.sync:
                self._roots = sync_roots(one for one in given if not isinstance(one, Document | SourceFile))
            if self.report.dry_run:
                for window in self._windows(given):
                    self._foretell(window)
            else:
                self._ingest(given)
            self._remove_vanished()
        finally:
            self._over.set()
            self._embedding.shutdown(cancel_futures=True)
            self._writing.shutdown(cancel_futures=True)
        self.report.seconds.total_s = time.perf_counter() - started
        return self.report

    def _ingest(self, inputs: Sequence[Input]) -> None:
        # What a killed run left: replaced blocks not yet deleted, commits that the index has not seen.
        self.to.collect_garbage()
        self.to.retriever.refresh()
        for window in self._windows(inputs):
            self._ingest_window(window)
        self.to.collect_garbage()  # of documents that others have moved onto
        self._save_index(force=True)

    # Reading

    def _windows(self, inputs: Sequence[Input]) -> Iterator[list[Prepared]]:
        window: list[Prepared] = []
        for document, file in self._documents(inputs):
            prepared = self._prepare(document, file)
            if prepared is None:
                continue
            window.append(prepared)
            self._expect(prepared)
            if sum(one.num_tokens for one in window) >= self.to.config.window_tokens:
                yield window
                window = []
        if window:
            yield window

    def _documents(self, inputs: Sequence[Input]) -> Iterator[tuple[Document, str]]:
        """All documents of the inputs, in order, with the ids of their files; failures go to the report. A file that is
        called something else than its path is in no folder that could be followed: its documents have no file."""
        sources = list(self._sources(inputs))
        self._known.look_for_vanished(self._roots, self._files)
        for done, source in enumerate(sources):
            name = source.where if isinstance(source, Document) else source.source or str(source.path)
            self.progress(ProgressEvent("read", done, len(sources), name))
            if isinstance(source, Document):
                yield source, ""
                continue
            records = self.to.reader.read(source)
            file = "" if source.source else source.id
            while (record := self._next(records)) is not None:
                if isinstance(record, Document):
                    yield record, file
                else:
                    self._fail(record.path, record, file)
        self.progress(ProgressEvent("read", len(sources), len(sources)))

    def _sources(self, inputs: Sequence[Input]) -> Iterator[SourceFile | Document]:
        """A file that is named twice, by its folder and by itself say, is read once."""
        for given in inputs:
            if isinstance(given, Document | SourceFile):
                yield given
                continue
            found = find_files([given])
            self.report.failed += [Failure(error.path, error) for error in found.failed]
            self.report.skipped += found.skipped
            for file in found.files:
                if file.id not in self._files:
                    self._files[file.id] = True
                    yield file

    def _next(self, records: Iterator[Document | ReaderError]) -> Document | ReaderError | None:
        with self._timed("read_s"):
            return next(records, None)

    def _prepare(self, document: Document, file: str) -> Prepared | None:
        """The document's chunks and keys; None when there is nothing to do or it cannot be ingested."""
        try:
            LIMIT.get().check()
            self.to.config.reading.check_text(document.text, document.where)
            document.check()
            if document.id in self._seen:
                raise DuplicateDocumentError(
                    f"{document.where}: the id {document.id!r} was given before in this call; give every document its "
                    "own id"
                )
            self._seen.add(document.id)
            content_hash = document.content_hash(self.chunker.settings)
            found = self._known.find(document, content_hash, file, lambda id: self._is_text_of(document, id))
            if found is not None:
                self._rename(found.id, document, content_hash if found.same else None, file)
                if found.same:
                    return self._prepare_unchanged(document, content_hash)
            with self._timed("chunk_s"):
                chunks = self.chunker.split(document.text)
            self.to.config.reading.check_chunks(len(chunks), document.where)
            for chunk in chunks:
                self.to.encoder.check(chunk.token_ids, document.where)
        except (IngestError, PromptError) as error:
            self._fail(document.where, error, file)
            return None
        keys = [self.to.encoder.key(chunk.token_ids) for chunk in chunks]
        return Prepared(document, file, content_hash, chunks, keys, found is not None)

    def _rename(self, id: str, document: Document, content_hash: str | None, file: str) -> None:
        """Let a stored document have the id, source and file that it has now. content_hash: None where its content is
        another; it is then still to be replaced."""
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
        elif old.source != version.source and old.file is not None:
            self.report.updated.append(id)
            self._told.add(id)

    def _is_text_of(self, document: Document, id: str) -> bool:
        stored = [chunk.text for chunk in self.to.documents.chunks_of(id)]
        return [chunk.text for chunk in self.chunker.split(document.text)] == stored

    def _prepare_unchanged(self, document: Document, content_hash: str) -> Prepared | None:
        """None when its KV blocks are there too, or are not wanted now."""
        eager = self.eager and not self.report.dry_run
        stored = tuple(self.to.documents.chunks_of(document.id)) if eager else ()
        keys = [self.to.encoder.key(chunk.token_ids) for chunk in stored]
        if all(chunk.handle == key and key in self.to.kv for chunk, key in zip(stored, keys, strict=True)):
            self._say_unchanged(document.id)
            return None
        chunks = [TextChunk(chunk.text, chunk.token_ids, ()) for chunk in stored]
        return Prepared(document, "", content_hash, chunks, keys, replaces=True, stored=stored)

    # Computing

    def _ingest_window(self, window: list[Prepared]) -> None:
        embedding = self._embedding.submit(self._embed, [one for one in window if not one.stored])
        if self.eager:
            self._encode_missing(window)
        vectors = _result(embedding)
        self._advance("embed", len(vectors))
        start = 0
        for one in window:
            if one.stored:
                self._commit_handles(one)
                continue
            self._commit(one, vectors[start : start + len(one.chunks)])
            start += len(one.chunks)
        self.to.collect_garbage()
        self._save_index()

    def _embed(self, documents: Sequence[Prepared]) -> NDArray[np.float32]:
        """Vectors of the documents' chunks, in order. Runs in a thread of its own."""
        embedder = self.to.retriever.embedder
        texts = (chunk.embedded_text(one.document.title) for one in documents for chunk in one.chunks)
        vectors = np.empty((sum(len(one.chunks) for one in documents), embedder.dimension), np.float32)
        with self._timed("embed_s"), limited(Limit(self._over)):
            for start in range(0, len(vectors), EMBED_TEXTS):
                LIMIT.get().check()
                vectors[start : start + EMBED_TEXTS] = embedder.embed(list(islice(texts, EMBED_TEXTS)))
        return vectors

    def _encode_missing(self, window: list[Prepared]) -> None:
        """Compute the window's blocks that no tier has, and see them flushed to disk."""
        # The same text twice is one block.
        wanted = {key: chunk.token_ids for one in window for key, chunk in zip(one.keys, one.chunks, strict=True)}
        missing = [key for key in wanted if key not in self.to.kv]
        self.report.reused_blocks += len(wanted) - len(missing)
        expected, needed = sum(one.num_tokens for one in window), sum(len(wanted[key]) for key in missing)
        self._total["encode"] -= expected - needed  # blocks that are on disk need no computing
        writes: list[Future[None]] = []
        together = self.to.config.batch_tokens or self.to.encoder.batch_tokens
        for batch in plan_batches([len(wanted[key]) for key in missing], together):
            keys = [missing[rank] for rank in batch]
            blocks = self._encode([wanted[key] for key in keys])
            _wait(writes)  # of the batch before: at most two batches are in memory
            writes = [self._writing.submit(self._write, key, block) for key, block in zip(keys, blocks, strict=True)]
            tokens = sum(len(wanted[key]) for key in keys)
            self.report.computed_tokens += tokens
            self._advance("encode", tokens)
        _wait(writes)

    def _encode(self, chunks: list[list[int]]) -> list[KVBlock]:
        limit = LIMIT.get()
        with self._timed("encode_s"):
            try:
                return self.to.encoder.encode(chunks, limit.allows)
            except AbandonedSignal:
                limit.check()
                raise

    def _write(self, key: str, block: KVBlock) -> None:
        with self._timed("write_s"):
            self.to.kv.put(key, block, flushed=True)  # a document is committed when its blocks outlive a kill
        self.report.kv_bytes += self.to.kv.stored_bytes(key)

    def _commit(self, one: Prepared, vectors: NDArray[np.float32]) -> None:
        document = one.document
        chunks = [
            NewChunk(
                self.chunker.chunk_id(document.id, ordinal), chunk.text, chunk.token_ids, vector,
                handle=key if self.eager or key in self.to.kv else None,
                uses_left=self.uses,
                metadata={"headings": list(chunk.headings)} if chunk.headings else {},
            )
            for ordinal, (chunk, key, vector) in enumerate(zip(one.chunks, one.keys, vectors, strict=True))
        ]  # fmt: skip
        new = NewDocument(
            document.id, document.where, one.content_hash, dict(document.metadata), document.title, one.file
        )  # fmt: skip
        with self._timed("commit_s"):
            before = self.to.documents.chunks_of(document.id) if one.replaces else []
            try:
                ids = self.to.documents.replace_document(new, chunks)
            except IngestError as error:
                self._fail(document.where, error, one.file)
                return
            self.to.retriever.apply(ids, vectors, [chunk.vector_id for chunk in before])
        self._say_stored(one)
        self._advance("commit", 1, document.id)

    def _commit_handles(self, one: Prepared) -> None:
        with self._timed("commit_s"):
            self.to.documents.set_handles({chunk.id: key for chunk, key in zip(one.stored, one.keys, strict=True)})
        self._say_unchanged(one.document.id)
        self._advance("commit", 1, one.document.id)

    def _remove_vanished(self) -> None:
        gone = self._known.vanished(self._roots, self._files, self._seen)
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

    def _foretell(self, window: list[Prepared]) -> None:
        """Report a window as `_ingest_window` would, without doing anything."""
        for one in window:
            self._say_stored(one)
        wanted = {key: len(chunk.token_ids) for one in window for key, chunk in zip(one.keys, one.chunks, strict=True)}
        self.report.computed_tokens += sum(size for key, size in wanted.items() if self.eager and key not in self.to.kv)

    def _say_stored(self, one: Prepared) -> None:
        (self.report.updated if one.replaces else self.report.added).append(one.document.id)
        self.report.chunks += len(one.chunks)
        self.report.tokens += one.num_tokens

    def _say_unchanged(self, id: str) -> None:
        if id not in self._told:
            self.report.unchanged.append(id)

    def _fail(self, source: str, error: IngestError | PromptError, file: str) -> None:
        """file: id of the file that it happened in; "" for none"""
        self.report.failed.append(Failure(source, error))
        if file:
            self._files[file] = False

    def _expect(self, one: Prepared) -> None:
        self._total["embed"] += 0 if one.stored else len(one.chunks)
        self._total["encode"] += one.num_tokens if self.eager else 0
        self._total["commit"] += 1

    def _advance(self, stage: str, step: int, item: str = "") -> None:
        self._done[stage] += step
        self.progress(ProgressEvent(stage, self._done[stage], self._total[stage], item))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - started
            setattr(self.report.seconds, phase, getattr(self.report.seconds, phase) + taken)


def _result(embedding: Future[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Wait for the embedding's vectors. Raises CancelledError and TimedOutError while it goes on."""
    while not wait([embedding], POLL_S).done:
        LIMIT.get().check()
    return embedding.result()


def _wait(writes: Sequence[Future[None]]) -> None:
    for write in writes:
        write.result()
