"""Batches of texts to run together. A separate module, since the embedder uses it without loading a language model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence


def plan_batches(lengths: Sequence[int], max_tokens: int, max_items: int = sys.maxsize) -> Iterator[list[int]]:
    """Yield ranks of texts of similar length to run together.

    A batch has at most `max_tokens` padded tokens (or a single text) and `max_items` texts. Ties keep their order, so
    the batches are deterministic.
    """
    order = sorted(range(len(lengths)), key=lambda rank: -lengths[rank])
    start = 0
    while start < len(order):
        count = max(1, min(max_items, max_tokens // max(lengths[order[start]], 1)))
        yield order[start : start + count]
        start += count
