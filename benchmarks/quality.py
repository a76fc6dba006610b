"""Answer quality on the registry: exact match of each method on each checkpoint, held-out entities and wordings.

python -m benchmarks.quality                                     # the bundled models, 1,000 questions a cell
python -m benchmarks.quality --checkpoint base=DIR --checkpoint link5=DIR --checkpoint link0=DIR --processes 2
python -m benchmarks.pages                                       # then put the tables into docs/methods.md

The first checkpoint is the base that the others were trained from. Every method reads the same prompts, cut into
prefix, passages and question, and decodes greedily. An answer counts when its whole text is the expected one; a two-hop
answer names the entity in between as well. Answers are kept in quality.answers.jsonl: run it again to go on. Rows of a
checkpoint that is no longer at hand stay in the table with --keep LABEL.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

import ragcache as rc
from benchmarks.environment import environment
from benchmarks.quality_units import Answers, Cell, Reads, Unit, answer_all, cases_of, units_of
from benchmarks.report import RESULTS, Goal, Result, show, write
from ragcache.errors import ConfigError
from ragcache.evaluation.intervals import RESAMPLES, wilson
from ragcache.evaluation.methods import FULL, MethodSpec, default_methods, parse_methods
from ragcache.prompt import prompt_format

CHECKPOINTS = ("base=mini-base", "link5=mini")
QUESTIONS = ("1 hop", "2 hops", "leaning")
PASSAGES = 8
SWEPT_PASSAGES = (3, 4, 6, 8, 10, 12, 14, 16)
STATED_QUESTIONS = 1000
RATIO_METHODS = ("cacheblend", "a3")  # of the goal on training-free methods at 15 %
SWEPT_METHODS = (FULL, "reposition", *RATIO_METHODS, "epic")  # and a checkpoint's own
RATIO = 0.15


class Checkpoint(NamedTuple):
    """methods: read the main cells; swept: read the cells with other numbers of passages and fixed positions."""

    label: str
    directory: str
    fingerprint: str
    methods: tuple[MethodSpec, ...]
    swept: tuple[MethodSpec, ...]


@dataclass(frozen=True)
class Row:
    """low, high: 95 % Wilson interval of the share of right answers.

    relative: to the better of the base's and the checkpoint's own full prefill on the same questions, with a paired
              bootstrap interval
    computed_share, kept_share: of the prompt's tokens, those that ran and those that were held, means over layers and
              questions; None where they were not counted
    """

    checkpoint: str
    method: str
    question: str
    passages: int
    position: int
    questions: int
    exact_match: float
    low: float
    high: float
    relative: float
    relative_low: float
    relative_high: float
    computed_share: float | None = None
    kept_share: float | None = None


def load_checkpoint(text: str, chosen: Mapping[str, str]) -> Checkpoint:
    """From "LABEL=DIRECTORY". chosen: methods by label, as `--methods` names them."""
    label, equals, directory = text.partition("=")
    if not equals:
        raise ConfigError(f"--checkpoint {text!r} is not LABEL=DIRECTORY")
    lm = rc.load_lm(directory, dtype="float32")
    own = [MethodSpec(name, name) for name in dict.fromkeys((FULL, "reposition", lm.default_method))]
    usable = default_methods(lm) if lm.reuse is None else own
    methods = parse_methods([chosen[label]]) if label in chosen else usable
    swept = [spec for spec in methods if spec.name in {*SWEPT_METHODS, lm.default_method}]
    return Checkpoint(label, directory, lm.fingerprint, tuple(methods), tuple(swept))


def cells(passages: Sequence[int], positions: bool) -> tuple[list[Cell], list[Cell]]:
    """Main cells, and those of the sweeps."""
    main = [Cell(question, PASSAGES) for question in QUESTIONS]
    swept = [Cell(question, count) for question in QUESTIONS[:2] for count in passages if count != PASSAGES]
    return main, swept + [Cell("1 hop", PASSAGES, place) for place in range(PASSAGES if positions else 0)]


def relative(right: Sequence[int], reference: Sequence[int]) -> tuple[float, float, float]:
    """Ratio of the shares of right answers to the same questions, and its 95 % interval by the paired bootstrap."""
    ours, theirs = np.array(right), np.array(reference)
    if not theirs.any():
        return float("nan"), float("nan"), float("nan")
    drawn = np.random.default_rng(0).integers(0, len(ours), size=(RESAMPLES, len(ours)))
    below = theirs[drawn].sum(1)
    low, high = np.quantile((ours[drawn].sum(1) / np.maximum(below, 1)), [0.025, 0.975])
    return float(ours.sum() / theirs.sum()), float(low), float(high)


class Table:
    """Rows from answers."""

    def __init__(self, checkpoints: Sequence[Checkpoint], answers: Answers, seed: int) -> None:
        self.checkpoints = checkpoints
        self.answers = answers
        self.seed = seed

    def units(self, one: Checkpoint, cell: Cell, methods: Sequence[MethodSpec], questions: int) -> list[Unit]:
        return list(units_of(one.directory, one.fingerprint, [cell], methods, questions, self.seed))

    def rows(self, cell: Cell, questions: int, *, swept: bool) -> Iterator[Row]:
        base_full = self._full(self.checkpoints[0], cell, questions)
        for one in self.checkpoints:
            own_full = self._full(one, cell, questions)
            reference = max(base_full, own_full, key=sum)
            for spec in one.swept if swept else one.methods:
                right, *shares = self._reads(one, cell, spec, questions)
                low, high = wilson(sum(right), len(right))
                share = sum(right) / len(right)
                means = (round(fmean(found), 4) if found else None for found in shares)
                exact = (len(right), share, low, high, *relative(right, reference))
                yield Row(one.label, spec.label, *cell, *exact, *means)

    def _full(self, one: Checkpoint, cell: Cell, questions: int) -> list[int]:
        return self._reads(one, cell, next(spec for spec in one.methods if spec.name == FULL), questions).right

    def _reads(self, one: Checkpoint, cell: Cell, spec: MethodSpec, questions: int) -> Reads:
        return self.answers.of(self.units(one, cell, [spec], questions), spec)


def regime(directory: str, cells: Sequence[Cell], questions: int, seed: int) -> dict[str, dict[str, Any]]:
    """By question: how long the passages and prompts were that its answers were read from, in this model's tokens."""
    tokenizer = rc.load_lm(directory, dtype="float32").tokenizer
    form = prompt_format(tokenizer)
    found = {}
    for cell in cells:
        prompts = [case.prompt(tokenizer, form) for case in cases_of(cell, questions, seed)]
        lengths = [len(ids) for prompt in prompts for ids in prompt.chunk_ids]
        found[cell.question] = {
            "passages": cell.passages,
            "passage_tokens": median(lengths),
            "passage_tokens_mean": round(fmean(lengths), 1),
            "prompt_tokens": median(prompt.num_tokens for prompt in prompts),
            "questions": questions,
            "seed": seed,
        }
    return found


