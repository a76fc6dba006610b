"""RAGBoost's ordering: passages in the order that lengthens the prefix shared with earlier prompts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

COUNTED_PASSAGES = 1 << 16
_SEARCHED = 256

Ids = tuple[int, ...]


class ReadCounts:
    """How often each passage was read, by its tokens' hash. Thread-safe; the least recently read are forgotten."""

    def __init__(self) -> None:
        self._counts: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()

    def count(self, passages: Sequence[Ids]) -> None:
        with self._lock:
            for ids in passages:
                self._counts[hash(ids)] = self._counts.pop(hash(ids), 0) + 1
            while len(self._counts) > COUNTED_PASSAGES:
                self._counts.popitem(last=False)

    def of(self, ids: Ids) -> int:
        with self._lock:
            return self._counts.get(hash(ids), 0)


def shared_order(
    known: Callable[[Sequence[int]], int], counts: ReadCounts, prefix_ids: Ids, passages: Sequence[Ids]
) -> list[int]:
    """Return the ranks of the passages in the order that shares most with the prefix tree.

    The longest sequence that the tree has after the prefix comes first. The other passages follow, most often read
    first, so that later prompts find them near the beginning. Equally read passages keep their relevance order.

    known: returns how many tokens of a sequence the tree has. At most 256 sequences are looked up
    """
    by_count = sorted(range(len(passages)), key=lambda rank: -counts.of(passages[rank]))
    best: list[int] = []
    best_tokens = 0
    looked = 0
    front: list[tuple[list[int], Ids]] = [([], prefix_ids)]
    while front and looked < _SEARCHED:
        order, ids = front.pop()
        further = []
        for rank in (rank for rank in by_count if rank not in order):
            looked += 1
            longer = (*ids, *passages[rank])
            tokens = known(longer)
            if tokens > max(best_tokens, len(ids)):
                best, best_tokens = [*order, rank], tokens
            if tokens == len(longer):
                further.append(([*order, rank], longer))
        front += reversed(further)
    return best + [rank for rank in by_count if rank not in best]


def relevance_hint(order: Sequence[int]) -> str:
    """Return a line that names the most relevant passages, or "" if they are already in that order.

    Passages carry no rank of their own, because that would prevent reuse of their KV.
    """
    if list(order) == sorted(order):
        return ""
    places = sorted(range(len(order)), key=lambda place: order[place])
    return f"Passages by relevance: {', '.join(str(place + 1) for place in places)}.\n"
