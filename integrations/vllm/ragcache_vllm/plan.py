"""The plan of a request: which tokens are loaded and which are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ragcache.errors import ConfigError, LayoutError
from ragcache.fusion.layout import Span
from ragcache.kv.block_key import Neighbours, Recipe, block_key
from ragcache_vllm.request_layout import RequestLayout


class Stretch(NamedTuple):
    """Consecutive tokens whose KV is in one block.

    key:    the block's key
    tokens: span of the tokens in the prompt
    offset: position of the first of them within the block
    """

    key: str
    tokens: Span
    offset: int

    def within(self, start: int, stop: int) -> Stretch:
        """Return the part that holds tokens [start, stop) of the prompt; it may be empty."""
        first = max(start, self.tokens.start)
        return Stretch(self.key, Span(first, min(stop, self.tokens.stop)), self.offset + first - self.tokens.start)


@dataclass(frozen=True)
class Plan:
    """The plan of a request's prompt.

    stretches: loaded tokens, in order
    computed:  tokens that the model runs, in order; the last span reaches to the prompt's end
    """

    stretches: tuple[Stretch, ...]
    computed: tuple[Span, ...]

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(stretch.key for stretch in self.stretches))

    @property
    def is_scattered(self) -> bool:
        """Return whether some computed tokens come before loaded ones."""
        return len(self.computed) > 1

    def computed_behind(self, start: int, num_tokens: int) -> list[Span]:
        """Return the tokens to run in a sequence of `num_tokens` (a preempted request's answer runs again) whose
        first `start` tokens are in vLLM's cache.
        """
        spans = [*self.computed[:-1], Span(self.computed[-1].start, num_tokens)]
        return [Span(max(span.start, start), span.stop) for span in spans if span.stop > start]

    def loaded_within(self, start: int, stop: int) -> list[Stretch]:
        """Return the stretches loaded for tokens [start, stop) of the prompt."""
        parts = (stretch.within(start, stop) for stretch in self.stretches)
        return [part for part in parts if part.tokens.num_tokens > 0]


@dataclass(frozen=True)
class Load:
    """A worker's task: to place stored blocks on the pages of a request.

    stretches:  the tokens to load, in order
    page_ids:   the request's pages in vLLM's cache, in order
    computed:   tokens that the model runs, in order; empty if they are the sequence's end, as vLLM expects
    num_tokens: length of the sequence
    is_async:   whether other requests go on while this request waits for the load; False: the whole step waits
    """

    request_id: str
    stretches: list[Stretch]
    page_ids: list[int]
    computed: list[Span]
    num_tokens: int
    is_async: bool


def make_plan(ids: Sequence[int], layout: RequestLayout, fingerprint: str) -> Plan:
    """Return the plan of a request. ids: its prompt

    Raises LayoutError if the layout does not fit the prompt, or its recipe leaves out tokens.
    """
    layout.check(len(ids))
    if not layout.recipe.is_dense:
        raise LayoutError(
            f"the layout's blocks are of recipe {layout.recipe}: they leave out tokens, and vLLM's pages hold all; "
            "encode them with kept=1"
        )
    prefix_ids = list(ids[: layout.prefix])
    near = layout.neighbours or ((),) * len(layout.blocks)
    keys = {
        block: _key(ids, block, layout, prefix_ids, fingerprint, neighbours)
        for block, neighbours in zip(layout.blocks, near, strict=True)
    }
    stretches = [Stretch(keys[block], span, span.start - block.start) for block, span in layout.loaded()]
    return Plan(tuple(stretches), layout.computed(len(ids)))


def _key(
    ids: Sequence[int],
    block: Span,
    layout: RequestLayout,
    prefix_ids: list[int],
    fingerprint: str,
    neighbours: Neighbours,
) -> str:
    own = list(ids[block.start : block.stop])
    if block.start == 0 and layout.prefix:
        return block_key(fingerprint, Recipe(), [], own, layout.block_salt)
    try:
        chunk = layout.recipe.unmarked(own)
    except ConfigError as error:
        raise LayoutError(f"tokens {block.start} to {block.stop} of the prompt: {error}") from error
    return block_key(fingerprint, layout.recipe, prefix_ids, chunk, layout.block_salt, neighbours)
