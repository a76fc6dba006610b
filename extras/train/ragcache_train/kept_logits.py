"""A teacher's likeliest logits on disk, so that later epochs need no forward pass of the teacher."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ragcache.errors import ConfigError

MOST = 64
"""Ids kept for each token. Their probabilities sum to more than 0.99 on most tokens; the others' sum is kept too."""


class KeptLogits:
    """Log-probabilities of the teacher's `MOST` likeliest ids, one file per row.

    A file is named by the teacher's digest, the row's ids and the places of its labels, so a row that is drawn again
    with another number, order or length of passages is another file. A damaged file is computed anew.

    Args:
        folder: is made if it does not exist.
        teacher: digest of the teacher's weights.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(self, folder: Path, teacher: str) -> None:
        self.folder, self._teacher = folder, teacher
        with _named(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def find(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Return the log-probabilities, float32 [num_labels, MOST], and their ids, int64, of a batch made by `collate`.

        Returns None if a row of the batch is not kept.
        """
        found = [self._read(self._path(ids, places), len(places)) for ids, places in _rows(batch)]
        if not all(one is not None for one in found):
            return None
        device = batch["input_ids"].device
        shares, ids = zip(*(one for one in found if one is not None), strict=True)
        return torch.cat(shares).to(device), torch.cat(ids).to(device)

    def keep(self, batch: dict[str, Any], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Write a batch's logits, float32 [num_labels, vocab_size], and return them as `find` would.

        Raises ConfigError if a file cannot be written.
        """
        shares, ids = logits.log_softmax(-1).topk(min(MOST, logits.shape[-1]))
        start = 0
        for row, places in _rows(batch):
            end = start + len(places)
            held = {"shares": shares[start:end].cpu().contiguous(), "ids": ids[start:end].int().cpu().contiguous()}
            path = self._path(row, places)
            with _named(self.folder):
                path.parent.mkdir(exist_ok=True)
                save_file(held, new := path.with_suffix(f".{os.getpid()}"))
                os.replace(new, path)
            start = end
        return shares, ids

    def _path(self, ids: Sequence[int], places: Sequence[int]) -> Path:
        name = hashlib.sha256(repr((self._teacher, list(ids), list(places))).encode()).hexdigest()
        return self.folder / name[:2] / f"{name}.safetensors"

    def _read(self, path: Path, count: int) -> tuple[Tensor, Tensor] | None:
        try:
            held = load_file(path)
            shares, ids = held["shares"], held["ids"]
        except (OSError, SafetensorError, KeyError):
            return None
        whole = shares.shape == ids.shape and len(ids) == count and bool(shares.isfinite().all())
        return (shares.float(), ids.long()) if whole else None


def kept_divergence(shares: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
    """Return KL(teacher || student) of each token over the kept ids and, as a single outcome, all other ids.

    Args:
        shares, ids: of the teacher, [num_labels, MOST] each; see `KeptLogits.find`.
        logits: of the student, float32 [num_labels, vocab_size].
    """
    own = logits.log_softmax(-1).gather(-1, ids)
    rest, own_rest = (_rest(one) for one in (shares, own))
    return (shares.exp() * (shares - own)).sum(-1) + rest.exp() * (rest - own_rest)


LEAST = 1e-6
"""Probability that the ids outside of the kept ones have at least, so that its logarithm stays finite."""


def _rest(shares: Tensor) -> Tensor:
    """Return the logarithm of the probability that these log-probabilities leave for all other ids."""
    return (1 - shares.exp().sum(-1)).clamp_min(LEAST).log().clamp_max(math.log(1 - LEAST))


def _rows(batch: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each row's ids and the places of its labels, from the row's start; a row that only pads has none."""
    ids, places, start = batch["input_ids"][0].tolist(), batch["places"].tolist(), 0
    for length in batch["lengths"]:
        own = [place - start for place in places if start <= place < start + length]
        if own:
            yield ids[start : start + length], own
        start += length


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Translate errors of writing into a ConfigError that names the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"the teacher's logits cannot be kept in {folder} ({error}); free space or name another folder "
            "for keep_logits, or leave it out"
        ) from error
