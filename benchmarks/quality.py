"""Answer quality over long passages: each method on each checkpoint, held-out entities and wordings.

python -m benchmarks.quality                                     # the bundled models, every method and kind
python -m benchmarks.quality --kinds single two-hop leaning --passages 8 --methods base:reposition,a3 --seed 2
python -m benchmarks.quality --checkpoint packet=DIR --checkpoint link0=DIR --name quality-budgets --processes 2
python -m benchmarks.pages                                       # then put the tables into docs/methods.md

Passages have 150 to 300 tokens (`ragcache_eval.registry.pages`). The checkpoint "base" is what the others were
trained from. Every method reads the same prompts, cut into prefix, passages and question. An answer counts when
its whole text is the expected one; a two-hop answer names the entity in between as well. Answers are kept in
quality.answers.jsonl: run it again to go on. Rows of a checkpoint that are not read anew stay in the table with --keep
LABEL.
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
from benchmarks.quality_plot import BASE, plot
from benchmarks.quality_units import Answers, Cell, Reads, Unit, answer_all, cases_of, units_of
from benchmarks.report import RESULTS, Goal, Result, show, write
from ragcache.engine.verdict import MethodVerdict, Verdict
from ragcache.errors import ConfigError
from ragcache.prompt import prompt_format
from ragcache_eval.case import Case
from ragcache_eval.intervals import RESAMPLES, estimate
from ragcache_eval.methods import FULL, MethodSpec, parse_methods
from ragcache_eval.registry import PAGE_KINDS

CHECKPOINTS = ("base=mini-long", "link5=mini-long-link")
PASSAGES = (8, 16)
PASSAGE_TOKENS = 225  # of a passage, about: budgets of EPIC are shares of it
BUDGETS = (0.05, 0.1, 0.15, 0.2)
KEPT = ("reposition:kept=0.25", "reposition:kept=0.1")
BEHIND = "reposition:neighbours=1"
"""Each passage was encoded behind the one before it in its document, if there is one."""
PROFILED = "prophet:ratio=0.15:layers=[2]:boundary_tokens=6:tail_tokens=6:pool_tokens=5"
"""The layer of mini-long that finds what is said of a name (QCFuse profiles layers), and the edges of each page; all of
it was chosen on another seed."""
OTHERS = (
    PROFILED,
    "reposition",
    BEHIND,
    "concat",
    "cachecraft:alpha=0.2",
    "kvshare:ratio=0.15",
    "samkv",
    "infllm",
    "ape",
    "entropy",
    *KEPT,
)
MAIN = (
    BEHIND,
    "epic:first_tokens=34",
    "epic:first_tokens=17:last_tokens=17",
    "a3:ratio=0.15",
    "prophet:ratio=0.15",
    PROFILED,
)
STATED_QUESTIONS = 1000
STATED_PASSAGES = 8
TRAINING_FREE = {"single": 0.97, "two-hop": 0.96, "leaning": 0.95}
MOST_COMPUTED = 0.16  # of the goal at 15 %: the question runs as well


class Checkpoint(NamedTuple):
    """methods: read every cell's questions; few: those over 8 passages alone, and no more than of a cell without a
    goal."""

    label: str
    directory: str
    fingerprint: str
    methods: tuple[MethodSpec, ...]
    few: tuple[MethodSpec, ...] = ()


@dataclass(frozen=True)
class Row:
    """low, high: 95 % interval of the share of right answers: Wilson's, or the bootstrap's over contexts where several
    questions are asked over one.

    relative: to the checkpoint's own full prefill on the same questions, with a paired bootstrap interval over contexts
    computed_share, kept_share: of the prompt's tokens, those that ran and those that were held, means over layers and
              questions
    first_token: seconds to the first token with blocks in memory, of full prefill's: median over the questions, in the
              same process
    by:       "" for all of a cell's questions; "head", "middle" or "end": leaning ones, the sentence standing there
    """

    checkpoint: str
    method: str
    kind: str
    passages: int
    questions: int
    exact_match: float
    low: float
    high: float
    relative: float
    relative_low: float
    relative_high: float
    computed_share: float
    kept_share: float
    first_token: float
    by: str = ""

    @property
    def subject(self) -> tuple[str, str, str, int, str]:
        return self.checkpoint, self.method, self.kind, self.passages, self.by


def budgeted_methods() -> list[str]:
    """Methods that rerun tokens, at each budget, as `parse_methods` takes them; then the others."""
    found = []
    for share in BUDGETS:
        tokens = round(share * PASSAGE_TOKENS)
        found += [
            f"epic:first_tokens={tokens}",
            f"epic:first_tokens={tokens - tokens // 2}:last_tokens={tokens // 2}",
            *(f"{name}:ratio={share:g}" for name in ("a3", "prophet", "cacheblend")),
        ]
    return [*found, *OTHERS]


def load_checkpoint(text: str, chosen: Mapping[str, str]) -> Checkpoint:
    """From "LABEL=DIRECTORY". chosen: methods by label, as `--methods` names them."""
    label, equals, directory = text.partition("=")
    if not equals:
        raise ConfigError(f"--checkpoint {text!r} is not LABEL=DIRECTORY")
    lm = rc.load_lm(directory, dtype="float32")
    if label in chosen:
        return Checkpoint(label, directory, lm.fingerprint, tuple(parse_methods([chosen[label]])))
    if lm.reuse is not None:
        own = parse_methods(list(dict.fromkeys(["reposition", lm.default_method])))
        return Checkpoint(label, directory, lm.fingerprint, tuple(own))
    specs = parse_methods(budgeted_methods())
    main = [spec for spec in specs if spec.label in (FULL, "reposition", *MAIN)]
    few = [spec for spec in specs if spec not in main]
    return Checkpoint(label, directory, lm.fingerprint, tuple(main), tuple(few))


def relative(
    right: Sequence[int], reference: Sequence[int], contexts: Sequence[str] | None = None
) -> tuple[float, float, float]:
    """Ratio of the shares of right answers to the same questions, and its 95 % interval by the paired bootstrap.

    contexts: what each question is asked over; whole contexts are drawn
    """
    owner = np.unique(contexts, return_inverse=True)[1] if contexts is not None else np.arange(len(right))
    ours, theirs = (np.bincount(owner, weights=one) for one in (right, reference))
    if not theirs.any():
        return float("nan"), float("nan"), float("nan")
    drawn = np.random.default_rng(0).integers(0, len(ours), size=(RESAMPLES, len(ours)))
    below = theirs[drawn].sum(1)
    low, high = np.quantile((ours[drawn].sum(1) / np.maximum(below, 1)), [0.025, 0.975])
    return float(ours.sum() / theirs.sum()), float(low), float(high)


def questions_of(cell: Cell, options: argparse.Namespace) -> int:
    """How many questions of a cell are asked: most where a goal is stated."""
    stated = cell.passages == STATED_PASSAGES and cell.kind in TRAINING_FREE
    return options.questions if stated else options.few_questions  # type: ignore[no-any-return]


class Table:
    """Rows from answers."""

    def __init__(self, checkpoints: Sequence[Checkpoint], answers: Answers, options: argparse.Namespace) -> None:
        self.checkpoints = checkpoints
        self.answers = answers
        self.options = options

    def units(self, one: Checkpoint, cell: Cell) -> list[Unit]:
        """All the work of a cell."""
        return [unit for methods, count in self._parts(one, cell) for unit in self._units(one, cell, methods, count)]

    def rows(self, cell: Cell) -> Iterator[Row]:
        for one in self.checkpoints:
            parts = self._parts(one, cell)
            full = self._reads(one, cell, one.methods[0], parts[0][1])
            for methods, count in parts:
                places, contexts = self._places(cell, count), [case.cluster for case in self._cases(cell, count)]
                for spec in methods:
                    reads = self._reads(one, cell, spec, count)
                    for place, numbers in places.items():
                        own = _chosen(reads, numbers), _chosen(full, numbers)
                        yield self._row(one.label, spec.label, cell, place, [contexts[n] for n in numbers], *own)

    def _parts(self, one: Checkpoint, cell: Cell) -> list[tuple[tuple[MethodSpec, ...], int]]:
        """Methods and how many questions they read."""
        count = questions_of(cell, self.options)
        if cell.passages != STATED_PASSAGES:
            return [(one.methods, count)]
        return [(one.methods, count), (one.few, min(count, self.options.few_questions))]

    def _places(self, cell: Cell, count: int) -> dict[str, list[int]]:
        """Numbers of the questions by where the sentence stands that leans; "": of all."""
        found = {"": list(range(count))}
        for number, case in enumerate(self._cases(cell, count)):
            if "place" in case.cell:
                found.setdefault(str(case.cell["place"]), []).append(number)
        return dict(sorted(found.items()))

    def _cases(self, cell: Cell, count: int) -> list[Case]:
        return cases_of(cell, count, self.options.seed, self.options.asked)

    def _units(self, one: Checkpoint, cell: Cell, methods: Sequence[MethodSpec], count: int) -> list[Unit]:
        drawn = count, self.options.seed, self.options.asked
        return list(units_of(one.directory, one.fingerprint, [cell], methods, *drawn)) if methods else []

    def _reads(self, one: Checkpoint, cell: Cell, spec: MethodSpec, count: int) -> Reads:
        return self.answers.of(self._units(one, cell, [spec], count), spec)

    def _row(
        self, label: str, method: str, cell: Cell, place: str, contexts: Sequence[str], reads: Reads, full: Reads
    ) -> Row:
        own = estimate([bool(one) for one in reads.right], contexts)
        ratio = relative(reads.right, full.right, contexts)
        faster = median(own / theirs for own, theirs in zip(reads.seconds, full.seconds, strict=True))
        shares = [round(one, 4) for one in (fmean(reads.computed), fmean(reads.kept), faster)]
        right = own.size, own.mean, own.low, own.high
        return Row(label, method, *cell, *right, *ratio, shares[0], shares[1], shares[2], place)


def _chosen(reads: Reads, numbers: Sequence[int]) -> Reads:
    def of(column: Sequence[Any]) -> list[Any]:
        return [column[number] for number in numbers]

    return Reads(of(reads.right), of(reads.computed), of(reads.kept), of(reads.seconds))


def regime(directory: str, cells: Sequence[Cell], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By cell: how long the passages and prompts were that its answers were read from, in this model's tokens.

    reads: how often a table of this seed was looked at, with this one
    """
    tokenizer = rc.load_lm(directory, dtype="float32").tokenizer
    form = prompt_format(tokenizer)
    found = {}
    for cell in cells:
        questions = questions_of(cell, options)
        cases = cases_of(cell, questions, options.seed, options.asked)
        prompts = [case.prompt(tokenizer, form) for case in cases]
        lengths = [len(ids) for prompt in prompts for ids in prompt.chunk_ids]
        found[f"{cell.kind}, {cell.passages}"] = {
            "passages": cell.passages,
            "passage_tokens": median(lengths),
            "passage_tokens_mean": round(fmean(lengths), 1),
            "prompt_tokens": median(prompt.num_tokens for prompt in prompts),
            "candidates": median(int(case.cell.get("candidates", 0)) for case in cases),
            "questions": questions,
            "contexts": len({case.cluster for case in cases}),
            "seed": options.seed,
            "reads": options.reads,
        }
    return found


