"""Draws of a batch as padded tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.batches import Draw
from ragcache_train.layout import IGNORED, EncodedRow, Sample, lay_out
from ragcache_train.mask import PADDING


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


def collate(samples: Sequence[Sample], multiple: int = 1) -> dict[str, Tensor]:
    """Right-padded int64 tensors [batch, length]: input_ids, position_ids, segments, labels.

    `shift_labels` is `labels` again: by that name transformers' Trainer knows that they are shifted already.
    multiple: the length is a multiple of it (FlexAttention's blocks)
    """
    longest = max(len(sample.ids) for sample in samples)
    length = -(-longest // multiple) * multiple
    labels = _padded([sample.labels for sample in samples], length, IGNORED)
    return {
        "input_ids": _padded([sample.ids for sample in samples], length, 0),
        "position_ids": _padded([sample.positions for sample in samples], length, 0),
        "segments": _padded([sample.segments for sample in samples], length, PADDING),
        "labels": labels,
        "shift_labels": labels,
    }


def collate_pairs(pairs: Sequence[Pair], multiple: int = 1) -> dict[str, Any]:
    """The students' batch, with the teachers' under "teacher"."""
    teachers = collate([pair.teacher for pair in pairs], multiple)
    return {**collate([pair.student for pair in pairs], multiple), "teacher": teachers}


def _padded(rows: Sequence[list[int]], length: int, filler: int) -> Tensor:
    return torch.tensor([row + [filler] * (length - len(row)) for row in rows])
