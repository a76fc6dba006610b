"""Chunks side by side: all of them start where the shared prefix ends, and the suffix stands behind the longest."""

from __future__ import annotations

from typing import NamedTuple

from ragcache.fusion.base import Inputs, Placement
from ragcache.prompt import Prompt


class Parallel(NamedTuple):
    """Where the parts of a prompt stand.

    placements:  the prefix, then the chunks at overlapping positions
    chunks_from: position of every chunk's first token
    suffix_from: position of the suffix's first token; all positions between belong to chunks
    """

    placements: list[Placement]
    chunks_from: int
    suffix_from: int


def parallel(prompt: Prompt, inputs: Inputs) -> Parallel:
    """The layout of parallel context encoding (Ratner et al., arXiv 2212.10947; APE section 4)."""
    start = len(prompt.prefix_ids)
    placements = [Placement(inputs.prefix, 0)] if inputs.prefix is not None else []
    placements += [Placement(block, start) for block in inputs.chunks]
    return Parallel(placements, start, start + max((len(chunk) for chunk in prompt.chunk_ids), default=0))
