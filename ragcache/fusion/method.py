"""The contract of a fusion method: it takes a request and returns a context that is ready to decode from.

A method lays out a prompt, places blocks in a FusedCache and runs the tokens that it must; the computed tokens are
counted. The engine knows nothing about a method except this contract.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from ragcache.errors import PromptError
from ragcache.fusion.layout import NO_ADDITIONS, AddedTokens, Layout, Span, lay_out
from ragcache.kv.block import KVBlock
from ragcache.kv.block_key import RECIPE_NAMES, Recipe
from ragcache.kv.state import compose
from ragcache.lazy_torch import Tensor, torch
from ragcache.models.card import ModelCard
from ragcache.prompt import Part, Passages, Prompt

if TYPE_CHECKING:
    from ragcache.kv.buffers import SharedContext
    from ragcache.kv.exact import Exact
    from ragcache.kv.fused_cache import FusedCache, Place
    from ragcache.models.language_model import LanguageModel
    from ragcache.models.layerwise import BeforeLayer


@dataclass
class PhaseTimes:
    """Seconds by phase.

    encode_s:  running the model over chunks or a prefix that had no block
    place_s:   waiting for blocks, rotating and copying them, layer by layer during the prefill
    prefill_s: the forward pass, without place_s
    """

    encode_s: float = 0.0
    place_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.encode_s + self.place_s + self.prefill_s


@dataclass(frozen=True, eq=False)
class PrefillOutput:
    """A context that is ready to decode from.

    cache:           every placed and computed token
    logits:          float32 [vocab_size], for the token after the suffix
    computed_tokens: tokens that ran in each layer
    kept_tokens:     tokens that each layer holds
    next_position:   position of the first token of the answer
    """

    cache: FusedCache
    logits: Tensor
    computed_tokens: tuple[int, ...]
    kept_tokens: tuple[int, ...]
    next_position: int


@dataclass(frozen=True, eq=False)
class PrefillRequest:
    """A prompt to read: the argument of a method's `prefill`.

    lm:             the model
    layout:         the position of every token
    blocks:         the blocks of `layout.placed(known)`, in order, on any device
    exact:          KV of the first tokens, from earlier passes: at most all tokens but the last
    base:           the context before the last text, shared by another request; it is not copied
    reserve_tokens: room to leave for decoding
    times:          seconds by phase, to which `run` adds
    """

    lm: LanguageModel
    layout: Layout
    blocks: Sequence[KVBlock] = ()
    exact: Exact | None = None
    base: SharedContext | None = None
    reserve_tokens: int = 64
    times: PhaseTimes = field(default_factory=PhaseTimes)

    @property
    def known(self) -> int:
        """Return how many tokens at the prompt's beginning already have KV."""
        first = self.base or self.exact
        return 0 if first is None else first.num_tokens

    @property
    def placements(self) -> list[tuple[KVBlock, int]]:
        """Return each block with the position of its first token."""
        pieces = self.layout.placed(self.known)
        return [(block, piece.start) for piece, block in zip(pieces, self.blocks, strict=True)]

    def place(self) -> Place:
        """Return a function that places a layer's available KV in a cache: `exact` first, then the blocks."""
        return Placer(self.lm, self.placements, self.exact).place

    def new_cache(self, place: Place | None = None, num_tokens: int | None = None) -> FusedCache:
        """Return a cache to run the prompt over.

        place:      called for each layer just before it runs, so that loading overlaps with computing; None: the cache
                    extends `base` if there is one, else `self.place()` is used
        num_tokens: room to reserve; None: for the prompt and the answer
        """
        if place is None and self.base is not None:
            room = self.layout.num_tokens - self.base.num_tokens + self.reserve_tokens
            return self.lm.new_cache(room, base=self.base)
        held = [sum(layer) for layer in zip(*(block.tokens_by_layer for block in self.blocks), strict=True)]
        dropped = sum(block.num_tokens for block in self.blocks) - max(held, default=0)
        room = self.layout.num_tokens - dropped + self.reserve_tokens if num_tokens is None else num_tokens
        return self.lm.new_cache(room, self.place() if place is None else place)

    def run(
        self,
        cache: FusedCache,
        ids: Sequence[int] | Tensor | None = None,
        positions: Tensor | None = None,
        *,
        slots: Tensor | None = None,
        before_layer: BeforeLayer | None = None,
    ) -> PrefillOutput:
        """Run tokens over the cache as `LanguageModel.run` does, and count the time.

        ids, positions: the tokens to run; None: all tokens that have no KV yet, see `Layout.running`
        slots, before_layer: see `LanguageModel.run`
        """
        ordered = None
        if ids is None or positions is None:
            ids, places, ordered = self.layout.running(self.known)
            positions = torch.tensor(places, device=self.lm.device)
        with self.running(cache):
            logits = self.lm.run(ids, positions, cache, slots=slots, ordered=ordered, before_layer=before_layer)
        return PrefillOutput(cache, logits, cache.computed_tokens, tuple(cache.lengths), self.layout.end)

    @contextmanager
    def running(self, cache: FusedCache) -> Iterator[None]:
        """Add the time spent in this context to `times`.

        The time that the cache spends placing is added to `place_s`, the rest to `prefill_s`.
        """
        started, placed = time.perf_counter(), cache.place_s
        try:
            yield
        finally:
            placed = cache.place_s - placed
            self.times.place_s += placed
            self.times.prefill_s += time.perf_counter() - started - placed


