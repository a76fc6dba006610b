"""Sequences of a context, and the cells that they share.

A sequence holds a text from its beginning on. It is described by elements: ids of tokens that ran, and marked ids of
tokens that were placed, as in a prefix tree (`Layout.elements`). Tokens that begin alike are copied from one sequence
to another, which shares their cells. When an answer ends its sequence is kept, until its cells or its number are
needed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count as numbers

from ragcache.errors import AnswerTooLargeError
from ragcache.models.deadline import Limit
from ragcache_llamacpp.options import NUMBERS


def same(count: int) -> int:
    """Return the argument: any number of a text's first tokens can be used."""
    return count


@dataclass(eq=False)
class CellSequence:
    """A sequence of a context, as the scheduler's requests use it.

    number:   llama.cpp's number of the sequence; see `options.NUMBERS`
    undo:     removes the sequence's tokens from an index on
    elements: its tokens, in order; an element's index is its position
    cells:    a name for the cell of each token; a copied token has the same cell
    reserved: number of further cells that it may take
    is_known: whether its cells are filled, so that other sequences may copy them
    pins:     number of copies that are being made of it
    keeps:    whether it is kept for later prompts when it ends
    release:  ends the sequence, if no context manager does
    generation: the pool's number of invalidations when it began
    """

    number: int
    undo: Callable[[CellSequence, int], None]
    elements: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    reserved: int = 0
    is_known: bool = False
    pins: int = 0
    keeps: bool = False
    release: Callable[[], object] = lambda: None
    generation: int = 0

    # The interface of a cache of the scheduler.
    fill = None
    step = None

    def mark(self) -> int:
        return len(self.elements)

    def rewind(self, mark: int) -> None:
        self.undo(self, mark)

    def acquire_reference(self) -> None:
        """Do nothing: the reader of an answer ends its sequence only once no pass works on it."""

    def release_reference(self) -> None:
        """Do nothing."""


