"""A request's layout: which of its tokens are in stored blocks, and which of these run anyway.

    tokens    prefix   | passage A |link| passage B |link| question
    blocks    [0, p)     [p, a)           [b, c)
    runs                                                            (EPIC: [b, b + 16), the first tokens of a block)

It is sent with the request as `kv_transfer_params` and carries no block key: keys are derived from the token ids, so
that no client can have another passage's KV used for its own tokens (law 8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

from ragcache.errors import ConfigError, LayoutError, is_whole
from ragcache.fusion.layout import Span
from ragcache.kv.block_key import Neighbours, Recipe, digest

PARAMS = "ragcache"
"""Name of the layout in a request's `kv_transfer_params`."""


def served_name(fingerprint: str) -> str:
    """Return the name under which another engine serves a store's model with this store's blocks.

    Requests use this name, so that an engine with another model or without the connector refuses them.
    """
    return f"ragcache-{fingerprint[:32]}"


@dataclass(frozen=True)
class RequestLayout:
    """The places of a request's passages.

    blocks: a span for each stored block, in order, markers included
    runs:   tokens within blocks that are computed again, in order (EPIC); tokens outside blocks are always computed
    prefix: length of the shared prefix at the beginning. It is stored like an isolated chunk if a block begins at 0,
            and part of the other blocks' keys if their recipe sees it
    recipe: how the blocks were encoded
    block_salt: salt of the block keys, a secret
    neighbours: for each block, the token ids of the passages that were read before it; none if no block has any

    Raises LayoutError if spans are empty, overlap or are out of order, and for neighbours that do not fit the blocks
    and their recipe.
    """

    blocks: tuple[Span, ...]
    runs: tuple[Span, ...] = ()
    prefix: int = 0
    recipe: Recipe = field(default_factory=Recipe)
    block_salt: str = ""
    neighbours: tuple[Neighbours, ...] = ()

    def __post_init__(self) -> None:
        for what, spans in (("blocks", self.blocks), ("runs", self.runs)):
            if any(not 0 <= span.start < span.stop for span in spans) or any(
                a.stop > b.start for a, b in pairwise(spans)
            ):
                raise LayoutError(f"the layout's {what} {_shown(spans)} are empty, overlap or stand out of order")
        if sum(len(own) for _, own in self._runs_by_block()) < len(self.runs):
            raise LayoutError(
                f"the layout's runs {_shown(self.runs)} lie outside its blocks {_shown(self.blocks)}; tokens outside "
                "blocks run anyway: leave them out"
            )
        if self.blocks and not 0 <= self.prefix <= self.blocks[-1].stop:
            raise LayoutError(f"the layout's prefix of {self.prefix} tokens ends behind its blocks")
        if self.neighbours and len(self.neighbours) != len(self.blocks):
            raise LayoutError(
                f"the layout has {len(self.blocks)} blocks and neighbours of {len(self.neighbours)}; give those of "
                "each block, an empty list for a block without any"
            )
        try:
            for near in self.neighbours:
                self.recipe.before(near)
        except ConfigError as error:
            raise LayoutError(f"the layout's neighbours: {error}") from error

    def check(self, num_tokens: int) -> None:
        """Raise LayoutError if the layout does not fit a prompt of `num_tokens` tokens, whose last token has to run."""
        if self.blocks and self.blocks[-1].stop >= num_tokens:
            raise LayoutError(
                f"the layout's blocks end at token {self.blocks[-1].stop} of a prompt of {num_tokens}, whose last "
                "token has to run; give the question at least one token"
            )

    def computed(self, num_tokens: int) -> tuple[Span, ...]:
        """Return the tokens of a prompt that the model computes, in order, neighbours joined."""
        free, at = list[Span](), 0
        for block in self.blocks:
            free.append(Span(at, block.start))
            at = block.stop
        free.append(Span(at, num_tokens))
        return _joined(sorted(span for span in (*free, *self.runs) if span.num_tokens))

    def loaded(self) -> Iterator[tuple[Span, Span]]:
        """Yield, in order, each stretch of tokens that is loaded: the block's span, then the stretch's span."""
        for block, runs in self._runs_by_block():
            at = block.start
            for run in (*runs, Span(block.stop, block.stop)):
                if at < run.start:
                    yield block, Span(at, run.start)
                at = run.stop

    def salt(self, fingerprint: str, caller_salt: str | None) -> str:
        """Return a digest of everything but the tokens that their KV depends on, for vLLM's `cache_salt`.

        caller_salt: the request's own `cache_salt`
        """
        return "ragcache:" + digest([self._json(), fingerprint, caller_salt])

    def to_params(self) -> dict[str, Any]:
        """Return the layout as `kv_transfer_params`."""
        return {PARAMS: self._json()}

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> Self | None:
        """Return the layout of a request; None if it has no layout. Raises LayoutError for an invalid layout."""
        given = (params or {}).get(PARAMS)
        if given is None:
            return None
        try:
            recipe = Recipe.from_json(given["recipe"])
            return cls(
                _spans(given["blocks"]),
                _spans(given["runs"]),
                _whole(given["prefix"]),
                recipe,
                str(given["block_salt"]),
                tuple(tuple(map(tuple, near)) for near in given.get("neighbours", ())),
            )
        except (AttributeError, ConfigError, IndexError, KeyError, TypeError, ValueError) as error:
            raise LayoutError(
                f"kv_transfer_params[{PARAMS!r}] is no layout ({error!r}); use RequestLayout.to_params"
            ) from error

    def _runs_by_block(self) -> Iterator[tuple[Span, list[Span]]]:
        """Yield each block with the runs within it."""
        at = 0
        for block in self.blocks:
            own = list[Span]()
            while at < len(self.runs) and self.runs[at].stop <= block.stop:
                if self.runs[at].start >= block.start:
                    own.append(self.runs[at])
                at += 1
            yield block, own

    def _json(self) -> dict[str, Any]:
        return {
            "blocks": [list(span) for span in self.blocks],
            "runs": [list(span) for span in self.runs],
            "prefix": self.prefix,
            "recipe": self.recipe.to_json(),
            "block_salt": self.block_salt,
            **({"neighbours": self.neighbours} if self.neighbours else {}),
        }


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    found = list[Span]()
    for span in spans:
        if found and found[-1].stop == span.start:
            found[-1] = Span(found[-1].start, span.stop)
        else:
            found.append(span)
    return tuple(found)


def _spans(given: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    return tuple(Span(_whole(start), _whole(stop)) for start, stop in given)


def _whole(value: object) -> int:
    if not is_whole(value):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _shown(spans: Sequence[Span]) -> str:
    shown = [f"[{span.start}, {span.stop})" for span in spans[:4]]
    return ", ".join(shown) + (" ..." if len(spans) > 4 else "")
