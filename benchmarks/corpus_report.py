"""A real corpus through the default retriever: recall, ingestion speed, bytes per token.

    python -m benchmarks.corpus_report CORPUS.jsonl.gz QUESTIONS.jsonl.gz [--model mini] [--embedder contriever]

CORPUS:    JSON lines with id, title, text, source; every row is ingested as one document
QUESTIONS: JSON lines with question and meta.gold_ids, the rows that answer it

A question is found at k when one of the k best chunks belongs to one of its gold rows.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.environment import environment
from benchmarks.options import add_numbers, add_places, settings_from
from benchmarks.prose import train_tokenizer
from benchmarks.report import Result, show, write
from benchmarks.shapes import SHAPES, build
from benchmarks.timing import Timing
from ragcache.engine.kb import RagCache
from ragcache.errors import ConfigError
from ragcache.ingest.chunker import ChunkerConfig
from ragcache.ingest.document import Document
from ragcache.models.language_model import LanguageModel
from ragcache.models.load import DTYPES, load_lm
from ragcache.retrieval.embedder import Embedder, load_embedder
from ragcache.retrieval.search import SEARCHES, Search

DEPTHS = (5, 10)


class Question(NamedTuple):
    text: str
    gold_ids: frozenset[str]


@dataclass(frozen=True)
class Settings:
    """model: bundled name, directory or hub id; shape: random weights instead, with a tokenizer learnt on the corpus.

    kv: "eager" computes KV blocks; "lazy" leaves them out, for recall alone
    limit: corpus rows to take, 0 for all
    embedder: "minilm", "contriever", directory or hub id
    """

    model: str = "mini"
    shape: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    chunk_tokens: int = 256
    kv: str = "eager"
    limit: int = 0
    embedder: str = "minilm"
    threads: int = 0


def read_rows(path: Path, fields: Collection[str]) -> Iterator[dict[str, Any]]:
    """Rows of JSON lines, compressed or not. Raises ConfigError naming the file and line when a row is no object with
    these fields."""
    reader = gzip.open if path.suffix == ".gz" else open
    with reader(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path.name}, line {number}: not JSON ({error})") from error
            missing = sorted(set(fields) - set(row)) if isinstance(row, dict) else sorted(fields)
            if missing:
                raise ConfigError(f"{path.name}, line {number}: it has no {', '.join(missing)}; see --help")
            yield row


def read_corpus(path: Path, limit: int = 0) -> list[Document]:
    rows = list(read_rows(path, {"id", "text"}))
    return [
        Document(row["id"], row["text"], title=row.get("title", ""), source=row.get("source", ""))
        for row in rows[: limit or None]
    ]


def read_questions(path: Path) -> list[Question]:
    rows = read_rows(path, {"question", "meta"})
    return [Question(row["question"], frozenset(row["meta"].get("gold_ids", ()))) for row in rows]


def recall(ranked: Sequence[Sequence[str]], questions: Sequence[Question], depth: int) -> float:
    """Part of the questions with a gold row among the first `depth` of their ranked document ids."""
    found = [bool(question.gold_ids & set(ids[:depth])) for ids, question in zip(ranked, questions, strict=True)]
    return statistics.mean(found)


def measure(
    settings: Settings,
    corpus: Path,
    questions_path: Path,
    embedder: Embedder,
    workdir: Path,
    arguments: Sequence[str],
) -> Result:
    hardware = environment("benchmarks.corpus_report", arguments, torch.device(settings.device))
    documents = read_corpus(corpus, settings.limit)
    present = {document.id for document in documents}
    questions = [question for question in read_questions(questions_path) if question.gold_ids & present]
    if not questions:
        raise ConfigError(f"{questions_path.name}: no question's gold_ids are ids of {corpus.name}; give the pair")
    lm = _model(settings, documents)
    chunker = ChunkerConfig(max_tokens=settings.chunk_tokens)
    with RagCache.open(workdir / "store", model=lm, embedder=embedder, chunker=chunker) as kb:
        report = kb.ingest(documents, kv=settings.kv)
        asked = {search: _ask(kb, questions, search) for search in SEARCHES}
        stored = kb.store.kv.stats().bytes_by_tier["disk"]
    words = sum(len(document.text.split()) for document in documents)
    figures = {
        "corpus": corpus.name,
        "documents": len(report.added),
        "failed": len(report.failed),
        "chunks": report.chunks,
        "tokens": report.tokens,
        "tokens_per_word": report.tokens / words,
        "questions": len(questions),
        **{f"recall@{depth}": recall(asked["vector"][0], questions, depth) for depth in DEPTHS},
        **{
            f"recall@{depth}, {search}": recall(asked[search][0], questions, depth)
            for search in SEARCHES[1:]
            for depth in DEPTHS
        },
        "ingestion_tokens_per_s": report.tokens / report.seconds.total_s,
        "kv_bytes": stored,
        "kv_bytes_per_token": stored / report.tokens,
        "ingestion_seconds": {name: round(value, 3) for name, value in asdict(report.seconds).items()},
    }
    default = Settings()
    name = f"corpus-{corpus.name.partition('.')[0]}-{settings.shape or Path(settings.model).name}"
    if settings.kv != "eager":  # without figures of KV it must not replace a result that has them
        name += f"-{settings.kv}"
    if settings.embedder != default.embedder:
        name += f"-{Path(settings.embedder).name}"
    timings = {f"retrieve: {search}": Timing.of(seconds) for search, (_, seconds) in asked.items()}
    return Result(name, settings, hardware, timings, {}, figures, [])


def _ask(kb: RagCache, questions: Sequence[Question], search: Search) -> tuple[list[list[str]], list[float]]:
    """Document ids of the hits, best first, and seconds, by question."""
    ranked, seconds = [], []
    for question in questions:
        started = time.perf_counter()
        hits = kb.retrieve(question.text, k=max(DEPTHS), search=search)
        seconds.append(time.perf_counter() - started)
        ranked.append([hit.chunk.document_id for hit in hits])
    return ranked, seconds


def _model(settings: Settings, documents: Sequence[Document]) -> LanguageModel:
    if settings.shape is None:
        return load_lm(settings.model, dtype=settings.dtype, device=settings.device)
    tokenizer = train_tokenizer((document.text for document in documents), SHAPES[settings.shape]["vocab_size"])
    return build(settings.shape, settings.dtype, settings.device, tokenizer).lm


def parse(arguments: Sequence[str]) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser("benchmarks.corpus_report", description=__doc__)
    default = Settings()
    parser.add_argument("corpus", type=Path)
    parser.add_argument("questions", type=Path)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default=default.model)
    model.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype)
    parser.add_argument("--device", default=default.device)
    parser.add_argument("--embedder", default=default.embedder)
    parser.add_argument("--kv", choices=("eager", "lazy"), default=default.kv)
    add_numbers(parser, default, ("chunk_tokens", "limit", "threads"))
    add_places(parser, "where the store is written; needs room for the KV blocks")
    given = parser.parse_args(arguments)
    return settings_from(given, Settings), given


def main(arguments: Sequence[str] | None = None, embedder: Callable[[], Embedder] | None = None) -> Result:
    """embedder: makes the embedding model; the default one when None."""
    arguments = sys.argv[1:] if arguments is None else arguments
    settings, given = parse(arguments)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory(dir=given.workdir) as workdir:
        made = embedder() if embedder else load_embedder(settings.embedder, settings.device)
        result = measure(settings, given.corpus, given.questions, made, Path(workdir), arguments)
    write(result, given.out)
    show(result)
    return result


if __name__ == "__main__":
    main()
