"""`ragcache eval`: measure methods on the user's own questions or on those of a public set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ragcache.cli.flags import Json
from ragcache.cli.terminal import command, print_json, print_table, say
from ragcache.errors import ConfigError
from ragcache_eval.measured_model import EvalOptions, EvaluatedModel

if TYPE_CHECKING:
    from ragcache_eval.report import Row


@command
def evaluate(models: EvaluatedModel, options: EvalOptions, as_json: Json = False) -> None:
    """Measure answers of fusion methods against gold answers and against full prefill.

    Results of every question are written as they come; run the same command again to go on after an interruption.
    """
    from ragcache_eval.methods import default_methods, parse_methods
    from ragcache_eval.runner import Runner
    from ragcache_eval.sources import load_cases

    specs = parse_methods(options.methods or [])
    lm = models.load()
    runner = Runner(lm, models.prompt_format(lm), options.settings())
    specs = specs if options.methods else default_methods(lm)
    loaded = {
        source: load_cases(source, directory=options.data_dir, limit=options.questions)
        for source in options.data or ["registry"]
    }
    names = _file_names(list(loaded))
    for source, cases in loaded.items():
        rows = options.run_source(runner, source, cases, specs, names[source])
        if as_json:
            print_json({"data": source, "rows": [row.to_json() for row in rows]})
        else:
            print_rows(f"{source}: {len(cases)} questions", rows)
    if not as_json:
        say(f"written to {options.out}: {', '.join(names.values())}")


def print_rows(title: str, rows: list[Row]) -> None:
    """Print the rows over all questions; the rows by cell are in the files."""
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
    """Return a file name for each source; "registry:hops=2" becomes "registry-hops=2".

    Raises ConfigError if two sources have the same file name.
    """
    names = {source: _file_name(source) for source in sources}
    if len(set(names.values())) < len(names):
        raise ConfigError("two sources would be written to files of one name; give each an --out of its own")
    return names


def _file_name(source: str) -> str:
    if Path(source).is_file():
        return Path(source).name.removesuffix(".gz").removesuffix(".jsonl")
    return "".join(c if c.isalnum() or c in "=._-" else "-" for c in source)
