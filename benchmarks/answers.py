"""Answers of a real model to real questions: every method beside full prefill of the same weights.

python -m benchmarks answers --model DIR --data DIR                      # every method, every set, 24 questions each
python -m benchmarks answers --model DIR --data DIR --methods reposition,epic:first_tokens=4 --sets nq10 --questions 100
python -m benchmarks answers --model DIR --data DIR --minutes 0          # the report of the journal

Questions are chosen by a hash of their ids, so that a larger --questions includes all questions of a smaller. Sets take
turns, a question each, and every method reads a question before the next question: whenever a run ends, all methods
have read the same questions. All methods are compared with a single full prefill per question. If a set names positions
of its gold passage, the n-th question has the passage at the n-th position, counting round. If a prompt is longer than
--context, passages without the answer are dropped from its end.

Each score is on disk before the next is measured. Run the same command again to go on, also with more questions, sets
or methods: the report covers all that the journal holds.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import chain, islice, zip_longest
from pathlib import Path

import numpy as np

import ragcache as rc
from benchmarks.answers_report import figures_of
from benchmarks.answers_report import markdown as markdown
from benchmarks.journal import Runs
from benchmarks.report import Result
from benchmarks.runner import Run
from ragcache.errors import ConfigError, check_least
from ragcache.ingest.context_chunks import without_copies
from ragcache.prompt import PromptFormat, encode_text, prompt_format
from ragcache.retrieval.embedder import load_embedder
from ragcache.retrieval.embedder_types import Embedder
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.journal import Journal
from ragcache_eval.methods import MethodSpec, all_methods, parse_methods, usable_methods
from ragcache_eval.runner import Runner, RunSettings
from ragcache_eval.sources import load_cases

SETS = ("xquad_en:passages=6", "nq10", "hotpotqa", "musique", "2wiki")
BUDGETS = (
    *(f"epic:first_tokens={tokens}" for tokens in (4, 8, 32)),
    "cacheblend:ratio=0.3",
    "a3:boundary_tokens=16",
    "prophet:boundary_tokens=16",
)
"""Methods with other budgets, which are measured beside each method with its default options."""
SYSTEM = "Give only the short answer that the text states, such as a name, a number or a date. No full sentence."
OPENING = {True: 'According to the text, the answer is "', False: ' "'}
"""The beginning of an answer, by whether there is a chat template; without a template "Answer:" precedes it. After an
opening quotation mark, small models copy a few words instead of writing a sentence."""
MAX_ANSWER_TOKENS = 24
STOP = ("\n", '"')


@dataclass(frozen=True)
class Settings:
    """model:      bundled name, directory or hub id
    data:       directory of question sets, as for `ragcache eval --data-dir`
    sets:       as for `ragcache eval --data`; questions: number of questions of each set
    methods:    A,B:option=value; all methods if none is named
    minutes:    begin no question after this time; 0: only report the journal
    context:    most tokens of prompt and answer
    neighbours: neighbours of each passage, for methods with neighbours=N
    seed:       seed of the choice of questions
    """

    model: str
    data: Path
    sets: tuple[str, ...] = SETS
    methods: tuple[str, ...] = ()
    questions: int = 24
    context: int = 2048
    minutes: float = float("inf")
    neighbours: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for least in ("questions", "context"):
            check_least(f"--{least}", getattr(self, least), 1)

    @property
    def name(self) -> str:
        return f"answers-{Path(self.model).name}"


def every_method() -> list[MethodSpec]:
    """Return each method with its default options and at other budgets, then all under every other accepted recipe."""
    own = [*all_methods(), *(MethodSpec.parse(text) for text in BUDGETS)]
    others = [(spec, recipe) for spec in own if not spec.is_reference for recipe in spec.method().recipes[1:]]
    return [*own, *(MethodSpec.parse(f"{spec.label}:recipe={recipe}") for spec, recipe in others)]


def choose(source: str, directory: Path | None, seed: int) -> list[Case]:
    """Return all questions of a set, in the order in which they are put; ids begin with the set's name.

    Raises ConfigError naming the available sets, the line that is not a question, or the question without an answer.
    """
    found: dict[str, list[Case]] = defaultdict(list)
    for case in load_cases(source, directory=directory):
        if not case.answers:
            raise ConfigError(f"{source}: question {case.id!r} has no answer; give it one, or leave the set out")
        found[case.cluster].append(case)
    order = sorted(found, key=lambda name: sha256(f"{seed}/{name}".encode()).digest())
    chosen = [found[name][number % len(found[name])] for number, name in enumerate(order)]
    return [replace(case, id=f"{source}/{case.id}", cell={"set": source}) for case in chosen]


def short_answers(lm: rc.LanguageModel) -> PromptFormat:
    """Return a prompt format that requests a few words."""
    form = prompt_format(lm.tokenizer, system=SYSTEM)
    return replace(form, tail=form.tail + OPENING[lm.tokenizer.chat_template is not None])


def fitted(case: Case, lm: rc.LanguageModel, form: PromptFormat, context: int) -> Case | None:
    """Return the case with as many passages as fit, with prompt and answer, into `context` tokens.

    Returns None if the passages that hold the answer do not fit.
    """
    ends = len(form.prefix_ids) + len(form.suffix_ids(lm.tokenizer, case.question)) + MAX_ANSWER_TOKENS
    room = context - ends
    lengths = [len(encode_text(lm.tokenizer, passage.rendered())) for passage in case.passages]
    kept = list(range(len(lengths)))
    while sum(lengths[rank] for rank in kept) > room:
        last = next((rank for rank in reversed(kept) if case.passages[rank].is_gold is not True), None)
        if last is None:
            return None
        kept.remove(last)
    return replace(case, passages=tuple(case.passages[rank] for rank in kept)) if kept else None


def questions_of(
    sources: Sequence[str], directory: Path | None, runner: Runner, context: int, count: int, seed: int
) -> dict[str, list[Case]]:
    """Return, by set, the first `count` questions that fit into `context` tokens."""
    found = {}
    for source in sources:
        cases = (fitted(case, runner.lm, runner.form, context) for case in choose(source, directory, seed))
        found[source] = [case for case, _ in zip(filter(None, cases), range(count), strict=False)]
        if not found[source]:
            raise ConfigError(f"{source}: no question fits into --context {context}; allow more tokens")
    return found


def with_neighbours(
    questions: dict[str, list[Case]], directory: Path, count: int, embedder: Embedder, lm: rc.LanguageModel, seed: int
) -> dict[str, list[Case]]:
    """Return the same questions with neighbours for each passage.

    These are the `count` passages of the whole set with the most similar embeddings, the most similar last, without
    copies, as a store of the set would read the passage after them.
    """
    return {
        source: _among(choose(source, directory, seed), cases, count, embedder, lm)
        for source, cases in questions.items()
    }


def _among(
    whole: Sequence[Case], cases: Sequence[Case], count: int, embedder: Embedder, lm: rc.LanguageModel
) -> list[Case]:
    """Return `cases` with the neighbours of each passage among the passages of the whole set."""
    texts = list(dict.fromkeys(passage.rendered() for case in (*whole, *cases) for passage in case.passages))
    places = {text: place for place, text in enumerate(texts)}
    vectors = np.asarray(embedder.embed(texts), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    tokens = cache(lambda place: encode_text(lm.tokenizer, texts[place]))

    def behind(passage: CasePassage) -> CasePassage:
        own = places[passage.rendered()]
        scores = vectors @ vectors[own]
        scores[own] = -np.inf
        others = ((texts[place], tokens(place)) for place in np.argsort(-scores)[: len(texts) - 1])
        nearest = list(islice(without_copies(tokens(own), others), count))
        return passage._replace(behind=tuple(nearest[::-1]))

    return [replace(case, passages=tuple(map(behind, case.passages))) for case in cases]


def in_turn(questions: dict[str, list[Case]]) -> Iterator[Case]:
    """Yield the first question of each set, the second of each, and so on."""
    return filter(None, chain.from_iterable(zip_longest(*questions.values())))


def read_questions(
    runner: Runner, cases: Sequence[Case], specs: Sequence[MethodSpec], journal: Journal, minutes: float
) -> int:
    """Run the methods on the questions until the time is up; return the number of questions that were read."""
    until = time.monotonic() + 60 * minutes
    for done, case in enumerate(cases):
        if time.monotonic() >= until:
            return done
        for _ in runner.run([case], specs, journal):
            pass
        print(f"\r{done + 1} of {len(cases)} questions", end="", file=sys.stderr, flush=True)
    return len(cases)


def measure(settings: Settings, run: Run) -> Result:
    asked = parse_methods(list(settings.methods)) if settings.methods else every_method()
    lm = rc.load_lm(settings.model, dtype=settings.dtype, device=settings.device)
    runner = Runner(lm, short_answers(lm), RunSettings(MAX_ANSWER_TOKENS, STOP, "skip", "full"))
    specs = usable_methods(asked, lm)
    chosen = settings.context, settings.questions, settings.seed
    questions = questions_of(settings.sets, settings.data, runner, *chosen)
    if settings.neighbours and settings.minutes > 0:
        near = settings.neighbours, load_embedder("minilm")
        questions = with_neighbours(questions, settings.data, *near, lm, settings.seed)
    path, runs = run.journal_path, Runs(run.journal_path)
    stated = {"dtype": settings.dtype, "context": settings.context, "seed": settings.seed}
    with Journal(path, {**stated, **runner.describe()}) as journal:
        if settings.minutes > 0:
            runs.add(run.environment)
            read_questions(runner, list(in_turn(questions)), specs, journal, settings.minutes)
            print(file=sys.stderr)
        scores = list(journal.done.values())
    if not scores:
        raise ConfigError(f"nothing was measured, and {path} holds nothing; allow more --minutes")
    left_out = [spec.label for spec in asked if spec not in specs]
    regime = {"model": Path(lm.name).name, **stated, "questions": settings.questions, "left_out": left_out}
    return run.result(figures={**figures_of(scores), "runs": runs.all()}, settings=regime)
