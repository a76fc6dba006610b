"""Recompute methods: blocks are placed, some of their tokens run again, and the suffix runs after them.

A method selects the context tokens that run, and may select again before every layer. Everything else is done here:
placing, slots, positions, the suffix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Real
from typing import TYPE_CHECKING, ClassVar

from ragcache.errors import ConfigError, is_whole
from ragcache.fusion.layout import Span
from ragcache.fusion.method import FusionMethod, PrefillOutput, PrefillRequest
from ragcache.kv.block import KVBlock
from ragcache.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    from ragcache.kv.fused_cache import FusedCache
    from ragcache.models.attention import Projected
    from ragcache.models.language_model import LanguageModel
    from ragcache.models.layerwise import BeforeLayer, LayerPoint


@dataclass(frozen=True)
class RecomputeContext:
    """The tokens that a recompute method selects from. Slots number the tokens of a cache: prefix, chunks, then all
    other text.

    prefix_tokens:  tokens that already have KV and never run again: the prefix; in a conversation, everything read so
                    far
    chunk_starts:   slot of each chunk's first token
    chunk_tokens:   number of tokens of each chunk
    first_is_exact: whether the first chunk's block was read after exactly the text that comes before it
    chunks:         the blocks, keys before RoPE
    ids, positions: of every token, by slot, int64
    """

    lm: LanguageModel
    prefix_tokens: int
    chunk_starts: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    chunks: Sequence[KVBlock]
    ids: Tensor
    positions: Tensor
    first_is_exact: bool

    @classmethod
    def of(cls, request: PrefillRequest) -> RecomputeContext:
        layout, known, device = request.layout, request.known, request.lm.device
        lengths = tuple(block.num_tokens for block in request.blocks)
        starts = tuple(accumulate(lengths, initial=known))[:-1]
        pieces, text = layout.placed(known), layout.running(known)
        ids = [*layout.ids[:known], *(id for piece in pieces for id in piece.ids), *text.ids]
        positions = [*range(known), *(at for piece in pieces for at in range(piece.start, piece.end)), *text.positions]
        all_ids, places = (torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in (ids, positions))
        return cls(request.lm, known, starts, lengths, request.blocks, all_ids, places, pieces[:1] == [layout.exact])

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in prefix and chunks."""
        return self.prefix_tokens + sum(self.chunk_tokens)

    def chunk_slots(self) -> Tensor:
        """Return every chunk token's slot, int64."""
        return torch.arange(self.prefix_tokens, self.num_tokens, device=self.lm.device)

    def text_slots(self) -> Tensor:
        """Return the slots of the text's tokens, int64, the suffix last. The text always runs."""
        return torch.arange(self.num_tokens, self.ids.shape[0], device=self.lm.device)

    def edges(self, first_tokens: int, last_tokens: int = 0) -> Tensor:
        """Return the slots of each chunk's first and last tokens: int64, ascending.

        An exact first chunk has none.
        """
        chunks = list(zip(self.chunk_starts, self.chunk_tokens, strict=True))[self.first_is_exact :]
        found = (edge_spans(Span(start, start + count), first_tokens, last_tokens) for start, count in chunks)
        slots = [slot for spans in found for span in spans for slot in range(*span)]
        return torch.tensor(slots, dtype=torch.int64, device=self.lm.device)


@dataclass(frozen=True, eq=False)
class Running:
    """The state just before a layer runs, in slots.

    layer: the layer's index
    slots: int64, ascending: the context tokens that are still running; the suffix follows them
    """

    layer: int
    slots: Tensor
    _point: LayerPoint

    def probe(self) -> Projected:
        """Compute the running tokens' queries, keys and values in this layer, those of the suffix included.

        The rest of the layer does not run, and nothing is stored.
        """
        return self._point.probe()

    def placed(self) -> tuple[Tensor, Tensor]:
        """Return this layer's keys and values by slot: [1, num_kv_heads, num_tokens, head_dim] each, keys rotated.

        Nothing has run in this layer yet: a context token has its block's keys and values; the suffix's are
        meaningless.
        """
        keys, values, _ = self._point.held()
        return keys, values


Choose = Callable[[Running], "Tensor | None"]
"""Selects the context tokens that run from this layer on: slots, int64, ascending; None: no change."""