def markdown(rows: Sequence[Row]) -> list[str]:
    """The main table, then exact match by number of passages and by position."""
    main = [row for row in rows if row.passages == PASSAGES and row.position < 0]
    lines = [
        f"Exact match over {PASSAGES} passages, {main[0].questions:,} held-out questions a cell, 95 % Wilson "
        "intervals; in brackets, relative to the better full prefill of the base and of the checkpoint itself.",
        "",
        "| checkpoint | method | " + " | ".join(QUESTIONS) + " |",
        "|---|---|" + "---|" * len(QUESTIONS),
    ]
    for label, method in dict.fromkeys((row.checkpoint, row.method) for row in main):
        own = {row.question: row for row in main if (row.checkpoint, row.method) == (label, method)}
        lines.append(f"| {label} | `{method}` | " + " | ".join(_cell(own[q]) for q in QUESTIONS if q in own) + " |")
    for question in QUESTIONS[:2]:
        found = [row for row in rows if row.question == question and row.position < 0]
        lines += _sweep(f"By number of passages, {question}", found, "passages")
    return lines + _sweep("By position of the gold passage, 1 hop", [r for r in rows if r.position >= 0], "position")


def _cell(row: Row) -> str:
    return f"{_share(row)} ({row.relative:.3f})"


def _share(row: Row) -> str:
    return f"{row.exact_match:.3f} [{row.low:.3f}, {row.high:.3f}]"


def _sweep(title: str, rows: Sequence[Row], by: str) -> list[str]:
    columns = sorted({getattr(row, by) for row in rows})
    if len(columns) < 2:
        return []
    counts = sorted({row.questions for row in rows})
    asked = " or ".join(f"{count:,}" for count in counts)
    lines = ["", f"{title}, {asked} questions a cell:", ""]
    lines.append("| checkpoint | method | " + " | ".join(map(str, columns)) + " |")
    lines.append("|---|---|" + "---|" * len(columns))
    for label, method in dict.fromkeys((row.checkpoint, row.method) for row in rows):
        own = {getattr(r, by): r for r in rows if (r.checkpoint, r.method) == (label, method)}
        if len(own) > 1:
            shares = (_share(own[c]) if c in own else "-" for c in columns)
            lines.append(f"| {label} | `{method}` | " + " | ".join(shares) + " |")
    return lines


