"""KVLink's figure 3: the first token over passages of several lengths, with link tokens, against full prefill.

python -m benchmarks.lengths
python -m benchmarks.lengths --lengths 100 500 --rounds 6 --journal lengths.jsonl

Blocks come out of a store's memory tier, and link ids are arbitrary: the work does not depend on them. All variants of
a length alternate within a round, and all lengths are measured in every round. Each round of a length is on disk before
the next one: the same command goes on where it was stopped, with more rounds or lengths if you like.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import Environment, environment, load_average
from benchmarks.lines import Lines
from benchmarks.options import add_numbers, add_places, settings_from
from benchmarks.reading import Bench, agreement, random_ids
from benchmarks.report import Goal, Result, show, write
from benchmarks.shapes import SHAPES, build
from benchmarks.timing import Samples, Variant, alternate, ratio, summarise
from ragcache.fusion import get_method
from ragcache.models.load import DTYPES

FULL, PLAIN = "full prefill", "no link tokens"
LIMIT = 0.15
"""The least that the paper states: the first token 85 to 96 % sooner, on an A100 with an 8B model."""


@dataclass(frozen=True)
class Settings:
    """lengths: tokens of a passage, one row each; links: tokens behind each passage, one column each"""

    shape: str = "SmolLM2-135M"
    dtype: str = "float32"
    device: str = "cpu"
    passages: int = 10
    lengths: tuple[int, ...] = (100, 200, 300, 400, 500)
    links: tuple[int, ...] = (1, 5)
    suffix: int = 30
    rounds: int = 10
    threads: int = 0
    seed: int = 0

    @property
    def name(self) -> str:
        return f"lengths-{self.shape}-{self.dtype}-{self.device.partition(':')[0]}"

    @property
    def fixed(self) -> dict[str, Any]:
        """What a journal's figures depend on."""
        return {name: value for name, value in asdict(self).items() if name not in ("lengths", "rounds")}


def variants(bench: Bench, settings: Settings) -> Iterator[Variant]:
    yield Variant(FULL, bench.plain_full, long=True)
    yield Variant(PLAIN, bench.reposition_memory)
    for number in settings.links:
        drawn = random_ids(bench.lm.vocab_size, number * settings.passages, settings.seed + 1)
        ids = [drawn[first : first + number] for first in range(0, len(drawn), number)]
        method = get_method("link", link_ids=ids)
        yield Variant(label(number), lambda method=method: bench.from_memory(method))  # type: ignore[misc]


def label(links: int) -> str:
    return f"link, {links} token{'s' if links > 1 else ''}"


def measure(settings: Settings, workdir: Path, journal: Lines) -> dict[str, float]:
    """Fill the journal with every round of every length. Returns the distances from plain transformers."""
    device = torch.device(settings.device)
    built = build(settings.shape, settings.dtype, device, seed=settings.seed)

    def bench(tokens: int) -> Bench:
        where = workdir / str(tokens)
        return Bench(built, settings.passages, tokens, settings.suffix, where, settings.seed)

    with ExitStack() as stack:
        benches = {tokens: stack.enter_context(bench(tokens)) for tokens in settings.lengths}
        checks, warmed = agreement(benches[min(settings.lengths)]), set[int]()
        for number in range(settings.rounds):
            for tokens, one in benches.items():
                if (key := f"{tokens}/{number}") not in journal.done:
                    before = load_average()
                    every = turned(list(variants(one, settings)), number)
                    found = alternate(every, 1, 1, device, label=key, warm=tokens not in warmed)
                    warmed.add(tokens)
                    seconds = {name: by_round[0] for name, by_round in found.items()}
                    journal.add(key, {"seconds": seconds, "load_1min": before})
    return checks


def turned(found: list[Variant], number: int) -> list[Variant]:
    """Each round begins with another one."""
    first = number % len(found)
    return [*found[first:], *found[:first]]


