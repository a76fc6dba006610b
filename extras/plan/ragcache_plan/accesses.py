"""Accesses to blocks as arrays, from a log of requests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import TraceError
from ragcache_plan.logs import LoggedRequest, read_log

Ints = NDArray[np.int64]
BYTES_PER_TOKEN = 131072  # Llama-3.1-8B in bfloat16
REUSED = ("passage", "block")  # kinds of parts that are blocks of a store


@dataclass(frozen=True, eq=False)
class Accesses:
    """Accesses of requests.

    blocks:     [accesses], the number of the requested block, requests after one another
    starts:     [requests + 1], where each request begins in `blocks`
    num_bytes, num_tokens: [number of blocks]
    """

    blocks: Ints
    starts: Ints
    num_bytes: Ints
    num_tokens: Ints

    @classmethod
    def of(cls, requests: Collection[Sequence[int]], num_bytes: Ints, num_tokens: Ints) -> Accesses:
        """Make accesses from requests, each a sequence of blocks."""
        blocks = np.array([block for request in requests for block in request], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum([len(request) for request in requests])]).astype(np.int64)
        return cls(blocks, starts, num_bytes, num_tokens)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def requests(self) -> int:
        return len(self.starts) - 1

    @property
    def total_tokens(self) -> int:
        """Return the tokens of all accesses."""
        return int(self.num_tokens[self.blocks].sum())

    def room(self, tokens: int) -> int:
        """Return the bytes of this many tokens, by the blocks' mean bytes per token."""
        return round(tokens * int(self.num_bytes.sum()) / max(1, int(self.num_tokens.sum())))

    @property
    def equal_sizes(self) -> bool:
        return len(self.num_bytes) == 0 or bool((self.num_bytes == self.num_bytes[0]).all())


def recorded(path: Path, bytes_per_token: int = BYTES_PER_TOKEN) -> Accesses:
    """Return the accesses to passages in a log of requests. bytes_per_token: of KV

    Raises TraceError naming the line that is wrong, or the file if it has no access.
    """
    found = from_requests(read_log(path), bytes_per_token)
    if not len(found):
        raise TraceError(path, "there is no access in it")
    return found


def from_requests(requests: Iterable[LoggedRequest], bytes_per_token: int = BYTES_PER_TOKEN) -> Accesses:
    """Return accesses to the passages of each request, or to its blocks in Mooncake's format."""
    numbers: dict[str, int] = {}
    tokens: list[int] = []
    found: list[list[int]] = []
    for request in requests:
        found.append([])
        for part in request.parts:
            if part.kind in REUSED:
                number = numbers.setdefault(part.hash, len(numbers))
                if number == len(tokens):
                    tokens.append(part.num_tokens)
                found[-1].append(number)
    lengths = np.array(tokens, dtype=np.int64)
    return Accesses.of(found, lengths * bytes_per_token, lengths)
