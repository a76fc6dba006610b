"""The part of an ingestion that needs no stored documents: read, cut, embed, encode.

The same code runs in the process that commits and in the actors of a Ray cluster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, Self, TypeVar

from ragcache.errors import IngestError, PromptError, ReaderError
from ragcache.ingest.chunker import Chunker, TextChunk
from ragcache.ingest.document import Document
from ragcache.ingest.encoder import BlockKeys
from ragcache.ingest.readers import SourceFile
from ragcache.ingest.report import IngestReport, IngestSeconds
from ragcache.ingest.sandbox import IsolatedReader
from ragcache.ingest.whole_chunker import PassthroughSplitter
from ragcache.kv.block import KVBlock
from ragcache.kv.block_key import Neighbours
from ragcache.models.batches import plan_batches
from ragcache.models.deadline import LIMIT, POLL_S, Limit, limited
from ragcache.retrieval.embedder_types import Embedder
from ragcache.retrieval.embedder_types import Vectors as Vectors
from ragcache.retrieval.windows import embed_windows
from ragcache.runtime import work_alone
from ragcache.store.kv_store import KVStore

# Texts passed to the embedder in a single call. If the embedder does not check for cancellation itself, cancelling
# takes effect after the call.
EMBED_TEXTS = 1024

T = TypeVar("T")
Source = SourceFile | Document
# Progress callback, called in the thread that computes: "encode" (tokens), "embed" (chunks), or "skip" (tokens that
# need no encoding because their KV is stored already).
Say = Callable[[str, int], None]


class ChunkedDocument(NamedTuple):
    """A document's chunks and the keys of their blocks."""

    chunks: list[TextChunk]
    keys: list[str]


CutResult = ChunkedDocument | IngestError | PromptError | None


class Record(NamedTuple):
    """A document of a source, or the error that prevented reading it.

    cut: the document's chunks, or the error that prevented cutting it; None: it was not cut yet
    """

    found: Document | ReaderError
    cut: CutResult = None


class EncodeJob(NamedTuple):
    """The embeddings and KV blocks to compute for a window of documents.

    texts:  texts to embed
    wanted: token ids by block key
    neighbours: by block key, the neighbours that the model reads before the chunk; chunks without neighbours are absent
    """

    texts: list[str]
    wanted: Mapping[str, list[int]]
    neighbours: Mapping[str, Neighbours] = MappingProxyType({})


class Work(Protocol):
    """The reading and computing of an ingestion, in this process or on a cluster."""

    def read(self, sources: Sequence[Source], known: Callable[[Source], frozenset[str]]) -> Iterator[Iterator[Record]]:
        """Yield the records of each source, in order.

        known: returns the content hashes that the store has for a source; documents with such a hash need not be cut
        """

    def compute(self, jobs: Iterable[tuple[T, EncodeJob]]) -> Iterator[tuple[T, list[Vectors]]]:
        """Yield the vectors of each job's texts (see `embed_windows`), in order, after its blocks are flushed.

        Each job comes with an object of the caller's, which is yielded with the vectors.
        """

    @property
    def is_ahead(self) -> bool:
        """Return whether later jobs than the last yielded have begun. They may rely on blocks that are stored now."""


class Workers(Protocol):
    """Processes on other machines that do the work of ingestions. Each ingestion connects to them and disconnects."""

    def work(self, worker: Worker) -> AbstractContextManager[Callable[[IngestReport, Say], Work]]:
        """Start workers that have loaded the parts of `worker`, for the length of a `with` block.

        Raises ClusterError, ConfigError, and the errors of loading.
        """


class WorkersConfig(Protocol):
    """The choice of workers for an ingestion."""

    @classmethod
    def of(cls, choice: Self | str | bool | None) -> Self | None:
        """Return the configuration that a user's value means; None without workers.

        choice: True: workers started for the ingestion; text: an address; None or False: no workers
        """

    def workers(self, open_kv: Callable[[], KVStore]) -> Workers:
        """Return the workers. open_kv: opens the store's KV in a worker; it is pickled"""


# Kinds of workers by name, each as the place of its configuration.
WORKERS: dict[str, type[WorkersConfig] | str] = {"ray": "ragcache_ray.cluster:RayConfig"}


