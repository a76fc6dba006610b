"""Report on the scores of `benchmarks.answers`: a row per method, over each set and over all, and the safe methods.

Intervals are 95 %, by the bootstrap over questions: 2,000 draws, each with as many questions of a set as the set has.
Over all sets, each set counts alike, however many of its questions were read. Shares of full prefill's accuracy are
ratios of these means over the questions that both methods read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import ConfigError
from ragcache_eval.intervals import RESAMPLES
from ragcache_eval.journal import Score
from ragcache_eval.methods import FULL
from ragcache_eval.runner import NO_PASSAGES

MOST_KL = 0.2
LEAST_RELATIVE = 0.95
FEWEST_QUESTIONS = 20
"""Limits that a method has to keep, over at least FEWEST_QUESTIONS questions, to be called safe."""
ALL = "all"

Numbers = NDArray[np.float64]
Interval = tuple[float, float, float]
"""A mean, and the ends of its 95 % interval."""


@dataclass(frozen=True)
class Row:
    """A method over the questions of a set, or of all sets.

    accuracy: share of answers that contain a gold answer, both normalised
    f1:       F1 of the answers' words
    kl:       KL from full prefill along its own answer, nats per token
    same_answer: share of answers that equal full prefill's
    relative: accuracy over full prefill's on the same questions; None if full prefill answers none correctly
    computed_share, kept_share: shares of the prompt's tokens, means over layers and questions
    first_token_s, first_token: median of the seconds, and of their ratio to full prefill's at the same question
    skipped:  number of questions that the method could not read; skipped_because: the first one's reason
    """

    set: str
    method: str
    questions: int
    sets: int
    accuracy: Interval
    f1: Interval
    kl: Interval | None
    same_answer: Interval | None
    relative: Interval | None
    computed_share: float
    kept_share: float
    first_token_s: float
    first_token: float
    skipped: int = 0
    skipped_because: str = ""

    @property
    def is_safe(self) -> bool:
        """Return whether the means keep to the limits."""
        return self._measured and self.kl[0] <= MOST_KL and self.relative[0] >= LEAST_RELATIVE  # type: ignore[index]

    @property
    def is_surely_safe(self) -> bool:
        """Return whether the far ends of the intervals keep to the limits too."""
        return self.is_safe and self.kl[2] <= MOST_KL and self.relative[1] >= LEAST_RELATIVE  # type: ignore[index]

    @property
    def _measured(self) -> bool:
        enough = self.questions >= FEWEST_QUESTIONS and self.method not in (FULL, NO_PASSAGES)
        return enough and self.kl is not None and self.relative is not None

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Row:
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
        return cls(**fields)


def label(key: str) -> str:
    """Return a method as the command line writes it, from its key in the journal (`MethodSpec.key`)."""
    if key == NO_PASSAGES:
        return key
    before, _, recipe = key.rpartition("@")
    recipe, _, primer = recipe.partition("^")
    recipe, _, neighbours = recipe.partition("<")
    behind = {"recipe": recipe, "primer": primer, "neighbours": neighbours}
    name, brace, options = before.partition("{")
    parts = [f"{one}={_text(value)}" for one, value in json.loads(brace + options).items()] if brace else []
    return ":".join([name, *parts, *(f"{one}={value}" for one, value in behind.items() if value)])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def figures_of(scores: Sequence[Score]) -> dict[str, Any]:
    """Return rows over all sets and over each, statistics of the prompts, and the methods that are safe."""
    by_set: dict[str, dict[str, dict[str, Score]]] = defaultdict(lambda: defaultdict(dict))
    for score in scores:
        by_set[str(score.cell["set"])][label(score.method)][score.case] = score
    methods = list(dict.fromkeys(label(score.method) for score in scores))
    groups = {ALL: list(by_set), **{name: [name] for name in by_set}} if len(by_set) > 1 else {n: [n] for n in by_set}
    rows = [row for name, sets in groups.items() for row in _rows(name, [by_set[one] for one in sets], methods)]
    overall = [row for row in rows if row.set == next(iter(groups), "")]
    return {
        "prompt_tokens": {name: median(s.prompt_tokens for s in of[FULL].values()) for name, of in by_set.items()},
        "rows": [asdict(row) for row in sorted(rows, key=lambda row: list(groups).index(row.set))],
        "safe": [row.method for row in overall if row.is_safe and row.sets == len(by_set)],
        "surely_safe": [row.method for row in overall if row.is_surely_safe and row.sets == len(by_set)],
    }


def _rows(name: str, sets: Sequence[Mapping[str, Mapping[str, Score]]], methods: Sequence[str]) -> Iterator[Row]:
    """Yield a row per method, full prefill and no passages first, then by cost.

    sets: scores by method and question, for each set that the rows are about
    """
    found = []
    for method in methods:
        pairs = [_pairs(of.get(method, {}), of.get(FULL, {})) for of in sets]
        measured = [some for some in pairs if some]
        skipped = [score.skipped for of in sets for score in of.get(method, {}).values() if score.skipped]
        if measured:
            found.append(_row(name, method, measured, skipped))
    yield from sorted(found, key=lambda row: (row.method != FULL, row.method != NO_PASSAGES, row.computed_share))


def _pairs(own: Mapping[str, Score], full: Mapping[str, Score]) -> list[tuple[Score, Score]]:
    """Return pairs of a method's and full prefill's scores of the same questions."""
    both = ((score, full[case]) for case, score in own.items() if case in full)
    return [(score, other) for score, other in both if not score.skipped and not other.skipped]


def _row(name: str, method: str, sets: Sequence[Sequence[tuple[Score, Score]]], skipped: Sequence[str]) -> Row:
    def mean(field: str) -> Interval | None:
        columns = [[getattr(score, field) for score, _ in pairs] for pairs in sets]
        return None if any(value is None for column in columns for value in column) else interval(columns)

    pairs = [pair for some in sets for pair in some]
    accuracy, f1 = mean("accuracy"), mean("f1")
    if accuracy is None or f1 is None:
        raise ConfigError(f"{name}: a score of {method} has no accuracy; the journal is of questions without answers")
    return Row(
        set=name,
        method=method,
        questions=len(pairs),
        sets=len(sets),
        accuracy=accuracy,
        f1=f1,
        kl=mean("kl_answer"),
        same_answer=mean("same_answer"),
        relative=ratio([[(float(s.accuracy or 0), float(full.accuracy or 0)) for s, full in some] for some in sets]),
        computed_share=round(fmean(score.computed_share or 0.0 for score, _ in pairs), 4),
        kept_share=round(fmean(score.kept_share or 0.0 for score, _ in pairs), 4),
        first_token_s=round(median(score.ttft_s or 0.0 for score, _ in pairs), 4),
        first_token=round(median((score.ttft_s or 0.0) / (full.ttft_s or 1.0) for score, full in pairs), 4),
        skipped=len(skipped),
        skipped_because=skipped[0] if skipped else "",
    )


def interval(sets: Sequence[Sequence[float | bool]]) -> Interval:
    """Return the mean of the sets' means, with its interval."""
    columns = [np.asarray(values, dtype=np.float64)[:, None] for values in sets]
    return _interval(_means(columns)[:, 0], _drawn(columns)[:, 0])


