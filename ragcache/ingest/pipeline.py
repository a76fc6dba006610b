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
from dataclasses import dataclass, field
from functools import partial

from ragcache.errors import BasisError, ConfigError, check_choice
from ragcache.ingest.chunker import Chunker
from ragcache.ingest.copying import CopyRun, StoredCuts
from ragcache.ingest.encoder import BlockNames, ModelEncoder
from ragcache.ingest.isolated import IsolatedReader
from ragcache.ingest.limits import ReadLimits
from ragcache.ingest.report import IngestReport, Progress
from ragcache.ingest.run import IngestRun, Input
from ragcache.ingest.whole import WholeTexts
from ragcache.ingest.workbench import Workbench, Workers, WorkHere
from ragcache.models.deadline import Limit, limited
from ragcache.retrieval.deletion import delete_documents
from ragcache.retrieval.retriever import Retriever
from ragcache.store.directory import StoreLayout
from ragcache.store.documents import DocumentStore, collect_garbage
from ragcache.store.kv_store import KVStore

KV_MODES = ("eager", "lazy", "hot")
HOT_AFTER = 2


@dataclass(frozen=True)
class IngestConfig:
    """window_tokens: documents are committed when this many tokens of chunks have come together
    batch_tokens:  padded tokens that the language model reads at once; what suits its device when None
    save_every_s:  seconds between two savings of the index; it is saved at the end in any case
    reading:       what reading one document may take
    """

    window_tokens: int = 8192
    batch_tokens: int | None = None
    save_every_s: float = 60.0
    reading: ReadLimits = field(default_factory=ReadLimits)


class Ingestor:
    """Changes the documents of one store. One ingestion at a time, in this process and all others: the store's writer
    lock holds that."""

    def __init__(
        self,
        layout: StoreLayout,
        documents: DocumentStore,
        kv: KVStore,
        retriever: Retriever,
        chunker: Chunker,
        names: BlockNames,
        config: IngestConfig | None = None,
    ) -> None:
        self.layout = layout
        self.documents = documents
        self.kv = kv
        self.retriever = retriever
        self.chunker = chunker
        self.names = names
        self.config = config or IngestConfig()
        self.reader = IsolatedReader(self.config.reading)

    @property
    def encoder(self) -> ModelEncoder:
        """Raises ConfigError where the model runs in another engine, which computes no blocks."""
        return self.names.encoder

    def close(self) -> None:
        """End the process that reads files; a later ingestion starts another one."""
        self.reader.close()

    def ingest(
        self,
        inputs: Iterable[Input] | Input,
        *,
        kv: str = "eager",
        hot_after: int = HOT_AFTER,
        chunker: Chunker | WholeTexts | None = None,
        sync: bool = False,
        dry_run: bool = False,
        cluster: Workers | None = None,
        progress: Progress | None = None,
        timeout_s: float = 30.0,
        cancelled: threading.Event | None = None,
    ) -> IngestReport:
        """Store documents: files, folders and Document objects.

        A document whose id is there already is replaced if its content differs, and left alone otherwise. An input that
        cannot be ingested is in the report's `failed`, and the others go on. After an interruption, running again
        finishes: it computes only what is not on disk.

        kv: "eager" computes KV blocks now; "lazy" leaves them to the first use; "hot" keeps those alone of chunks that
            were retrieved `hot_after` times (the first uses compute and keep nothing)
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
        if kv not in KV_MODES:
            raise ConfigError(f"kv={kv!r} is unknown; choose one of {', '.join(KV_MODES)}")
        if hot_after < 1:
            raise ConfigError(f"hot_after is {hot_after}; a passage is hot after 1 retrieval or more")
        if kv != "lazy":
            _ = self.encoder
        if cluster is not None and kv == "eager" and self.kv.basis.is_lacking:
            raise BasisError(
                "the store's codec has no basis yet, which no cluster makes; ingest some documents without one first"
            )
        if cluster is not None and self.names.neighbourhood is not None:
            raise ConfigError(
                "this store's chunks are encoded behind their neighbours, which are known when all documents are "
                "stored; ingest without a cluster"
            )
        with (
            nullcontext() if dry_run else self.layout.writer(timeout_s),
            limited(Limit(cancelled)),
            closing(self._bench(chunker or self.chunker)) as bench,
            nullcontext(partial(WorkHere, bench)) if cluster is None else cluster.work(bench) as work,
        ):
            run = IngestRun(
                self,
                bench,
                work,
                eager=kv == "eager",
                uses=hot_after if kv == "hot" else 0,
                sync=sync,
                dry_run=dry_run,
                progress=progress,
            )
            return run(inputs)

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
        again finishes. Options and errors as for `ingest`; kv is "eager" or "lazy".
        """
        check_choice("kv", kv, ("eager", "lazy"))
        if kv == "eager":
            _ = self.encoder
        cuts = StoredCuts(self.names.card.tokenizer, self.names.card.max_positions)
        with self.layout.writer(timeout_s), closing(self._bench(cuts)) as bench:
            run = CopyRun(source, self, bench, partial(WorkHere, bench), cuts, eager=kv == "eager", progress=progress)
            return run([])

    def _bench(self, chunker: Chunker | WholeTexts) -> Workbench:
        return Workbench(
            self.config.reading,
            self.reader,
            chunker,
            self.retriever.embedder,
            self.names,
            self.kv,
            self.config.batch_tokens,
        )

    def delete(self, ids: Iterable[str], *, timeout_s: float = 30.0) -> list[str]:
        """Delete documents; see `delete_documents`."""
        store = (self.layout, self.documents, self.kv, self.retriever)
        return delete_documents(*store, ids, timeout_s=timeout_s)

    def collect_garbage(self) -> int:
        """Delete the blocks that no chunk refers to any more; returns how many. The caller holds the writer lock."""
        return collect_garbage(self.documents, self.kv)
