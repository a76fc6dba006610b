"""Ingestion against a plain batched forward pass of the same chunks.

    python -m benchmarks ingest --set tokens=10000

Ingestion is complete: chunking, embedding, KV precomputation, blocks flushed to disk, SQL, index. The baseline only
runs the model over right-padded batches of chunks of similar length, and drops keys and values.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import plain
from benchmarks.files import file_system
from benchmarks.prose import documents, train_tokenizer
from benchmarks.questions import load_named
from benchmarks.report import Goal, Result
from benchmarks.runner import Run
from benchmarks.shapes import SHAPES, Built, ModelSettings, build
from benchmarks.timing import Variant, alternate, ratio, summarise
from ragcache.engine.kb import RagCache
from ragcache.errors import IngestError
from ragcache.ingest.chunker import ChunkerConfig
from ragcache.ingest.document import Document
from ragcache.ingest.read_limits import IngestConfig
from ragcache.ingest.report import IngestReport
from ragcache.retrieval.embedder_types import Embedder

WHOLE = "ingestion"
DECODER = "transformers: decoder alone"  # no head, no padding mask, no cache


@dataclass(frozen=True)
class Settings(ModelSettings):
    """tokens: tokens of all documents. chunk_tokens: most tokens of a chunk. batch_tokens: tokens that run together,
    padding included. embedder: see `load_named`"""

    tokens: int = 10000
    chunk_tokens: int = 512
    batch_tokens: int = 512
    embedder: str = "minilm"


class Ingestion:
    """Repeated ingestion of the same documents into an empty store."""

    def __init__(self, built: Built, embedder: Embedder, settings: Settings, root: Path) -> None:
        self._lm, self._plain = built
        self._embedder = embedder
        self._root = root
        self._chunker = ChunkerConfig(max_tokens=settings.chunk_tokens)
        self._config = IngestConfig(batch_tokens=settings.batch_tokens)
        self._batch_tokens = settings.batch_tokens
        self._documents: list[Document] = documents(self._lm.tokenizer, settings.tokens)
        self.report = IngestReport()
        self.clear()
        self.ingest()
        self.chunks, self.bytes = self._stored()

    def clear(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def ingest(self) -> None:
        with self._open() as kb:
            self.report = kb.ingest(self._documents)
        if self.report.failed:
            raise IngestError(f"{self.report.failed[0].source}: {self.report.failed[0].error}")

    def decoder_alone(self) -> None:
        plain.read_chunks(self._plain, self.chunks, max(1, self._batch_tokens // max(map(len, self.chunks))))

    def _open(self) -> RagCache:
        # Opening the store is timed too: it takes milliseconds, since the models are loaded already. Passages are read
        # alone, as the decoder reads them: in company, the default, the model reads three times the tokens.
        return RagCache.open(
            self._root,
            model=self._lm,
            embedder=self._embedder,
            chunker=self._chunker,
            ingest=self._config,
            recipe="isolated",
        )

    def _stored(self) -> tuple[list[list[int]], int]:
        """Return the token ids of all chunks as ingestion cut them, and the bytes of their blocks on disk."""
        with self._open() as kb:
            store = kb.store.documents
            ids = [list(chunk.token_ids) for document in store.documents() for chunk in store.chunks_of(document.id)]
            return ids, kb.store.kv.stats().bytes_by_tier["disk"]


def measure(settings: Settings, run: Run) -> Result:
    device = torch.device(settings.device)
    tokenizer = train_tokenizer(vocab_size=min(16384, SHAPES[settings.shape]["vocab_size"]))
    built = build(settings.shape, settings.dtype, device, tokenizer, settings.seed)
    work = Ingestion(built, load_named(settings.embedder, settings.device), settings, run.workdir / "store")
    variants = [Variant(WHOLE, work.ingest, work.clear), Variant(DECODER, work.decoder_alone)]
    samples = alternate(variants, settings.rounds, settings.rounds, device, run.journal)
    tokens = sum(map(len, work.chunks))
    timings = summarise(samples)
    share = ratio(samples, DECODER, WHOLE)
    figures = {
        "tokens": tokens,
        "chunks": len(work.chunks),
        "bytes_per_token": work.bytes / tokens,
        "file_system": file_system(run.workdir),
        **{f"{name}, tokens/s": tokens / timing.median_s for name, timing in timings.items()},
        **{f"last ingestion, {name}": seconds for name, seconds in asdict(work.report.seconds).items()},
    }
    what = f"{WHOLE} / {DECODER}, tokens/s"
    goal = Goal.of(what, "at least", 0.90, share, settings.has_cpu_goals and tokens >= 5000)
    return run.result(timings, {what: share}, figures, [goal])
