"""Tables of results/peers.json, for results/peers.md and results/README.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.report import goal_lines

OURS, INSIDE = "ragcache reposition", "ragcache in vLLM, reposition"
ANSWERS = "answers/s"
# Ratio, kind and limit of each goal; `askers` are 8.
GOALS = (
    (f"bfloat16, again: {OURS} / new: vllm", "at most", 0.025),
    (f"bfloat16, again: {OURS} / vllm", "at most", 0.95),
    (f"float32, again: {OURS} / vllm", "at most", 1.0),
    (f"bfloat16, again, {ANSWERS}: {OURS} / vllm", "at least", 1.0),
    (f"bfloat16, again, askers, {ANSWERS}: {OURS} / vllm", "at least", 1.0),
    (f"bfloat16, random, askers, {ANSWERS}: {OURS} / vllm", "at least", 15.0),
    (f"bfloat16, random: {INSIDE} / again: vllm", "at most", 1.5),
    (f"bfloat16, random: {INSIDE} / vllm", "at most", 0.10),
    (f"bfloat16, again, askers, {ANSWERS}: {INSIDE} / vllm", "at least", 0.9),
    (f"bfloat16, random, askers, {ANSWERS}: {INSIDE} / vllm", "at least", 5.0),
)
# Streams by name; peers.json has three that are not asked any more.
CELLS = {
    "new": "new passages",
    "again": "the same again",
    "random": "random",
    "zipf": "Zipf",
    "first turn": "first turn",
    "later turn": "later turns",
}


def markdown(found: Mapping[str, Any]) -> list[str]:
    """Return the page's lines. found: the benchmark's result"""
    dtypes = found["figures"]["dtypes"]
    lines = [*_sizes(found["settings"]), ""]
    for dtype, figures in dtypes.items():
        lines += [*_first_tokens(dtype, figures), "", *_compared(dtype, found["ratios"]), ""]
        lines += [line for table in (_throughput(dtype, figures), _together(dtype, figures)) for line in (*table, "")]
    lines += [*_verdicts(dtypes, found["ratios"]), "", *_goals(found), ""]
    lines += [*_agreement(dtypes), "", *_not_run(dtypes)]
    return [*lines, *_about(dtypes), "", _where(found["hardware"])]


def _sizes(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence with the sizes of the run."""
    yield (
        f"{settings['shape']} shape, random weights, {settings['passages']} passages of {settings['tokens']} tokens, "
        f"{settings['suffix']} of question and {settings['answer']} of answer; {settings['rounds']} rounds of new "
        f"passages and of the same again, {settings['questions']} questions of random passages out of "
        f"{settings['pool']}, {settings['bursts']} bursts of {settings['askers']} askers; transformers and llama.cpp, "
        f"which are slow, the first {settings['slow_rounds']} of each. {settings['threads']} threads, "
        f"{settings['kv_mib']:,} MiB of cache each."
    )


def _rows(cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row for rows in cells.values() for row in rows))


def _header(first: str, columns: list[str]) -> Iterator[str]:
    yield f"| {first} | " + " | ".join(columns) + " |"
    yield "|" + "---|" * (len(columns) + 1)


def _table(cells: Mapping[str, Mapping[str, Any]], show: Callable[[Mapping[str, Any]], str]) -> Iterator[str]:
    """Yield a row for every row that some cell has; a dash if a cell lacks it."""
    columns = [cell for cell in CELLS if cell in cells]
    yield from _header("", [CELLS[cell] for cell in columns])
    for row in _rows(cells):
        texts = [show(cells[cell][row]) if row in cells[cell] else "-" for cell in columns]
        yield f"| {row} | " + " | ".join(texts) + " |"


def _first_tokens(dtype: str, figures: Mapping[str, Any]) -> Iterator[str]:
    yield f"{dtype}: time to first token in ms, median; in brackets tokens of the prompt that were not computed:"
    yield ""
    yield from _table(figures["cells"], _first_token)


def _first_token(value: Mapping[str, Any]) -> str:
    return f"{1000 * value['first_s']:,.0f} ({value['reused_tokens']:,.0f})"


