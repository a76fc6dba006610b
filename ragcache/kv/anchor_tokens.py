"""Anchors: trained tokens after each segment of a chunk; only their KV is kept.

KVLink, section 2.4 (arXiv 2502.16002), after AnLLMs (arXiv 2402.07616). A chunk of two segments with two anchors each:

    ids       t  t  t  t  a1 a2 t  t  t  t  a1 a2
    segment   0  0  0  0  0  0  1  1  1  1  1  1

Text sees its own segment. An anchor sees its segment and the anchors before it; tokens after the chunk see only
anchors. Positions are those of the sequence above.

A single number for each token decides which tokens it sees; training's masks read the same number. Its lower bits hold
the token's passage. The bits above them hold four times its segment, plus 1 for text that is replaced by anchors, plus
2 for text that sees no anchors. A token of an ordinary passage has the passage's number; a token outside all passages
has 0 or less.
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
"""Number of a prefix that is read before every passage (recipes `prefix` and `primer`)."""
DROPPED = SHARED | 1 << _PASSAGE_BITS
"""Number of a primer: passages see the primer and the prefix; tokens outside the passages do not see the primer."""


class Anchors(NamedTuple):
    """The tokens after each segment of a chunk.

    ids:     the anchors, the same after each segment
    segment: text tokens of a segment. A chunk's last segment may be shorter: it has its share of anchors, the first
             ones, so that a chunk of n tokens has ceil(n * len(ids) / segment) anchors in all
    """

    ids: tuple[int, ...]
    segment: int

    @classmethod
    def of(cls, anchors: object) -> Anchors | None:
        """Return the anchors for (ids, text tokens). Raises ConfigError for other values, or fewer tokens than ids."""
        if anchors is None:
            return None
        try:
            own, segment = cast(Sequence[Any], anchors)
            found = cls(tuple(own), segment)
        except (TypeError, ValueError):
            found = cls((), 0)
        if not (all(map(is_whole, (*found.ids, found.segment))) and 1 <= len(found.ids) <= found.segment):
            raise ConfigError(
                f"anchors {anchors!r} cannot be used: give their ids, at least one, and the text tokens of a segment, "
                "at least as many, as ((5, 6), 100)"
            )
        return found

    def __str__(self) -> str:
        shown = f"{self.ids[0]} to {self.ids[-1]}" if len(self.ids) > 1 else f"{self.ids[0]}"
        return f"anchors {shown} behind every {self.segment} tokens"

    @property
    def share(self) -> float:
        """Return the number of anchors for each text token."""
        return len(self.ids) / self.segment

    def count(self, text_tokens: int) -> int:
        """Return the number of anchors of a chunk of `text_tokens` tokens."""
        return -(-text_tokens * len(self.ids) // self.segment)

    def held(self, num_tokens: int) -> int:
        """Return the number of anchors among `num_tokens` tokens of text and anchors."""
        return num_tokens - num_tokens * self.segment // (self.segment + len(self.ids))

    def join(self, text: Sequence[int]) -> list[int]:
        """Return the chunk's ids with its anchors."""
        segments = [text[start : start + self.segment] for start in range(0, len(text), self.segment)]
        return [id for own in segments for id in (*own, *self.ids[: self.count(len(own))])]

    def split(self, joined: Sequence[int]) -> list[int]:
        """Return the chunk's own ids, from the result of `join`."""
        return [id for id, number in zip(joined, self.numbers(len(joined)), strict=True) if gives_way(number)]

    def numbers(self, num_tokens: int, passage: int = 1) -> list[int]:
        """Return the number of each of `num_tokens` tokens of text and anchors. passage: the passage's rank, from 1"""
        found: list[int] = []
        whole = self.segment + len(self.ids)
        for segment, start in enumerate(range(0, num_tokens, whole)):
            size = min(whole, num_tokens - start)
            anchors, own = self.held(size), passage | 4 * segment << _PASSAGE_BITS
            found += [own | 3 << _PASSAGE_BITS] * (size - anchors) + [own] * anchors
        return found


def gives_way(number: Any) -> Any:
    """Return whether tokens are text whose KV is dropped. number: a token's number, or int64 numbers of any shape"""
    return (number >> _PASSAGE_BITS) & 1 == 1


def sees_within(query: Tensor, key: Tensor) -> Tensor:
    """Return whether tokens see earlier tokens of the same passage.

    A token sees its own segment, and anchors unless it is text that sees none. Tokens outside all passages see those
    with the same number. query, key: int64 numbers, which broadcast
    """
    same_segment = query >> (_PASSAGE_BITS + 2) == key >> (_PASSAGE_BITS + 2)
    anchor_seen: Tensor = ~gives_way((query >> 1) | key)
    return ((query ^ key) & PASSAGE == 0) & (same_segment | anchor_seen)
