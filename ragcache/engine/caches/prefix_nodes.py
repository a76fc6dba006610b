"""Nodes of a prefix tree, and the pages that their edges share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragcache.kv.block import KVBlock
from ragcache.kv.state import State

Elements = NDArray[np.int64]
T = TypeVar("T")


class Owned(NamedTuple):
    """Elements [start, stop) of a sequence that belong to `owner`, such as a document that may be deleted."""

    start: int
    stop: int
    owner: int


@dataclass(eq=False)
class Held(Generic[T]):
    """Content that nodes and leases share. uses: number of nodes and leases that hold it; at 0 its bytes are free"""

    content: T
    num_bytes: int
    uses: int = 0


Page = Held[KVBlock]
"""Rotated keys and values of some tokens in all layers, held by slices. Never written to once it is in the tree."""
End = Held[tuple[State, ...]]
"""States of recurrent layers after the last element of a node."""


class Slice(NamedTuple):
    """Tokens [start, stop) of a page. When a node is split, both halves share the page of the cut."""

    page: Page
    start: int
    stop: int


@dataclass(eq=False)
class Node:
    """A node with the edge that leads to it.

    elements: the edge's elements, int64 [n]
    slices:   the elements' KV, in order
    owned:    owners of the elements; their positions count from the beginning of the edge
    leases:   number of leases that end at this node
    end:      states after the edge, if a stored sequence ends there
    """

    elements: Elements
    slices: list[Slice]
    owned: list[Owned]
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    leases: int = 0
    end: End | None = None


def ends_along(path: Sequence[tuple[Node, int]]) -> list[tuple[int, End]]:
    """Return the states along a path of nodes, each with the number of elements before it.

    path: nodes, each with its number of shared elements
    """
    found, at = [], 0
    for node, shared in path:
        at += shared
        if node.end is not None and shared == len(node.elements):
            found.append((at, node.end))
    return found


def common_length(one: Elements | NDArray[np.int32], other: Elements | NDArray[np.int32]) -> int:
    """Return the length of the longest common prefix of two rows of elements or token ids."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def cut(slices: Sequence[Slice], first: int, last: int = sys.maxsize) -> list[Slice]:
    """Return slices of the tokens [first, last), counted from the first token of `slices`."""
    found, at = [], 0
    for page, start, stop in slices:
        begin, end = max(start, start + first - at), min(stop, start + last - at)
        if begin < end:
            found.append(Slice(page, begin, end))
        at += stop - start
    return found


def reaching(owned: Sequence[Owned], start: int, stop: int) -> list[Owned]:
    """Clip like `clip`, but let owners of earlier elements also own the first element.

    The KV of these elements was computed over those earlier elements. The nodes above may have been stored for another
    prompt, and list the earlier elements under that prompt's owners alone.
    """
    return clip([Owned(one.start, max(one.stop, start + 1), one.owner) for one in owned], start, stop)


def clip(owned: Sequence[Owned], start: int, stop: int) -> list[Owned]:
    """Return the owners of the elements [start, stop), with positions that count from `start`."""
    parts = (Owned(max(one.start, start) - start, min(one.stop, stop) - start, one.owner) for one in owned)
    return [part for part in parts if part.start < part.stop]
