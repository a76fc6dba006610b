"""Nodes of a prefix tree, and the pages that their edges share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragcache.kv.block import KVBlock

Elements = NDArray[np.int64]


class Owned(NamedTuple):
    """Elements [start, stop) of a sequence belong to something that may be deleted: `owner` names it."""

    start: int
    stop: int
    owner: int


@dataclass(eq=False)
class Page:
    """Rotated keys and values of some tokens in all layers. Never written to once it is in the tree.

    uses: slices of it that nodes and leases hold; its bytes are free when there are none
    """

    held: KVBlock
    uses: int = 0


class Slice(NamedTuple):
    """Tokens [start, stop) of a page. A node that is split shares the page of the cut between its halves."""

    page: Page
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(eq=False)
class Node:
    """An edge and what hangs below it.

    elements: of the edge, int64 [n]; slices: their KV, in order; owned: within the edge
    leases:   askers that are reading down to here
    """

    elements: Elements
    slices: list[Slice]
    owned: list[Owned]
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    leases: int = 0


def common_length(one: Elements, other: Elements) -> int:
    """Length of the longest common prefix."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def first_tokens(slices: Sequence[Slice], count: int) -> list[Slice]:
    """The first `count` tokens."""
    found = []
    for page, start, stop in slices:
        if count <= 0:
            break
        found.append(Slice(page, start, min(stop, start + count)))
        count -= stop - start
    return found


def rest_of(slices: Sequence[Slice], skip: int) -> list[Slice]:
    """All but the first `skip` tokens."""
    found = []
    for page, start, stop in slices:
        if skip < stop - start:
            found.append(Slice(page, start + max(0, skip), stop))
        skip -= stop - start
    return found


def reaching(owned: Sequence[Owned], start: int, stop: int) -> list[Owned]:
    """Like `clip`, and what ends before `start` owns the first element: all was computed over it, and the tokens above
    may be known as another owner's alone."""
    return clip([Owned(one.start, max(one.stop, start + 1), one.owner) for one in owned], start, stop)


def clip(owned: Sequence[Owned], start: int, stop: int) -> list[Owned]:
    """The part in [start, stop), counted from start."""
    parts = (Owned(max(one.start, start) - start, min(one.stop, stop) - start, one.owner) for one in owned)
    return [part for part in parts if part.start < part.stop]
