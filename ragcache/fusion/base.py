"""The contract of a fusion method: how blocks become one context.

A method places blocks in a FusedCache and runs the tokens it must. What it computes is counted. The engine knows
nothing of any method beyond what stands here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ragcache.errors import PromptError
from ragcache.fusion.additions import NO_ADDITIONS, Additions
from ragcache.kv.block import KVBlock
from ragcache.kv.cache import Adjust, FusedCache
from ragcache.kv.identity import Recipe
from ragcache.kv.rope import Angles
from ragcache.models.lm import LanguageModel
from ragcache.prompt import Prompt


@dataclass
class PhaseTimes:
    """Seconds by phase.

    encode_s:  running the model over chunks or a prefix that had no block
    place_s:   waiting for blocks, rotating and copying them; happens layer by layer inside the prefill
    prefill_s: the forward pass itself, without place_s
    """

    encode_s: float = 0.0
    place_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.encode_s + self.place_s + self.prefill_s


class Exact(Protocol):
    """The KV that a pass over all of the prompt's first `num_tokens` tokens left, keys rotated to 0, 1, ..."""

    num_tokens: int

    def copy_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer's to [num_kv_heads, num_tokens, head_dim] each."""


@dataclass(frozen=True)
class Inputs:
    """Blocks of one prompt, on the model's device.

    prefix: the isolated block of the prefix ids; None when there are none
    chunks: one block a chunk, in the prompt's order
    recipe: how the chunks were encoded
    exact:  of the prompt's first tokens, for a method with `takes_exact`: at most all but the last one
    """

    prefix: KVBlock | None
    chunks: Sequence[KVBlock]
    recipe: Recipe
    exact: Exact | None = None


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A context that is ready to decode from.

    cache:  every placed and computed token
    logits: float32 [vocab_size], for the token after the suffix
    computed_tokens: tokens that ran in each layer
    kept_tokens:     tokens that each layer holds
    next_position:   position of the first token of the answer
    """

    cache: FusedCache
    logits: Tensor
    computed_tokens: tuple[int, ...]
    kept_tokens: tuple[int, ...]
    next_position: int

    @classmethod
    def of(cls, cache: FusedCache, logits: Tensor, next_position: int) -> Prefilled:
        return cls(cache, logits, cache.computed_tokens, tuple(cache.lengths), next_position)


@dataclass(frozen=True)
class FusionMethod(ABC):
    """Subclasses are frozen dataclasses: their fields are the method's options, checked in __post_init__.

    name:           what users write
    paper:          where it comes from
    needs_training: whether an untrained model is expected to answer worse with it
    reuses_blocks:  whether it wants KV blocks at all (full prefill does not)
    recipes:        recipes its blocks may be encoded under, the default first
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    needs_training: ClassVar[bool] = False
    reuses_blocks: ClassVar[bool] = True
    recipes: ClassVar[tuple[str, ...]] = ("isolated", "prefix")

    @property
    def takes_exact(self) -> bool:
        """Whether it goes on from KV of the prompt's first tokens that a plain pass left."""
        return False

    @property
    def keeps_context(self) -> bool:
        """Whether it can read several turns, each with passages of its own (`fusion/turns.py`): every token at its
        global position, blocks as they are, all other tokens over everything before them."""
        return False

    def additions(self, lm: LanguageModel) -> Additions:
        """Tokens that the method puts between the prompt's own. Raises ConfigError where `lm` has none trained."""
        return NO_ADDITIONS

    def check(self, lm: LanguageModel, prompt: Prompt) -> None:
        """Raises ConfigError or PromptError when the method cannot read this prompt with this model."""
        count = len(prompt.chunk_ids)
        limit = self.additions(lm).max_chunks if count else None
        if limit is not None and count > limit:
            raise PromptError(
                f"{count} passages were given and method {self.name!r} reads {limit} at most with {lm.name}; "
                f"ask for fewer (k={limit})"
            )

    @abstractmethod
    def prefill(
        self, lm: LanguageModel, prompt: Prompt, inputs: Inputs, times: PhaseTimes, reserve_tokens: int
    ) -> Prefilled:
        """Build the context of `prompt` and run what the method runs, the whole suffix included.

        reserve_tokens: room to leave for decoding
        """


@dataclass(frozen=True)
class Placement:
    """Where one block goes.

    rotate_from: position to which the block's first key is rotated; its other keys follow consecutively
    """

    block: KVBlock
    rotate_from: int


