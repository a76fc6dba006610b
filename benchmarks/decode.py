"""Decoding behind a long context, against transformers' generate over the same KV.

    python -m benchmarks.decode --shape SmolLM2-135M --dtype float32 --device cpu --context 5000 --tokens 32

Both start from a cache that holds the context, so that only decoding is timed: every token is one forward pass.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks import plain
from benchmarks.environment import environment
from benchmarks.options import add_places, measure_and_report, settings_from
from benchmarks.reading import random_prompt, truncate
from benchmarks.report import Goal, Result
from benchmarks.shapes import SHAPES, Built, build
from benchmarks.timing import Ratio, Timing, Variant, alternate, ratio
from ragcache.fusion.fuse import fuse
from ragcache.models.generate import decode
from ragcache.models.load import DTYPES
from ragcache.models.sampler import Sampling

OURS = "ragcache"
THEIRS = "transformers: generate"


@dataclass(frozen=True)
class Settings:
    """context: tokens that are there when decoding starts. tokens: that are decoded."""

    shape: str = "SmolLM2-135M"
    dtype: str = "float32"
    device: str = "cpu"
    context: int = 5000
    tokens: int = 32
    rounds: int = 10
    threads: int = 0
    seed: int = 0

    @property
    def name(self) -> str:
        return f"decode-{self.shape}-{self.dtype}-{self.device.partition(':')[0]}"


class Decoding:
    """Two decoders over the same context. The step times of every run are kept.

    A step is the time from one token to the next; the first token of a run, which pays for setting up, is left out.
    """

    def __init__(self, built: Built, context: int, count: int, seed: int) -> None:
        self._lm, self._plain = built
        self._count = count
        prompt = random_prompt(self._lm.vocab_size, 1, context - 1, 1, seed)
        fused = fuse(self._lm, prompt, "full", reserve_tokens=count + 1)
        self._ids = prompt.ids
        self._logits: Tensor = fused.next_logits
        self._cache = fused.cache
        self._plain_cache = DynamicCache()
        self.steps: dict[str, list[float]] = {OURS: [], THEIRS: []}
        self.tokens: dict[str, list[int]] = {}

    def rewind(self) -> None:
        truncate(self._cache, len(self._ids))

    def ours(self) -> None:
        """The first token is chosen from the prompt's logits, with no pass: one more makes `count` passes."""
        started = time.perf_counter()
        steps = decode(self._lm, self._cache, self._logits, len(self._ids), Sampling(max_tokens=self._count + 1))
        tokens, stamps = [], []
        for token in steps:
            tokens.append(token)
            stamps.append(time.perf_counter() - started)
        self._note(OURS, tokens[1:], stamps[1:])

    def fill_plain_cache(self) -> None:
        self.rewind()
        layers = [self._cache.layer_state(layer)[:2] for layer in range(self._lm.shape.num_layers)]
        self._plain_cache = plain.filled_cache(layers)

    def theirs(self) -> None:
        ids = [*self._ids, int(self._logits.argmax())]
        self._note(THEIRS, *plain.generate(self._plain, ids, self._plain_cache, self._count))

    def _note(self, name: str, tokens: list[int], stamps: list[float]) -> None:
        self.tokens[name] = tokens
        self.steps[name].append(statistics.median(later - earlier for earlier, later in pairwise(stamps)))


def measure(settings: Settings, arguments: Sequence[str]) -> Result:
    device = torch.device(settings.device)
    hardware = environment("benchmarks.decode", arguments, device)
    built = build(settings.shape, settings.dtype, device, seed=settings.seed)
    work = Decoding(built, settings.context, settings.tokens, settings.seed)
    variants = [Variant(OURS, work.ours, work.rewind), Variant(THEIRS, work.theirs, work.fill_plain_cache)]
    samples = alternate(variants, settings.rounds, settings.rounds, device, label="decode")
    steps = {name: taken[-settings.rounds :] for name, taken in work.steps.items()}  # without the warm-up
    by_step = _paired(steps[THEIRS], steps[OURS])
    ratios = {
        f"{OURS} / {THEIRS}, tokens/s": by_step,
        f"{OURS} / {THEIRS}, tokens/s, set-up included": ratio(samples, THEIRS, OURS),
    }
    timings = {f"{name}, a token": Timing.of(taken) for name, taken in steps.items()}
    figures = {
        **{f"{name}, tokens/s": 1 / statistics.median(taken) for name, taken in steps.items()},
        **{f"{name}, {settings.tokens} tokens, s": Timing.of(list(s.values())).median_s for name, s in samples.items()},
        "same_tokens": work.tokens[OURS] == work.tokens[THEIRS],
    }
    applies = settings.context >= 5000 and settings.shape == "SmolLM2-135M"
    goal = Goal.of(f"{OURS} / {THEIRS}, tokens/s", "at least", 1.0, by_step, applies)
    return Result(settings.name, settings, hardware, timings, ratios, figures, [goal])


def _paired(above: Sequence[float], below: Sequence[float]) -> Ratio:
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return Ratio.of(ratios)


def parse(arguments: Sequence[str]) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser("benchmarks.decode", description=__doc__)
    default = Settings()
    parser.add_argument("--shape", choices=SHAPES, default=default.shape)
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype)
    parser.add_argument("--device", default=default.device)
    for name in ("context", "tokens", "rounds", "threads", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    add_places(parser, None)
    given = parser.parse_args(arguments)
    return settings_from(given, Settings), given


def main(arguments: Sequence[str] | None = None) -> Result:
    arguments = sys.argv[1:] if arguments is None else arguments
    settings, given = parse(arguments)
    return measure_and_report(measure, settings, settings.threads, given.out, arguments)


if __name__ == "__main__":
    main()
