"""Passages of a model with recurrent layers: joined by the maps of their blocks, against full prefill.

    python -m benchmarks.hybrid --shape Qwen3.5-0.8B --passages 10 --tokens 500 --suffix 30

Blocks are in memory, as they are and with the codec int8. The floor is the suffix behind nothing: no passage at all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks import plain
from benchmarks.environment import environment
from benchmarks.options import add_numbers, add_places, measure_and_report, settings_from
from benchmarks.reading import random_prompt
from benchmarks.report import Goal, Result
from benchmarks.shapes import HYBRID_SHAPES, build_hybrid
from benchmarks.timing import Variant, alternate, ratio, summarise
from ragcache.codecs import get_codec
from ragcache.fusion.fuse import encode, fuse
from ragcache.models.load import DTYPES
from ragcache.prompt import Prompt

OURS, INT8 = "reposition", "reposition, int8"
FLOOR, FULL = "floor: the suffix alone", "transformers: full prefill"
MOST = 0.05


@dataclass(frozen=True)
class Settings:
    shape: str = "Qwen3.5-0.8B"
    dtype: str = "float32"
    device: str = "cpu"
    passages: int = 10
    tokens: int = 500
    suffix: int = 30
    rounds: int = 10
    threads: int = 0
    seed: int = 0

    @property
    def name(self) -> str:
        kind = self.device.partition(":")[0]
        return f"hybrid-{self.shape}-{self.dtype}-{kind}-{self.passages}x{self.tokens}"


def measure(settings: Settings, arguments: Sequence[str]) -> Result:
    device = torch.device(settings.device)
    hardware = environment("benchmarks.hybrid", arguments, device)
    lm, model = build_hybrid(settings.shape, settings.dtype, device, settings.seed)
    prompt = random_prompt(lm.vocab_size, settings.passages, settings.tokens, settings.suffix, settings.seed)
    started = time.perf_counter()
    blocks = encode(lm, prompt)
    encoded_s = time.perf_counter() - started
    int8 = get_codec("int8")
    small = [int8.decode(int8.encode(block)) for block in blocks]
    suffix = Prompt([], [], prompt.suffix_ids)
    variants = [
        Variant(OURS, lambda: fuse(lm, prompt, "reposition", blocks=blocks).next_logits),
        Variant(INT8, lambda: fuse(lm, prompt, "reposition", blocks=small).next_logits),
        Variant(FLOOR, lambda: fuse(lm, suffix, "full").next_logits),
        Variant(FULL, lambda: plain.full_prefill(model, prompt.ids), long=True),
    ]
    rounds = settings.rounds
    samples = alternate(variants, rounds, rounds, device, label="hybrid", warm_long=rounds > 1)
    pairs = [(OURS, FULL), (INT8, FULL), (OURS, FLOOR)]
    ratios = {f"{above} / {below}": ratio(samples, above, below) for above, below in pairs}
    exact, rounded = (fuse(lm, prompt, "reposition", blocks=held).next_logits for held in (blocks, small))
    figures = {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "recurrent layers": len(lm.shape.states),
        "attention layers": lm.shape.num_layers,
        "a block's maps, bytes": lm.shape.map_bytes,
        "a block's KV, bytes": settings.tokens * lm.shape.token_bytes,
        "a block, bytes": blocks[0].num_bytes,
        "a block with int8, bytes": small[0].num_bytes,
        "logits by int8, distance / norm": float((rounded - exact).norm() / exact.norm()),
        "encoding all passages, s": encoded_s,
    }
    applies = (settings.shape, settings.passages, settings.tokens) == ("Qwen3.5-0.8B", 10, 500)
    goals = [Goal.of(f"hybrid: {OURS} / {FULL}", "at most", MOST, ratios[f"{OURS} / {FULL}"], applies)]
    return Result(settings.name, settings, hardware, summarise(samples), ratios, figures, goals)


def main(arguments: Sequence[str] | None = None) -> Result:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser, default = argparse.ArgumentParser("benchmarks.hybrid", description=__doc__), Settings()
    parser.add_argument("--shape", choices=HYBRID_SHAPES, default=default.shape)
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype)
    parser.add_argument("--device", default=default.device)
    add_numbers(parser, default, ("passages", "tokens", "suffix", "rounds", "threads", "seed"))
    add_places(parser, None)
    given = parser.parse_args(arguments)
    settings = settings_from(given, Settings)
    return measure_and_report(measure, settings, settings.threads, given.out, arguments)


if __name__ == "__main__":
    main()
