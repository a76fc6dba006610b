"""eval."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ragcache.cli.command import command
from ragcache.cli.evaluated import EvaluatedModel, progress
from ragcache.cli.options import Json, option
from ragcache.cli.output import print_json, print_table, say
from ragcache.errors import ConfigError

if TYPE_CHECKING:
    from ragcache.evaluation.case import Case
    from ragcache.evaluation.methods import MethodSpec
    from ragcache.evaluation.report import Row
    from ragcache.evaluation.runner import Runner


@command
def evaluate(
    models: EvaluatedModel,
    methods: Annotated[
        list[str] | None,
        option("--methods", "Comma-separated, as in reposition,fast=cacheblend:ratio=0.15; all that the model can."),
    ] = None,
    data: Annotated[
        list[str] | None,
        option("--data", "File of JSON lines, set of --data-dir, registry, needle or ruler; may be repeated."),
    ] = None,
    data_dir: Annotated[Path | None, option("--data-dir", "Directory of public question sets.")] = None,
    out: Annotated[Path, option("--out", "Directory of the results; a rerun goes on there.")] = Path("eval"),
    questions: Annotated[int | None, option("--questions", "Take this many of each set.", min=1)] = None,
    max_tokens: Annotated[int, option("--max-tokens", "Longest answer, in tokens.", min=1)] = 32,
    stop: Annotated[list[str] | None, option("--stop", "End an answer at this string; may be repeated.")] = None,
    on_overflow: Annotated[
        Literal["error", "skip"], option("--on-overflow", "Questions that do not fit the model: refuse or leave out.")
    ] = "error",
    plot: Annotated[bool, option("--plot/--no-plot", "Draw NAME.png beside the tables.")] = True,
    as_json: Json = False,
) -> None:
    """Measure answers of fusion methods against gold answers and against full prefill.

    Results of every question are written as they come; run the same command again to go on after an interruption.
    """
    from ragcache.evaluation.methods import default_methods, parse_methods
    from ragcache.evaluation.runner import Runner, RunSettings
    from ragcache.evaluation.sources import load_cases

    specs = parse_methods(methods or [])
    lm = models.load()
    runner = Runner(lm, models.prompt_format(lm), RunSettings(max_tokens, tuple(stop or ()), on_overflow))
    specs = specs if methods else default_methods(lm)
    load = partial(load_cases, count_tokens=runner.count_tokens, directory=data_dir, limit=questions)
    loaded = {source: load(source) for source in data or ["registry"]}
    names = _file_names(list(loaded))
    for source, cases in loaded.items():
        rows = run_source(runner, source, cases, specs, out, names[source], plot)
        if as_json:
            print_json({"data": source, "rows": [row.to_json() for row in rows]})
        else:
            print_rows(f"{source}: {len(cases)} questions", rows)
    if not as_json:
        say(f"written to {out}: {', '.join(names.values())}")


def run_source(
    runner: Runner, source: str, cases: list[Case], specs: list[MethodSpec], out: Path, name: str, plot: bool
) -> list[Row]:
    """Measure one set and write its tables."""
    from ragcache.evaluation.journal import Journal
    from ragcache.evaluation.plots import plot as draw
    from ragcache.evaluation.report import summarise, write_report
    from ragcache.evaluation.runner import NO_PASSAGES

    with Journal(out / f"{name}.results.jsonl", {"data": source, **runner.describe()}) as journal:
        scores = list(progress(runner.run(cases, specs, journal), len(cases) * (len(specs) + 1), name))
    labels = {NO_PASSAGES: NO_PASSAGES, **{spec.key: spec.label for spec in specs}}
    rows = summarise(scores, labels)
    header = {"data": source, "model": runner.lm.name, "questions": len(cases), **runner.describe()}
    write_report(out, name, header, rows)
    if plot:
        draw(rows, out / f"{name}.png", f"{source}, {runner.lm.name}")
    return rows


def print_rows(title: str, rows: list[Row]) -> None:
    """The rows over all questions; those by cell are in the files."""
    columns = ("accuracy", "exact_match", "f1", "same_answer", "top1_answer", "kl_answer")
    costs = ("kept_share", "computed_share", "ttft_s")
    found = []
    for row in rows:
        if row.cell:
            continue
        quality = [f"{row.quality[name].mean:.3f}" if name in row.quality else "-" for name in columns]
        paid = [f"{row.costs[name]:.3f}" if name in row.costs else "-" for name in costs]
        found.append((row.method, row.questions, *quality, *paid))
    say(title)
    print_table(["method", ">questions", *(f">{name.replace('_', ' ')}" for name in (*columns, *costs))], found)


def _file_names(sources: list[str]) -> dict[str, str]:
    """A file name a source; "registry:hops=2" becomes "registry-hops=2"."""
    names = {source: _file_name(source) for source in sources}
    if len(set(names.values())) < len(names):
        raise ConfigError("two sources would be written to files of one name; give each an --out of its own")
    return names


def _file_name(source: str) -> str:
    if Path(source).is_file():
        return Path(source).name.removesuffix(".gz").removesuffix(".jsonl")
    return "".join(c if c.isalnum() or c in "=._-" else "-" for c in source)
