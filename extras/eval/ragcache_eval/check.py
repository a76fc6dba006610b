"""The gate for users of blending: which methods answer as full prefill does, on this model and these passages."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ragcache.engine.assemble import open_retriever
from ragcache.engine.options import StoreConfig
from ragcache.engine.store_config import StoreParts, open_store
from ragcache.engine.verdict import FULL, MethodVerdict, Verdict
from ragcache.errors import ConfigError, RagCacheError, check_least
from ragcache.fusion.fuse import block_recipe
from ragcache.ingest.text_blocks import split_sentences
from ragcache.kv.block_key import PRIMER
from ragcache.models.card import ModelCard
from ragcache.models.primer import DEFAULT_PRIMER
from ragcache.store.neighbours import NEIGHBOURS, NeighbourChoice, NeighbourTable
from ragcache.store.records import Chunk
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.journal import Ledger, Score
from ragcache_eval.methods import MethodSpec
from ragcache_eval.metrics import BM25
from ragcache_eval.report import Row, summarise
from ragcache_eval.runner import NO_PASSAGES, Runner
from ragcache_eval.sources import read_entries

MEASURED = ("top1_answer", "top1_first", "kl_answer", "kl_first", "same_answer", "accuracy")


@dataclass(frozen=True)
class Thresholds:
    """Limits inside which a method is safe; all are means over the questions.

    min_agreement: share of the tokens of full prefill's answer that the method would choose as well
    max_kl:   KL(full prefill || method) along that answer, nats a token
    min_same_answer: share of questions with exactly the same answer
    max_accuracy_drop: of full prefill's accuracy, where gold answers are known: 0.03 lets a method keep 97 % of it
    """

    min_agreement: float = 0.95
    max_kl: float = 0.1
    min_same_answer: float = 0.85
    max_accuracy_drop: float = 0.03

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value < 0 or (one.name != "max_kl" and value > 1):
                raise ConfigError(f"{one.name.replace('_', '-')} is {value}; choose a share between 0 and 1")

    def broken_by(self, row: Row, full: Row) -> str:
        """The thresholds that a method breaks, in words; empty when it keeps them all."""
        found = {name: estimate.mean for name, estimate in row.quality.items()}
        least = {"top1_answer": self.min_agreement, "same_answer": self.min_same_answer}
        wrong = [f"{_WORDS[n]} {found[n]:.3f} is below {limit:g}" for n, limit in least.items() if found[n] < limit]
        most = {"kl_answer": (found["kl_answer"], self.max_kl)}
        if "accuracy" in found:
            whole = full.quality["accuracy"].mean
            most["accuracy"] = (1 - found["accuracy"] / whole if whole else 0.0, self.max_accuracy_drop)
        wrong += [f"{_WORDS[n]} {value:.3f} is above {limit:g}" for n, (value, limit) in most.items() if value > limit]
        return "; ".join(wrong)


_WORDS = {
    "top1_answer": "top-1 agreement",
    "same_answer": "share of equal answers",
    "kl_answer": "KL from full prefill",
    "accuracy": "loss of accuracy",
}


class Checked(NamedTuple):
    """The verdict, and the table behind it (full prefill and the no-passages baseline among its rows)."""

    verdict: Verdict
    rows: list[Row]


class Check:
    """One model, some methods, some questions. `scores()` does the work, `finish()` judges."""

    def __init__(
        self,
        runner: Runner,
        source: str,
        cases: Sequence[Case],
        specs: Sequence[MethodSpec],
        thresholds: Thresholds,
        neighbours: int = 0,
        primer: Sequence[int] = (),
    ) -> None:
        """Prepare the check of `specs` over blocks as the store encodes them.

        Args:
            neighbours: neighbours that each passage is encoded after.
            primer: ids of the primer that each passage is encoded after; none without a primer.
        """
        self.runner = Runner(runner.lm, runner.form, replace(runner.settings, reference="full"))
        evicting = next((spec for spec in specs if spec.evict is not None), None)
        if evicting is not None:
            raise ConfigError(f"{evicting.label}: a verdict is about methods, not about eviction; leave evict out")
        sparse = next((spec for spec in specs if spec.kept < 1), None)
        if sparse is not None:
            raise ConfigError(f"{sparse.label}: a verdict is about methods over whole KV; leave kept out")
        behind = next((spec for spec in specs if spec.neighbours), None)
        if behind is not None:
            raise ConfigError(f"{behind.label}: a verdict is about blocks as the store has them; leave neighbours out")
        self.source = source
        self.cases = list(cases)
        self.thresholds = thresholds
        self.neighbours, self.primer = neighbours, tuple(primer)
        self._probe = next(filter(self._fits, self.cases), None)
        self.specs = [self._as_stored(spec) for spec in specs]
        self.refused = {spec.key: reason for spec in self.specs if (reason := self._refusal(spec))}
        self._scores: list[Score] = []

    def _as_stored(self, spec: MethodSpec) -> MethodSpec:
        method = spec.method()
        if not method.reuses_blocks:
            return spec
        if self.primer and spec.recipe in (None, PRIMER) and not spec.primer and PRIMER in method.recipes:
            spec = replace(spec, recipe=PRIMER, primer=self.primer)
        has_neighbours = any(passage.behind for case in self.cases for passage in case.passages)
        return replace(spec, neighbours=self.neighbours if has_neighbours else 0)

    @property
    def running(self) -> list[MethodSpec]:
        return [spec for spec in self.specs if spec.key not in self.refused]

    def scores(self) -> Iterator[Score]:
        for score in self.runner.run(self.cases, self.running, Ledger()):
            self._scores.append(score)
            yield score

    def finish(self) -> Checked:
        """Raises ConfigError when no question could be measured."""
        labels = {NO_PASSAGES: NO_PASSAGES, **{spec.key: spec.label for spec in self.running}}
        rows = [row for row in summarise(self._scores, labels) if not row.cell]
        by_key = dict(zip(labels, rows, strict=True))
        full = next(by_key[spec.key] for spec in self.running if spec.name == FULL)
        if not full.questions:
            raise ConfigError(f"no question could be measured: {full.skipped_because}")
        judged = [self._judge(spec, by_key.get(spec.key), full) for spec in self.specs if spec.name != FULL]
        lm = self.runner.lm
        limits = asdict(self.thresholds)
        behind = self.neighbours, self.primer
        return Checked(
            Verdict(lm.fingerprint, lm.name, self.source, full.questions, limits, tuple(judged), *behind), rows
        )

    def _fits(self, case: Case) -> bool:
        return self.runner.fits(case.prompt(self.runner.lm.tokenizer, self.runner.form))

    def _refusal(self, spec: MethodSpec) -> str:
        """Why this model cannot do a method at all; empty when it can."""
        if spec.name == FULL or self._probe is None:
            return ""
        try:
            reader = self.runner.reader(self._probe)
            fused, _ = reader.read(spec.method(), spec.recipe, neighbours=spec.neighbours, primer=spec.primer)
        except RagCacheError as error:
            return str(error)
        fused.cache.release()
        return ""

    def _judge(self, spec: MethodSpec, row: Row | None, full: Row) -> MethodVerdict:
        options = dict(spec.options)
        primer = "" if spec.recipe != PRIMER or isinstance(spec.primer, tuple) else spec.primer or DEFAULT_PRIMER
        if row is None or not row.questions:
            reason = self.refused.get(spec.key) or f"no question was measured: {row.skipped_because if row else ''}"
            reason = f"cannot run: {reason}"
            return MethodVerdict(spec.name, options, spec.recipe or "", safe=False, reason=reason, primer=primer)
        broken = self.thresholds.broken_by(row, full)
        figures: dict[str, Any] = {name: row.quality[name].mean for name in MEASURED if name in row.quality}
        return MethodVerdict(
            name=spec.name,
            options=options,
            recipe=spec.recipe or block_recipe(self.runner.lm, spec.method()).name,
            safe=not broken,
            reason=broken,
            computed_share=row.costs["computed_share"],
            figures={**figures, "kept_share": row.costs["kept_share"], "ttft_s": row.costs["ttft_s"]},
            primer=primer,
        )


# A store's own passages: under questions of the user's, as retrieval finds them, or under questions made from them.


def opened(path: Path, database: str | None = None) -> closing[StoreParts]:
    """The store for reading. Raises StoreNotFoundError and what else opening raises."""
    return closing(open_store(path, StoreConfig(database=database, read_only=True), create=False))


def made_from(store: StoreParts, *, questions: int, passages: int, lm: ModelCard, seed: int = 0) -> list[Case]:
    """Return sentence completions over the store's chunks, or over its passages if it has no documents.

    See `completion_cases`. Raises ConfigError for a store without chunks and passages.
    """
    documents = store.documents
    chunks = [chunk for one in documents.documents() for chunk in documents.chunks_of(one.id)]
    texts = [chunk.text for chunk in chunks] or foreign_texts(store, lm)
    behind = neighbour_texts(store, chunks) if chunks else None
    return completion_cases(texts, questions=questions, passages=passages, seed=seed, behind=behind)


def foreign_texts(store: StoreParts, lm: ModelCard) -> list[str]:
    """Decode the passages that belong to no document of the store.

    Raises ConfigError if there are no such passages, or if their tokens belong to another model.
    """
    found = store.kv.passages.contents() if store.kv.passages is not None else []
    if not found:
        raise ConfigError(
            f"{store.layout.root}: the store holds neither documents nor passages; ingest or precompute some first, or "
            "give questions with passages of their own (--data)"
        )
    bound = store.documents.properties()
    if bound.get("fingerprint") != lm.fingerprint:
        raise ConfigError(
            f"{store.layout.root}: its passages are kept as tokens of {bound.get('model_name')!r}, not of {lm.name!r}; "
            "leave --model out, or give questions with passages of their own (--data)"
        )
    return [str(lm.tokenizer.decode(ids)) for ids in found]


def neighbours_of(store: StoreParts) -> NeighbourChoice:
    """What the store's passages are read behind."""
    return NeighbourChoice.of(store.documents.properties().get(NEIGHBOURS))