def ratio(sets: Sequence[Sequence[tuple[float, float]]]) -> Interval | None:
    """Return the ratio of the columns' means with its interval, drawn in pairs; None if the second mean is 0."""
    columns = [np.asarray(values, dtype=np.float64) for values in sets]
    means, drawn = _means(columns), _drawn(columns)
    if not means[0, 1]:
        return None
    drawn = drawn[drawn[:, 1] > 0]
    return _interval(means[:, 0] / means[:, 1], drawn[:, 0] / drawn[:, 1])


def _means(sets: Sequence[Numbers]) -> Numbers:
    """Return the mean of the sets' means, [1, columns]. sets: [questions, columns] each"""
    return np.mean([values.mean(0) for values in sets], axis=0, keepdims=True)  # type: ignore[no-any-return]


def _drawn(sets: Sequence[Numbers]) -> Numbers:
    """Return `_means` of questions drawn from each set, [RESAMPLES, columns]; the same for the same values."""
    rng = np.random.default_rng(0)
    means = [values[rng.integers(0, len(values), size=(RESAMPLES, len(values)))].mean(1) for values in sets]
    return np.mean(means, axis=0)  # type: ignore[no-any-return]


def _interval(mean: Numbers, drawn: Numbers) -> Interval:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return round(float(mean[0]), 5), round(float(low), 5), round(float(high), 5)


def markdown(found: Mapping[str, Any]) -> list[str]:
    """Return a page from a result's file: where and how it was measured, and tables over all sets and per set."""
    groups = _groups(found)
    lines = [f"# {found['name']}", "", *_about(found), "", *safe_lines(found), ""]
    for name, rows in groups.items():
        lines += [f"## {_title(found, name)}", "", *table(rows, found["settings"]["questions"]), ""]
    return lines[:-1]


def overview(found: Mapping[str, Any]) -> list[str]:
    """Return the part that results/README.md shows: the table over all sets, and KL and accuracy over each."""
    groups = _groups(found)
    whole = next(iter(groups.values()))
    lines = [*_about(found), "", *safe_lines(found), "", *table(whole, found["settings"]["questions"]), ""]
    return [*lines, *_by_set(found, groups), ""] if len(groups) > 1 else lines