def goals(checkpoints: Sequence[Checkpoint], rows: Sequence[Row]) -> list[Goal]:
    """Stated for 8 passages and 1,000 questions."""
    main = {(r.checkpoint, r.method, r.question): r for r in rows if r.passages == PASSAGES and r.position < 0}
    found: list[Goal] = []

    def add(what: str, limit: float, measured: float, questions: int) -> None:
        found.append(Goal(what, "at least", limit, measured, applies=questions >= STATED_QUESTIONS))

    def add_relative(what: str, limit: float, row: Row) -> None:
        applies, interval = row.questions >= STATED_QUESTIONS, (row.relative_low, row.relative_high)
        found.append(Goal(what, "at least", limit, row.relative, applies, None, *interval))

    base = checkpoints[0]
    for label in ("link5",):
        for question, limit in (("1 hop", 0.99), ("2 hops", 0.97)):
            own, full = main.get((label, "link", question)), main.get((label, FULL, question))
            bare = main.get(("link0", "reposition", question))
            if own is not None:
                add_relative(f"link K=5, {question}, relative", limit, own)
            if own is not None and bare is not None:
                add(f"link K=5 above K=0, {question}", 0.0, own.exact_match - bare.exact_match, own.questions)
            if full is not None:
                drop = full.exact_match - main[base.label, FULL, question].exact_match
                add(f"full prefill of the linked model against the base's, {question}", -0.01, drop, full.questions)
    for spec in base.methods:
        row = main[base.label, spec.label, "1 hop"]
        if spec.name in RATIO_METHODS and dict(spec.options).get("ratio", RATIO) == RATIO:
            add_relative(f"{spec.label} at 15 % on the base, 1 hop, relative", 0.97, row)
    return found


def kept_rows(path: Path, labels: Sequence[str], seed: int) -> list[Row]:
    """Rows of these checkpoints in an earlier run's file. Raises ConfigError where it has none of this seed."""
    if not labels:
        return []
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    rows = [Row(**row) for row in found.get("figures", {}).get("rows", ()) if row["checkpoint"] in labels]
    missing = sorted(set(labels) - {row.checkpoint for row in rows})
    if missing or found["settings"]["seed"] != seed:
        raise ConfigError(f"{path} has no rows of {', '.join(missing or labels)} with seed {seed}; leave --keep out")
    return rows


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.quality", description=__doc__)
    parser.add_argument("--checkpoint", action="append", metavar="LABEL=DIR", help="the base first; may be repeated")
    parser.add_argument("--methods", action="append", default=[], metavar="LABEL:A,B", help="of one checkpoint")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="LABEL",
        help="its rows stay as they are in --out, unless it is read anew",
    )
    parser.add_argument("--questions", type=int, default=STATED_QUESTIONS, help="a cell")
    parser.add_argument("--sweep-questions", type=int, default=500, help="a cell of another size or fixed position")
    parser.add_argument("--passages", type=int, nargs="*", default=list(SWEPT_PASSAGES), help="sizes to sweep over")
    parser.add_argument("--no-positions", action="store_true", help="leave fixed positions out")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="quality", help="of the files in --out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(given)


def main(arguments: Sequence[str] | None = None) -> Result:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    where = environment("benchmarks.quality", given, torch.device("cpu"))
    chosen = dict(one.split(":", 1) for one in options.methods)
    checkpoints = [load_checkpoint(text, chosen) for text in options.checkpoint or CHECKPOINTS]
    gone = [label for label in options.keep if label not in {one.label for one in checkpoints}]
    kept = kept_rows(options.out / f"{options.name}.json", gone, options.seed)
    answers = Answers(options.out / f"{options.name}.answers.jsonl")
    table = Table(checkpoints, answers, options.seed)
    main_cells, swept_cells = cells(options.passages, not options.no_positions)
    sizes = [(cell, options.questions, False) for cell in main_cells]
    sizes += [(cell, options.sweep_questions, True) for cell in swept_cells]
    units = [
        unit
        for one in checkpoints
        for cell, count, swept in sizes
        for unit in table.units(one, cell, one.swept if swept else one.methods, count)
    ]
    for done in answer_all(units, answers, options.processes):
        print(f"\r{done} of {len(units)} units", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows = [row for cell, count, swept in sizes for row in table.rows(cell, count, swept=swept)] + kept
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    lengths = regime(checkpoints[0].directory, main_cells, options.questions, options.seed)
    figures = {"regime": lengths, "rows": [asdict(row) for row in rows]}
    result = Result(options.name, settings, where, {}, {}, figures, goals(checkpoints, rows))
    write(result, options.out)
    lines = markdown(rows)
    (options.out / f"{options.name}.md").write_text("\n".join(lines) + "\n")
    show(Result(result.name, None, where, {}, {}, {}, result.goals))
    Console(width=160).print("\n".join(lines), highlight=False)
    return result


if __name__ == "__main__":
    main()