class Placer:
    """Rotates and copies one layer of every block into a cache, in order, from whatever device the blocks are on.

    placements: each block with the position to which its first key is rotated; its other keys follow consecutively
    exact:      KV of the first tokens, which is placed before the blocks

    An encoded block is decoded straight into the cache, so no decoded copy of it is ever held.
    """

    def __init__(
        self, lm: LanguageModel, placements: Sequence[tuple[KVBlock, int]], exact: Exact | None = None
    ) -> None:
        from ragcache.kv.rope import AnglesAt

        self._lm = lm
        self._exact = exact
        self._angles_at = partial(AnglesAt, lm.rope)
        placements = [pair for pair in placements if pair[0].num_tokens]
        self._blocks = [block for block, _ in placements]
        self._starts = [start for _, start in placements]
        held = [block.tokens_by_layer for block in self._blocks]
        self._lengths = [list(layer) for layer in zip(*held, strict=True)]
        self._sparse = any(min(own) < block.num_tokens for own, block in zip(held, self._blocks, strict=True))
        ranges = [(start, start + block.num_tokens) for block, start in placements]
        parts = [torch.arange(start, end, device=lm.device) for start, end in ranges]
        self.positions = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=lm.device)
        joined = all(end == start for (_, end), (start, _) in pairwise(ranges))
        first = ranges[0][0] if ranges and joined else self.positions
        self._angles = self._angles_at(first, self.positions.shape[0])
        # One layer's keys side by side: they stay in the processor's cache from the copy to the rotation.
        widths = (layer.num_kv_heads * layer.key_dim for layer in lm.shape.layers)
        widest = max((width * sum(own) for width, own in zip(widths, self._lengths, strict=False)), default=0)
        self._kernel = None
        if self._blocks:
            from ragcache.fusion.place_check import place_kernel

            self._kernel = place_kernel(lm, self._blocks)
        width = widest if self._kernel is None else 0
        self._scratch = torch.empty(width, dtype=lm.dtype, device=lm.device)
        if lm.pool.lane is not None:  # the current stream fills the tables now, before other streams read them
            for layer in range(len(self._lengths)):
                self._angles.of(layer)

    def place(self, cache: FusedCache, layer: int) -> None:
        if self._exact is not None:
            from ragcache.kv.exact import place_exact

            place_exact(cache, layer, self._exact)
        if not self._blocks:
            return
        if (rank := layer - len(self._lengths)) >= 0:  # a recurrent layer's state passes through all blocks, in order
            maps, width = [block.states[rank] for block in self._blocks], self._lm.shape.states[rank].conv[1]
            cache.states[rank] = compose(cache.states[rank], maps, width, self._lm.device)
            return
        positions, angles, lengths = self.positions, self._angles, self._lengths[layer]
        if self._sparse:
            positions = self._positions_by_head(layer)
            angles = self._angles_at(positions)
        keys, values = cache.reserve(layer, positions)
        if self._kernel is not None:
            self._kernel.place(layer, angles.of(layer), keys[0], values[0])
            return
        scratch = self._scratch[: keys.numel()].view(keys.shape[1:])
        for block, place in zip(self._blocks, torch.split(scratch, lengths, dim=1), strict=True):
            block.copy_keys(layer, place)
        self._lm.rope.turn(scratch[None], angles.of(layer), keys)
        for block, place in zip(self._blocks, torch.split(values[0], lengths, dim=1), strict=True):
            block.copy_values(layer, place)

    def _positions_by_head(self, layer: int) -> Tensor:
        """Return the positions of all blocks' tokens that each head holds: int64 [num_kv_heads, tokens of a head]."""
        heads, parts = self._lm.shape.layers[layer].num_kv_heads, []
        for block, start, count in zip(self._blocks, self._starts, self._lengths[layer], strict=True):
            places = block.places(layer)
            own = torch.arange(count).expand(heads, -1) if places is None else places
            parts.append(own.to(self._lm.device) + start)
        return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class FusionMethod:
    """The base class of fusion methods.

    Subclasses are frozen dataclasses: their fields are the method's options, checked in __post_init__. A method's
    capabilities are class attributes, or properties if its options decide them.

    name:           the name that users write
    paper:          the paper that the method comes from
    summary:        a phrase for the table of methods
    needs_training: whether an untrained model is expected to answer worse with it
    reuses_blocks:  whether it reads KV blocks at all (full prefill does not)
    recipes:        recipes that its blocks may be encoded under, the default first
    joins_states:   whether it can read with a model that has recurrent layers: it runs no token of a placed passage
                    again, and none between placed passages
    takes_exact:    whether it continues from KV of the prompt's first tokens that a plain pass computed
    keeps_context:  whether it can read several groups of passages with text between them, as in a conversation: every
                    token at its global position, blocks unchanged or with some of their tokens run again, and text that
                    sees everything before it
    shares_context: whether the context before the last text does not depend on that text, so that questions over the
                    same passages can share it
    takes_sparse:   whether it reads blocks whose heads hold only some of their tokens (`Recipe.kept`); such a
                    method moves blocks unchanged and neither runs nor selects passages' tokens
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    needs_training: ClassVar[bool] = False
    reuses_blocks: ClassVar[bool] = True
    recipes: ClassVar[tuple[str, ...]] = RECIPE_NAMES
    joins_states: ClassVar[bool] = False
    takes_exact: ClassVar[bool] = False
    keeps_context: ClassVar[bool] = False
    shares_context: ClassVar[bool] = True
    takes_sparse: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Make a method that overrides `prefill` share no context and take no sparse blocks, by default.

        A class attribute of the method overrides this.
        """
        if "prefill" in vars(cls):
            for name in {"shares_context", "takes_sparse"} - vars(cls).keys():
                setattr(cls, name, False)

    def keeps_context_with(self, lm: ModelCard) -> bool:
        """Return whether `keeps_context` holds with this model.

        Blocks of a model with recurrent layers can only be placed next to each other, without text between them.
        """
        return self.keeps_context and not (lm.is_recurrent and self.reuses_blocks)

    def reruns(self, layout: Layout) -> list[Span] | None:
        """Return the tokens of placed passages that run again, in order, if the layout alone decides which.

        An engine that can load blocks and run tokens can then read with this method without calling it. None: the
        method chooses while the model runs, may change attention (it overrides `prefill`), or passages overlap.
        """
        is_global = all(before.end == piece.start for before, piece in pairwise(layout.pieces))
        return [] if type(self).prefill is FusionMethod.prefill and is_global else None

    def num_reruns(self, layout: Layout) -> int:
        """Return how many tokens of placed passages run again, in most of the layers."""
        return sum(span.num_tokens for span in self.reruns(layout) or ())

    def additions(self, lm: ModelCard) -> AddedTokens:
        """Return the tokens that the method puts between the prompt's own.

        The base class adds none. Raises ConfigError if the method needs trained tokens and `lm` has none.
        """
        return NO_ADDITIONS

    def added_to(self, lm: ModelCard, parts: Sequence[Part]) -> AddedTokens:
        """Return `additions` if the prompt has a passage, else no additions.

        So a model without trained tokens can still read a prompt without passages. Raises the errors of `additions`.
        """
        has_passages = any(isinstance(part, Passages) and part.chunk_ids for part in parts)
        return self.additions(lm) if has_passages else NO_ADDITIONS

    def layout(self, lm: ModelCard, parts: Sequence[Part], recipe: Recipe) -> Layout:
        """Lay out the prompt: return the position of every token. recipe: how passages are encoded"""
        return lay_out(parts, recipe, self.added_to(lm, parts), separate=self.reuses_blocks)

    def prefix_ids(self, lm: ModelCard, prompt: Prompt) -> list[int]:
        """Return the ids before the first passage: the prefix, and the ids that the method adds after it.

        For a method that reads blocks, `PrefillRequest.exact` holds the KV of these ids.
        """
        return [*prompt.prefix_ids, *self.added_to(lm, prompt.parts).behind_prefix]

    def check(self, lm: ModelCard, prompt: Prompt) -> None:
        """Raise ConfigError or PromptError if the method cannot read this prompt with this model."""
        count = len(prompt.chunk_ids)
        limit = self.additions(lm).max_chunks if count else None
        if limit is not None and count > limit:
            raise PromptError(
                f"{count} passages were given and method {self.name!r} reads {limit} at most with {lm.name}; "
                f"ask for fewer (k={limit})"
            )
        if prompt.label_ids and not self.keeps_context_with(lm):
            others = "full" if lm.is_recurrent else "reposition, cacheblend, epic, link or full"
            raise PromptError(
                f"text stands between two passages, and method {self.name!r} reads none there; choose "
                f"{others}, or put it before, behind or into a passage"
            )

    def prefill(self, request: PrefillRequest) -> PrefillOutput:
        """Read the prompt. The base class places all blocks where the layout has them and runs the text."""
        return request.run(request.new_cache())
