"""eval: questions of one's own or of a public set, and a paper's table (--suite)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ragcache.cli.flags import Json, option
from ragcache.cli.terminal import command, print_json, print_table, say
from ragcache.errors import ConfigError
from ragcache_eval.measured_model import EvalOptions, EvaluatedModel

if TYPE_CHECKING:
    from ragcache import LanguageModel
    from ragcache_eval.case import Case
    from ragcache_eval.intervals import Estimate
    from ragcache_eval.report import Row
    from ragcache_eval.suites.base import Column, QuestionSet, Suite
    from ragcache_eval.suites.compare import Measured

MAX_TOKENS = 32


@dataclass(frozen=True)
class SuiteOptions:
    """The paper's table, and how long its generated contexts are."""

    suite: Annotated[
        str | None,
        option("--suite", "A paper's table: kvlink, a3, samkv, longbench, ruler or capability; --data names columns."),
    ] = None
    length: Annotated[int, option("--length", "Tokens of the contexts of --suite ruler.", min=64)] = 4096


@command
def evaluate(models: EvaluatedModel, options: EvalOptions, suites: SuiteOptions, as_json: Json = False) -> None:
    """Measure answers of fusion methods against gold answers and against full prefill.

    Results of every question are written as they come; run the same command again to go on after an interruption.
    With --suite the questions, methods and metrics are those of a paper's table, which stands beside what was measured.
    """
    from ragcache_eval.methods import default_methods, parse_methods
    from ragcache_eval.runner import Runner
    from ragcache_eval.sources import load_cases

    if suites.suite is not None:
        run_suite(suites, models, options, as_json)
        return
    specs = parse_methods(options.methods or [])
    lm = models.load()
    runner = Runner(lm, models.prompt_format(lm), options.settings(MAX_TOKENS))
    specs = specs if options.methods else default_methods(lm)
    load = partial(load_cases, count_tokens=runner.count_tokens, directory=options.data_dir, limit=options.questions)
    loaded = {source: load(source) for source in options.data or ["registry"]}
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


# A paper's table, measured here.


def run_suite(suites: SuiteOptions, models: EvaluatedModel, options: EvalOptions, as_json: bool) -> None:
    """Measure a suite and write its table."""
    from ragcache_eval.suites import get_suite
    from ragcache_eval.suites.base import QuestionSet
    from ragcache_eval.suites.compare import compare, not_measured, table, to_json, write_comparison

    suite = get_suite(suites.suite or "")
    columns = suite.chosen(options.data or [])
    asked = [one for one in columns if isinstance(one, QuestionSet)]
    if asked:
        found, left_out = _answers(suite, asked, suites.length, models, options)
    else:
        found, left_out = _abilities(columns, models, options), {}
    model = models.model or "mini"
    lines = compare(suite, columns, model, found)
    write_comparison(options.out, suite, columns, lines, left_out)
    if as_json:
        print_json(to_json(suite, columns, lines, left_out))
        return
    say(f"{suite.name}: {model} beside {suite.table}")
    heads, *rows = table(suite, columns, lines)
    print_table(heads, rows)
    for line in (suite.note, *not_measured(left_out)):
        say(line)
    say(f"written to {options.out}: {suite.name}.md, {suite.name}.json")


def _answers(
    suite: Suite, asked: Sequence[QuestionSet], length: int, models: EvaluatedModel, options: EvalOptions
) -> tuple[list[Measured], dict[str, str]]:
    """Every method over every set; and those of the suite's own that the model cannot use, with the reason."""
    from ragcache_eval.methods import link_tokens, parse_methods, why_not
    from ragcache_eval.runner import Runner
    from ragcache_eval.suites.compare import Measured

    specs = parse_methods(options.methods or suite.methods)
    lm = models.load()
    reasons = {} if options.methods else {spec.label: why_not(spec, lm) for spec in specs}
    left_out = {label: reason for label, reason in reasons.items() if reason is not None}
    specs = [spec for spec in specs if spec.label not in left_out]
    scores: dict[str, dict[str, Estimate]] = {spec.label: {} for spec in specs}
    for one, cases in _loaded(asked, lm, length, options).items():
        runner = Runner(lm, models.prompt_format(lm, one.question_format), options.settings(one.max_tokens))
        source = f"{suite.name}/{one.name}" + (f":length={length}" if one.generated or one.filled else "")
        for row in options.run_source(runner, source, cases, specs, f"{suite.name}-{one.name}"):
            if not row.cell and row.method in scores and "score" in row.quality:
                scores[row.method][one.name] = row.quality["score"]
    return [Measured(spec, scores[spec.label], link_tokens(spec, lm)) for spec in specs], left_out


def _loaded(
    asked: Sequence[QuestionSet], lm: LanguageModel, length: int, options: EvalOptions
) -> dict[QuestionSet, list[Case]]:
    """Questions of all sets, before the first is asked: what is missing shows at once."""
    from ragcache.ingest.chunker import Chunker, ChunkerConfig
    from ragcache.prompt import encode_text
    from ragcache_eval.suites.cases import CUT_TOKENS, suite_cases

    tokenizer = lm.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{lm.name} has no tokenizer; a suite asks in words")
    chunker = Chunker(tokenizer, ChunkerConfig(CUT_TOKENS))
    return {
        one: suite_cases(
            one,
            lambda text: len(encode_text(tokenizer, text)),
            lambda text: [chunk.text for chunk in chunker.split(text)],
            directory=options.data_dir,
            limit=options.questions,
            length=length,
        )
        for one in asked
    }


def _abilities(columns: Sequence[Column], models: EvaluatedModel, options: EvalOptions) -> list[Measured]:
    """The model itself, by lm-eval."""
    from ragcache_eval.methods import FULL, MethodSpec
    from ragcache_eval.suites.capability import measure
    from ragcache_eval.suites.compare import Measured

    found = measure(
        [column.name for column in columns],
        models.model or "mini",
        dtype=models.dtype or "float32",
        device=models.device,
        limit=options.questions,
        directory=options.data_dir,
    )
    return [Measured(MethodSpec(FULL, FULL), found)]
