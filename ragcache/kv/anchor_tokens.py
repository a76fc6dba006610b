"""Anchors: trained tokens behind each segment of a chunk, whose KV alone is kept of it.

KVLink, section 2.4 (arXiv 2502.16002), after AnLLMs (arXiv 2402.07616). A chunk of two segments with two anchors each:

    ids       t  t  t  t  a1 a2 t  t  t  t  a1 a2
    segment   0  0  0  0  0  0  1  1  1  1  1  1

Text sees its own segment. An anchor sees that and the anchors before it; tokens after the chunk see anchors alone.
Positions are those of the sequence above.

Who sees whom follows from one number a token, which training's masks read as well: its passage in the lower bits, above
them four times its segment, 1 more for text that gives way to anchors, and 2 more for text that sees none. A token of
an ordinary passage has the passage's number, one outside all passages 0 or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ragcache.errors import ConfigError, is_whole

if TYPE_CHECKING:
    from torch import Tensor

OPEN = 0
"""Number of a token that every passage's tokens may be allowed to see, such as a prefix's."""
_PASSAGE_BITS = 16
PASSAGE = (1 << _PASSAGE_BITS) - 1
SHARED = PASSAGE
"""Number of a prefix that every passage is read behind (recipes `prefix` and `primer`)."""
DROPPED = SHARED | 1 << _PASSAGE_BITS
"""Number of a primer: passages see it and the prefix, nothing outside them sees it."""


class Anchors(NamedTuple):
    """What stands behind each segment.

    ids:     the same behind each
    segment: text tokens of one. The last one of a chunk may be shorter: it has its share of anchors, the first ones, so
             that a chunk of n tokens has ceil(n * len(ids) / segment) in all
    """

    ids: tuple[int, ...]
    segment: int

    @classmethod
    def of(cls, given: object) -> Anchors | None:
        """Return anchors of (ids, text tokens). Raises ConfigError for other values, or fewer text tokens than ids."""
        if given is None:
            return None
        try:
            own, segment = cast(Sequence[Any], given)
            found = cls(tuple(own), segment)
        except (TypeError, ValueError):
            found = cls((), 0)
        if not (all(map(is_whole, (*found.ids, found.segment))) and 1 <= len(found.ids) <= found.segment):
            raise ConfigError(
                f"anchors {given!r} cannot be used: give their ids, at least one, and the text tokens of a segment, at "
                "least as many, as ((5, 6), 100)"
            )
        return found

    def __str__(self) -> str:
        shown = f"{self.ids[0]} to {self.ids[-1]}" if len(self.ids) > 1 else f"{self.ids[0]}"
        return f"anchors {shown} behind every {self.segment} tokens"

    @property
    def share(self) -> float:
        """Anchors a text token."""
        return len(self.ids) / self.segment

    def count(self, text_tokens: int) -> int:
        """Anchors of a chunk of so many tokens."""
        return -(-text_tokens * len(self.ids) // self.segment)

    def held(self, num_tokens: int) -> int:
        """Anchors among `num_tokens` tokens of text and anchors."""
        return num_tokens - num_tokens * self.segment // (self.segment + len(self.ids))

    def join(self, text: Sequence[int]) -> list[int]:
        """The chunk's ids with its anchors."""
        segments = [text[start : start + self.segment] for start in range(0, len(text), self.segment)]
        return [id for own in segments for id in (*own, *self.ids[: self.count(len(own))])]

    def split(self, joined: Sequence[int]) -> list[int]:
        """The chunk's own ids of what `join` made."""
        return [id for id, number in zip(joined, self.numbers(len(joined)), strict=True) if gives_way(number)]

    def numbers(self, num_tokens: int, passage: int = 1) -> list[int]:
        """Of each of `num_tokens` tokens of text and anchors. passage: which one it is, from 1"""
        found: list[int] = []
        whole = self.segment + len(self.ids)
        for segment, start in enumerate(range(0, num_tokens, whole)):
            size = min(whole, num_tokens - start)
            anchors, own = self.held(size), passage | 4 * segment << _PASSAGE_BITS
            found += [own | 3 << _PASSAGE_BITS] * (size - anchors) + [own] * anchors
        return found


def gives_way(number: Any) -> Any:
    """Whether tokens are text whose KV is dropped: the number of one, or int64 numbers of any shape."""
    return (number >> _PASSAGE_BITS) & 1 == 1


def sees_within(query: Tensor, key: Tensor) -> Tensor:
    """Whether tokens see others that stand before them in the same passage: all of their own segment, and all but some
    text see anchors. Of no passage: those of the same number. query, key: int64 numbers, which broadcast"""
    same_segment = query >> (_PASSAGE_BITS + 2) == key >> (_PASSAGE_BITS + 2)
    anchor_seen: Tensor = ~gives_way((query >> 1) | key)
    return ((query ^ key) & PASSAGE == 0) & (same_segment | anchor_seen)
