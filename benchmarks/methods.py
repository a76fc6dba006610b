"""Costs of every fusion method: time against full prefill, tokens computed, tokens kept.

python -m benchmarks methods
python -m benchmarks methods --set shape=Llama-3.1-8B --set dtype=bfloat16 --set device=cuda
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import plain
from benchmarks.reading import checked, distance, first_token, in_hand, random_prompt, truncate
from benchmarks.report import Goal, Result
from benchmarks.runner import Run
from benchmarks.shapes import Built, PromptSettings, build
from benchmarks.timing import Ratio, Variant, alternate, ratio, summarise
from ragcache.fusion import METHODS, get_method
from ragcache.fusion.fuse import FuseOutput, block_recipe, encode, fuse
from ragcache.fusion.method import FusionMethod
from ragcache.kv.block import KVBlock
from ragcache.kv.block_key import Recipe

LINK_TOKENS = 5
FULL = "transformers: full prefill"
FLOOR, LINK_FLOOR = "floor: suffix over KV in place", "floor: links and suffix over KV in place"
LONG_SHARE = 0.1  # a method that computes a larger share takes long, so it runs in a few of the rounds only


@dataclass(frozen=True)
class Settings(PromptSettings):
    """passages x tokens of context, then suffix tokens. rounds: rounds of short variants; long_rounds: rounds of full
    prefill and of methods that compute many tokens."""

    rounds: int = 15
    long_rounds: int = 10


def link_ids(settings: Settings, vocab_size: int) -> list[list[int]]:
    """Return random ids as the link tokens after each passage: the time does not depend on the ids."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    drawn: list[list[int]] = torch.randint(vocab_size, (settings.passages, LINK_TOKENS), generator=generator).tolist()
    return drawn


def chosen_methods(links: Sequence[Sequence[int]]) -> dict[str, FusionMethod]:
    """Return all methods by row, with the options that goals are about, or else with default options."""
    options: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "link": [(f"link, {LINK_TOKENS} tokens", {"link_ids": links})],
        "markers": [("markers", {"doc_start_id": 1, "doc_end_id": 2})],
        "cacheblend": [
            ("cacheblend, 0.15", {"ratio": 0.15}),
            ("cacheblend, 0.15, gradual", {"ratio": 0.15, "gradual": True}),
        ],
        "epic": [("epic, 16 tokens", {"first_tokens": 16})],
        "a3": [("a3, 0.15", {"ratio": 0.15})],
    }
    rows = [(name, row, given) for name in METHODS for row, given in options.get(name, [(name, {})])]
    return {row: get_method(name, **given) for name, row, given in rows}


class Bench:
    """A prompt, its blocks under every recipe that the methods need, and the two floors."""

    def __init__(self, built: Built, settings: Settings) -> None:
        self.lm, self.plain = built
        self.prompt = random_prompt(
            self.lm.vocab_size, settings.passages, settings.tokens, settings.suffix, settings.seed
        )
        self._links = link_ids(settings, self.lm.vocab_size)
        self.methods = chosen_methods(self._links)
        self._blocks: dict[Recipe, list[KVBlock]] = {}
        self._context = self.fuse(get_method("reposition")).cache
        linked = self.fuse(get_method("link", link_ids=self._links))
        self._link_context, self.link_logits = linked.cache, linked.next_logits
        self._link_positions = linked.cache.layer_state(0)[2][self.prompt.context_tokens :].clone()

    def fuse(self, method: FusionMethod, **options: Any) -> FuseOutput:
        blocks = self._stored(method) if method.reuses_blocks else None
        return fuse(self.lm, self.prompt, method, blocks, reserve_tokens=0, **options)

    def first_token(self, method: FusionMethod) -> int:
        return first_token(self.fuse(method))

    def floor(self) -> int:
        """Run the suffix alone: no method can be faster."""
        truncate(self._context, self.prompt.context_tokens)
        return int(self.lm.run(self.prompt.suffix_ids, self.prompt.context_tokens, self._context).argmax())

    def link_floor_logits(self) -> Tensor:
        truncate(self._link_context, self.prompt.context_tokens)
        ids = [*(id for links in self._links for id in links), *self.prompt.suffix_ids]
        return self.lm.run(ids, self._link_positions, self._link_context, ordered=False)

    def link_floor(self) -> int:
        """Run link tokens and suffix alone: `link` cannot be faster."""
        return int(self.link_floor_logits().argmax())

    def plain_full(self) -> int:
        return int(plain.full_prefill(self.plain, self.prompt.ids).argmax())

    def _stored(self, method: FusionMethod) -> list[KVBlock]:
        recipe = block_recipe(self.lm, method)
        if recipe not in self._blocks:
            self._blocks[recipe] = in_hand(encode(self.lm, self.prompt, recipe), self.lm.device)
        return self._blocks[recipe]


