"""Draws of a batch as padded tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from ragcache.models.reuse import ReuseSpec
from ragcache.training.batches import Draw
from ragcache.training.layout import IGNORED, EncodedRow, Sample, lay_out
from ragcache.training.mask import PADDING


class DrawnRows:
    """A data set for torch's DataLoader: from a Draw to its Sample."""

    def __init__(self, rows: Sequence[EncodedRow], spec: ReuseSpec | None, shuffle: bool) -> None:
        self.rows, self.spec, self.shuffle = rows, spec, shuffle

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, draw: Draw) -> Sample:
        row = self.rows[draw.row]
        order = None
        if self.shuffle and row.shuffle:  # the paper's A.5: or the model learns where answers stand
            order = random.Random(draw.seed).sample(range(len(row.chunks)), len(row.chunks))
        return lay_out(row, self.spec, draw.apart, order)


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


def _padded(rows: Sequence[list[int]], length: int, filler: int) -> Tensor:
    return torch.tensor([row + [filler] * (length - len(row)) for row in rows])
