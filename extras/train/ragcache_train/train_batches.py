"""Batches of training: rows as the sequences that the engine would build for them, and the rows that run together.

    link         prefix, KV-START, chunk 0, links of slot 0, chunk 1, links of slot 1, ..., KV-END, then the question
    markers      prefix, [doc_start, chunk, doc_end] for each chunk, then the question
    reposition   prefix, chunks, then the question (Block-Attention)
    standard     the same ids as reposition, read as a single text: every token sees all before it

Passages that are read after the prefix, or after a primer that follows it, have the positions of their encoding, right
after these; `shifts` says how far they are moved for the rest of the prompt. A primer is read once per row.

Several questions follow in turn; each starts at the position after the context.

As many rows run together as fit, shuffled anew each epoch; the plan depends only on the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch

from ragcache.errors import ConfigError
from ragcache.fusion.layout import NO_ADDITIONS, AddedTokens, Layout, Segment
from ragcache.fusion.layout import lay_out as lay_out_parts
from ragcache.kv.block_key import Recipe
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.prompt import Passages, Text
from ragcache_train.train_options import BatchOptions

IGNORED = -100
OPEN = 0
"""Segment of the context's tokens that see all tokens before them: prefix, link tokens, KV-START and KV-END."""
SHARED = 1 << 16
"""Segment of a prefix that passages are read after (recipes `prefix` and `primer`): above the segments of passages."""
DROPPED = SHARED + 1
"""Segment of a primer: passages see the primer and the prefix, tokens outside the passages do not see the primer."""


class Ask(NamedTuple):
    """A question with its answer. suffix: ids of the question and the template's tail; answer: ids to be learned, the
    end of text included
    """

    suffix: Sequence[int]
    answer: Sequence[int]

    @property
    def learned(self) -> Ask:
        """Return question and answer as a single answer, of which every token but the first is learned."""
        whole = [*self.suffix, *self.answer]
        return Ask(whole[:1], whole[1:])


class EncodedRow(NamedTuple):
    """A line of the data as ids.

    kind:    the line's type ("qa", "chat", ...)
    where:   file and line, for messages
    apart:   whether its chunks are always, sometimes (None) or never encoded separately
    shuffle: whether its chunks may change places
    primer:  ids that each chunk is read after, following the prefix, if the recipe is "primer"
    """

    kind: str
    where: str
    prefix: Sequence[int]
    chunks: Sequence[Sequence[int]]
    asks: Sequence[Ask]
    apart: bool | None
    shuffle: bool
    primer: tuple[int, ...] = ()


@dataclass
class Sample:
    """A sequence; all lists have its length. A label is the id that follows, or -100 if nothing is learned.

    shifts: how far each token is moved for tokens outside passages
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    shifts: list[int] = field(default_factory=list)

    def add(
        self,
        ids: Sequence[int],
        start: int,
        segments: Sequence[int],
        labels: Sequence[int] | None = None,
        shift: int = 0,
    ) -> None:
        """Append tokens at positions from `start` on."""
        self.shifts += [shift] * len(ids)
        self.ids += ids
        self.positions += range(start, start + len(ids))
        self.segments += segments
        self.labels += [IGNORED] * len(ids) if labels is None else labels


def lay_out(row: EncodedRow, spec: TrainedTokens, apart: bool, order: Sequence[int] | None = None) -> Sample:
    """Return the row as a sequence.

    spec:  how passages are encoded separately
    apart: whether passages are encoded separately in this sequence
    order: of the passages; None: unchanged

    Raises ConfigError if there are more passages than link slots.
    """
    context = _context(row, spec if apart else None, order)
    sample = Sample()
    pieces = list(context.pieces)
    behind = None
    if context.separate and spec.recipe != "isolated" and row.chunks:
        behind = _add_head(sample, pieces, row.primer)
    for piece in pieces:
        shift = 0 if behind is None or piece.passage is None else piece.start - behind
        number = OPEN if piece.passage is None or not context.separate else piece.passage + 1
        sample.add(piece.ids, piece.start - shift, [number] * len(piece.ids), shift=shift)
    for number, ask in enumerate(row.asks, start=1):
        labels = [IGNORED] * (len(ask.suffix) - 1) + list(ask.answer)
        sample.add([*ask.suffix, *ask.answer[:-1]], context.end, [-number] * len(labels), labels)
    return sample


def _add_head(sample: Sample, pieces: list[Segment], primer: Sequence[int]) -> int:
    """Move the text before all passages into the sample, and a primer after it. Return the passages' first position."""
    head = pieces.pop(0).ids if pieces[0].passage is None else ()
    sample.add(head, 0, [SHARED] * len(head))
    sample.add(primer, len(head), [DROPPED] * len(primer))
    return len(sample.ids)