def agreement(bench: Bench) -> dict[str, float]:
    """Return distances: from plain transformers for methods that must equal full prefill, from `link` for its floor.

    Raises RagCacheError if a distance is too large.
    """
    read = plain.full_prefill(bench.plain, bench.prompt.ids)
    every = [("full", get_method("full")), *((name, get_method(name, ratio=1)) for name in ("cacheblend", "a3"))]
    found = {f"{name}_error": distance(bench.fuse(method).next_logits, read) for name, method in every}
    return checked(
        {**found, "link_floor_error": distance(bench.link_floor_logits(), bench.link_logits)}, bench.lm.dtype
    )


def token_counts(bench: Bench) -> dict[str, dict[str, float]]:
    """Return, by row, the tokens computed and kept, and their shares of the prompt's tokens; means over the layers."""
    found = {}
    for row, method in bench.methods.items():
        fused = bench.fuse(method)
        computed, kept = statistics.fmean(fused.computed_tokens), statistics.fmean(fused.kept_tokens)
        shares = {"computed share": computed / fused.prompt_tokens, "kept share": kept / fused.prompt_tokens}
        found[row] = {"computed tokens": computed, "kept tokens": kept, **shares}
        fused.cache.release()
    return found


def measure(settings: Settings, run: Run) -> Result:
    device = torch.device(settings.device)
    bench = Bench(build(settings.shape, settings.dtype, device, seed=settings.seed), settings)
    checks, counts = agreement(bench), token_counts(bench)
    samples = alternate(_variants(bench, counts), settings.rounds, settings.long_rounds, device, run.journal)
    ratios = {f"{row} / {FULL}": ratio(samples, row, FULL) for row in [*bench.methods, FLOOR, LINK_FLOOR]}
    link = f"link, {LINK_TOKENS} tokens"
    over_floors = (("reposition", FLOOR), (link, LINK_FLOOR), (link, FLOOR))
    ratios |= {f"{row} / {floor}": ratio(samples, row, floor) for row, floor in over_floors}
    figures = {f"{row}: {what}": value for row, by_what in counts.items() for what, value in by_what.items()}
    return run.result(summarise(samples), ratios, {**figures, **checks}, _goals(settings, ratios, figures))


def _variants(bench: Bench, counts: Mapping[str, Mapping[str, float]]) -> list[Variant]:
    def row(name: str, method: FusionMethod) -> Variant:
        return Variant(name, lambda: bench.first_token(method), long=counts[name]["computed share"] > LONG_SHARE)

    variants = [row(name, method) for name, method in bench.methods.items()]
    variants += [Variant(FLOOR, bench.floor), Variant(LINK_FLOOR, bench.link_floor)]
    return [*variants, Variant(FULL, bench.plain_full, long=True)]


def _goals(settings: Settings, ratios: Mapping[str, Ratio], figures: Mapping[str, float]) -> list[Goal]:
    applies = settings.has_goals_sizes and settings.has_cpu_goals
    wanted = [
        (f"a3, 0.15 / {FULL}", 0.25),
        (f"cacheblend, 0.15 / {FULL}", 0.25),
        (f"epic, 16 tokens / {FULL}", 0.08),
        (f"samkv / {FULL}", 0.25),
        (f"link, {LINK_TOKENS} tokens / {LINK_FLOOR}", 1.15),
    ]
    timed = [Goal.of(what, "at most", limit, ratios[what], applies) for what, limit in wanted if what in ratios]
    kept = "samkv: kept share"
    return [*timed, Goal(kept, "at most", 0.20, figures[kept], applies)] if kept in figures else timed
