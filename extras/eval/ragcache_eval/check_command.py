"""`ragcache check`: find the methods that are safe for a model and a store's passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragcache.cli.flags import Json, option
from ragcache.cli.terminal import FAILED, command, print_json, print_table, say
from ragcache.errors import ConfigError
from ragcache_eval.measured_model import EvaluatedModel, progress
from ragcache_eval.thresholds import Thresholds

if TYPE_CHECKING:
    from ragcache.engine.verdict import Verdict
    from ragcache_eval.case import Case
    from ragcache_eval.methods import MethodSpec
    from ragcache_eval.runner import Runner


@dataclass(frozen=True)
class QuestionOptions:
    """Options of the questions, and of the passages that are read with them."""

    store: Annotated[
        Path | None, option("--store", "Check on this store's passages, and keep the verdict there for method auto.")
    ] = None
    database: Annotated[str | None, option("--database", "SQLAlchemy URL of the store's documents.")] = None
    data: Annotated[
        str | None, option("--data", "Questions as JSON lines (passages come from the store), or a set as for eval.")
    ] = None
    data_dir: Annotated[Path | None, option("--data-dir", "Directory of public question sets.")] = None
    questions: Annotated[int, option("--questions", "Number of questions.", min=1)] = 50
    k: Annotated[int, option("--k", "Number of passages that each question has.", min=2)] = 5
    embedder: Annotated[
        str | None,
        option("--embedder", "Embedder for --data over a store; the store's own if not given."),
    ] = None

    def stored_model(self) -> tuple[str, str | None]:
        """Return name and dtype of the model that the store was made with, or the bundled model without a store."""
        if self.store is None:
            return "mini", None
        from ragcache_eval.store_cases import opened

        with opened(self.store, self.database) as found:
            bound = found.documents.properties()
        dtype = bound.get("model_dtype")
        return str(bound.get("model_name", "mini")), None if dtype is None else str(dtype)

    def company(self) -> tuple[int, tuple[int, ...]]:
        """Return the number of neighbours and the ids of the primer that the store's passages are encoded after."""
        if self.store is None:
            return 0, ()
        from ragcache.models.primer import bound_primer
        from ragcache_eval.store_cases import neighbours_of, opened

        with opened(self.store, self.database) as found:
            return neighbours_of(found).number, bound_primer(found.documents.properties())

    def cases(self, runner: Runner, device: str) -> tuple[str, list[Case]]:
        """Return a description of the questions in words, and the questions."""
        from ragcache_eval.sources import load_cases
        from ragcache_eval.store_cases import asked_of, made_from, opened

        if self.store is None:
            source = self.data or f"registry:passages={self.k}"
            return source, load_cases(source, directory=self.data_dir, limit=self.questions)
        with opened(self.store, self.database) as found:
            if self.data is None:
                cases = made_from(found, questions=self.questions, passages=self.k, lm=runner.lm)
                return "sentences of the store to be completed", cases
            file = Path(self.data)
            if not file.is_file():
                raise ConfigError(f"{file}: no such file; with --store, --data is a file of questions")
            cases = asked_of(
                found, file, passages=self.k, lm=runner.lm, device=device, embedder=self.embedder, limit=self.questions
            )
            return f"{file.name} over the store", cases


@command
def check(
    models: EvaluatedModel,
    asked: QuestionOptions,
    thresholds: Thresholds,
    methods: Annotated[list[str] | None, option("--methods", "As for eval; every method if left out.")] = None,
    profile_layers: Annotated[
        int,
        option(
            "--profile-layers",
            "Find so many layers for prophet to choose by, on half of the questions; judge on the others.",
            min=0,
        ),
    ] = 0,
    max_tokens: Annotated[int, option("--max-tokens", "Longest answer, in tokens.", min=1)] = 32,
    as_json: Json = False,
) -> None:
    """Find the fusion methods that are safe for a model: those that answer as full prefill does.

    Without --data, the questions are to complete sentences of the store's passages. Without --store, they are about
    generated text, so the verdict says nothing about your documents. The exit status is 1 if no method is safe.
    """
    from ragcache.engine.verdict import save_verdict
    from ragcache_eval.check import Check
    from ragcache_eval.methods import all_methods, parse_methods, shipped_primers
    from ragcache_eval.runner import Runner, RunSettings

    lm = models.load(*asked.stored_model())
    runner = Runner(lm, models.prompt_format(lm), RunSettings(max_tokens, on_overflow="skip"))
    source, cases = asked.cases(runner, models.device)
    near, primer = asked.company()
    specs = parse_methods(methods) if methods else [*all_methods(), *(() if primer else shipped_primers())]
    if profile_layers:
        if len(cases) < 2:
            raise ConfigError(f"--profile-layers needs 2 questions, one to judge on, and there are {len(cases)}")
        half = (len(cases) + 1) // 2
        specs = _profiled(runner, cases[:half], specs, profile_layers, near)
        cases = cases[half:]
    checking = Check(runner, source, cases, specs, thresholds, near, primer)
    for _ in progress(checking.scores(), len(cases) * (len(checking.running) + 1), "Checking"):
        pass
    verdict = checking.finish().verdict
    written = None if asked.store is None else save_verdict(asked.store, verdict)
    if as_json:
        print_json(verdict.to_json())
    else:
        _print_verdict(verdict, written)
    if verdict.best() is None:
        raise typer.Exit(FAILED)


def _profiled(
    runner: Runner, cases: Sequence[Case], specs: Sequence[MethodSpec], count: int, neighbours: int
) -> list[MethodSpec]:
    """Return the methods, `prophet` with the layers found. Raises ConfigError if `prophet` is not among them."""
    from ragcache_eval.profile import Profile, can_profile

    found = []
    for spec in specs:
        if can_profile(spec):
            profile = Profile(runner, cases, replace(spec, neighbours=neighbours), count)
            for _ in progress(profile.scores(), profile.num_scores, "Profiling layers"):
                pass
            spec = replace(profile.spec, neighbours=0)
        found.append(spec)
    if found == list(specs):
        raise ConfigError("--profile-layers finds layers for prophet, which is not among the methods, or names its own")
    return found


def _print_verdict(verdict: Verdict, written: Path | None) -> None:
    from ragcache.engine.verdict import KL

    say(f"{verdict.model}: {verdict.questions} questions ({verdict.source}), compared with full prefill")
    names = ("top1_answer", "kl_answer", "same_answer", "accuracy")
    rows = []
    for found in verdict.methods:
        figures = [f"{found.figures[name]:.3f}" if name in found.figures else "-" for name in names]
        share = "-" if found.computed_share is None else f"{found.computed_share:.3f}"
        options = {**found.options, **({"primer": found.primer} if found.primer else {})}
        given = ":".join(f"{name}={value}" for name, value in options.items())
        label = f"{found.name}:{given}" if given else found.name
        rows.append((label, "safe" if found.safe else "NOT SAFE", *figures, share, found.reason))
    print_table(
        ["method", "verdict", *(f">{name.replace('_', ' ')}" for name in names), ">computed share", "why"], rows
    )
    best = verdict.best()
    say(f"auto takes: {best.name if best else 'full prefill, since no method is safe'}")
    if verdict.best_primer is not None:
        own, behind = verdict.best_primer
        say(
            "nearest to full prefill with nothing computed at the question: passages read after the primer of "
            f"{behind.primer} tokens, KL {behind.figures[KL]:.3f} instead of {own.figures[KL]:.3f}; encode them so by "
            f"`ragcache reencode NEW --store OLD --recipe primer --primer {behind.primer}`"
        )
    if written is not None:
        say(f"kept in {written}")
