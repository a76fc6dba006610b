"""Check which fusion methods answer as full prefill does, on a model and its passages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from ragcache.engine.verdict import FULL, MethodVerdict, Verdict
from ragcache.errors import ConfigError, RagCacheError
from ragcache.fusion.fuse import block_recipe
from ragcache.kv.block_key import PRIMER
from ragcache.models.primer import DEFAULT_PRIMER
from ragcache_eval.case import Case
from ragcache_eval.journal import Ledger, Score
from ragcache_eval.methods import MethodSpec
from ragcache_eval.report import Row, summarise
from ragcache_eval.runner import NO_PASSAGES, Runner
from ragcache_eval.thresholds import Thresholds

MEASURED = ("top1_answer", "top1_first", "kl_answer", "kl_first", "same_answer", "accuracy")


class Checked(NamedTuple):
    """The verdict, and the table it rests on (with rows for full prefill and the no-passages baseline)."""

    verdict: Verdict
    rows: list[Row]


class Check:
    """A check of methods on a model and questions. Iterate `scores()` to measure, then call `finish()` to judge."""

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
            runner: runs the methods; its reference is always full prefill's answer.
            source: description of the questions, for the verdict.
            neighbours: number of neighbours that each passage is encoded after.
            primer: ids of the primer that each passage is encoded after; () without a primer.

        Raises:
            ConfigError: a spec states how blocks are encoded, which the store decides (`kept`, `neighbours`).
        """
        self.runner = Runner(runner.lm, runner.form, replace(runner.settings, reference="full"))
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
        """Return the verdict and its table. Raises ConfigError if no question could be measured."""
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
        """Return why this model cannot run a method at all, found by reading a question; "" if it can."""
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
