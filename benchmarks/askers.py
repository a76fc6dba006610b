"""Many askers at once, against one at a time and against threads that do not share passes.

    python -m benchmarks askers --set askers=8

Whole questions through the engine: retrieval, blocks from the memory tier, fused prefill, decoding. Every asker asks
its next question as soon as it has an answer; askers start one after another. All three ways answer the same questions,
and their answers are compared.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.prose import documents, train_tokenizer
from benchmarks.questions import load_named
from benchmarks.report import Goal, Result
from benchmarks.runner import Run
from benchmarks.shapes import SHAPES, ModelSettings, build
from benchmarks.timing import Ratio, Timing
from ragcache.engine.answer import Answer
from ragcache.engine.kb import RagCache
from ragcache.engine.options import StoreConfig
from ragcache.errors import ConfigError
from ragcache.ingest.document import Document
from ragcache.models.sampler import Sampling
from ragcache.models.scheduler import PassStats

ONE, JOINED, APART = "one at a time", "joined passes", "a pass each"
SHARED = "KV bytes of all askers over the same passages / one asker's"
MEMORY_BYTES = 8 << 30
LOOK_S = 0.002
STAGGER = 0.5  # share of an answer's time, between the starts of two askers


@dataclass(frozen=True)
class Settings(ModelSettings):
    """passages: passages that a question reads, of `tokens` tokens each. documents: number of documents in the store.
    answer: tokens of an answer. embedder: see `load_named`"""

    method: str = "reposition"
    embedder: str = "minilm"
    askers: int = 8
    questions: int = 24
    passages: int = 10
    tokens: int = 200
    documents: int = 30
    answer: int = 32

    @property
    def sizes(self) -> str:
        return f"{self.askers}x{self.passages}x{self.tokens}"

    @property
    def on_goal(self) -> bool:
        """Return whether the goals apply to this run."""
        where = (self.shape, self.dtype, self.device.partition(":")[0])
        stated = self.has_cpu_goals or where == ("Llama-3.1-8B", "bfloat16", "cuda")
        return stated and self.askers == 8 and self.passages * self.tokens >= 1000 and self.questions >= 24


class Served(NamedTuple):
    """Answers to all questions, in the questions' order, and the seconds until the last answer."""

    answers: list[Answer]
    seconds: float
    passes: PassStats

    @property
    def ttfts(self) -> list[float]:
        return [answer.timings.ttft_s for answer in self.answers]

    @property
    def answers_per_s(self) -> float:
        return len(self.answers) / self.seconds


class Asking:
    """A knowledge base, and the questions."""

    def __init__(self, kb: RagCache, questions: Sequence[str], settings: Settings) -> None:
        self._kb = kb
        self._questions = questions
        self._settings = settings
        self._sampling = Sampling(max_tokens=settings.answer)
        self._stagger_s = 0.0

    def warm_up(self) -> None:
        """Bring all blocks to memory, and measure the time of a question to spread the askers' starts.

        All answers have the same length, so askers that started together would end and ask together again and again.
        """
        for question in self._questions:
            self._kb.ask(question, self._settings.passages, sampling=Sampling(max_tokens=1))
        seconds = [self._ask(question).timings.total_s for question in self._questions[:2]]
        self._stagger_s = STAGGER * min(seconds)

    def one(self) -> Served:
        return self._serve(1)

    def joined(self) -> Served:
        return self._serve(self._settings.askers)

    def apart(self) -> Served:
        self._kb.lm.scheduler.sharing = False
        try:
            return self._serve(self._settings.askers)
        finally:
            self._kb.lm.scheduler.sharing = True

    def most_held_bytes(self, askers: int) -> int:
        """Return the most bytes of KV that this many answers over the same passages hold at once."""
        most = 0
        with ThreadPoolExecutor(askers) as pool:
            jobs = [pool.submit(self._ask, self._questions[0]) for _ in range(askers)]
            while not all(job.done() for job in jobs):
                most = max(most, self._kb.admission.reserved_bytes)
                time.sleep(LOOK_S)
        for job in jobs:
            job.result()
        return most

    def _ask(self, question: str) -> Answer:
        return self._kb.ask(question, self._settings.passages, sampling=self._sampling)

    def _serve(self, askers: int) -> Served:
        """Answer all questions by this many askers; each takes the next question that is left."""
        answers: dict[int, Answer] = {}
        left: Iterator[tuple[int, str]] = iter(enumerate(self._questions))
        lock = threading.Lock()

        def loop(number: int) -> None:
            time.sleep(number * self._stagger_s)
            while True:
                with lock:
                    rank, question = next(left, (-1, ""))
                if rank < 0:
                    return
                answers[rank] = self._ask(question)

        before = self._kb.lm.scheduler.stats()
        started = time.perf_counter()
        with ThreadPoolExecutor(askers) as pool:
            for done in [pool.submit(loop, number) for number in range(askers)]:
                done.result()
        seconds = time.perf_counter() - started
        return Served(
            [answers[rank] for rank in sorted(answers)], seconds, _since(before, self._kb.lm.scheduler.stats())
        )


def _since(before: PassStats, after: PassStats) -> PassStats:
    members = {size: count - before.members.get(size, 0) for size, count in after.members.items()}
    return PassStats(after.passes - before.passes, after.tokens - before.tokens, members)


def passages_of(lm_tokenizer: object, settings: Settings) -> list[Document]:
    """Return documents of `settings.tokens` tokens of English each, cut from Python's help topics."""
    whole = documents(lm_tokenizer, settings.documents * settings.tokens * 2)  # type: ignore[arg-type]
    ids = [token for one in whole for token in lm_tokenizer(one.text, add_special_tokens=False)["input_ids"]]  # type: ignore[operator]
    starts = range(0, settings.documents * settings.tokens, settings.tokens)
    texts = [lm_tokenizer.decode(ids[start : start + settings.tokens]) for start in starts]  # type: ignore[attr-defined]
    if not texts or len(ids) < settings.documents * settings.tokens:
        raise ConfigError(f"there is no English for {settings.documents} documents; ask for fewer or shorter ones")
    return [Document(f"passage {number}", text) for number, text in enumerate(texts)]