def samples_of(journal: Lines, tokens: int) -> Samples:
    """Seconds by variant and round of one length."""
    found: Samples = {}
    for key, value in journal.done.items():
        length, _, number = key.partition("/")
        for name, seconds in value["seconds"].items() if int(length) == tokens else ():
            found.setdefault(name, {})[int(number)] = seconds
    return found


def result_of(settings: Settings, about: Environment, journal: Lines, checks: dict[str, float]) -> Result:
    timings, ratios, goals = {}, {}, []
    own = Settings()
    applies = (settings.shape, settings.dtype, settings.device, settings.passages) == (
        own.shape,
        own.dtype,
        own.device,
        own.passages,
    )
    for tokens in settings.lengths:
        samples = samples_of(journal, tokens)
        timings |= {f"{tokens}: {name}": timing for name, timing in summarise(samples).items()}
        for above in (PLAIN, *map(label, settings.links)):
            what = f"{tokens}: {above} / {FULL}"
            ratios[what] = ratio(samples, above, FULL)
            goals.append(Goal.of(what, "at most", LIMIT, ratios[what], applies))
    loads = [value["load_1min"] for value in journal.done.values()]
    figures = {**checks, "least_load_1min": min(loads), "most_load_1min": max(loads)}
    about = replace(about, load_1min=max(loads))  # a verdict is of all rounds, whichever run took them
    return Result(settings.name, settings, about, timings, ratios, figures, goals)


def markdown(settings: Settings, result: Result) -> list[str]:
    names = (PLAIN, *map(label, settings.links))
    lines = [f"| tokens of a passage | {FULL}, s | " + " | ".join(f"{name}, s | / {FULL}" for name in names) + " |"]
    lines.append("|" + "---|" * (2 + 2 * len(names)))
    for tokens in settings.lengths:
        cells = [f"{result.timings[f'{tokens}: {FULL}'].median_s:.3f}"]
        for name in names:
            share = result.ratios[f"{tokens}: {name} / {FULL}"]
            cells.append(f"{result.timings[f'{tokens}: {name}'].median_s:.3f}")
            cells.append(f"{share.median:.3f} [{share.low:.3f}, {share.high:.3f}]")
        lines.append(f"| {tokens} | " + " | ".join(cells) + " |")
    least, most = (result.figures[f"{name}_load_1min"] for name in ("least", "most"))
    return [*lines, "", f"Load average over a minute while it ran: {least:g} to {most:g}."]


def parse(arguments: Sequence[str]) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        "benchmarks.lengths", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Settings()
    parser.add_argument("--shape", choices=SHAPES, default=default.shape)
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype)
    parser.add_argument("--device", default=default.device)
    for name in ("lengths", "links"):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=getattr(default, name))
    add_numbers(parser, default, ("passages", "suffix", "rounds", "threads", "seed"))
    parser.add_argument("--journal", type=Path, help="default: NAME.journal.jsonl in --out")
    add_places(parser, "where blocks are written; a disk, not tmpfs")
    given = parser.parse_args(arguments)
    given.lengths, given.links = tuple(given.lengths), tuple(given.links)
    return settings_from(given, Settings), given


def main(arguments: Sequence[str] | None = None) -> Result:
    arguments = sys.argv[1:] if arguments is None else arguments
    settings, given = parse(arguments)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    about = environment("benchmarks.lengths", arguments, torch.device(settings.device))
    journal = Lines(given.journal or given.out / f"{settings.name}.journal.jsonl", settings.fixed)
    with tempfile.TemporaryDirectory(dir=given.workdir) as workdir:
        checks = measure(settings, Path(workdir), journal)
    result = result_of(settings, about, journal, checks)
    page = markdown(settings, result)
    write(result, given.out).with_suffix(".md").write_text("\n".join(page) + "\n", encoding="utf-8")
    show(result)
    print("\n".join(page))
    return result


if __name__ == "__main__":
    main()