class SequencePool:
    """Numbers and cells of a context, given to prompts and kept for later prompts. First come, first served.

    num_cells: cells of the context
    parallel:  prompts at the same time; as many sequences are kept beside them
    undo:      removes the tokens of a sequence from an index on

    Thread-safe. `removed` holds the numbers whose cells the model's thread has to remove before it does anything else.
    """

    def __init__(self, num_cells: int, parallel: int, undo: Callable[[CellSequence, int], None]) -> None:
        self.num_cells = num_cells
        self.parallel = parallel
        self.removed: deque[int] = deque()
        self._undo = undo
        self._free = [*self.numbers(parallel)]
        self._active: list[CellSequence] = []
        self._kept: list[CellSequence] = []  # the least recently used first
        self._growing = 0
        self._queue: deque[object] = deque()
        self._names = numbers()
        self._generation = 0
        self._changed = threading.Condition()

    @staticmethod
    def numbers(parallel: int) -> range:
        """Return the numbers of the sequences: one for each prompt, and as many for kept sequences."""
        return range(1, 1 + 2 * parallel * NUMBERS, NUMBERS)

    def known(self, elements: Sequence[int], usable: Callable[[int], int] = same) -> int:
        """Return how many of the first elements a prompt can copy from a sequence, at most all but the last."""
        with self._changed:
            return self._best(elements, usable)[1]

    def acquire(
        self, elements: Sequence[int], usable: Callable[[int], int], lengths: Sequence[int], limit: Limit
    ) -> tuple[list[CellSequence], CellSequence | None]:
        """Wait until there are a sequence and cells for each length, and return the sequences and their base or None.

        The base is the sequence to copy the first elements from. The new sequences list them already; call `begin` once
        they were copied.

        usable:  the number of first elements that can be used, given the number that a sequence holds
        lengths: most tokens of each sequence, those that are copied included

        Raises AnswerTooLargeError if there can never be as many cells, and the errors of `limit`.
        """
        ticket = object()
        if max(lengths) > self.num_cells:
            raise AnswerTooLargeError(
                f"prompt and answer have up to {max(lengths)} tokens, and llama.cpp's context holds {self.num_cells}; "
                f"ask for a shorter answer (max_tokens) or fewer passages (k), or give "
                f"engine='llama.cpp:n_ctx={max(lengths)}'"
            )
        with self._changed:
            self._queue.append(ticket)
            try:
                while True:
                    base, known = self._best(elements, usable)
                    wanted = sum(lengths) - known * len(lengths)
                    is_next = self._queue[0] is ticket and not self._growing
                    if is_next and self._has_room(wanted, len(lengths), base):
                        break
                    limit.check()
                    self._changed.wait(limit.poll_s())
                limit.check()
                found = [self._new(base, known, length - known) for length in lengths]
                if base is not None:
                    base.pins += 1
                return found, base
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def begin(self, found: Iterable[CellSequence], base: CellSequence | None) -> None:
        """Record that the base's tokens are in the sequences now."""
        with self._changed:
            for sequence in found:
                sequence.is_known = True
            if base is not None:
                base.pins -= 1
                if base not in self._active and base not in self._kept:
                    self._remove(base)
            self._changed.notify_all()

    def extend(self, sequence: CellSequence, elements: Sequence[int]) -> None:
        """Record that a sequence holds further tokens, in cells that were reserved for it."""
        with self._changed:
            sequence.cells += [next(self._names) for _ in elements]
            sequence.elements += elements
            sequence.reserved -= len(elements)

    def shorten(self, sequence: CellSequence, length: int) -> None:
        """Record that a sequence holds its first `length` tokens alone."""
        with self._changed:
            sequence.reserved += len(sequence.elements) - length
            del sequence.elements[length:], sequence.cells[length:]

    def grow(self, sequence: CellSequence, num_tokens: int, limit: Limit) -> None:
        """Wait for further cells. Growing answers have priority over new ones.

        Raises AnswerTooLargeError if every answer in progress waits for cells, and the errors of `limit`.
        """
        with self._changed:
            self._growing += 1
            try:
                while not self._has_room(num_tokens, 0, None):
                    if self._growing >= len(self._active):
                        raise AnswerTooLargeError(
                            f"the answers in progress fill llama.cpp's context of {self.num_cells} tokens; limit them "
                            f"(max_tokens), or give engine='llama.cpp:n_ctx={2 * self.num_cells}'"
                        )
                    limit.check()
                    self._changed.wait(limit.poll_s())
                sequence.reserved += num_tokens
            finally:
                self._growing -= 1
                self._changed.notify_all()

    def release(self, sequence: CellSequence, *, keep: bool) -> None:
        """End a sequence, and keep its tokens for later prompts if `keep` is set and no document was deleted since."""
        with self._changed:
            self._active.remove(sequence)
            sequence.reserved = 0
            if keep and sequence.generation == self._generation and sequence.elements:
                self._kept.append(sequence)
            elif not sequence.pins:
                self._remove(sequence)
            self._changed.notify_all()

    def forget(self) -> None:
        """Drop all kept sequences. Sequences in use are neither copied from now on nor kept later."""
        with self._changed:
            self._generation += 1
            kept, self._kept = self._kept, []
            for sequence in kept:
                if not sequence.pins:
                    self._remove(sequence)
            self._changed.notify_all()

    @property
    def kept_tokens(self) -> int:
        with self._changed:
            return _num_cells(self._kept)

    # Everything below runs under the lock.

    def _best(self, elements: Sequence[int], usable: Callable[[int], int]) -> tuple[CellSequence | None, int]:
        """Return the sequence that holds most of the first elements, and how many."""
        best, most = None, 0
        for sequence in (*self._active, *self._kept):
            if sequence.is_known and sequence.generation == self._generation:
                known = usable(min(_common(sequence.elements, elements), len(elements) - 1))
                if known > most:
                    best, most = sequence, known
        if best in self._kept:
            self._kept.remove(best)
            self._kept.append(best)
        return best, most

    def _has_room(self, num_cells: int, num_sequences: int, base: CellSequence | None) -> bool:
        """Return whether there is room, after dropping kept sequences if necessary."""
        idle = [one for one in self._kept if one is not base and not one.pins]
        while num_sequences > len(self._free) or num_cells > self._num_free():
            if not idle:
                return False
            self._kept.remove(idle[0])
            self._remove(idle.pop(0))
        return True

    def _num_free(self) -> int:
        return self.num_cells - _num_cells([*self._active, *self._kept]) - sum(one.reserved for one in self._active)

    def _new(self, base: CellSequence | None, known: int, reserved: int) -> CellSequence:
        sequence = CellSequence(self._free.pop(0), self._undo, reserved=reserved, generation=self._generation)
        if base is not None:
            sequence.elements, sequence.cells = base.elements[:known], base.cells[:known]
        self._active.append(sequence)
        return sequence

    def _remove(self, sequence: CellSequence) -> None:
        self.removed.append(sequence.number)
        self._free.append(sequence.number)


def _num_cells(sequences: Iterable[CellSequence]) -> int:
    return len(set().union(*(one.cells for one in sequences)))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of first elements that both have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
