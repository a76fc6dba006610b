"""Exact and approximate reuse on the same streams of questions: tokens that were not computed, time to first token.

python -m benchmarks.prefix                  # SmolLM2-135M's shape, random weights
python -m benchmarks.prefix --stream-questions 0     # only what the shared order does to answers (bundled model)

Streams: passages drawn at random, by Zipf's law, and conversations that keep their context. Full prefill without a
prefix tree, with it, with it and the shared order; blocks by `reposition` and `link`, computed at ingestion. Every way
reads the same questions in the same order, beginning with nothing in its tree; one at a time.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import ragcache as rc
from benchmarks.environment import environment
from benchmarks.options import add_numbers, add_places, settings_from
from benchmarks.prose import documents, train_tokenizer
from benchmarks.report import Result, show, write
from benchmarks.shapes import SHAPES, build
from benchmarks.timing import Timing
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.retrieval.embedder import Embedder
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_eval.intervals import estimate
from ragcache_eval.registry import MAX_ANSWER_TOKENS

VLLM_BLOCK = 16
LINK_TOKENS = 5
EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True)
class Settings:
    """documents: of `tokens` tokens each, one passage; k: passages of a question
    stream_questions: of each stream; turns: of a conversation; zipf: exponent of rank
    answer_tokens: of each answer; prefix_mib: the tree's budget
    quality_questions: of the example corpus, read by the bundled model
    """

    shape: str = "SmolLM2-135M"
    dtype: str = "float32"
    device: str = "cpu"
    documents: int = 40
    tokens: int = 200
    k: int = 5
    stream_questions: int = 24
    turns: int = 4
    zipf: float = 1.0
    answer_tokens: int = 8
    prefix_mib: int = 512
    quality_questions: int = 200
    seed: int = 0


@dataclass(frozen=True)
class Way:
    """method and options of `ask`; exact: with a prefix tree."""

    name: str
    method: str
    exact: bool
    order: str = "relevance"


WAYS = (
    Way("full", "full", False),
    Way("full, tree", "full", True),
    Way("full, tree, shared order", "full", True, "shared"),
    Way("reposition", "reposition", True),
    Way("link", "link", True),
)


@dataclass(frozen=True)
class Asked:
    """One question: what the model was spared, and what it took."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


def drawn(settings: Settings, exponent: float) -> Iterator[list[int]]:
    """Passages of each question, most relevant first; popularity falls as rank^-exponent."""
    generator = np.random.default_rng(settings.seed)
    weights = np.arange(1, settings.documents + 1, dtype=float) ** -exponent
    for _ in range(settings.stream_questions):
        yield generator.choice(settings.documents, settings.k, replace=False, p=weights / weights.sum()).tolist()


def talks(settings: Settings) -> list[list[list[int]]]:
    """Conversations of `turns` questions; every passage of a question is taken over by the next one or drawn anew."""
    generator = np.random.default_rng(settings.seed + 1)
    by_zipf = list(drawn(settings, settings.zipf))
    found: list[list[list[int]]] = []
    for number, fresh in enumerate(by_zipf):
        if number % settings.turns == 0:
            found.append([fresh])
            continue
        before = found[-1][-1]
        stay = [one for one in before if generator.random() < 0.5]
        found[-1].append([*stay, *(one for one in fresh if one not in stay)][: settings.k])
    return found