@dataclass
class Worker:
    """Reader, chunker, embedder, encoder and KV store of an ingestion.

    One thread may read while another computes, but never two of a kind.

    batch_tokens: padded tokens that the model reads at once; None: a number that suits its device
    """

    reader: IsolatedReader
    chunker: Chunker | PassthroughSplitter
    embedder: Embedder
    block_keys: BlockKeys
    kv: KVStore
    batch_tokens: int | None

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._embedding = ThreadPoolExecutor(1, thread_name_prefix="ragcache-embed")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="ragcache-write", initializer=work_alone)

    def close(self) -> None:
        self._over.set()
        self._embedding.shutdown(cancel_futures=True)
        self._writing.shutdown(cancel_futures=True)

    def read(self, source: Source, seconds: IngestSeconds) -> Iterator[Document | ReaderError]:
        if isinstance(source, Document):
            yield source
            return
        records = self.reader.read(source)
        while True:
            with seconds.timed("read_s"):
                found = next(records, None)
            if found is None:
                return
            yield found

    def check(self, document: Document) -> None:
        """Raise IngestError for a document that no store can hold."""
        self.reader.limits.check_text(document.text, document.where)
        document.check()

    def cut(self, document: Document, seconds: IngestSeconds) -> ChunkedDocument:
        """Cut a document into chunks and compute their block keys. Raises IngestError, PromptError."""
        with seconds.timed("chunk_s"):
            chunks = self.chunker.split(document.text, document.places)
        self.reader.limits.check_chunks(len(chunks), document.where)
        for chunk in chunks:
            self.block_keys.check(chunk.token_ids, document.where)
        return ChunkedDocument(chunks, [self.block_keys.key(chunk.token_ids) for chunk in chunks])

    def compute(self, job: EncodeJob, report: IngestReport, say: Say) -> list[Vectors]:
        """Embed the job's texts and encode its missing blocks, which are flushed on return.

        Return the vectors of each text; see `embed_windows`.
        """
        embedding = self._embedding.submit(self._embed, job.texts, report.seconds)
        ids_by_key, stored = job.wanted, self.kv.lookup(job.wanted, "durable")
        missing = [key for key in ids_by_key if key not in stored]
        report.reused_blocks += len(ids_by_key) - len(missing)
        say("skip", sum(map(len, ids_by_key.values())) - sum(len(ids_by_key[key]) for key in missing))
        behind = {key: job.neighbours.get(key, ()) for key in missing}
        read = [len(ids_by_key[key]) + sum(map(len, behind[key])) for key in missing]
        writes: list[Future[None]] = []
        try:
            for batch in (
                plan_batches(read, self.batch_tokens or self.block_keys.encoder.batch_tokens) if missing else ()
            ):
                keys = [missing[rank] for rank in batch]
                with report.seconds.timed("encode_s"):
                    blocks = self.block_keys.encoder.encode(
                        [ids_by_key[key] for key in keys], [behind[key] for key in keys]
                    )
                _wait(writes)  # writes of the previous batch: at most two batches are in memory
                writes = [
                    self._writing.submit(self._write, key, block, report)
                    for key, block in zip(keys, blocks, strict=True)
                ]
                report.computed_tokens += sum(read[rank] for rank in batch)
                say("encode", sum(len(ids_by_key[key]) for key in keys))
            _wait(writes)
        except BaseException:
            wait(writes)  # a failed run deletes what it has written, and nothing may be written after that
            raise
        while not wait([embedding], POLL_S).done:
            LIMIT.get().check()
        vectors = embedding.result()
        say("embed", len(vectors))
        return vectors

    def _embed(self, texts: Sequence[str], seconds: IngestSeconds) -> list[Vectors]:
        """Return the vectors of each text, in order. Runs in the embedding thread."""
        vectors = list[Vectors]()
        with seconds.timed("embed_s"), limited(Limit(self._over)):
            for start in range(0, len(texts), EMBED_TEXTS):
                LIMIT.get().check()
                vectors += embed_windows(self.embedder, texts[start : start + EMBED_TEXTS], self.embedder.embed)
        return vectors

    def _write(self, key: str, block: KVBlock, report: IngestReport) -> None:
        with report.seconds.timed("write_s"):
            self.kv.put(key, block)  # a document is committed only once its blocks would survive a kill
        report.kv_bytes += sum(stored.num_bytes for stored in self.kv.lookup([key], "durable").values())


class LocalWorkers:
    """Work in this process, window by window."""

    is_ahead = False

    def __init__(self, worker: Worker, report: IngestReport, say: Say) -> None:
        self._worker, self._report, self._say = worker, report, say

    def read(self, sources: Sequence[Source], known: Callable[[Source], frozenset[str]]) -> Iterator[Iterator[Record]]:
        for source in sources:
            yield map(Record, self._worker.read(source, self._report.seconds))

    def compute(self, jobs: Iterable[tuple[T, EncodeJob]]) -> Iterator[tuple[T, list[Vectors]]]:
        for item, job in jobs:
            yield item, self._worker.compute(job, self._report, self._say)


def _wait(writes: Sequence[Future[None]]) -> None:
    for write in writes:
        write.result()