def neighbour_texts(store: StoreParts, chunks: Sequence[Chunk]) -> list[tuple[str, ...]]:
    """By chunk, the texts that it is read behind, in the order of reading, as the last ingestion found them."""
    near = NeighbourTable(store.documents.database).of(chunk.vector_id for chunk in chunks)
    there = store.documents.chunks_by_vector_ids({id for found in near.values() for id in found})
    texts = {chunk.vector_id: chunk.text for chunk in there}
    in_order = neighbours_of(store).in_order
    return [tuple(texts[id] for id in in_order(near.get(chunk.vector_id, [])) if id in texts) for chunk in chunks]


def asked_of(
    store: StoreParts,
    file: Path,
    *,
    passages: int,
    lm: ModelCard,
    device: str = "auto",
    embedder: str | None = None,
    limit: int | None = None,
) -> list[Case]:
    """Return the questions of a file, each with the passages that the store's retriever finds, best first. In a store
    without documents the passages are ranked by BM25.

    Lines that bring passages of their own keep them. Raises ConfigError, EmbedderError.
    """
    entries = read_entries(file)[:limit]
    if not store.documents.documents(limit=1):
        cases = [entry.case for entry in entries]
        if all(case.passages for case in cases):
            return cases
        texts = foreign_texts(store, lm)
        words = BM25(texts)
        nearest = [[CasePassage(texts[rank]) for rank in words.ranked(case.question)[:passages]] for case in cases]
        return [replace(case, passages=case.passages or tuple(near)) for case, near in zip(cases, nearest, strict=True)]
    retriever = open_retriever(store, StoreConfig(read_only=True), embedder, None, device)
    cases = []
    for entry in entries:
        hits = [] if entry.case.passages else retriever.retrieve(entry.case.question, passages)
        behind = neighbour_texts(store, [hit.chunk for hit in hits])
        own = tuple(CasePassage(hit.chunk.text, behind=near) for hit, near in zip(hits, behind, strict=True))
        cases.append(replace(entry.case, passages=entry.case.passages or own))
    empty = next((case for case in cases if not case.passages), None)
    if empty is not None:
        raise ConfigError(f"{empty.id}: nothing was retrieved; ingest something first")
    return cases


