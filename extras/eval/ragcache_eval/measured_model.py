"""Shared parts of the commands that measure a model: options, progress on the terminal, a question set's results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from ragcache.cli.flags import option
from ragcache.cli.terminal import on_terminal
from ragcache.errors import ConfigError

if TYPE_CHECKING:
    from ragcache import LanguageModel
    from ragcache.engine.contract import EmbeddedModel
    from ragcache.models.card import ModelCard
    from ragcache.prompt import PromptFormat
    from ragcache_eval.case import Case
    from ragcache_eval.methods import MethodSpec
    from ragcache_eval.report import Row
    from ragcache_eval.runner import Runner, RunSettings

T = TypeVar("T")


@dataclass(frozen=True)
class EvaluatedModel:
    """The model that is measured."""

    model: Annotated[str | None, option("--model", "Bundled name, directory or hub id; the store's own, or mini.")] = (
        None
    )
    dtype: Annotated[str | None, option("--dtype", "float32, bfloat16, float16 or auto; the weights' own.")] = None
    device: Annotated[str, option("--device", "Where the model runs: auto, cuda, xpu, mps or cpu.")] = "auto"
    engine: Annotated[
        str | None, option("--engine", "llama.cpp for a GGUF file; as the store was made if not given.")
    ] = None
    system: Annotated[str | None, option("--system", "System prompt, before all passages.")] = None
    question_format: Annotated[
        str | None, option("--question-format", "Text behind the passages, with {question} in it.")
    ] = None

    def load(self, default: str = "mini", dtype: str | None = None) -> LanguageModel | EmbeddedModel:
        """Load the model. default, dtype: used if the options name none; the dtype may be an engine's name"""
        from ragcache import load_lm
        from ragcache.engine.contract import EMBEDDED

        address = self.engine or (dtype if self.dtype is None and dtype in EMBEDDED else None)
        if address is None:
            return load_lm(self.model or default, dtype=self.dtype or dtype, device=self.device)
        engine = address.partition(":")[0]
        if engine not in EMBEDDED:
            raise ConfigError(f"--engine {address!r} runs no model here; give {' or '.join(EMBEDDED)}, or leave it out")
        return EMBEDDED[engine](self.model or default, address)

    def prompt_format(self, lm: ModelCard) -> PromptFormat:
        from ragcache.prompt import prompt_format

        return prompt_format(lm.tokenizer, system=self.system, question_format=self.question_format)


@dataclass(frozen=True)
class EvalOptions:
    """Methods, questions, answers and results."""

    methods: Annotated[
        list[str] | None,
        option("--methods", "Comma-separated, as in reposition,fast=cacheblend:ratio=0.15; all that the model can."),
    ] = None
    data: Annotated[
        list[str] | None,
        option("--data", "File of JSON lines, set of --data-dir, registry or pages; may be repeated."),
    ] = None
    data_dir: Annotated[Path | None, option("--data-dir", "Directory of public question sets.")] = None
    out: Annotated[Path, option("--out", "Directory of the results; a rerun goes on there.")] = Path("eval")
    questions: Annotated[int | None, option("--questions", "Take this many of each set.", min=1)] = None
    max_tokens: Annotated[int, option("--max-tokens", "Longest answer, in tokens.", min=1)] = 32
    stop: Annotated[list[str] | None, option("--stop", "End an answer at this string; may be repeated.")] = None
    on_overflow: Annotated[
        Literal["error", "skip"], option("--on-overflow", "Questions that do not fit the model: refuse or leave out.")
    ] = "error"

    def settings(self) -> RunSettings:
        """Return the run's settings."""
        from ragcache_eval.runner import RunSettings

        return RunSettings(self.max_tokens, tuple(self.stop or ()), self.on_overflow)

    def run_source(
        self, runner: Runner, source: str, cases: list[Case], specs: list[MethodSpec], name: str
    ) -> list[Row]:
        """Measure a question set, write its tables, and return their rows.

        Each score is added to NAME.results.jsonl in the results' directory at once, and scores found there are not
        measured again. The tables are NAME.json and NAME.md.
        """
        from ragcache_eval.journal import Journal
        from ragcache_eval.report import summarise, write_report
        from ragcache_eval.runner import NO_PASSAGES

        with Journal(self.out / f"{name}.results.jsonl", {"data": source, **runner.describe()}) as journal:
            scores = list(progress(runner.run(cases, specs, journal), len(cases) * (len(specs) + 1), name))
        labels = {NO_PASSAGES: NO_PASSAGES, **{spec.key: spec.label for spec in specs}}
        rows = summarise(scores, labels)
        header = {"data": source, "model": runner.lm.name, "questions": len(cases), **runner.describe()}
        write_report(self.out, name, header, rows)
        return rows


def progress(items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Yield the items, with a bar on standard error if that is a terminal."""
    if not on_terminal():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description=label, total=total, console=Console(stderr=True))
