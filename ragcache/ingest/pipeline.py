"""Ingestion pipeline: read documents, cut them into chunks, embed and encode the chunks, commit.

    files -> documents -> chunks -> window of documents -> embedding (a thread)            -> one SQL transaction
                                                        -> KV blocks -> disk (a thread)    a document -> index

The order makes a kill at any instant harmless (law 9). Blocks are written first: until a document refers to them they
are only content-addressed files, which the next run finds again. A document becomes visible in one transaction, after
all its blocks are flushed. The index is updated after SQL. Replaced blocks are deleted last, from a list in SQL.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial

from ragcache import errors
from ragcache.ingest.chunker import Chunker
from ragcache.ingest.ingest_run import IngestRun, Input, StoreWriter
from ragcache.ingest.read_limits import NO_TOKEN_LIMITS, TokenLimits
from ragcache.ingest.report import IngestReport, Progress
from ragcache.ingest.sandbox import IsolatedReader
from ragcache.ingest.whole_chunker import PassthroughSplitter
from ragcache.ingest.worker import LocalWorkers, Worker, Workers
from ragcache.models.deadline import Limit, limited
from ragcache.store.documents import DocumentStore

KV_MODES = ("eager", "lazy")


@dataclass
class Ingestor(StoreWriter):
    """Adds, replaces and removes the documents of a store. The store's writer lock allows a single ingestion at a time,
    across all processes."""

    def __post_init__(self) -> None:
        self.reader = IsolatedReader(self.config.reading)

    def close(self) -> None:
        """End the process that reads files; the next ingestion starts a new process."""
        self.reader.close()

    def ingest(
        self,
        inputs: Iterable[Input] | Input,
        *,
        kv: str = "eager",
        chunker: Chunker | PassthroughSplitter | None = None,
        replace: bool = True,
        sync: bool = False,
        dry_run: bool = False,
        cluster: Workers | None = None,
        progress: Progress | None = None,
        timeout_s: float = 30.0,
        cancelled: threading.Event | None = None,
        limits: TokenLimits = NO_TOKEN_LIMITS,
    ) -> IngestReport:
        """Store documents: files, folders and Document objects.

        If a document's id is already stored, the document is left alone when its content is the same. Otherwise it
        replaces the stored document or, with replace=False, fails. An input that cannot be ingested is listed in the
        report's `failed`, and the other inputs are still ingested. To finish an interrupted ingestion, run it again: it
        computes only the blocks that are not on disk.

        kv: "eager" computes KV blocks now; "lazy" leaves them to the first use
        chunker: cuts these inputs; None: the ingestor's own chunker
        replace: whether a stored document with other content may be replaced
        sync: make the store match the given files and folders. Documents whose files in these folders have vanished
            are deleted at the end; if the content of such a document is found at another path, the document moves there
            with its KV and embeddings. A file that could not be read does not count as vanished
        dry_run: change nothing; the report states the changes that would be made
        cluster: the workers that read files and run the models; None: this process. In both cases this process stores
            the documents, in order
        timeout_s: seconds to wait for another writer
        cancelled: set this event to stop; it is checked between and within batches, so within a second or two
        limits: a document beyond them fails before its KV is computed

        Raises CancelledError, StoreBusyError, StoreReadOnlyError, StoreFullError, ClusterError, ConfigError,
        NotAllowedError if the caller may add no documents, and BasisError if the first passages have too few tokens for
        the codec; documents that were committed stay. With sync, raises ReaderError for a given path that does not
        exist or cannot be read; then nothing was changed.
        """
        eager = self._is_eager(kv)
        if cluster is not None and eager and self.kv.lacks_basis:
            raise errors.BasisError(
                "the store's codec has no basis yet, which no cluster makes; ingest some documents without one first"
            )
        if cluster is not None and self.block_keys.neighbourhood is not None:
            raise errors.ConfigError(
                "this store's chunks are encoded behind their neighbours, which are known when all documents are "
                "stored; ingest without a cluster"
            )
        with (
            nullcontext() if dry_run else self.layout.writer(timeout_s),
            limited(Limit(cancelled)),
            closing(self._worker(chunker or self.chunker)) as worker,
            nullcontext(partial(LocalWorkers, worker)) if cluster is None else cluster.work(worker) as work,
        ):
            return IngestRun(self, worker, work, eager, progress, replace, sync, dry_run, limits=limits).run(inputs)

    def copy(
        self, source: DocumentStore, *, kv: str = "eager", progress: Progress | None = None, timeout_s: float = 30.0
    ) -> IngestReport:
        """Copy the documents of `source`, a store that may belong to another model, into this store.

        Passages keep their texts and ids; this store's models embed and encode them. `source` is not changed. A
        document with a passage that is too long for the model is listed in the report's `failed`. To finish an
        interrupted copy, run it again. Options and errors are those of `ingest`.
        """
        eager = self._is_eager(kv)
        whole = PassthroughSplitter(self.block_keys.card.tokenizer, self.block_keys.card.max_positions)
        with self.layout.writer(timeout_s), closing(self._worker(whole)) as worker:
            work = partial(LocalWorkers, worker)
            return IngestRun(self, worker, work, eager, progress, copied=(source, whole)).run([])

    def _is_eager(self, kv: str) -> bool:
        """Return whether KV is computed now. Raises ConfigError and NotAllowedError, see `ingest`."""
        errors.check_choice("kv", kv, KV_MODES)
        # Both properties raise if the caller may add no documents, or if no model here can compute KV.
        _ = self.documents.into
        if kv == "eager":
            _ = self.block_keys.encoder
        return kv == "eager"

    def _worker(self, chunker: Chunker | PassthroughSplitter) -> Worker:
        return Worker(self.reader, chunker, self.retriever.embedder, self.block_keys, self.kv, self.config.batch_tokens)