def _groups(found: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Return rows by set, in the order of the file."""
    groups: dict[str, list[Row]] = {}
    for row in found["figures"]["rows"]:
        groups.setdefault(row["set"], []).append(Row.from_json(row))
    return groups


def _by_set(found: Mapping[str, Any], groups: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    sets = [name for name in groups if name != ALL]
    rows = {(row.set, row.method): row for own in groups.values() for row in own}
    tokens = found["figures"]["prompt_tokens"]
    yield "KL, and in brackets right answers over all of them, by set with the median tokens of its prompts:"
    yield ""
    yield "| method | " + " | ".join(f"{name}, {tokens[name]:,.0f}" for name in sets) + " |"
    yield "|---|" + "---|" * len(sets)
    for row in groups[ALL]:
        if row.kl is not None:
            cells = (_cell(rows.get((name, row.method))) for name in sets)
            yield f"| `{row.method}` | {' | '.join(cells)} |"


def _cell(row: Row | None) -> str:
    if row is None or row.kl is None:
        return "-"
    return f"{row.kl[0]:.3f} ({row.accuracy[0] * row.questions:.0f}/{row.questions})"


def _title(found: Mapping[str, Any], name: str) -> str:
    tokens = found["figures"]["prompt_tokens"]
    return (
        f"{name}, prompts of {tokens[name]:,.0f} tokens (median)" if name in tokens else "All sets, each counted alike"
    )


def _about(found: Mapping[str, Any]) -> Iterator[str]:
    settings, hardware = found["settings"], found["hardware"]
    yield f"`{hardware['command']}`: {settings['model']}, {settings['dtype']}, prompts and answers of at most"
    yield f"{settings['context']:,} tokens; greedy answers of at most 24 tokens, to the end of their quotation."
    yield "Intervals are 95 %, by the bootstrap over questions; over all, sets count alike. KL is taken along full"
    yield "prefill's own answer, in nats a token. Seconds depend on the machine's load: read first tokens as shares of"
    yield "full prefill's at the same question."
    yield ""
    yield _measured_on(found["figures"]["runs"] or [hardware])
    if settings["left_out"]:
        yield f"Left out, as this model was not trained for them: {', '.join(f'`{n}`' for n in settings['left_out'])}."


def _measured_on(runs: Sequence[Mapping[str, Any]]) -> str:
    """Describe the common and the differing properties of a journal's runs."""
    machines = dict.fromkeys(run["gpu"] or f"{run['cpu']}, {run['threads']} of {run['cores']} threads" for run in runs)
    loads = sorted(run["load_1min"] for run in runs)
    clean = "clean tree" if all(run["clean"] for run in runs) else "uncommitted changes"
    commits = ", ".join(dict.fromkeys(str(run["commit"]) for run in runs))
    days = sorted({str(run["date"])[:10] for run in runs})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    return f"Measured {when} on {'; '.join(machines)}; load {loads[0]:g} to {loads[-1]:g}; commit {commits}, {clean}."


def safe_lines(found: Mapping[str, Any]) -> Iterator[str]:
    figures = found["figures"]
    rule = f"KL at most {MOST_KL:g}, accuracy at least {LEAST_RELATIVE:g} of full prefill's"
    enough = f"over {FEWEST_QUESTIONS} questions or more and every set"
    yield f"Safe by this table ({rule}, {enough}), cheapest first: {_names(figures['safe'])}."
    yield f"With both limits outside of the 95 % intervals: {_names(figures['surely_safe'])}."


def _names(methods: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in methods) or "none"


HEADS = (
    *("method", "questions", "computed", "kept", "first token", "of full's"),
    *("KL", "accuracy", "of full's", "F1", "same answer"),
)


def table(rows: Sequence[Row], asked: int) -> Iterator[str]:
    """Yield the table's lines. asked: questions of each set; a row over fewer questions says so"""
    yield "| " + " | ".join(HEADS) + " |"
    yield "|" + "---|" * len(HEADS)
    for row in rows:
        most = max(one.sets for one in rows)
        due = asked * most
        count = str(row.questions) if row.questions >= due else f"{row.questions} of {due}"
        count += f", {row.sets} of {most} sets" * (row.sets < most)
        costs = [f"{row.computed_share:.3f}", f"{row.kept_share:.3f}", f"{row.first_token_s:.2f} s"]
        closed = row.method == NO_PASSAGES
        marks = [
            f"`{row.method}`" if not closed else row.method,
            f"{count}{f', {row.skipped} skipped' * bool(row.skipped)}",
        ]
        cells = [*marks, *(["-"] * 4 if closed else [*costs, f"{row.first_token:.3f}"])]
        cells += [_text_of(one) for one in (row.kl, row.accuracy, row.relative, row.f1, row.same_answer)]
        yield "| " + " | ".join(cells) + " |"


def _text_of(value: Interval | None) -> str:
    return "-" if value is None else f"{value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]"
