"""A training row as the sequence that the engine would build for it.

    link         prefix, KV-START, chunk 0, links of slot 0, chunk 1, links of slot 1, ..., KV-END, then the question
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
from ragcache.models.reuse import ReuseSpec
from ragcache.training.reuse.mask import OPEN

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
    """

    kind: str
    where: str
    prefix: Sequence[int]
    chunks: Sequence[Sequence[int]]
    asks: Sequence[Ask]
    apart: bool | None
    shuffle: bool


@dataclass
class Layout:
    """One sequence; all lists have its length. A label is the id that follows, or -100 where nothing is learned."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], start: int, segment: int, labels: Sequence[int] | None = None) -> int:
        """Append tokens at positions from `start` on; returns the position behind them."""
        self.ids += ids
        self.positions += range(start, start + len(ids))
        self.segments += [segment] * len(ids)
        self.labels += [IGNORED] * len(ids) if labels is None else labels
        return start + len(ids)


def lay_out(row: EncodedRow, spec: ReuseSpec | None, apart: bool, order: Sequence[int] | None = None) -> Layout:
    """The row as one sequence.

    spec:  how passages are encoded separately; None: never
    apart: whether they are in this sequence
    order: of the passages; None: as they come

    Raises ConfigError when there are more passages than link slots.
    """
    chunks = list(row.chunks) if order is None else [row.chunks[rank] for rank in order]
    layout = Layout()
    position = layout.add(row.prefix, 0, OPEN)
    if apart and spec is not None and chunks:
        position = _add_context(layout, chunks, spec, position)
    else:
        for chunk in chunks:
            position = layout.add(chunk, position, OPEN)
    for number, ask in enumerate(row.asks, start=1):
        labels = [IGNORED] * (len(ask.suffix) - 1) + list(ask.answer)
        layout.add([*ask.suffix, *ask.answer[:-1]], position, -number, labels)
    return layout


def _add_context(layout: Layout, chunks: Sequence[Sequence[int]], spec: ReuseSpec, position: int) -> int:
    if spec.method == "markers":
        return _add_marked(layout, chunks, spec, position)
    if spec.link_tokens and len(chunks) > spec.link_slots:
        raise ConfigError(
            f"a row has {len(chunks)} passages and there are link tokens for {spec.link_slots}; "
            f"train with at least {len(chunks)} link slots"
        )
    if spec.kv_start_id is not None:
        position = layout.add([spec.kv_start_id], position, OPEN)
    for slot, chunk in enumerate(chunks):
        position = layout.add(chunk, position, slot + 1)
        position = layout.add(spec.link_ids(slot), position, OPEN)
    if spec.kv_end_id is not None:
        position = layout.add([spec.kv_end_id], position, OPEN)
    return position


def _add_marked(layout: Layout, chunks: Sequence[Sequence[int]], spec: ReuseSpec, position: int) -> int:
    """TurboRAG: reordered positions run on from chunk to chunk; composite ones start again at each, and the question
    stands behind the longest."""
    start = end = position
    for rank, chunk in enumerate(chunks):
        marked = [i for i in (spec.doc_start_id, *chunk, spec.doc_end_id) if i is not None]
        end = max(end, layout.add(marked, start, rank + 1))
        start = end if spec.positions == "reordered" else position
    return end


def layout_tokens(row: EncodedRow, spec: ReuseSpec | None, apart: bool) -> int:
    """Length of the row's sequence."""
    asked = sum(len(ask.suffix) + len(ask.answer) - 1 for ask in row.asks)
    return context_tokens(row, spec, apart) + asked


def context_tokens(row: EncodedRow, spec: ReuseSpec | None, apart: bool) -> int:
    """Tokens before the questions."""
    added = 0
    if apart and spec is not None and row.chunks:
        around = (spec.kv_start_id is not None) + (spec.kv_end_id is not None)
        by_chunk = spec.link_tokens if spec.method != "markers" else 2
        added = around + by_chunk * len(row.chunks)
    return len(row.prefix) + sum(len(chunk) for chunk in row.chunks) + added
