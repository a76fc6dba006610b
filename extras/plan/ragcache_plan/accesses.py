"""Accesses to blocks as arrays, from a store's trace or from a log of requests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import TraceError
from ragcache.store.trace import Access
from ragcache_plan.logs import LoggedRequest, json_lines, read_log

Ints = NDArray[np.int64]
BYTES_PER_TOKEN = 131072  # Llama-3.1-8B in bfloat16
REUSED = ("passage", "block")  # kinds of parts that are blocks of a store
LARGEST = 1 << 40  # bytes or tokens of a block: beyond it a line is no measurement, and sums would overflow


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
        """Return the bytes of so many tokens, by the mean over the blocks."""
        return round(tokens * int(self.num_bytes.sum()) / max(1, int(self.num_tokens.sum())))

    @property
    def equal_sizes(self) -> bool:
        return len(self.num_bytes) == 0 or bool((self.num_bytes == self.num_bytes[0]).all())


def recorded(path: Path, bytes_per_token: int = BYTES_PER_TOKEN) -> Accesses:
    """Read a store's trace, or the passages of a log of requests, whose tokens have so many bytes each.

    Raises TraceError naming the line that is wrong, or the file if it is empty.
    """
    if path.is_dir() or "hash_ids" in next(json_lines(path), (0, {}))[1]:
        found = from_requests(read_log(path), bytes_per_token)
    else:
        found = from_accesses(read_trace(path))
    if not len(found):
        raise TraceError(path, "there is no access in it")
    return found


def read_trace(path: Path) -> Iterator[Access]:
    """Yield the accesses of a file, in its order. Raises TraceError naming the line that is not an access, and why."""
    for number, fields in json_lines(path):
        yield _access(path, number, fields)


def _access(path: Path, number: int, fields: dict[str, Any]) -> Access:
    try:
        texts = [fields[name] for name in ("request", "handle", "tier")]
        sizes = [fields[name] for name in ("bytes", "tokens")]
        at = fields["at"]
    except KeyError as error:
        raise TraceError(path, f"it has no {error.args[0]!r}", number) from error
    if not all(isinstance(text, str) and text for text in texts):
        raise TraceError(path, "'request', 'handle' and 'tier' are texts that are not empty", number)
    if not all(type(size) is int and 0 <= size <= LARGEST for size in sizes):
        raise TraceError(path, f"'bytes' and 'tokens' are whole numbers from 0 to {LARGEST:,}", number)
    if type(at) not in (int, float) or not abs(at) < float("inf"):
        raise TraceError(path, "'at' is a number of seconds", number)
    return Access(texts[0], texts[1], sizes[0], sizes[1], texts[2], float(at))


def from_accesses(accesses: Iterable[Access]) -> Accesses:
    """Return accesses with the requests in the order in which they first appear.

    Lines of requests that ran at once may be mixed. A block's size is the last size seen.
    """
    numbers: dict[str, int] = {}
    sizes: list[tuple[int, int]] = []
    requests: dict[str, list[int]] = {}
    for access in accesses:
        number = numbers.setdefault(access.handle, len(numbers))
        size = (access.num_bytes, access.num_tokens)
        if number == len(sizes):
            sizes.append(size)
        else:
            sizes[number] = size
        requests.setdefault(access.request, []).append(number)
    num_bytes, num_tokens = np.array(sizes, dtype=np.int64).reshape(-1, 2).T
    return Accesses.of(requests.values(), num_bytes, num_tokens)


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
