"""The Ray actor of an ingestion. Nothing here imports Ray."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import ragcache
from ragcache.errors import IngestError, ModelMismatchError, PromptError, ReaderError
from ragcache.ingest.chunker import Chunker
from ragcache.ingest.document import Document
from ragcache.ingest.encoder import ModelEncoder
from ragcache.ingest.read_limits import ReadLimits
from ragcache.ingest.report import IngestReport, IngestSeconds
from ragcache.ingest.sandbox import IsolatedReader
from ragcache.ingest.whole_chunker import PassthroughSplitter
from ragcache.ingest.worker import CutResult, EncodeJob, Record, Source, Vectors, Worker
from ragcache.kv.block_key import Recipe
from ragcache.models.load import load_lm
from ragcache.retrieval.embedder_types import Embedder
from ragcache.store.kv_store import KVStore

# Records are sent in parts of about this many characters.
PART_CHARS = 1 << 20


class Item(NamedTuple):
    """An input for an actor.

    source: None if there is nothing to do
    known:  content hashes of documents that need not be cut, as the store has them
    """

    source: Source | None
    known: frozenset[str]


@dataclass
class ReadRecords:
    """Records that were read, each with the index of its item.

    is_last: whether they are the last of the batch
    """

    records: list[tuple[int, Record]] = field(default_factory=list)
    is_last: bool = False
    seconds: IngestSeconds = field(default_factory=IngestSeconds)


class Computed(NamedTuple):
    """The result of a job, without the KV, which the actor writes to the store. said: steps of progress, in order"""

    vectors: list[Vectors]
    report: IngestReport
    said: list[tuple[str, int]]


@dataclass(frozen=True)
class Setup:
    """The parts from which a worker is made in another process; can be pickled if the embedder can.

    folder:  current directory of the ingestion, for relative paths
    open_kv: opens the store's KV
    """

    folder: str
    model: str
    dtype: str
    device: str
    fingerprint: str
    recipe: Recipe
    prefix_ids: list[int]
    salt: str
    embedder: Embedder
    chunker: Chunker | PassthroughSplitter
    open_kv: Callable[[], KVStore]
    limits: ReadLimits
    batch_tokens: int | None

    def build(self) -> Worker:
        """Return the worker. Raises ModelMismatchError if the model has other weights here, and the errors of
        loading.
        """
        with contextlib.suppress(OSError):  # a missing file is reported by its path
            os.chdir(self.folder)
        lm = load_lm(self.model, dtype=self.dtype, device=self.device)
        if lm.fingerprint != self.fingerprint:
            raise ModelMismatchError(
                f"{self.model}: the model that an actor finds under this name is another one; give every node of the "
                "cluster the same files"
            )
        encoder = ModelEncoder(lm, self.recipe, self.prefix_ids, self.salt)
        kv = self.open_kv()
        kv.use_device(lm.device)
        reader = IsolatedReader(self.limits)
        return Worker(reader, self.chunker, self.embedder, encoder, kv, self.batch_tokens)


class Actor:
    """Reads in one thread and computes in another. An actor that was restarted after it died continues its work."""

    def __init__(self, setup: bytes) -> None:
        """Make an actor; `load` or its first work builds the worker. setup: a pickled `Setup`"""
        self._setup = setup
        self._worker: Worker | None = None
        self._building = threading.Lock()
        self._batch = -1
        self._records: Iterator[tuple[int, Record]] = iter(())
        self._sent = 0
        self._seconds = IngestSeconds()

    def version(self) -> str:
        return ragcache.__version__

    def load(self) -> None:
        """Load model and embedder. Raises the errors of `Setup.build`."""
        self._ready()

    def read(self, batch: int, items: Sequence[Item], start: int) -> ReadRecords:
        """Return the next part of a batch's records, from number `start` on."""
        if (self._batch, self._sent) != (batch, start):
            self._records, self._batch = self._read(self._ready(), items), batch
            next(islice(self._records, start, start), None)  # skips records that an actor sent before it died
        part, chars = ReadRecords(), 0
        for rank, record in self._records:
            part.records.append((rank, record))
            chars += len(record.found.text) if isinstance(record.found, Document) else 0
            if chars >= PART_CHARS:
                break
        else:
            part.is_last = True
        self._sent = start + len(part.records)
        part.seconds, self._seconds = self._seconds, IngestSeconds()
        return part

    def compute(self, job: EncodeJob) -> Computed:
        report, said = IngestReport(), list[tuple[str, int]]()
        vectors = self._ready().compute(job, report, lambda stage, step: said.append((stage, step)))
        return Computed(vectors, report, said)

    def _ready(self) -> Worker:
        with self._building:
            if self._worker is None:
                setup: Setup = pickle.loads(self._setup)
                self._worker = setup.build()
            return self._worker

    def _read(self, worker: Worker, items: Sequence[Item]) -> Iterator[tuple[int, Record]]:
        for rank, (source, known) in enumerate(items):
            for found in () if source is None else worker.read(source, self._seconds):
                cut = None if isinstance(found, ReaderError) else self._cut(worker, found, known)
                yield rank, Record(found, cut)

    def _cut(self, worker: Worker, document: Document, known: frozenset[str]) -> CutResult:
        try:
            worker.check(document)
            if document.content_hash(worker.chunker.settings) in known:
                return None
            return worker.cut(document, self._seconds)
        except (IngestError, PromptError) as error:
            return error