def _compared(dtype: str, ratios: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ratios of `reposition` to the other rows, by stream; the last column is the goal's comparison."""
    columns = [cell for cell in CELLS if any(name.startswith(f"{dtype}, {cell}: {OURS} / ") for name in ratios)]
    found = [name.partition(f": {OURS} / ") for name in ratios if name.startswith(f"{dtype}, ")]
    rows = list(
        dict.fromkeys(row for where, _, row in found if where.partition(", ")[2] in columns and ": " not in row)
    )
    yield f"{dtype}: time to first token of `reposition` over theirs, median of pairs; below 1 ours is faster:"
    yield ""
    yield from _header("over", [*(CELLS[cell] for cell in columns), "ours read / theirs new"])
    for row in rows:
        names = [f"{dtype}, {cell}: {OURS} / {row}" for cell in columns]
        names.append(f"{dtype}, again: {OURS} / new: {row}")
        yield f"| {row} | " + " | ".join(_ratio(ratios.get(name)) for name in names) + " |"


def _ratio(value: Mapping[str, Any] | None) -> str:
    return "-" if value is None else f"{value['median']:.3f}"


def _throughput(dtype: str, figures: Mapping[str, Any]) -> Iterator[str]:
    yield f"{dtype}: answers/s, one asker:"
    yield ""
    yield from _table(figures["cells"], lambda value: f"{value['answers_per_s']:.2f}")


def _together(dtype: str, figures: Mapping[str, Any]) -> Iterator[str]:
    cells = figures["together"]
    if not cells:
        return
    askers = max(int(value["askers"]) for rows in cells.values() for value in rows.values())
    yield f"{dtype}: {askers} askers at the same moment, answers/s, and in brackets the last one's first token in ms,"
    yield "medians of bursts:"
    yield ""
    yield from _table(cells, lambda value: f"{value['answers_per_s']:.2f} ({1000 * value['first_s_max']:,.0f})")


def _verdicts(dtypes: Mapping[str, Any], ratios: Mapping[str, Any]) -> Iterator[str]:
    """Yield the streams and rows in which `reposition` is slower."""
    lost = [*_lost_first_tokens(ratios), *_lost_together(dtypes)]
    yield "Where `reposition` is the slower one:"
    yield ""
    yield from lost or ["- nowhere in this run"]


def _lost_first_tokens(ratios: Mapping[str, Any]) -> Iterator[str]:
    for name, value in ratios.items():
        where, _, row = name.partition(f": {OURS} / ")
        dtype, _, cell = where.partition(", ")
        if value["median"] > 1 and cell in CELLS and ": " not in row and row != "ragcache link":
            yield f"- first token, {dtype}, {CELLS[cell]}: {value['median']:.2f} x the time of {row}"


def _lost_together(dtypes: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for answers/s of a single asker and of several, in which decoding counts too."""
    for dtype, figures in dtypes.items():
        for kind, cells in (("one asker", figures["cells"]), ("several askers", figures["together"])):
            for cell, rows in cells.items():
                for row, value in rows.items():
                    ours = rows.get(OURS, value)["answers_per_s"]
                    if row.partition(" ")[0] != "ragcache" and value["answers_per_s"] > ours and _counts(figures, row):
                        share = ours / value["answers_per_s"]
                        yield f"- answers/s, {dtype}, {kind}, {CELLS[cell]}: {share:.2f} x those of {row}"


def _counts(figures: Mapping[str, Any], row: str) -> bool:
    return bool(figures["agreement"].get(row, {"agrees": True})["agrees"])


def _goals(found: Mapping[str, Any]) -> Iterator[str]:
    yield from goal_lines(found)
    measured = {goal["what"] for goal in found["goals"]}
    for what, kind, limit in GOALS:
        if what not in measured:
            yield f"| {what} | {kind} {limit:g} | - | - | - | not measured |"


def _agreement(dtypes: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of the agreement with transformers, for rows that should compute the same."""
    found = [(dtype, row, same) for dtype, figures in dtypes.items() for row, same in figures["agreement"].items()]
    if not found:
        yield "Answers were not compared with transformers', which was not run."
        return
    yield "Greedy answers to the check prompts that are transformers', in the same dtype, up to the first difference:"
    yield ""
    yield from _header("", ["dtype", "first tokens", "all tokens", "compared"])
    for dtype, row, same in found:
        verdict = "yes" if same["agrees"] else "no: left out of the ratios"
        counts = f"{same['first']} of {same['prompts']} | {same['common']} of {same['tokens']}"
        yield f"| {row} | {dtype} | {counts} | {verdict} |"


def _not_run(dtypes: Mapping[str, Any]) -> Iterator[str]:
    missing = [(dtype, *one) for dtype, figures in dtypes.items() for one in figures["not_run"].items()]
    for dtype, name, why in missing:
        yield f"- {name}, {dtype}: not run (to its end), because {why}"
    if missing:
        yield ""


def _about(dtypes: Mapping[str, Any]) -> Iterator[str]:
    """Yield versions and settings, which differ between dtypes at most in the type of the KV."""
    yield from _header("peer", ["versions", "settings"])
    peers = {name: about for figures in reversed(list(dtypes.values())) for name, about in figures["peers"].items()}
    for name, about in peers.items():
        yield f"| {name} | {_pairs(about['versions'])} | {_pairs(about['settings'])} |"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _where(hardware: Mapping[str, Any]) -> str:
    stolen = hardware.get("stolen_share")
    host = "" if stolen is None else f", {stolen:.0%} of the processors' time taken by the host"
    return (
        f"`{hardware['command']}`, {hardware['cpu']}, {hardware['threads']} threads, load before the run "
        f"{hardware['load_1min']}{host}, commit {hardware['commit']}, {hardware['date'][:10]}."
    )