# Questions made from passages, for users who have none: half a sentence is given, the other half is wanted.


MIN_WORDS, MAX_WORDS = 8, 40
QUESTION = 'How does this sentence of the text above go on? "{start} ..."'


def completion_cases(
    texts: Sequence[str],
    *,
    questions: int,
    passages: int,
    seed: int = 0,
    behind: Sequence[tuple[str, ...]] | None = None,
) -> list[Case]:
    """Cases over the given chunk texts: one sentence each, its chunk among others in an order drawn by `seed`.

    behind: by chunk, what it is read behind; None: nothing

    A context has all chunks where there are fewer than `passages`. The same texts and seed give the same cases.
    Raises ConfigError when no chunk has a sentence of 8 to 40 words.
    """
    rng = random.Random(f"completion/{seed}")
    places = [place for place, text in enumerate(texts) if next(_usable(text), None)]
    if not places:
        raise ConfigError(f"none of {len(texts)} passages has a sentence to ask about; give questions of your own")
    rng.shuffle(places)
    cases = []
    for number in range(questions):
        place = places[number % len(places)]
        words = rng.choice(list(_usable(texts[place]))).split()
        others = [other for other in range(len(texts)) if other != place]
        chosen = [place, *rng.sample(others, min(passages - 1, len(others)))]
        rng.shuffle(chosen)
        start, rest = " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])
        near = ((),) * len(texts) if behind is None else behind
        found = tuple(CasePassage(texts[one], is_gold=one == place, behind=near[one]) for one in chosen)
        cases.append(Case(f"completion-{number:04d}", QUESTION.format(start=start), found, (rest,)))
    return cases


