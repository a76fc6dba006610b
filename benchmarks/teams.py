"""What other threads' OpenMP teams cost a pass of the model: see ragcache/runtime.py.

    python -m benchmarks.teams --shape SmolLM2-135M --others 2

Other threads each do one large operation and then only wait, like a reader that has copied a block. Meanwhile this one
decodes a token, and decodes codec int8 into place: with the others' teams left alive, ended, and never there.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.environment import environment
from benchmarks.options import add_numbers, add_places, measure_and_report, settings_from
from benchmarks.report import Goal, Result
from benchmarks.shapes import SHAPES, build
from benchmarks.timing import Timing, Variant, alternate, ratio, summarise
from ragcache.codecs import get_codec
from ragcache.codecs.sample_block import example_block
from ragcache.models.language_model import LanguageModel
from ragcache.runtime import end_team, work_alone

NONE, LEFT, ENDED, ALONE = "no other thread", "teams left alive", "teams ended", "others work alone"
KINDS = (NONE, LEFT, ENDED, ALONE)
LARGE = 1 << 20  # numbers in one operation: PyTorch shares it among threads
GOAL = 1.1


@dataclass(frozen=True)
class Settings:
    """others: threads beside. steps: tokens, and blocks decoded, in one measurement. tokens: of the block."""

    shape: str = "SmolLM2-135M"
    others: int = 2
    steps: int = 10
    tokens: int = 500
    rounds: int = 15
    threads: int = 0


def nothing() -> None:
    return


BEFORE: dict[str, Callable[[], None]] = {LEFT: nothing, ENDED: nothing, ALONE: work_alone}
AFTER: dict[str, Callable[[], None]] = {LEFT: nothing, ENDED: end_team, ALONE: nothing}


class Others:
    """Threads that have computed once, and wait until others take their place."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    def replace(self, kind: str) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._over, ready = threading.Event(), threading.Barrier(self._count + 1)
        work = partial(self._work, kind, ready, self._over)
        self._threads = [threading.Thread(target=work) for _ in range(self._count if kind != NONE else 0)]
        for thread in self._threads:
            thread.start()
        if self._threads:
            ready.wait()

    @staticmethod
    def _work(kind: str, ready: threading.Barrier, over: threading.Event) -> None:
        BEFORE[kind]()
        torch.zeros(LARGE).add_(1)
        AFTER[kind]()
        ready.wait()
        over.wait()


class Work:
    def __init__(self, lm: LanguageModel, settings: Settings) -> None:
        self._lm, self._steps = lm, settings.steps
        codec = get_codec("int8")
        self._block = codec.decode(codec.encode(example_block(lm.shape.layers, settings.tokens, torch.float32)))
        self._place = torch.empty_like(self._block.layer_keys(0))

    def decode_tokens(self) -> None:
        cache = self._lm.new_cache(self._steps)
        for position in range(self._steps):
            self._lm.run([1], position, cache)
        cache.release()

    def decode_block(self) -> None:
        for _ in range(self._steps):
            for layer in range(self._block.num_layers):
                self._block.copy_keys(layer, self._place)
                self._block.copy_values(layer, self._place)


def measure(settings: Settings, arguments: Sequence[str]) -> Result:
    hardware = environment("benchmarks.teams", arguments, torch.device("cpu"))
    lm = build(settings.shape).lm
    work = Work(lm, settings)
    others, timings = Others(settings.others), dict[str, Timing]()
    ratios, goals = {}, []
    for what, run in (("a token", work.decode_tokens), ("an int8 block", work.decode_block)):
        variants = [Variant(f"{what}: {kind}", run, partial(others.replace, kind)) for kind in KINDS]
        samples = alternate(variants, settings.rounds, settings.rounds, lm.device, label=what)
        for name, timing in summarise(samples).items():
            each = (seconds / settings.steps for seconds in (timing.median_s, timing.min_s, timing.max_s))
            timings[name] = Timing(*each, timing.runs)
        for kind in (LEFT, ENDED, ALONE):
            found = ratio(samples, f"{what}: {kind}", f"{what}: {NONE}")
            ratios[f"{what}: {kind} / {NONE}"] = found
            if kind != LEFT:
                goals.append(Goal.of(f"{what}: {kind} / {NONE}", "at most", GOAL, found, settings == Settings()))
    others.replace(NONE)
    return Result("teams", settings, hardware, timings, ratios, {}, goals)


def parse(arguments: Sequence[str]) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser("benchmarks.teams", description=__doc__)
    default = Settings()
    parser.add_argument("--shape", choices=SHAPES, default=default.shape)
    add_numbers(parser, default, ("others", "steps", "tokens", "rounds", "threads"))
    add_places(parser, None)
    given = parser.parse_args(arguments)
    return settings_from(given, Settings), given


def main(arguments: Sequence[str] | None = None) -> Result:
    arguments = sys.argv[1:] if arguments is None else arguments
    settings, given = parse(arguments)
    return measure_and_report(measure, settings, settings.threads, given.out, arguments)


if __name__ == "__main__":
    main()
