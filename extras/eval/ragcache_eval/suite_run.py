"""A paper's table, measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ragcache.cli.flags import option
from ragcache.cli.terminal import print_json, print_table, say
from ragcache.errors import ConfigError
from ragcache_eval.measured_model import EvalOptions, EvaluatedModel

if TYPE_CHECKING:
    from ragcache.models.card import ModelCard
    from ragcache_eval.case import Case
    from ragcache_eval.intervals import Estimate
    from ragcache_eval.suites.base import QuestionSet, Suite
    from ragcache_eval.suites.compare import Measured


@dataclass(frozen=True)
class SuiteOptions:
    """The paper's table."""

    suite: Annotated[str | None, option("--suite", "A paper's table: kvlink, a3 or samkv; --data names columns.")] = (
        None
    )


def run_suite(suites: SuiteOptions, models: EvaluatedModel, options: EvalOptions, as_json: bool) -> None:
    """Measure a suite and write its table."""
    from ragcache_eval.suites import get_suite
    from ragcache_eval.suites.compare import compare, not_measured, table, to_json, write_comparison

    suite = get_suite(suites.suite or "")
    columns = suite.chosen(options.data or [])
    found, left_out = _answers(suite, columns, models, options)
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
    suite: Suite, asked: Sequence[QuestionSet], models: EvaluatedModel, options: EvalOptions
) -> tuple[list[Measured], dict[str, str]]:
    """Measure every method over every set; also return the suite's methods that the model cannot use, and why."""
    from ragcache_eval.methods import link_tokens, parse_methods, why_not
    from ragcache_eval.runner import Runner
    from ragcache_eval.suites.compare import Measured

    specs = parse_methods(options.methods or suite.methods)
    lm = models.load()
    reasons = {} if options.methods else {spec.label: why_not(spec, lm) for spec in specs}
    left_out = {label: reason for label, reason in reasons.items() if reason is not None}
    specs = [spec for spec in specs if spec.label not in left_out]
    scores: dict[str, dict[str, Estimate]] = {spec.label: {} for spec in specs}
    for one, cases in _loaded(asked, lm, options).items():
        runner = Runner(lm, models.prompt_format(lm, one.question_format), options.settings(one.max_tokens))
        for row in options.run_source(runner, f"{suite.name}/{one.name}", cases, specs, f"{suite.name}-{one.name}"):
            if not row.cell and row.method in scores and "score" in row.quality:
                scores[row.method][one.name] = row.quality["score"]
    return [Measured(spec, scores[spec.label], link_tokens(spec, lm)) for spec in specs], left_out


def _loaded(asked: Sequence[QuestionSet], lm: ModelCard, options: EvalOptions) -> dict[QuestionSet, list[Case]]:
    """Load the questions of all sets before any is measured, so that missing data shows at once."""
    from ragcache.ingest.chunker import Chunker, ChunkerConfig
    from ragcache_eval.suites.cases import CUT_TOKENS, suite_cases

    tokenizer = lm.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{lm.name} has no tokenizer; a suite asks in words")
    chunker = Chunker(tokenizer, ChunkerConfig(CUT_TOKENS))
    return {
        one: suite_cases(
            one,
            lambda text: [chunk.text for chunk in chunker.split(text)],
            directory=options.data_dir,
            limit=options.questions,
        )
        for one in asked
    }