@dataclass(frozen=True)
class RecomputeMethod(FusionMethod, ABC):
    """A method that selects tokens of placed passages to run again.

    narrows: whether its chooser only ever drops running tokens, so that no token joins in a later layer
    """

    narrows: ClassVar[bool] = False

    @abstractmethod
    def candidates(self, context: RecomputeContext) -> Tensor:
        """Return the slots of the context tokens that may run in any layer: int64, ascending.

        With no candidates, the method equals `reposition`.
        """

    def chooser(self, context: RecomputeContext) -> Choose | None:
        """Return a function that selects the tokens that run, before every layer of a single pass.

        None: the candidates run in all layers.
        """
        return None

    def prefill(self, request: PrefillRequest) -> PrefillOutput:
        context = RecomputeContext.of(request)
        candidates = self.candidates(context)
        if not candidates.numel():
            return super().prefill(request)
        return rerun(request, context, open_cache(request, context), candidates, self.chooser(context), self.narrows)


def open_cache(request: PrefillRequest, context: RecomputeContext) -> FusedCache:
    """Return a cache whose entries are ordered by slot.

    When a layer is reached, the KV that exists is placed in it, followed by room for the text's tokens, which `rerun`
    fills.
    """
    place_known, text = request.place(), context.text_slots()

    def place(cache: FusedCache, layer: int) -> None:
        place_known(cache, layer)
        cache.reserve(layer, context.positions[text])

    return request.new_cache(place)


def rerun(
    request: PrefillRequest,
    context: RecomputeContext,
    cache: FusedCache,
    candidates: Tensor,
    choose: Choose | None = None,
    narrows: bool = False,
) -> PrefillOutput:
    """Run the candidates, or in each layer those that `choose` selects, and the text after them.

    cache:      as `open_cache` returns it
    candidates: slots of context tokens, int64, ascending
    choose:     selects before every layer; None: all candidates run in all layers
    narrows:    see RecomputeMethod
    """
    slots = torch.cat([candidates, context.text_slots()])
    before = None if choose is None else in_rows(choose, slots, candidates.numel(), narrows)
    return request.run(cache, context.ids[slots], context.positions[slots], slots=slots, before_layer=before)


def check_ratio(ratio: float) -> None:
    """Raise ConfigError if `ratio` is not a share in [0, 1]."""
    if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0 <= ratio <= 1:
        raise ConfigError(f"ratio is {ratio!r}; choose the share of the chunks' tokens, a number from 0 to 1")


def check_tokens(**options: object) -> None:
    """Raise ConfigError for an option that is not a number of tokens."""
    for name, value in options.items():
        if not is_whole(value) or value < 0:
            raise ConfigError(f"{name} is {value!r}; choose a number of tokens, 0 or more")


def edge_spans(span: Span, first_tokens: int, last_tokens: int) -> list[Span]:
    """Return the spans of a span's first and last tokens, in order: none for no tokens, a single span if they meet."""
    head, tail = min(span.start + first_tokens, span.stop), max(span.stop - last_tokens, span.start)
    found = [span] if tail <= head else [Span(span.start, head), Span(tail, span.stop)]
    return [edge for edge in found if edge.num_tokens]


def highest(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest scores, ascending.

    Of equal scores the first are taken, on every device.
    """
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:count].sort().values


def chosen(scores: Tensor, slots: Tensor, count: int, always: Tensor) -> Tensor:
    """Return at least `count` of the slots, ascending: all of `always`, then those with the highest scores.

    scores: of the slots, in their order
    """
    first = scores.masked_fill(torch.isin(slots, always), torch.inf)
    return slots[highest(first, max(count, always.shape[0]))]


def in_rows(choose: Choose, slots: Tensor, num_candidates: int, narrows: bool = False) -> BeforeLayer:
    """Return `choose` as a callback for `lm.run`, which numbers the tokens of a pass by index, the text included.

    slots:          slots of the tokens of the pass: the candidates, then the text
    num_candidates: number of the candidates
    narrows:        see RecomputeMethod
    """
    from ragcache.models.layerwise import RowsToRun

    suffix = torch.arange(num_candidates, slots.shape[0], device=slots.device)

    def before_layer(point: LayerPoint) -> Tensor | RowsToRun | None:
        running = point.rows[: point.rows.shape[0] - suffix.shape[0]]
        chosen = choose(Running(point.layer, slots[running], point))
        if chosen is None:
            return None
        rows = torch.cat([torch.searchsorted(slots[:num_candidates], chosen), suffix])
        late = 0 if running.shape[0] else chosen.shape[0]
        return RowsToRun(rows, late) if narrows or running.shape[0] in (0, num_candidates) else rows

    return before_layer
