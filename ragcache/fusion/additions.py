"""Tokens that a method puts between a prompt's own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Additions:
    """Where a method adds token ids. A prompt without chunks gets none of them.

    behind_prefix: behind the prefix, and part of its block
    markers:       in front of and behind every chunk, and part of its block
    links:         behind the chunk of that rank, one tuple a chunk; empty: behind none
    behind_chunks: in front of the suffix
    reserved:      ids that no answer may hold
    max_chunks:    chunks that the method can read; None: any number
    """

    behind_prefix: tuple[int, ...] = ()
    markers: tuple[int, int] | None = None
    links: tuple[tuple[int, ...], ...] = ()
    behind_chunks: tuple[int, ...] = ()
    reserved: frozenset[int] = frozenset()
    max_chunks: int | None = None

    def ids(self, num_chunks: int) -> list[int]:
        """All ids added to a prompt of so many chunks."""
        if not num_chunks:
            return []
        links = [id for behind_one in self.links[:num_chunks] for id in behind_one]
        return [*self.behind_prefix, *(self.markers or ()) * num_chunks, *links, *self.behind_chunks]


NO_ADDITIONS = Additions()
