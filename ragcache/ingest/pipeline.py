"""Documents into a store: read, cut, embed and encode, commit.

    files -> documents -> chunks -> window of documents -> embedding (a thread)            -> one SQL transaction
                                                        -> KV blocks -> disk (a thread)    a document -> index

The order makes a kill at any instant harmless (law 9). Blocks come first: without a document that refers to them they
are only content-addressed files, found again by the next run. A document becomes visible in one transaction, when
all its blocks are flushed. The index follows SQL. Replaced blocks are deleted last, from a list that SQL keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial

from ragcache.errors import (
    BasisError,
    ConfigError,
    check_choice,
)
from ragcache.ingest.chunker import Chunker
from ragcache.ingest.ingest_run import IngestRun, Input
from ragcache.ingest.report import IngestReport, Progress
from ragcache.ingest.sandbox import IsolatedReader
from ragcache.ingest.store_writer import StoreWriter
from ragcache.ingest.whole_chunker import PassthroughSplitter
from ragcache.ingest.worker import (
    LocalWorkers,
    Worker,
    Workers,
)
from ragcache.models.deadline import Limit, limited
from ragcache.store.documents import DocumentStore

KV_MODES = ("eager", "lazy")


@dataclass
class Ingestor(StoreWriter):
    """Changes the documents of one store. One ingestion at a time, in this process and all others: the store's writer
    lock holds that."""

    def __post_init__(self) -> None:
        self.reader = IsolatedReader(self.config.reading)

    def close(self) -> None:
        """End the process that reads files; a later ingestion starts another one."""
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
    ) -> IngestReport:
        """Store documents: files, folders and Document objects.

        A document whose id is there already is replaced if its content differs (or fails, unless `replace`), and left
        alone otherwise. An input that cannot be ingested is in the report's `failed`, and the others go on. After an
        interruption, running again finishes: it computes only what is not on disk.

        kv: "eager" computes KV blocks now; "lazy" leaves them to the first use
        chunker: cuts these inputs; None: the ingestor's own
        sync: the given files and folders are all that there is of them: documents from files under them that have
            vanished are deleted at the end, and one whose content is found at another path under them moves there, with
            its KV and embeddings. What failed to be read has not vanished
        dry_run: change nothing; the report says what would be
        cluster: where files are read and the models run; None: here. This process stores the documents, in order
        timeout_s: how long to wait for another writer
        cancelled: set it to stop: looked at between and within batches, so within a second or two

        Raises CancelledError, StoreBusyError, StoreReadOnlyError, StoreFullError, ClusterError, ConfigError, and
        BasisError when the first passages are too few for the codec; what was committed stays. With sync, ReaderError
        for a given path that is not there or cannot be read; then nothing was changed.
        """
        check_choice("kv", kv, KV_MODES)
        if kv == "eager":
            _ = self.block_keys.encoder
        if cluster is not None and kv == "eager" and self.kv.lacks_basis:
            raise BasisError(
                "the store's codec has no basis yet, which no cluster makes; ingest some documents without one first"
            )
        if cluster is not None and self.block_keys.neighbourhood is not None:
            raise ConfigError(
                "this store's chunks are encoded behind their neighbours, which are known when all documents are "
                "stored; ingest without a cluster"
            )
        with (
            nullcontext() if dry_run else self.layout.writer(timeout_s),
            limited(Limit(cancelled)),
            closing(self._worker(chunker or self.chunker)) as worker,
            nullcontext(partial(LocalWorkers, worker)) if cluster is None else cluster.work(worker) as work,
        ):
            return IngestRun(
                self, worker, work, kv == "eager", progress, replace=replace, sync=sync, dry_run=dry_run
            ).run(inputs)

    def copy(
        self,
        source: DocumentStore,
        *,
        kv: str = "eager",
        progress: Progress | None = None,
        timeout_s: float = 30.0,
    ) -> IngestReport:
        """Store the documents of another store, which may be of another model: the same passages under the same ids,
        embedded and encoded by the models of this one. The other store is not changed.

        A document whose passage is too long for the model is in the report's `failed`. After an interruption, running
        again finishes. Options and errors as for `ingest`.
        """
        check_choice("kv", kv, KV_MODES)
        if kv == "eager":
            _ = self.block_keys.encoder
        whole = PassthroughSplitter(self.block_keys.card.tokenizer, self.block_keys.card.max_positions)
        with self.layout.writer(timeout_s), closing(self._worker(whole)) as worker:
            work = partial(LocalWorkers, worker)
            return IngestRun(self, worker, work, kv == "eager", progress, copied=(source, whole)).run([])

    def _worker(self, chunker: Chunker | PassthroughSplitter) -> Worker:
        return Worker(self.reader, chunker, self.retriever.embedder, self.block_keys, self.kv, self.config.batch_tokens)