def markdown(rows: Sequence[Row]) -> list[str]:
    """A table by number of passages, then leaning questions by the place of the sentence that leans."""
    lines: list[str] = []
    for passages in sorted({row.passages for row in rows}):
        own = [row for row in rows if row.passages == passages]
        lines += _table(f"{passages} passages", [row for row in own if not row.by], "kind")
        lines += _table(f"{passages} passages, leaning, by place", [row for row in own if row.by], "by")
    return lines[:-1]


def _table(title: str, rows: Sequence[Row], by: str) -> Iterator[str]:
    """Share of right answers with its interval, in brackets relative to the checkpoint's full prefill."""
    if not rows:
        return
    columns = list(dict.fromkeys(getattr(row, by) for row in rows))
    counts = sorted({row.questions for row in rows})
    asked = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    yield f"{title}, {asked} questions a cell:"
    yield ""
    yield f"| checkpoint | method | computed | kept | first token | {' | '.join(columns)} |"
    yield "|---|---|---|---|---|" + "---|" * len(columns)
    for label, method in dict.fromkeys((row.checkpoint, row.method) for row in rows):
        own = {getattr(row, by): row for row in rows if (row.checkpoint, row.method) == (label, method)}
        means = (fmean(getattr(row, name) for row in own.values()) for name in SHARES)
        cells = (_cell(own[column]) if column in own else "-" for column in columns)
        yield f"| {label} | `{method}` | {' | '.join(f'{one:.3f}' for one in means)} | {' | '.join(cells)} |"
    yield ""


