"""A trace as arrays: recorded by a store, or generated."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import ConfigError, TraceError, check_least
from ragcache.store.trace import Access

Ints = NDArray[np.int64]
LARGEST = 1 << 40  # bytes or tokens of one block: beyond it a line is no measurement, and sums would overflow


@dataclass(frozen=True, eq=False)
class Accesses:
    """blocks:     [accesses], the number of the block that was asked for, requests after one another
    starts:     [requests + 1], where each request begins in `blocks`
    num_bytes, num_tokens: [number of blocks]
    never_read: blocks of the corpus that no request asks for, and that have no number
    """

    blocks: Ints
    starts: Ints
    num_bytes: Ints
    num_tokens: Ints
    never_read: int = 0

    @classmethod
    def of(
        cls, requests: Collection[Sequence[int]], num_bytes: Ints, num_tokens: Ints, never_read: int = 0
    ) -> Accesses:
        """requests: the blocks of each."""
        blocks = np.array([block for request in requests for block in request], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum([len(request) for request in requests])]).astype(np.int64)
        return cls(blocks, starts, num_bytes, num_tokens, never_read)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def requests(self) -> int:
        return len(self.starts) - 1

    @property
    def equal_sizes(self) -> bool:
        return len(self.num_bytes) == 0 or bool((self.num_bytes == self.num_bytes[0]).all())


def recorded(path: Path) -> Accesses:
    """A file that a store wrote. Raises TraceError naming the line that is wrong, or the file when it is empty."""
    found = from_accesses(read_trace(path))
    if not len(found):
        raise TraceError(path, "there is no access in it")
    return found


def read_trace(path: Path) -> Iterator[Access]:
    """The accesses of a file, in its order. Raises TraceError naming the line that is none, and why."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _access(path, number, line)
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error})") from error


def _access(path: Path, number: int, line: bytes) -> Access:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise TraceError(path, f"not UTF-8 ({error.reason})", number) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(path, f"not JSON ({error})", number) from error
    if not isinstance(fields, dict):
        raise TraceError(path, "not a JSON object", number)
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
    """Requests in the order in which they appear first; lines of requests that ran at once may be mixed. A block's size
    is the last one that was seen."""
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


@dataclass(frozen=True)
class Workload:
    """A stream of requests, the same for the same seed.

    requests, k:  so many requests, each for k different blocks
    blocks:       in the corpus
    zipf:         the block of popularity rank r is drawn in proportion to r ** -zipf
    drift:        after every so many requests the hottest block becomes the coldest and all others move up one rank;
                  0: popularity stays
    session:      requests in a session, on average (geometric), 16 sessions running at once; 1: none
    sticky:       chance that a request takes a block from the one before it in its session
    tokens:       of a block, from the least to the most, evenly
    bytes_per_token: of a block
    bytes_per_block: beside them, however many tokens it has: states of recurrent layers

    Raises ConfigError naming the option.
    """

    requests: int = 200_000
    k: int = 5
    blocks: int = 100_000
    zipf: float = 0.8
    drift: int = 0
    session: float = 1.0
    sticky: float = 0.5
    tokens: tuple[int, int] = (256, 256)
    bytes_per_token: int = 131072
    bytes_per_block: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for option, value, least in (
            ("requests", self.requests, 1),
            ("k", self.k, 1),
            ("blocks", self.blocks, 1),
            ("drift", self.drift, 0),
            ("session", self.session, 1),
            ("bytes-per-token", self.bytes_per_token, 1),
            ("seed", self.seed, 0),
        ):
            check_least(f"--{option}", value, least)
        if not 0 <= self.zipf <= 10:
            raise ConfigError(f"--zipf is {self.zipf:g}; give an exponent from 0 (all alike) to 10")
        if not 0 <= self.sticky <= 1:
            raise ConfigError(f"--sticky is {self.sticky:g}; give a chance from 0 to 1")
        if not 1 <= self.tokens[0] <= self.tokens[1]:
            raise ConfigError(f"--chunk-tokens is {self.tokens[0]}-{self.tokens[1]}; give 1 or more, the least first")


SESSIONS_AT_ONCE = 16
DRAWS = 3  # a block drawn twice in a request is left out; so many draws for each that is wanted