def _context(row: EncodedRow, spec: TrainedTokens | None, order: Sequence[int] | None) -> Layout:
    """Return the layout of everything before the questions, as the engine makes it for an answer."""
    chunks = tuple(tuple(row.chunks[rank]) for rank in (range(len(row.chunks)) if order is None else order))
    parts = (Text(tuple(row.prefix)), Passages(chunks))
    if spec is None:
        return lay_out_parts(parts, Recipe(), NO_ADDITIONS, separate=False)
    added = AddedTokens.trained(spec)
    if added.max_chunks is not None and len(chunks) > added.max_chunks:
        raise ConfigError(
            f"a row has {len(chunks)} passages and there are link tokens for {spec.link_slots}; "
            f"train with at least {len(chunks)} link slots"
        )
    recipe = Recipe(spec.recipe, markers=added.markers, primer=row.primer)
    return lay_out_parts(parts, recipe, added)


def layout_tokens(row: EncodedRow, spec: TrainedTokens, apart: bool) -> int:
    """Return the length of the row's sequence, in tokens."""
    asked = sum(len(ask.suffix) + len(ask.answer) - 1 for ask in row.asks)
    return context_tokens(row, spec, apart) + asked


def context_tokens(row: EncodedRow, spec: TrainedTokens, apart: bool) -> int:
    """Return the number of tokens before the questions, a primer's among them."""
    chunks = [len(chunk) for chunk in row.chunks]
    added = 0
    if apart and chunks:
        added = len(row.primer) + AddedTokens.trained(spec).num_tokens(chunks)
    return len(row.prefix) + sum(chunks) + added


SHORTEST = 0.25
"""Least share of a passage that `vary` leaves when it cuts the passage."""


def vary(row: EncodedRow, seed: int, most: int | None) -> EncodedRow:
    """Draw the number (at least two), order and length of the row's passages, and the order of its questions.

    About every other passage is cut; it keeps its last token, a line's end.

    Args:
        row: is returned as it is if its passages may not change places.
        most: passages that are kept at most; None returns the row as it is.
    """
    if most is None or not row.shuffle or not row.chunks:
        return row
    rng = random.Random(seed)
    most = min(most, len(row.chunks))
    count = rng.randint(min(2, most), most)
    chunks = []
    for chunk in rng.sample(list(row.chunks), count):
        length = len(chunk) if rng.random() < 0.5 else max(1, round(len(chunk) * rng.uniform(SHORTEST, 1)))
        chunks.append([*chunk[: length - 1], chunk[-1]])
    return row._replace(chunks=chunks, asks=rng.sample(list(row.asks), len(row.asks)))


POOL_BATCHES = 50  # shuffled rows are packed together for about this many batches


class Draw(NamedTuple):
    """A row in an epoch. apart: its chunks are encoded separately; seed: of the order of its passages."""

    row: int
    apart: bool
    seed: int