SHARES = ("computed_share", "kept_share", "first_token")


def _cell(row: Row) -> str:
    return f"{row.exact_match:.3f} [{row.low:.3f}, {row.high:.3f}] ({row.relative:.3f})"


def auto_rows(rows: Sequence[Row], directory: Path, fingerprint: str) -> list[Row]:
    """Rows of what `method="auto"` takes for a kind of question, by the verdict in check/KIND.json (`ragcache check
    --json` over questions of another seed) on the base of this fingerprint; full prefill's where no method is safe."""
    found = []
    for kind in TRAINING_FREE:
        path = directory / "check" / f"{kind}.json"
        read = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if read.get("fingerprint") != fingerprint:
            continue
        best = Verdict(**{**read, "methods": [MethodVerdict(**one) for one in read["methods"]]}).best()
        for row in rows:
            spec = MethodSpec.parse(row.method)
            taken = spec.name == FULL if best is None else spec.neighbours == 0 and best.is_about(spec.method())
            if taken and (row.checkpoint, row.kind, row.passages, row.by) == (BASE, kind, STATED_PASSAGES, ""):
                found.append(row)
    return found


def goals(rows: Sequence[Row], auto: Sequence[Row] = ()) -> list[Goal]:
    """Stated for 8 passages and 1,000 questions, as shares of the same weights' full prefill. auto: see `auto_rows`

    Labels say what a checkpoint is: "base" is what the others start from, "link5" is trained whole, "frozen" has links
    on frozen weights, "packet" packets.
    """
    main = {(r.checkpoint, r.method, r.kind): r for r in rows if r.passages == STATED_PASSAGES and not r.by}
    found: list[Goal] = []

    def add(what: str, limit: float, row: Row | None, kind: str = "at least") -> None:
        if row is not None:
            applies, interval = row.questions >= STATED_QUESTIONS, (row.relative_low, row.relative_high)
            found.append(Goal(f"{what}, {row.kind}", kind, limit, row.relative, applies, None, *interval))

    full = main.get((BASE, FULL, "leaning"))
    if full is not None:
        stated, interval = full.questions >= STATED_QUESTIONS, (full.low, full.high)
        found.append(Goal("full prefill, leaning", "at least", 0.9, full.exact_match, stated, None, *interval))
    add("raw reuse falls", 0.7, main.get((BASE, "reposition", "leaning")), "at most")
    for kind, limit in TRAINING_FREE.items():
        cheap = [r for r in rows if (r.checkpoint, r.kind, r.passages, r.by) == (BASE, kind, STATED_PASSAGES, "")]
        cheap = [row for row in cheap if row.computed_share <= MOST_COMPUTED + _question_share(rows, kind)]
        alone = [row for row in cheap if ":neighbours=" not in row.method]
        for what, some in (("", cheap), (" over blocks read alone", alone)):
            best = max(some, key=lambda row: row.relative, default=None)
            add(f"best training-free method at 15 % computed{what}", limit, best)
    for label, method, limits in (
        ("link5", "link", (0.99, 0.98, 0.97)),
        ("frozen", "link", (0.98, 0.98, 0.95)),
        ("packet", "packet", (0.98, 0.98)),
    ):
        for kind, limit in zip(TRAINING_FREE, limits, strict=False):
            add(f"{label}: `{method}`", limit, main.get((label, method, kind)))
    for row in auto:
        add(f"what `auto` takes (`{row.method}`)", 0.97, row)
    packet, moved = main.get(("packet", "packet", "leaning")), main.get((BASE, "reposition", "leaning"))
    if packet is not None and moved is not None:
        applies = packet.questions >= STATED_QUESTIONS
        gain = packet.exact_match - moved.exact_match
        found.append(Goal("packets above `reposition`, leaning", "at least", 0.0, gain, applies))
    return found