def questions_of(passages: Sequence[Document], settings: Settings) -> list[str]:
    """Return questions, each with some words of another passage, so that different passages are found."""
    random = np.random.default_rng(settings.seed)
    found = []
    for number in range(settings.questions):
        words = passages[number % len(passages)].text.split() or ["it"]
        chosen = random.choice(words, size=12)
        found.append(f"What is said about {' '.join(chosen)}?")
    return found


def measure(settings: Settings, run: Run) -> Result:
    device = torch.device(settings.device)
    tokenizer = train_tokenizer(vocab_size=min(16384, SHAPES[settings.shape]["vocab_size"]))
    lm = build(settings.shape, settings.dtype, device, tokenizer, settings.seed).lm
    store = StoreConfig(memory_bytes=MEMORY_BYTES, prefix_bytes=0)
    embedder = load_named(settings.embedder, settings.device)
    with RagCache.open(run.workdir / "store", model=lm, method=settings.method, embedder=embedder, store=store) as kb:
        passages = passages_of(tokenizer, settings)
        kb.ingest(passages, split=False)
        work = Asking(kb, questions_of(passages, settings), settings)
        work.warm_up()
        held = {askers: work.most_held_bytes(askers) for askers in (1, settings.askers)}
        return summarise(settings, run, _rounds(work, settings.rounds), held)


def _rounds(work: Asking, rounds: int) -> dict[str, list[Served]]:
    ways: list[tuple[str, Callable[[], Served]]] = [(ONE, work.one), (JOINED, work.joined), (APART, work.apart)]
    served: dict[str, list[Served]] = {name: [] for name, _ in ways}
    for number in range(rounds):
        first = number % len(ways)
        for name, way in [*ways[first:], *ways[:first]]:
            served[name].append(way())
            print(f"askers round {number + 1}/{rounds}: {name}", file=sys.stderr, flush=True)
    return served


def summarise(settings: Settings, run: Run, served: dict[str, list[Served]], held: dict[int, int]) -> Result:
    """Return the result. held: bytes of KV by number of askers over the same passages"""
    ttfts = {name: [s for one in runs for s in one.ttfts] for name, runs in served.items()}
    totals = {name: [a.timings.total_s for one in runs for a in one.answers] for name, runs in served.items()}
    timings = {f"{name}: first token": Timing.of(taken) for name, taken in ttfts.items()}
    timings |= {f"{name}: answer": Timing.of(taken) for name, taken in totals.items()}
    ratios = {
        f"{JOINED} / {ONE}, answers/s": _paired(served[JOINED], served[ONE]),
        f"{JOINED} / {APART}, answers/s": _paired(served[JOINED], served[APART]),
        f"{APART} / {ONE}, answers/s": _paired(served[APART], served[ONE]),
    }
    same = {name: _same(runs, served[ONE][0]) for name, runs in served.items()}
    passes = [one.passes for one in served[JOINED]]
    figures = {
        **{f"{name}, answers/s": statistics.median(one.answers_per_s for one in runs) for name, runs in served.items()},
        **{f"{name}, first token p50, s": float(np.percentile(taken, 50)) for name, taken in ttfts.items()},
        **{f"{name}, first token p95, s": float(np.percentile(taken, 95)) for name, taken in ttfts.items()},
        **{f"{name}, answers like {ONE}": share for name, share in same.items()},
        "kv bytes by askers over the same passages": {str(askers): num_bytes for askers, num_bytes in held.items()},
        "prompt tokens, mean": statistics.mean(a.usage.prompt_tokens for a in served[ONE][0].answers),
        f"{JOINED}, passes": sum(one.passes for one in passes),
        f"{JOINED}, tokens a pass": sum(one.tokens for one in passes) / sum(one.passes for one in passes),
        f"{JOINED}, passes by members": _by_members(passes),
    }
    least = 3.0 if settings.device.startswith("cuda") else 1.5
    faster, later = f"{JOINED} / {ONE}, answers/s", f"{JOINED} / {ONE}, first token p95"
    slower = Ratio.of([_p95(a) / _p95(b) for a, b in zip(served[JOINED], served[ONE], strict=True)])
    ratios[later] = slower
    goals = [
        Goal.of(faster, "at least", least, ratios[faster], settings.on_goal),
        Goal.of(later, "at most", 1.5, slower, settings.on_goal),
        Goal(SHARED, "at most", 1.5, held[settings.askers] / held[1], settings.on_goal),
        Goal(f"{JOINED}: share of answers like {ONE}", "at least", 1.0, same[JOINED], True),
    ]
    return run.result(timings, ratios, figures, goals)


def _p95(one: Served) -> float:
    return float(np.percentile(one.ttfts, 95))


def _paired(above: Sequence[Served], below: Sequence[Served]) -> Ratio:
    ratios = [a.answers_per_s / b.answers_per_s for a, b in zip(above, below, strict=True)]
    return Ratio.of(ratios)


def _same(runs: Sequence[Served], expected: Served) -> float:
    """Return the share of answers whose text equals the single asker's."""
    pairs = [(a.text, b.text) for one in runs for a, b in zip(one.answers, expected.answers, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def _by_members(passes: Sequence[PassStats]) -> dict[str, int]:
    sizes = sorted({size for one in passes for size in one.members})
    return {str(size): sum(one.members.get(size, 0) for one in passes) for size in sizes}