def _usable(text: str) -> Iterator[str]:
    """Sentences on one line, neither short nor long."""
    for sentence in split_sentences(text):
        if "\n" not in sentence.strip() and MIN_WORDS <= len(sentence.split()) <= MAX_WORDS:
            yield sentence.strip()


# Layers by which `prophet` chooses best on a model and its passages: QCFuse's profiled layers (arXiv 2606.05875).


PROFILED = "prophet"


def can_profile(spec: MethodSpec) -> bool:
    """Whether the method chooses by layers, and none are named."""
    return spec.name == PROFILED and dict(spec.options).get("layers") is None


class Profile:
    """Finds layers for one way of writing `prophet`. `scores()` does the work; `spec` is then the method with them.

    First each layer chooses alone, then each beside those found before, `count` times: the one stays with which answers
    come nearest to full prefill's (least mean KL along its answer). How QCFuse profiles is not known here.
    """

    def __init__(self, runner: Runner, cases: Sequence[Case], spec: MethodSpec, count: int) -> None:
        """Raises ConfigError for another method, for one whose layers are named, and without questions."""
        if not can_profile(spec):
            raise ConfigError(f"{spec.label}: layers are profiled for {PROFILED} alone, where none are named")
        if not cases:
            raise ConfigError("layers are profiled on questions, and there are none; give at least one")
        check_least("profile_layers", count, 1)
        self.runner = Runner(runner.lm, runner.form, replace(runner.settings, reference="full"))
        self.cases = list(cases)
        self.count = min(count, runner.lm.num_layers)
        self.spec = spec

    @property
    def num_scores(self) -> int:
        """How many `scores()` yields."""
        tried = sum(self.runner.lm.num_layers - found for found in range(self.count))
        return len(self.cases) * (tried + 2 * self.count)

    def scores(self) -> Iterator[Score]:
        found: tuple[int, ...] = ()
        for _ in range(self.count):
            left = [layer for layer in range(self.runner.lm.num_layers) if layer not in found]
            tried = {self._with((*found, layer)).key: (*found, layer) for layer in left}
            specs = [MethodSpec(FULL, FULL), *(self._with(layers) for layers in tried.values())]
            far: dict[str, list[float]] = {key: [] for key in tried}
            for score in self.runner.run(self.cases, specs, Ledger()):
                if score.method in far and score.kl_answer is not None:
                    far[score.method].append(score.kl_answer)
                yield score
            if not all(far.values()):
                raise ConfigError("no question of the profile could be measured; give questions that fit the model")
            found = tried[min(far, key=lambda key: fmean(far[key]))]
        self.spec = self._with(found)

    def _with(self, layers: Sequence[int]) -> MethodSpec:
        named, options = sorted(layers), [one for one in self.spec.options if one[0] != "layers"]
        label = f"{self.spec.label}:layers=[{','.join(map(str, named))}]"
        return replace(self.spec, label=label, options=(*options, ("layers", named)))
