"""Answers of the bundled models over long pages: every method beside full prefill of the same weights.

python -m benchmarks quality                                                # the bundled models, every kind of question
python -m benchmarks quality --models mini-base --methods reposition,epic --kinds leaning --set questions=50

Pages of 150 to 300 tokens about held-out names, in wordings that training did not use (`ragcache_eval.registry.pages`).
Questions are read and scored as `ragcache eval` does it; a run that was killed goes on from its journals.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ragcache as rc
from benchmarks.answers import every_method, questions_of
from benchmarks.answers_report import Row, figures_of, table
from benchmarks.report import Result, where_line
from benchmarks.runner import Run
from ragcache.prompt import prompt_format
from ragcache_eval.journal import Journal, Score
from ragcache_eval.methods import parse_methods, usable_methods
from ragcache_eval.registry.pages import PAGE_KINDS
from ragcache_eval.registry.questions import MAX_ANSWER_TOKENS
from ragcache_eval.runner import Runner, RunSettings


@dataclass(frozen=True)
class Settings:
    """models: bundled names or directories; methods: A,B:option=value, every one where none is named
    kinds:  of questions; passages: pages in a context; seed: of the table, options are chosen on another one
    """

    models: tuple[str, ...] = ("mini-base", "mini")
    methods: tuple[str, ...] = ()
    kinds: tuple[str, ...] = PAGE_KINDS
    passages: int = 8
    questions: int = 100
    seed: int = 0
    threads: int = 0


def measure(settings: Settings, run: Run) -> Result:
    asked = parse_methods(list(settings.methods)) if settings.methods else every_method()
    drawn = f"passages={settings.passages},questions={settings.questions},seed={settings.seed}"
    sources = [f"pages:kind={kind},{drawn}" for kind in settings.kinds]
    found = {}
    for model in settings.models:
        lm = rc.load_lm(model, dtype="float32")
        reading = RunSettings(MAX_ANSWER_TOKENS, on_overflow="skip", reference="full")
        runner = Runner(lm, prompt_format(lm.tokenizer), reading)
        questions = questions_of(sources, None, runner, lm.max_positions, settings.questions, settings.seed)
        cases = [case for own in questions.values() for case in own]
        specs, scores = usable_methods(asked, lm), list[Score]()
        with Journal(run.journal_path.with_suffix(f".{Path(model).name}.jsonl"), runner.describe()) as journal:
            for score in runner.run(cases, specs, journal):
                scores.append(score)
                print(
                    f"\r{model}: {len(scores)} of {len(cases) * (len(specs) + 1)}", end="", file=sys.stderr, flush=True
                )
        print(file=sys.stderr)
        found[model] = figures_of(scores)
    return run.result(figures=found)


def markdown(found: Mapping[str, Any]) -> list[str]:
    """Return a table for each model and kind of question."""
    lines = ["# Quality", "", where_line(found), ""]
    for model, figures in found["figures"].items():
        for name in dict.fromkeys(row["set"] for row in figures["rows"]):
            rows = [Row.from_json(row) for row in figures["rows"] if row["set"] == name]
            lines += [f"## {model}, {name}", "", *table(rows, found["settings"]["questions"]), ""]
    return lines[:-1]
