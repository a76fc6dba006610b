"""Reads a prompt: passages' states are placed, and all other tokens run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import NamedTuple, Self

from torch import Tensor

from ragcache.errors import PromptError
from ragcache.fusion.fuse import PromptPlan
from ragcache.fusion.layout import Layout, Segment, Span
from ragcache.kv.opaque_block import OpaqueBlock
from ragcache_llamacpp.context import LlamaContext
from ragcache_llamacpp.model import LlamaModel
from ragcache_llamacpp.sequences import CellSequence

_RERUN = 4 << 32  # added to the elements of a passage's tokens that run again


class Step(NamedTuple):
    """Tokens [start, stop) of a prompt. piece: the passage that they are placed from; None: they run"""

    start: int
    stop: int
    piece: Segment | None


@dataclass(frozen=True, eq=False)
class Reading:
    """A prompt as llama.cpp reads it: which tokens run, and which are placed.

    reruns: tokens of placed passages that run again. The last token always runs, for its logits
    """

    layout: Layout
    reruns: Sequence[Span]

    @classmethod
    def of(cls, plan: PromptPlan) -> Self:
        """Return how a planned prompt is read. Its method must read by the layout alone."""
        return cls(plan.layout, (plan.method.reruns(plan.layout) or ()) if plan.method.reuses_blocks else ())

    @cached_property
    def elements(self) -> list[int]:
        """Return the elements of the prompt's tokens: see `Layout.elements`; those that run again are marked."""
        found = self.layout.elements
        for span in self.reruns if self.layout.separate else ():
            for place in range(*span):
                found[place] += _RERUN
        return found

    def steps(self, known: int) -> list[Step]:
        """Return the steps after the first `known` tokens, in order. Tokens that run together are a single step."""
        end = self.layout.num_tokens
        placed = {id(piece) for piece in self.layout.placed(known)}
        again = {place for span in self.reruns for place in range(*span)} | {end - 1}
        found: list[Step] = []
        for piece in self.layout.pieces:
            for place in range(max(piece.start, known), piece.end):
                origin = piece if id(piece) in placed and place not in again else None
                if found and found[-1].piece is origin:
                    found[-1] = found[-1]._replace(stop=place + 1)
                else:
                    found.append(Step(place, place + 1, origin))
        return found


def prefill(
    lm: LlamaModel, sequence: CellSequence, reading: Reading, blocks: Mapping[int, OpaqueBlock]
) -> tuple[Tensor, float, int]:
    """Place and run the prompt's tokens that the sequence does not hold.

    blocks: by the position of the passage's first token

    Returns the last token's logits, the seconds of placing, and how many tokens ran. All states are set and shifted
    before any token runs, because a pass after a shift rotates the whole context.
    """
    ids, elements = reading.layout.ids, reading.elements
    steps = reading.steps(len(sequence.elements))
    started = time.perf_counter()
    if placed := [step for step in steps if step.piece is not None]:
        lm.call(partial(_place, lm.context, sequence, placed, blocks))
    placed_s, computed, logits = time.perf_counter() - started, 0, None
    for runs, group in groupby(steps, lambda step: step.piece is None):
        together = list(group)
        start, stop = together[0].start, together[-1].stop
        if runs:
            logits = lm.run(ids[start:stop], sequence)
            computed += stop - start
            sequence.elements[start:stop] = elements[start:stop]
        else:
            lm.call(partial(lm.context.join, sequence.number, start, stop))
            lm.sequences.extend(sequence, elements[start:stop])
    if logits is None:
        raise PromptError("a prompt without tokens cannot be read")
    return logits, placed_s, computed


def _place(
    context: LlamaContext, sequence: CellSequence, steps: Sequence[Step], blocks: Mapping[int, OpaqueBlock]
) -> None:
    """Set the passages' states beside the sequence, at their positions in the prompt."""
    for step in steps:
        if step.piece is not None:
            block = blocks[step.piece.start]
            first = block.first + block.start + step.start - step.piece.start
            context.place(block.data, first, first + step.stop - step.start, sequence.number, step.start)