def generated(workload: Workload) -> Accesses:
    """Draw the workload's accesses. A request has fewer than k blocks where popularity is too steep for k.

    Time and memory grow with the requests alone: of more than a million blocks only those are numbered that are drawn.
    """
    random = np.random.default_rng(workload.seed)
    few = workload.blocks <= EXACT
    num_tokens = _lengths(workload, workload.blocks, random) if few else np.empty(0, np.int64)
    drawn = _drawn_ranks(workload, random.random(workload.requests * workload.k * DRAWS))
    if workload.drift:
        drawn += np.repeat(np.arange(workload.requests) // workload.drift, workload.k * DRAWS)
    drawn %= workload.blocks
    if not few:
        read, drawn = np.unique(drawn, return_inverse=True)
        num_tokens = _lengths(workload, len(read), random)
    # Popularity is not to follow the blocks' numbers, by which a store is filled.
    drawn = random.permutation(len(num_tokens))[drawn]
    requests = _requests(workload, drawn.reshape(workload.requests, -1).tolist(), random)
    never_read = workload.blocks - len(num_tokens)
    return Accesses.of(
        requests, num_tokens * workload.bytes_per_token + workload.bytes_per_block, num_tokens, never_read
    )


def _lengths(workload: Workload, blocks: int, random: np.random.Generator) -> Ints:
    return random.integers(workload.tokens[0], workload.tokens[1] + 1, blocks)


def _drawn_ranks(workload: Workload, shares: NDArray[np.float64]) -> Ints:
    """Ranks, from 0, below which the shares of all popularity lie. Beyond a million by the integral of r ** -zipf over
    r - 1/2 ... r + 1/2, which there is its value."""
    head = min(workload.blocks, EXACT)
    cumulated = np.cumsum(np.arange(1, head + 1, dtype=np.float64) ** -workload.zipf)
    first, last, power = head + 0.5, workload.blocks + 0.5, 1 - workload.zipf
    tail = np.log(last / first) if power == 0 else (last**power - first**power) / power
    mass = shares * (cumulated[-1] + tail)
    ranks = np.searchsorted(cumulated, mass, side="right").astype(np.int64)
    beyond = mass[mass >= cumulated[-1]] - cumulated[-1]
    if len(beyond) and workload.blocks > head:
        at = first * np.exp(beyond) if power == 0 else (first**power + power * beyond) ** (1 / power)
        ranks[mass >= cumulated[-1]] = np.rint(at).astype(np.int64) - 1
    drawn: Ints = np.minimum(ranks, workload.blocks - 1)
    return drawn


def _requests(workload: Workload, fresh: list[list[int]], random: np.random.Generator) -> list[list[int]]:
    """Each request's different blocks, those that it takes over from its session first."""
    found = []
    before: list[list[int]] = [[] for _ in range(SESSIONS_AT_ONCE)]
    chosen: list[Any] = random.integers(0, SESSIONS_AT_ONCE, workload.requests).tolist()
    ends: list[Any] = (random.random(workload.requests) < 1 / workload.session).tolist()
    kept: list[Any] = (random.random((workload.requests, workload.k)) < workload.sticky).tolist()
    for draws, session, end, keep in zip(fresh, chosen, ends, kept, strict=True):
        taken = [block for block, stays in zip(before[session], keep, strict=False) if stays]
        request = list(dict.fromkeys(taken + draws))[: workload.k]
        before[session] = [] if end else request
        found.append(request)
    return found


# Zipf's law: the chunk of rank r is asked for in proportion to r ** -exponent.


EXACT = 1 << 20


def zipf_mass(exponent: float, ranks: float) -> float:
    """Sum of r ** -exponent for r = 1 ... ranks; beyond a million by its integral, with the trapezium's correction."""
    whole = int(ranks)
    head = min(whole, EXACT)
    total = float(np.sum(np.arange(1, head + 1, dtype=np.float64) ** -exponent))
    if whole <= EXACT:
        return total
    low, high = float(EXACT), float(whole)
    if exponent == 1:
        tail = float(np.log(high / low))
    else:
        tail = (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
    return total + tail + float(high**-exponent - low**-exponent) / 2


def ranks_above(exponent: float, ranks: int, least: float, uses: float) -> int:
    """How many of the chunks are asked for at least `least` times, when all together are `uses` times."""
    if least <= 0:
        return ranks
    first = uses / zipf_mass(exponent, ranks)  # uses of the chunk of rank 1
    if first < least:
        return 0
    if exponent == 0:
        return ranks
    # The floor of a number that is whole but for rounding must not lose a rank.
    reached = np.exp(min(np.log(first / least) / exponent, np.log(ranks) + 1))
    return min(ranks, int(reached * (1 + 1e-12)))