def consecutive(blocks: Sequence[KVBlock]) -> list[Placement]:
    """Blocks one behind the other at global positions."""
    placements, start = [], 0
    for block in blocks:
        placements.append(Placement(block, start))
        start += block.num_tokens
    return placements


class Placer:
    """Rotates and copies one layer of every block into a cache, one behind the other, from whatever device they are on.

    An encoded block decodes straight into its place: nobody ever holds it decoded.
    """

    def __init__(self, lm: LanguageModel, placements: Sequence[Placement]) -> None:
        self._lm = lm
        placements = [p for p in placements if p.block.num_tokens]
        self._blocks = [p.block for p in placements]
        self._lengths = [block.num_tokens for block in self._blocks]
        ranges = [(p.rotate_from, p.rotate_from + p.block.num_tokens) for p in placements]
        parts = [torch.arange(start, end, device=lm.device) for start, end in ranges]
        self.positions = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=lm.device)
        joined = all(end == start for (_, end), (start, _) in pairwise(ranges))
        self._first = ranges[0][0] if ranges and joined else None
        self._angles: dict[str | None, Angles | None] = {}
        # One layer's keys side by side: it stays in the processor's cache from the copy to the rotation.
        size = (lm.shape.num_kv_heads, self.positions.shape[0], lm.shape.key_dim)
        self._scratch = torch.empty(size, dtype=lm.dtype, device=lm.device)

    def place(self, cache: FusedCache, layer: int) -> None:
        if not self._blocks:
            return
        keys, values = cache.reserve(layer, self.positions)
        for block, place in zip(self._blocks, torch.split(self._scratch, self._lengths, dim=1), strict=True):
            block.copy_keys(layer, place)
        self._lm.rope.turn(self._scratch[None], self._angles_of(layer), keys)
        for block, place in zip(self._blocks, torch.split(values[0], self._lengths, dim=1), strict=True):
            block.copy_values(layer, place)

    def _angles_of(self, layer: int) -> Angles | None:
        rope = self._lm.rope
        if not rope.rotated[layer]:
            return None
        kind = rope.layer_type(layer)
        if kind not in self._angles:
            consecutive = self._first is not None
            where = self._first if self._first is not None else self.positions
            self._angles[kind] = rope.angles(layer, where, self.positions.shape[0] if consecutive else 0)
        return self._angles[kind]


def place_exact(lm: LanguageModel, exact: Exact, cache: FusedCache, layer: int) -> None:
    """Copy one layer into a cache that holds nothing yet."""
    keys, values = cache.reserve(layer, torch.arange(exact.num_tokens, device=lm.device))
    exact.copy_layer(layer, keys[0], values[0])


def prefill_over(
    lm: LanguageModel, prompt: Prompt, placements: Sequence[Placement], times: PhaseTimes, reserve_tokens: int
) -> Prefilled:
    """Run the suffix over placed blocks, placing each layer just before it is needed."""
    return run_over(lm, prompt.suffix_ids, prompt.context_tokens, placements, times, reserve_tokens)


def run_over(
    lm: LanguageModel,
    ids: Sequence[int],
    positions: Tensor | int,
    placements: Sequence[Placement],
    times: PhaseTimes,
    reserve_tokens: int,
    adjust: Adjust | None = None,
) -> Prefilled:
    """Run tokens over placed blocks, placing each layer just before it is needed.

    positions: of the first of consecutive tokens, which stand behind all blocks; or int64 [num_tokens], ascending,
               where some stand between the blocks and see what is at or before their own position
    adjust:    changes attention scores; see FusedCache
    """
    placer = Placer(lm, placements)

    def fill(layer: int) -> None:
        started = time.perf_counter()
        placer.place(cache, layer)
        times.place_s += time.perf_counter() - started

    behind = isinstance(positions, int)
    cache = lm.new_cache(placer.positions.shape[0] + len(ids) + reserve_tokens, fill)
    cache.adjust = adjust
    started, placed = time.perf_counter(), times.place_s
    logits = lm.run(ids, positions, cache, ordered=behind)
    times.prefill_s += time.perf_counter() - started - (times.place_s - placed)
    next_position = positions + len(ids) if isinstance(positions, int) else int(positions[-1]) + 1
    return Prefilled.of(cache, logits, next_position)
