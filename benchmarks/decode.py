"""Decoding after a long context, against transformers' generate over the same KV.

    python -m benchmarks decode --set context=5000 --set tokens=32

Both start from a cache that holds the context, so that only decoding is timed: a forward pass per token.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks import plain
from benchmarks.reading import random_prompt, truncate
from benchmarks.report import Goal, Result
from benchmarks.runner import Run
from benchmarks.shapes import Built, ModelSettings, build
from benchmarks.timing import Timing, Variant, alternate, ratio
from ragcache.fusion.fuse import fuse
from ragcache.models.generate import decode
from ragcache.models.sampler import Sampling

OURS = "ragcache"
THEIRS = "transformers: generate"


@dataclass(frozen=True)
class Settings(ModelSettings):
    """context: tokens in the cache when decoding starts. tokens: number of tokens that are decoded."""

    context: int = 5000
    tokens: int = 32


class Decoding:
    """Two decoders over the same context. Each run returns its median step as an additional sample.

    A step is the time from a token to the next. The first token of a run is left out, as it includes the set-up.
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
        self.tokens: dict[str, list[int]] = {}

    def rewind(self) -> None:
        truncate(self._cache, len(self._ids))

    def ours(self) -> dict[str, float]:
        """Decode by ragcache. The first token comes from the prompt's logits without a pass, so one more is decoded."""
        started = time.perf_counter()
        steps = decode(self._lm, self._cache, self._logits, len(self._ids), Sampling(max_tokens=self._count + 1))
        tokens, stamps = [], []
        for token in steps:
            tokens.append(token)
            stamps.append(time.perf_counter() - started)
        return self._note(OURS, tokens[1:], stamps[1:])

    def fill_plain_cache(self) -> None:
        self.rewind()
        layers = [self._cache.layer_state(layer)[:2] for layer in range(self._lm.shape.num_layers)]
        self._plain_cache = plain.filled_cache(layers)

    def theirs(self) -> dict[str, float]:
        ids = [*self._ids, int(self._logits.argmax())]
        return self._note(THEIRS, *plain.generate(self._plain, ids, self._plain_cache, self._count))

    def _note(self, name: str, tokens: list[int], stamps: list[float]) -> dict[str, float]:
        self.tokens[name] = tokens
        return {f"{name}, a token": statistics.median(later - earlier for earlier, later in pairwise(stamps))}


def measure(settings: Settings, run: Run) -> Result:
    device = torch.device(settings.device)
    built = build(settings.shape, settings.dtype, device, seed=settings.seed)
    work = Decoding(built, settings.context, settings.tokens, settings.seed)
    variants = [Variant(OURS, work.ours, work.rewind), Variant(THEIRS, work.theirs, work.fill_plain_cache)]
    samples = alternate(variants, settings.rounds, settings.rounds, device, run.journal)
    by_step = ratio(samples, f"{THEIRS}, a token", f"{OURS}, a token")
    ratios = {
        f"{OURS} / {THEIRS}, tokens/s": by_step,
        f"{OURS} / {THEIRS}, tokens/s, set-up included": ratio(samples, THEIRS, OURS),
    }
    timings = {name: Timing.of(list(samples[name].values())) for name in (f"{OURS}, a token", f"{THEIRS}, a token")}
    figures = {
        **{name.replace(", a token", ", tokens/s"): 1 / own.median_s for name, own in timings.items()},
        **{
            f"{name}, {settings.tokens} tokens, s": statistics.median(samples[name].values()) for name in (OURS, THEIRS)
        },
        "same_tokens": work.tokens[OURS] == work.tokens[THEIRS],
    }
    applies = settings.context >= 5000 and settings.shape == "SmolLM2-135M"
    goal = Goal.of(f"{OURS} / {THEIRS}, tokens/s", "at least", 1.0, by_step, applies)
    return run.result(timings, ratios, figures, [goal])
