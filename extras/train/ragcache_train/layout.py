"""A training row as the sequence that the engine would build for it.

    link         prefix, KV-START, chunk 0, links of slot 0, chunk 1, links of slot 1, ..., KV-END, then the question;
                 with anchors, each chunk as text and anchors by turns
    markers      prefix, [doc_start, chunk, doc_end] for each chunk, then the question
    reposition   prefix, chunks, then the question (Block-Attention)
    standard     the same ids as reposition, read as one text: every token sees all before it

Several questions stand one after another; each starts at the position behind the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ragcache.errors import ConfigError
from ragcache.fusion.layout import NO_ADDITIONS, AddedTokens, Layout, Segment
from ragcache.fusion.layout import lay_out as lay_out_parts
from ragcache.kv.anchor_tokens import OPEN
from ragcache.kv.block_key import Recipe
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.prompt import Passages, Text

IGNORED = -100


class Ask(NamedTuple):
    """suffix: ids of the question and the template's tail; answer: ids to be learned, the end of text included."""

    suffix: Sequence[int]
    answer: Sequence[int]


class EncodedRow(NamedTuple):
    """One line of the data as ids.

    kind:    the line's type ("qa", "chat", ...)
    where:   file and line, for messages
    apart:   whether its chunks are always, sometimes (None) or never encoded separately
    shuffle: whether its chunks may change places
    linked:  whether link tokens and the like stand beside its chunks; False: only what blocks hold
    """

    kind: str
    where: str
    prefix: Sequence[int]
    chunks: Sequence[Sequence[int]]
    asks: Sequence[Ask]
    apart: bool | None
    shuffle: bool
    linked: bool = True


@dataclass
class Sample:
    """One sequence; all lists have its length. A label is the id that follows, or -100 where nothing is learned."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], start: int, segments: Sequence[int], labels: Sequence[int] | None = None) -> None:
        """Append tokens at positions from `start` on."""
        self.ids += ids
        self.positions += range(start, start + len(ids))
        self.segments += segments
        self.labels += [IGNORED] * len(ids) if labels is None else labels


def lay_out(row: EncodedRow, spec: TrainedTokens | None, apart: bool, order: Sequence[int] | None = None) -> Sample:
    """The row as one sequence.

    spec:  how passages are encoded separately; None: never
    apart: whether they are in this sequence
    order: of the passages; None: as they come

    Raises ConfigError when there are more passages than link slots.
    """
    context = _context(row, spec if apart else None, order)
    sample = Sample()
    for piece in context.pieces:
        sample.add(piece.ids, piece.start, _segments(piece, spec if context.separate else None))
    for number, ask in enumerate(row.asks, start=1):
        labels = [IGNORED] * (len(ask.suffix) - 1) + list(ask.answer)
        sample.add([*ask.suffix, *ask.answer[:-1]], context.end, [-number] * len(labels), labels)
    return sample


def _segments(piece: Segment, spec: TrainedTokens | None) -> list[int]:
    """The number of each token for the mask. spec: None where passages are read as one text"""
    if piece.passage is None or spec is None:
        return [OPEN] * len(piece.ids)
    if spec.anchors is not None:
        return spec.anchors.numbers(len(piece.ids), piece.passage + 1)
    return [piece.passage + 1] * len(piece.ids)


def _context(row: EncodedRow, spec: TrainedTokens | None, order: Sequence[int] | None) -> Layout:
    """Layout of everything before the questions, as for serving."""
    chunks = tuple(tuple(row.chunks[rank]) for rank in (range(len(row.chunks)) if order is None else order))
    parts = (Text(tuple(row.prefix)), Passages(chunks))
    if spec is None:
        return lay_out_parts(parts, Recipe(), NO_ADDITIONS, separate=False)
    added = _added(row, spec)
    if added.max_chunks is not None and len(chunks) > added.max_chunks:
        raise ConfigError(
            f"a row has {len(chunks)} passages and there are link tokens for {spec.link_slots}; "
            f"train with at least {len(chunks)} link slots"
        )
    return lay_out_parts(parts, Recipe(markers=added.markers, anchors=added.anchors), added)


def _added(row: EncodedRow, spec: TrainedTokens) -> AddedTokens:
    return AddedTokens.trained(spec) if row.linked else AddedTokens.in_blocks(spec)


def layout_tokens(row: EncodedRow, spec: TrainedTokens | None, apart: bool) -> int:
    """Length of the row's sequence."""
    asked = sum(len(ask.suffix) + len(ask.answer) - 1 for ask in row.asks)
    return context_tokens(row, spec, apart) + asked


def context_tokens(row: EncodedRow, spec: TrainedTokens | None, apart: bool) -> int:
    """Tokens before the questions."""
    chunks = [len(chunk) for chunk in row.chunks]
    added = _added(row, spec).num_tokens(chunks) if apart and spec is not None else 0
    return len(row.prefix) + sum(chunks) + added
