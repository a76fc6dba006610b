"""Draws of a batch as one sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from ragcache.kv.anchor_tokens import OPEN
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.batches import Draw
from ragcache_train.layout import IGNORED, EncodedRow, Sample, lay_out


class DrawnRows:
    """A data set for torch's DataLoader: from a Draw to its Sample."""

    def __init__(self, rows: Sequence[EncodedRow], spec: TrainedTokens | None, shuffle: bool) -> None:
        self.rows, self.spec, self.shuffle = rows, spec, shuffle

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, draw: Draw) -> Sample:
        return lay_out(self.rows[draw.row], self.spec, draw.apart, self._order(draw))

    def _order(self, draw: Draw) -> list[int] | None:
        row = self.rows[draw.row]
        if not (self.shuffle and row.shuffle):
            return None
        # The paper's A.5: or the model learns where answers stand.
        return random.Random(draw.seed).sample(range(len(row.chunks)), len(row.chunks))


class Pair(NamedTuple):
    """One row as the student reads it, passages apart, and as its teacher does: as one text."""

    student: Sample
    teacher: Sample


class DrawnPairs:
    """The same data set for training on frozen weights: from a Draw to its Pair."""

    def __init__(self, rows: Sequence[EncodedRow], spec: TrainedTokens, shuffle: bool) -> None:
        self._student, self._teacher = DrawnRows(rows, spec, shuffle), DrawnRows(rows, None, shuffle)

    def __len__(self) -> int:
        return len(self._student)

    def __getitem__(self, draw: Draw) -> Pair:
        return Pair(self._student[draw], self._teacher[draw])


def collate(samples: Sequence[Sample], multiple: int = 1) -> dict[str, Any]:
    """Rows packed one behind another, as int64 tensors.

    input_ids, position_ids: [1, length]
    segments, rows: [length]; see `Visibility`
    labels:         [num_labels], the ids to be learned, in order; places: [num_labels], of the tokens they follow
    lengths:        of the rows, as numbers: nothing has to be read back from a device to know shapes

    `shift_labels` is `labels` again: by that name transformers' Trainer knows that they are shifted already.
    multiple: the length is a multiple of it; a row of its own fills it up
    """
    lengths = [len(sample.ids) for sample in samples]
    if more := -sum(lengths) % multiple:
        filler = Sample()
        filler.add([0] * more, 0, [OPEN] * more)
        samples, lengths = [*samples, filler], [*lengths, more]
    ids, positions, segments, following = (
        torch.tensor(list(chain.from_iterable(lists)))
        for lists in zip(*((s.ids, s.positions, s.segments, s.labels) for s in samples), strict=True)
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
    }


def collate_pairs(pairs: Sequence[Pair], multiple: int = 1) -> dict[str, Any]:
    """The students' batch, with the teachers' under "teacher"."""
    teachers = collate([pair.teacher for pair in pairs], multiple)
    return {**collate([pair.student for pair in pairs], multiple), "teacher": teachers}