class Corpus:
    """Documents of so many tokens each, and a model of a real shape that has link tokens."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        vocabulary = min(16384, int(SHAPES[settings.shape]["vocab_size"]) - 200)
        self.tokenizer = train_tokenizer(vocab_size=vocabulary)
        self.lm = build(settings.shape, settings.dtype, settings.device, self.tokenizer, settings.seed).lm
        self.lm.reuse = TrainedTokens(
            "link", link_tokens=LINK_TOKENS, link_slots=settings.k, first_link_id=vocabulary, kv_start_id=None
        )
        joined = [doc.text for doc in documents(self.tokenizer, 4 * settings.documents * settings.tokens)]
        ids = [id for text in joined for id in self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        step = settings.tokens
        self.texts = [str(self.tokenizer.decode(ids[n * step : (n + 1) * step - 1])) for n in range(settings.documents)]

    def open(self, root: Path, way: Way) -> rc.RagCache:
        config = rc.StoreConfig(prefix_bytes=self.settings.prefix_mib << 20 if way.exact else 0)
        kb = rc.RagCache.open(root, model=self.lm, method=way.method, embedder=BagOfWords(), store=config)
        texts = [rc.Document(str(number), text) for number, text in enumerate(self.texts)]
        kb.ingest(texts, kv="lazy" if way.method == "full" else "eager", split=False)
        return kb


def ask_all(kb: rc.RagCache, settings: Settings, way: Way, stream: str) -> list[Asked]:
    options: dict[str, Any] = {"sampling": rc.Sampling(settings.answer_tokens), "order": way.order}
    if stream != "conversations":
        exponent = settings.zipf if stream == "zipf" else 0.0
        answers = (
            kb.ask(_question(number), hits=[rc.Passage(id=str(one)) for one in passages], **options)
            for number, passages in enumerate(drawn(settings, exponent))
        )
        return [_asked(answer) for answer in answers]
    found = []
    for talk in talks(settings):
        messages: list[dict[str, Any]] = []
        read: set[int] = set()
        for number, passages in enumerate(talk):
            new = [rc.Passage(id=str(one)) for one in passages if one not in read]
            read.update(passages)
            messages.append({"role": "user", "content": [*new, _question(number)]})
            answer = kb.chat(messages, context="keep", **options)
            messages.append({"role": "assistant", "content": answer.text})
            found.append(_asked(answer))
    return found


def _question(number: int) -> str:
    return f"Question: what do these say about number {number}?"


def _asked(answer: rc.Answer) -> Asked:
    return Asked(answer.usage.prompt_tokens, answer.usage.cached_tokens, answer.timings.ttft_s)


def hit_share(asked: Sequence[Asked], block: int = 1) -> float:
    """Prompt tokens that were not computed; block: of each prompt's whole blocks only, as vLLM counts."""
    return sum(one.cached_tokens // block * block for one in asked) / sum(one.prompt_tokens for one in asked)


def run_streams(settings: Settings, workdir: Path | None) -> tuple[dict[str, Any], dict[str, Timing]]:
    corpus = Corpus(settings)
    figures: dict[str, Any] = {}
    timings: dict[str, Timing] = {}
    for stream in ("random", "zipf", "conversations"):
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=workdir) as root, corpus.open(Path(root) / "kb", way) as kb:
                kb.ask("Warm up?", hits=[], method_options={"reuse": False} if way.method == "full" else None)
                asked = ask_all(kb, settings, way, stream)
            name = f"{stream}: {way.name}"
            timings[name] = Timing.of([one.ttft_s for one in asked])
            figures[name] = {
                "prompt_tokens": sum(one.prompt_tokens for one in asked),
                "hit_share": hit_share(asked),
                "ttft_mean_s": statistics.mean(one.ttft_s for one in asked),
            }
            if way.method == "full" and way.exact:
                figures[name]["hit_share_by_16"] = hit_share(asked, VLLM_BLOCK)
            print(f"{name}: {figures[name]['hit_share']:.3f}", file=sys.stderr, flush=True)
            gc.collect()
    return figures, timings


ORDERINGS: dict[str, dict[str, Any]] = {
    "relevance": {"order": "relevance"},
    "shared, with hint": {"order": "shared", "hint": True},
    "shared, no hint": {"order": "shared", "hint": False},
}