class BatchPlan:
    """An epoch's batches, by number. Iterating gives the batches of all epochs, in order, up to `num_batches`."""

    def __init__(
        self,
        rows: Sequence[EncodedRow],
        spec: TrainedTokens,
        options: BatchOptions,
        seed: int,
        *,
        num_batches: int | None = None,
        epochs: float = 1.0,
    ) -> None:
        self.rows, self.spec, self.options, self.seed = rows, spec, options, seed
        self._lengths = [[layout_tokens(row, spec, apart) for apart in (False, True)] for row in rows]
        self._by_kind = _by_kind(rows, options.mixture)
        self.num_batches = self._count(epochs) if num_batches is None else num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[Draw]]:
        left, epoch = self.num_batches, 0
        while left > 0:
            batches = self.epoch(epoch)[:left]
            yield from batches
            left -= len(batches)
            epoch += 1

    def _count(self, epochs: float) -> int:
        whole = int(epochs)
        count = sum(len(self.epoch(epoch)) for epoch in range(whole))
        if epochs > whole:
            count += round((epochs - whole) * len(self.epoch(whole)))
        return max(count, 1)

    def epoch(self, number: int) -> list[list[Draw]]:
        """Return the batches of an epoch, in order."""
        rng = random.Random(f"{self.seed}/{number}")
        draws = [self._draw(row, rng) for row in self._members(rng)]
        rng.shuffle(draws)
        lengths = {draw: self._length(draw) for draw in draws}
        mean = sum(lengths.values()) / len(draws)
        pool = max(1, round(POOL_BATCHES * self.options.tokens / mean))
        batches = []
        for start in range(0, len(draws), pool):
            batches += self._pack(draws[start : start + pool], lengths)
        rng.shuffle(batches)
        return batches

    def _members(self, rng: random.Random) -> list[int]:
        if self.options.mixture is None:
            return list(range(len(self.rows)))
        total = sum(self.options.mixture.values())
        members: list[int] = []
        for kind, rows in self._by_kind.items():
            wanted = round(len(self.rows) * self.options.mixture[kind] / total)
            members += rows * (wanted // len(rows)) + rng.sample(rows, wanted % len(rows))
        return members

    def _draw(self, row: int, rng: random.Random) -> Draw:
        apart = self.rows[row].apart
        chance, seed = rng.random(), rng.getrandbits(32)
        return Draw(row, chance < self.options.separate_share if apart is None else apart, seed)

    def _length(self, draw: Draw) -> int:
        if self.options.most is not None:
            return layout_tokens(vary(self.rows[draw.row], draw.seed, self.options.most), self.spec, draw.apart)
        return self._lengths[draw.row][draw.apart]

    def _pack(self, draws: Sequence[Draw], lengths: Mapping[Draw, int]) -> list[list[Draw]]:
        """Return batches of the draws, by first fit and the longest first: all but the last are nearly full."""
        batches: list[list[Draw]] = []
        room: list[int] = []  # of the batches, in tokens
        for draw in sorted(draws, key=lengths.__getitem__, reverse=True):
            length = lengths[draw]
            place = next((place for place, left in enumerate(room) if left >= length), len(room))
            if place == len(room):
                batches.append([])
                room.append(self.options.tokens)
            batches[place].append(draw)
            room[place] = room[place] - length if len(batches[place]) != self.options.rows else 0
        return batches


def _by_kind(rows: Sequence[EncodedRow], mixture: Mapping[str, float] | None) -> dict[str, list[int]]:
    """Return the rows of each kind that the mixture names. Raises ConfigError for a kind that has no rows."""
    found: dict[str, list[int]] = {kind: [] for kind, share in (mixture or {}).items() if share > 0}
    for index, row in enumerate(rows):
        if row.kind in found:
            found[row.kind].append(index)
    empty = [kind for kind, members in found.items() if not members]
    if empty:
        raise ConfigError(f"the mixture names {', '.join(empty)} and the data has no such row")
    return found


class DrawnRows:
    """A data set for torch's DataLoader: from a Draw to its Sample."""

    def __init__(self, rows: Sequence[EncodedRow], spec: TrainedTokens, shuffle: bool, most: int | None = None) -> None:
        self.rows, self.spec, self.shuffle, self.most = rows, spec, shuffle, most

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, draw: Draw) -> Sample:
        row = vary(self.rows[draw.row], draw.seed, self.most)
        return lay_out(row, self.spec, draw.apart, self._order(draw) if self.most is None else None)

    def _order(self, draw: Draw) -> list[int] | None:
        row = self.rows[draw.row]
        if not (self.shuffle and row.shuffle):
            return None
        # The paper's A.5: otherwise the model learns where answers are.
        return random.Random(draw.seed).sample(range(len(row.chunks)), len(row.chunks))


class Pair(NamedTuple):
    """A row as the student reads it, passages apart, and as its teacher does: as a single text."""

    student: Sample
    teacher: Sample


class DrawnPairs(DrawnRows):
    """The same data set for training by a teacher: from a Draw to its Pair."""

    def __getitem__(self, draw: Draw) -> Any:
        return Pair(super().__getitem__(draw), super().__getitem__(draw._replace(apart=False)))


def collate(samples: Sequence[Sample], multiple: int = 1) -> dict[str, Any]:
    """Return rows packed one after another, as int64 tensors.

    input_ids, position_ids: [1, length]
    segments, rows: [length]; see `Visibility`
    labels:         [num_labels], the ids to be learned, in order; places: [num_labels], of the tokens they follow
    lengths:        of the rows, as numbers: nothing has to be read back from a device to know shapes
    shifts:         [length], absent where no token is moved

    `shift_labels` is `labels` again: by that name transformers' Trainer knows that they are shifted already.
    multiple: the length is a multiple of this number; an additional row pads the sequence
    """
    lengths = [len(sample.ids) for sample in samples]
    if more := -sum(lengths) % multiple:
        filler = Sample()
        filler.add([0] * more, 0, [OPEN] * more)
        samples, lengths = [*samples, filler], [*lengths, more]
    ids, positions, segments, following, shifts = (
        torch.tensor(list(chain.from_iterable(lists)))
        for lists in zip(*((s.ids, s.positions, s.segments, s.labels, s.shifts) for s in samples), strict=True)
    )
    places = (following != IGNORED).nonzero()[:, 0]
    labels = following[places]
    return {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "segments": segments,
        "rows": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        "lengths": lengths,
        "places": places,
        "labels": labels,
        "shift_labels": labels,
        **({"shifts": shifts} if shifts.any() else {}),
    }


def collate_pairs(pairs: Sequence[Pair], multiple: int = 1) -> dict[str, Any]:
    """Return the students' batch, with the teachers' under "teacher"."""
    teachers = collate([pair.teacher for pair in pairs], multiple)
    return {**collate([pair.student for pair in pairs], multiple), "teacher": teachers}
