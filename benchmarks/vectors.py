"""The vector index kinds over many vectors: recall, bytes a vector, time of a query and of building.

python -m benchmarks.vectors                     # 1,000,000 vectors of 384: 3 GB of memory and of disk, half an hour
python -m benchmarks.vectors --vectors 100000    # a few minutes

The vectors are synthetic, shaped like embeddings of passages: unit length, in topics of 100 on average around centres,
their variance falling with the number of the direction (the k-th has 1/k of the first one's). Questions are vectors of
the same topics that are not stored. They lie in a real SQLite store, from which the index is built, and from which
`ivfpq` ranks its candidates. `flat` is the truth that the others are held against. Writes results/vectors.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.environment import environment
from benchmarks.malloc import allocated_bytes
from benchmarks.options import add_numbers, add_places, settings_from
from benchmarks.report import Goal, Result, show, write
from benchmarks.timing import Timing
from ragcache.retrieval.vector_index import VectorIndex
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NewChunk, NewDocument

Vectors = NDArray[np.float32]
MILLION, DIMENSION = 1_000_000, 384
LEAST_RECALL = 0.95
TOPIC = 100  # vectors around a centre, on average
SPREAD = 0.7  # of a topic's vectors, beside the centres'
A_DOCUMENT = 10_000  # vectors stored in one transaction


@dataclass(frozen=True)
class Settings:
    """queries: for the recall, and timed one by one; threads: of FAISS"""

    vectors: int = MILLION
    dimension: int = DIMENSION
    queries: int = 500
    k: int = 10
    threads: int = 1
    seed: int = 0


class Embeddings:
    """Vectors as the module's docstring says."""

    def __init__(self, settings: Settings) -> None:
        random = np.random.default_rng(settings.seed)
        self._scale = (np.arange(1, settings.dimension + 1) ** -0.5).astype(np.float32)
        topics = max(1, settings.vectors // TOPIC)
        self._centres = random.standard_normal((topics, settings.dimension), dtype=np.float32) * self._scale

    def draw(self, count: int, seed: int) -> Vectors:
        random = np.random.default_rng((1, seed))
        centres = self._centres[random.integers(len(self._centres), size=count)]
        rows = centres + SPREAD * self._scale * random.standard_normal(centres.shape, dtype=np.float32)
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


@dataclass(frozen=True)
class Row:
    """One index kind. bytes_a_vector: of the file; memory_bytes_a_vector: that it takes once read"""

    kind: str
    recall: float
    bytes_a_vector: float
    memory_bytes_a_vector: float | None
    query_ms: float
    build_s: float


def fill(documents: DocumentStore, embeddings: Embeddings, settings: Settings) -> None:
    for number, start in enumerate(range(0, settings.vectors, A_DOCUMENT)):
        rows = embeddings.draw(min(A_DOCUMENT, settings.vectors - start), number)
        chunks = [NewChunk(f"{number}#{n}", "", [1], row) for n, row in enumerate(rows)]
        documents.replace_document(NewDocument(str(number)), chunks)
        say(f"stored {start + len(rows):,}")


def build(documents: DocumentStore, kind: str, settings: Settings) -> tuple[VectorIndex, float]:
    """The index as an opened store builds it from SQL, and the seconds that it took."""
    index = VectorIndex(settings.dimension, kind=kind, stored=_stored(documents, settings))
    started = time.perf_counter()
    index.make_ready(range(1, settings.vectors + 1))
    for batch in documents.all_vectors():
        index.add(batch.ids, batch.vectors)
        say(f"{kind}: {len(index):,}")
    return index, time.perf_counter() - started


def measure(settings: Settings, kinds: Sequence[str], workdir: Path) -> Iterator[tuple[Row, Timing]]:
    embeddings = Embeddings(settings)
    questions = embeddings.draw(settings.queries, 1 << 40)
    truth: list[set[int]] = []
    with closing(DocumentStore.open(workdir / "store.sqlite3")) as documents:
        fill(documents, embeddings, settings)
        for kind in ("flat", *(kind for kind in kinds if kind != "flat")):
            built, build_s = build(documents, kind, settings)
            path = workdir / f"index.{kind}"
            built.save(path)
            del built
            before = allocated_bytes()
            index = VectorIndex.load(path, _stored(documents, settings))
            now = allocated_bytes()
            found, timing = ask(index, questions, settings.k)
            del index  # before the next kind's growth is measured
            truth = truth or found
            hits = sum(len(true & got) for true, got in zip(truth, found, strict=True))
            yield (
                Row(
                    kind,
                    hits / (settings.k * len(questions)),
                    path.stat().st_size / settings.vectors,
                    None if before is None or now is None else (now - before) / settings.vectors,
                    1000 * timing.median_s,
                    build_s,
                ),
                timing,
            )


def ask(index: VectorIndex, questions: Vectors, k: int) -> tuple[list[set[int]], Timing]:
    found, seconds = [], []
    for question in questions:
        started = time.perf_counter()
        result = index.search(question, k)
        seconds.append(time.perf_counter() - started)
        found.append(set(result.ids.tolist()))
    return found, Timing.of(seconds)


def goals(rows: Sequence[Row], settings: Settings) -> list[Goal]:
    applies = settings.vectors >= MILLION and settings.dimension == DIMENSION
    what = f"recall@{settings.k} of flat, ivfpq, 1,000,000 vectors of {DIMENSION}"
    return [Goal(what, "at least", LEAST_RECALL, row.recall, applies) for row in rows if row.kind == "ivfpq"]


def say(what: str) -> None:
    print(f"\r{what}".ljust(60), end="", file=sys.stderr, flush=True)


def _stored(documents: DocumentStore, settings: Settings) -> Any:
    return partial(documents.vectors_by_ids, dimension=settings.dimension)


def main(arguments: Sequence[str] | None = None) -> Result:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("benchmarks.vectors", description=__doc__)
    add_numbers(parser, Settings(), list(Settings.__dataclass_fields__))
    parser.add_argument("--kinds", nargs="+", default=["ivfpq"], help="beside flat: hnsw, ivfpq")
    add_places(parser, "where the store is written; a disk, not tmpfs")
    given = parser.parse_args(arguments)
    settings = settings_from(given, Settings)
    hardware = environment("benchmarks.vectors", arguments, torch.device("cpu"))
    faiss.omp_set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory(dir=given.workdir) as workdir:
        rows, timings = zip(*measure(settings, given.kinds, Path(workdir)), strict=True)
    figures = {row.kind: asdict(row) for row in rows}
    times = {row.kind: timing for row, timing in zip(rows, timings, strict=True)}
    result = Result("vectors", settings, hardware, times, {}, figures, goals(rows, settings))
    print(f"\nwritten to {write(result, given.out)}")
    show(result)
    return result


if __name__ == "__main__":
    main()