def quality(
    settings: Settings, workdir: Path | None, embedder: Embedder | None, examples: Path = EXAMPLES
) -> dict[str, Any]:
    """Exact match of the bundled model, full prefill, over what is retrieved for the example corpus' questions."""
    lines = (examples / "corpus_questions.jsonl").read_text(encoding="utf-8").splitlines()
    step = max(1, len(lines) // settings.quality_questions)
    questions = [json.loads(line) for line in lines[::step][: settings.quality_questions]]
    figures, short = {}, rc.Sampling(MAX_ANSWER_TOKENS)
    with tempfile.TemporaryDirectory(dir=workdir) as root:
        kb_root = Path(root) / "kb"
        with rc.RagCache.open(kb_root, model="mini", method="full", embedder=embedder) as kb:
            kb.ingest(examples / "corpus", kv="lazy")
        for name, options in ORDERINGS.items():  # opened anew: each begins with an empty tree
            with rc.RagCache.open(kb_root, method="full", embedder=embedder) as kb:
                asked = [kb.ask(one["question"], 8, sampling=short, on_overflow="trim", **options) for one in questions]
            right = [answer.text.strip() == one["answer"] for answer, one in zip(asked, questions, strict=True)]
            figures[name] = {
                "exact_match": estimate(right)._asdict(),
                "hit_share": hit_share([_asked(answer) for answer in asked]),
            }
            print(f"{name}: {figures[name]}", file=sys.stderr, flush=True)
    return figures


def markdown(figures: dict[str, Any], timings: dict[str, Timing]) -> list[str]:
    lines = []
    if timings:
        lines += ["| stream | way | hit share | by blocks of 16 | TTFT mean | median |", "|---|---|---|---|---|---|"]
    for name, timing in timings.items():
        stream, _, way = name.partition(": ")
        own = figures["streams"][name]
        blocks = f"{own['hit_share_by_16']:.3f}" if "hit_share_by_16" in own else "-"
        mean, median = (f"{1000 * seconds:.0f} ms" for seconds in (own["ttft_mean_s"], timing.median_s))
        lines.append(f"| {stream} | {way} | {own['hit_share']:.3f} | {blocks} | {mean} | {median} |")
    if figures["quality"]:
        lines += ["", "| order | exact match | hit share |", "|---|---|---|"]
    for name, own in figures["quality"].items():
        match = own["exact_match"]
        interval = f"{match['mean']:.3f} [{match['low']:.3f}, {match['high']:.3f}]"
        lines.append(f"| {name} | {interval} | {own['hit_share']:.3f} |")
    return lines


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.prefix", description=__doc__)
    default = Settings()
    parser.add_argument("--shape", choices=SHAPES, default=default.shape)
    parser.add_argument("--dtype", default=default.dtype)
    parser.add_argument("--device", default=default.device)
    parser.add_argument("--zipf", type=float, default=default.zipf, help="exponent of popularity")
    names = ("documents", "tokens", "k", "stream_questions", "turns", "answer_tokens", "prefix_mib")
    add_numbers(parser, default, (*names, "quality_questions", "seed"))
    add_places(parser, "where stores are written")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, embedder: Embedder | None = None, examples: Path = EXAMPLES) -> Result:
    """embedder: of the example corpus; the default one when None."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    settings = settings_from(options, Settings)
    where = environment("benchmarks.prefix", given, torch.device(settings.device))
    streams, timings = run_streams(settings, options.workdir) if settings.stream_questions else ({}, {})
    answers = quality(settings, options.workdir, embedder, examples) if settings.quality_questions else {}
    figures = {"streams": streams, "quality": answers}
    name = "prefix" if streams else "prefix-quality"
    result = Result(name, settings, where, timings, {}, figures, [])
    write(result, options.out)
    lines = markdown(figures, timings)
    (options.out / f"{name}.md").write_text("\n".join(lines) + "\n")
    show(Result(name, None, where, timings, {}, {}, []))
    Console(width=140).print("\n".join(lines), highlight=False)
    return result


if __name__ == "__main__":
    main()
