"""Write the tables of docs/methods.md, results/methods.md and results/README.md: `python -m benchmarks.pages`.

A table is the section between <!-- NAME: begin --> and <!-- NAME: end -->. `methods` is made from the code, `costs`
from results/methods-*.json, `public` from results/eval/MODEL/*.json (`ragcache eval`), `peers` from results/peers.json,
`answers` from results/answers-*.json, and `timed` from the goals of all results. A table without results says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ragcache as rc
from benchmarks import answers_report, peers_report
from benchmarks.report import GOALS_HEAD, RESULTS, goal_line, goal_lines, goals_of, where_line
from ragcache.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
METHODS_PAGE = DOCS / "methods.md"
COSTS_PAGE = RESULTS / "methods.md"
RESULTS_PAGE = RESULTS / "README.md"
FULL = "transformers: full prefill"


def write_section(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace a section's content with `lines`. Raises ConfigError if the page has no such section."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ConfigError(f"{page} has no section {begin} ... {end}; put both marks where it goes")
    before, after = text[: text.index(begin)], text[text.index(end) :]
    page.write_text("\n".join([before + begin, "", *lines, "", after]), encoding="utf-8")


def methods_table() -> list[str]:
    """Return a table of every method that the code knows."""
    lines = ["| method | what it does | paper | training | recipes | options |", "|---|---|---|---|---|---|"]
    for one in rc.methods():
        options = ", ".join(f"`{name}`" for name in one.options) or "-"
        trained = "needed" if one.needs_training else "none"
        recipes = ", ".join(one.recipes) if rc.METHODS[one.name].reuses_blocks else "-"
        lines.append(f"| `{one.name}` | {one.summary} | {one.paper} | {trained} | {recipes} | {options} |")
    return lines


def cost_lines(results: Path) -> list[str]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("methods-*.json"))]
    lines = [line for one in found for line in (*_cost_table(one), "")]
    return lines[:-1] if lines else ["Not measured: run `python -m benchmarks methods`."]


def _cost_table(found: dict[str, Any]) -> Iterator[str]:
    """Yield a row per method: median time, its ratio to full prefill in the same rounds, tokens computed and kept."""
    settings = found["settings"]
    sizes = f"{settings['passages']} x {settings['tokens']} tokens, suffix {settings['suffix']}"
    yield f"{settings['shape']} shape, {settings['dtype']}, {settings['device']}, {sizes}:"
    yield ""
    yield "| method | first token, ms | / full prefill | computed | kept |"
    yield "|---|---|---|---|---|"
    for name, timing in found["timings"].items():
        ratio = found["ratios"].get(f"{name} / {FULL}")
        shares = [found["figures"].get(f"{name}: {what} share") for what in ("computed", "kept")]
        cells = [f"{1000 * timing['median_s']:.1f}", f"{ratio['median']:.3f}" if ratio else "-"]
        yield f"| {name} | " + " | ".join([*cells, *(f"{s:.3f}" if s is not None else "-" for s in shares)]) + " |"
    yield ""
    yield from (*goal_lines(found), "", where_line(found))


def public_lines(results: Path) -> list[str]:
    """Return a table for each model that `ragcache eval` measured on the public sets."""
    found = [_public_table(directory) for directory in sorted((results / "eval").glob("*")) if directory.is_dir()]
    lines = [line for table in found for line in (*table, "")]
    return lines[:-1] if lines else ["Not measured: run `ragcache eval`."]


def _public_table(directory: Path) -> Iterator[str]:
    """Yield a row per set: full prefill's accuracy, and each method's distance from it along the reference answer."""
    sets = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))]
    rows = [{row["method"]: row for row in one["rows"] if not row["cell"]} for one in sets]
    methods = [name for name in rows[0] if name not in {"no passages", "full"}]
    yield f"`{directory.name}`; of each method, top-1 agreement with full prefill / KL from it, in nats a token:"
    yield ""
    yield "| set | questions | tokens | accuracy, full | " + " | ".join(f"`{name}`" for name in methods) + " |"
    yield "|---|---|---|---|" + "---|" * len(methods)
    for one, row in zip(sets, rows, strict=True):
        full, agreement = row["full"], [row[name]["quality"] for name in methods]
        tokens = f"{full['costs']['prompt_tokens']:,.0f}"
        cells = [str(full["questions"]), tokens, f"{full['quality']['accuracy']['mean']:.2f}"]
        cells += [f"{of['top1_answer']['mean']:.2f} / {of['kl_answer']['mean']:.2f}" for of in agreement]
        yield f"| `{one['data']}` | " + " | ".join(cells) + " |"


def timed_lines(results: Path) -> list[str]:
    """Return every goal on time in the results, at the sizes that it applies to, with its verdict."""
    lines = list(GOALS_HEAD)
    for path in sorted(results.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        timed = [goal for goal in goals_of(found) if goal.pairs is not None and goal.applies]
        lines += [goal_line(goal, found["hardware"]) for goal in timed]
    return lines


def peers_lines(results: Path) -> list[str]:
    path = results / "peers.json"
    if not path.is_file():
        return ["Not measured: run `python -m benchmarks peers`."]
    return peers_report.markdown(json.loads(path.read_text(encoding="utf-8")))


def answers_lines(results: Path) -> list[str]:
    """Return a part for each real model."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("answers-*.json"))]
    parts = [[f"### {one['name'].removeprefix('answers-')}", "", *answers_report.overview(one)] for one in found]
    return [line for part in parts for line in part][:-1] or ["Not measured: run `python -m benchmarks answers`."]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("benchmarks.pages", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, help="folder of copies to write in place of the pages")
    given = parser.parse_args(arguments)
    sections = {
        (METHODS_PAGE, "methods"): methods_table(),
        (COSTS_PAGE, "costs"): cost_lines(given.results),
        (RESULTS_PAGE, "answers"): answers_lines(given.results),
        (RESULTS_PAGE, "timed"): timed_lines(given.results),
        (RESULTS_PAGE, "public"): public_lines(given.results),
        (RESULTS_PAGE, "peers"): peers_lines(given.results),
    }
    for (page, name), lines in sections.items():
        write_section(page if given.out is None else given.out / page.relative_to(ROOT), name, lines)


if __name__ == "__main__":
    main()
