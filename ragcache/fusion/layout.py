"""The layout of a prompt, each token with its position: plain data, without tensors or a model.

    parts   Text(prefix)     Passages(A, B)              Text(question)
    pieces  prefix KV-START  [A] links  [B] links        KV-END question     each with the position of its first token

A label before a passage is text. It is in the same piece as the link tokens of the passage before it.

A passage is placed exactly as its block holds it; text runs and sees everything before it. Methods differ in the tokens
that they add and in the passages' positions. Serving, conversations, evaluation and training all use this layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ragcache.errors import ConfigError
from ragcache.kv.block_key import Recipe, Sides, sides_of
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.prompt import Part, Text

Positions = Literal["global", "parallel", "encoded"]
"""The positions of passages.

global:   every token has its place in the prompt
parallel: the passages of a group start at the same position, after the text before them; the next text starts after
          the longest passage (Ratner et al., arXiv 2212.10947; APE section 4; TurboRAG's composite positions)
encoded:  passages keep the positions at which they were encoded, from 0 or after the prefix; text has its place in the
          prompt
"""

COMPOSITE = "composite"
"""TurboRAG's name for passages that start at the same position."""

# KV of a passage that was encoded alone depends on where the passage began. In a prefix tree its tokens therefore have
# other elements than the same tokens in running text, and its first token has another element than its later tokens.
_FIRST, _REST = 1 << 32, 2 << 32


class Span(NamedTuple):
    """Tokens [start, stop) of a prompt."""

    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class AddedTokens:
    """Tokens that a method adds to each group of passages, and the passages' positions. Groups without chunks get none.

    behind_prefix: ids after the prefix; they are part of the prefix's block
    markers:       ids before and after every chunk; they are part of the chunk's block, as in a Recipe
    links:         ids of the link tokens after each chunk, a tuple for each rank; empty: no link tokens
    behind_chunks: ids after the last chunk, before the suffix
    reserved:      ids that no answer may contain
    max_chunks:    chunks that the method can read; None: any number
    positions:     the passages' positions
    """

    behind_prefix: tuple[int, ...] = ()
    markers: Sides | None = None
    links: tuple[tuple[int, ...], ...] = ()
    behind_chunks: tuple[int, ...] = ()
    reserved: frozenset[int] = frozenset()
    max_chunks: int | None = None
    positions: Positions = "global"

    def __post_init__(self) -> None:
        object.__setattr__(self, "markers", sides_of(self.markers))

    @classmethod
    def trained(cls, spec: TrainedTokens) -> AddedTokens:
        """Return the additions that a checkpoint was trained with."""
        return cls(
            behind_prefix=() if spec.kv_start_id is None else (spec.kv_start_id,),
            markers=spec.markers,
            links=tuple(tuple(spec.link_ids(slot)) for slot in range(spec.link_slots)),
            behind_chunks=() if spec.kv_end_id is None else (spec.kv_end_id,),
            reserved=spec.added_ids,
            max_chunks=spec.link_slots if spec.link_tokens else None,
            positions="parallel" if spec.positions == COMPOSITE else "global",
        )

    def num_tokens(self, chunks: Sequence[int]) -> int:
        """Return how many tokens are added to a prompt whose chunks have these lengths."""
        if not chunks:
            return 0
        links = sum(len(behind_one) for behind_one in self.links[: len(chunks)])
        markers = len(chunks) * sum(len(side) for side in self.markers or ())
        return len(self.behind_prefix) + markers + links + len(self.behind_chunks)


NO_ADDITIONS = AddedTokens()


class Segment(NamedTuple):
    """Consecutive tokens.

    start:   position of the first token
    ids:     token ids; a passage's include the markers of its block
    passage: the passage's number in the prompt, from 0; None: text
    """

    start: int
    ids: tuple[int, ...]
    passage: int | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class Tokens(NamedTuple):
    """Tokens that run, with their positions.

    behind: whether they all come after every placed block, and so see all blocks
    """

    ids: list[int]
    positions: list[int]
    behind: bool


@dataclass(frozen=True)
class Layout:
    """Pieces of a prompt in reading order.

    separate: whether passages see only themselves and their blocks are placed; False: they run as text does
    exact:    the first passage if its block's KV is exact, because the block was encoded after the very text that comes
              before it here; None: no block's KV is exact
    """

    pieces: tuple[Segment, ...]
    separate: bool = True
    exact: Segment | None = None

    @property
    def ids(self) -> list[int]:
        return [id for piece in self.pieces for id in piece.ids]

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def end(self) -> int:
        """Return the position after all tokens: that of the answer's first token."""
        return max((piece.end for piece in self.pieces), default=0)

    @property
    def passages(self) -> list[Segment]:
        return [piece for piece in self.pieces if piece.passage is not None]

    @property
    def elements(self) -> list[int]:
        """Return the numbers that identify the tokens in a prefix tree: ids for text, other numbers for passages."""
        found: list[int] = []
        for piece in self.pieces:
            if self._is_placed(piece):
                found += [piece.ids[0] + _FIRST, *(id + _REST for id in piece.ids[1:])]
            else:
                found += piece.ids
        return found

    def usable(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens can be reused from KV: a block cannot be placed in part."""
        rest = next(self._behind(num_tokens), None)
        return num_tokens - rest[1] if rest is not None and self._is_placed(rest[0]) else num_tokens

    def placed(self, known: int = 0) -> list[Segment]:
        """Return the passages whose blocks are placed, in order, if the first `known` tokens already have KV."""
        return [piece for piece, _ in self._behind(known) if self._is_placed(piece)]

    def running(self, known: int = 0) -> Tokens:
        """Return the tokens that run, in order, if the first `known` tokens already have KV."""
        ids, positions, behind = list[int](), list[int](), True
        for piece, skip in self._behind(known):
            if self._is_placed(piece):
                behind = behind and not ids
            else:
                ids += piece.ids[skip:]
                positions += range(piece.start + skip, piece.end)
        return Tokens(ids, positions, behind)

    def _is_placed(self, piece: Segment) -> bool:
        return self.separate and piece.passage is not None

    def _behind(self, known: int) -> Iterator[tuple[Segment, int]]:
        """Yield the pieces that reach beyond the first `known` tokens, with how many of their tokens are known."""
        start = 0
        for piece in self.pieces:
            if start + len(piece.ids) > known:
                yield piece, max(0, known - start)
            start += len(piece.ids)


def lay_out(parts: Sequence[Part], recipe: Recipe, added: AddedTokens, *, separate: bool = True) -> Layout:
    """Lay out a prompt with the tokens that a method adds to each group of passages. Adjacent texts become one piece.

    recipe: how passages are encoded; its markers are included only if passages are read `separate`

    Raises ConfigError for more passages in a group than the method can read.
    """
    pieces: list[Segment] = []
    end = behind_text = 0
    for ids, passage in _joined(parts, recipe, added, separate):
        start = end
        if passage is not None and added.positions != "global":
            start = behind_text if added.positions == "parallel" or recipe.sees_prefix else 0
        pieces.append(Segment(start, tuple(ids), passage))
        end = end + len(ids) if added.positions == "encoded" else max(end, start + len(ids))
        if passage is None:
            behind_text = end
    prefix = len(added.behind_prefix) + sum(len(part.ids) for part in parts[:1] if isinstance(part, Text))
    seen = None if recipe.bos or recipe.neighbours or recipe.primer_ids else prefix * recipe.sees_prefix
    exact = next((piece for piece in pieces if piece.passage == 0 and piece.start == seen), None)
    return Layout(tuple(pieces), separate, exact)


def _joined(
    parts: Sequence[Part], recipe: Recipe, added: AddedTokens, separate: bool
) -> Iterator[tuple[Sequence[int], int | None]]:
    """Yield the ids of each piece, with the passage's number or None for text."""
    text: list[int] = []
    number = 0
    for part in parts:
        if isinstance(part, Text):
            text += part.ids
            continue
        count = len(part.chunk_ids)
        if added.max_chunks is not None and count > added.max_chunks:
            raise ConfigError(f"{count} passages of one turn, and the method reads {added.max_chunks}")
        own = added if count else NO_ADDITIONS
        text += own.behind_prefix
        for rank, (label, chunk) in enumerate(zip(part.labels, part.chunk_ids, strict=True)):
            text += label
            if text:
                yield text, None
            yield recipe.marked(chunk) if separate else chunk, number
            text = list(own.links[rank]) if rank < len(own.links) else []
            number += 1
        text += own.behind_chunks
    if text:
        yield text, None