def _question_share(rows: Sequence[Row], kind: str) -> float:
    """What runs where nothing but the question does."""
    return min((r.computed_share for r in rows if r.kind == kind and r.passages == STATED_PASSAGES), default=0.0)


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
    parser.add_argument("--checkpoint", action="append", metavar="LABEL=DIR", help="may be repeated")
    parser.add_argument("--methods", action="append", default=[], metavar="LABEL:A,B", help="of one checkpoint")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="LABEL",
        help="its rows stay as they are in --out, but for those that are read anew",
    )
    parser.add_argument("--questions", type=int, default=STATED_QUESTIONS, help="a cell with a goal")
    parser.add_argument("--few-questions", type=int, default=200, help="another cell, or a method beside the main")
    parser.add_argument("--asked", type=int, default=4, help="questions over a context, at most: it is read once")
    parser.add_argument("--kinds", nargs="+", choices=PAGE_KINDS, default=list(PAGE_KINDS))
    parser.add_argument("--passages", type=int, nargs="+", default=list(PASSAGES), help="in a context; a cell each")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0, help="of the table; choose options with another one")
    parser.add_argument(
        "--reads", type=int, default=1, help="how often a table of this seed was looked at, this one too"
    )
    parser.add_argument("--name", default="quality", help="of the files in --out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(given)


def main(arguments: Sequence[str] | None = None) -> Result:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    where = environment("benchmarks.quality", given, torch.device("cpu"))
    chosen = dict(one.split(":", 1) for one in options.methods)
    checkpoints = [load_checkpoint(text, chosen) for text in options.checkpoint or CHECKPOINTS]
    kept = kept_rows(options.out / f"{options.name}.json", options.keep, options.seed)
    answers = Answers(options.out / f"{options.name}.answers.jsonl")
    table = Table(checkpoints, answers, options)
    cells = [Cell(kind, passages) for passages in options.passages for kind in options.kinds]
    units = [unit for one in checkpoints for cell in cells for unit in table.units(one, cell)]
    for done in answer_all(units, answers, options.processes):
        print(f"\r{done} of {len(units)} units", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows = [row for cell in cells for row in table.rows(cell)]
    anew = {row.subject for row in rows}
    rows += [row for row in kept if row.subject not in anew]
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    lengths = regime(checkpoints[0].directory, cells, options)
    figures: dict[str, Any] = {"regime": lengths, "rows": [asdict(row) for row in rows]}
    base = next((one.fingerprint for one in checkpoints if one.label == BASE), "")
    result = Result(options.name, settings, where, {}, {}, figures, goals(rows, auto_rows(rows, options.out, base)))
    plot(figures["rows"], write(result, options.out).with_suffix(".png"))
    show(Result(result.name, None, where, {}, {}, {}, result.goals))
    Console(width=160).print("\n".join(markdown(rows)), highlight=False)
    return result


if __name__ == "__main__":
    main()
