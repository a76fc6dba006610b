"""Settings of tests that take random input: some in every run, 100,000 in `scripts/test --all`."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EACH = 10
"""Inputs of an example: the first is drawn, the others are random changes of it, as drawing takes most of the time."""
counts = pytest.mark.parametrize(
    "count", [1000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
"""Parametrises a test by its number of inputs."""


def inputs(count: int) -> Callable[[Any], Any]:
    """Run a test of `given` with so many inputs, the same in every short run. An example of over 5 s fails."""
    short, checks = count <= 1000, list(HealthCheck)
    examples = max(10, count // EACH)
    return settings(
        max_examples=examples, deadline=5000, database=None, derandomize=short, suppress_health_check=checks
    )


def series(values: st.SearchStrategy[Any], change: Callable[[Any, Random], Any]) -> st.SearchStrategy[list[Any]]:
    """Lists of `EACH` inputs: a value, and random changes of it."""
    return st.tuples(values, st.integers(0, 1 << 32)).map(
        lambda drawn: [drawn[0], *(change(drawn[0], Random(drawn[1] + rank)) for rank in range(1, EACH))]
    )


def json_values(names: list[str], texts: list[str]) -> st.SearchStrategy[Any]:
    """JSON in which these names and texts are frequent; numbers are small, or beyond what programs keep."""
    words = st.sampled_from(texts) | st.text(max_size=12)
    numbers = st.integers(-3, 20) | st.sampled_from([2**31, 2**63, -(2**63), 10**30]) | st.floats(width=32)
    leaves = st.none() | st.booleans() | numbers | words
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(names) | st.text(max_size=4), inner, max_size=5)
        ),
        max_leaves=12,
    )


EXTREMES = [None, True, "", "\0", "\ud83d", "x" * 5000, 0, -1, 2**63, 1e308, float("nan"), [], {}, [[[[]]]]]


def changed_json(value: Any, random: Random, names: list[str]) -> Any:
    """JSON with some of its parts replaced by others of it or by extremes, left out, repeated or renamed."""
    parts: list[Any] = [*EXTREMES]

    def collect(one: Any) -> None:
        parts.append(one)
        for inner in one.values() if isinstance(one, dict) else one if isinstance(one, list) else ():
            collect(inner)

    def change(one: Any) -> Any:
        if random.random() < 0.1:
            return random.choice(parts)
        if isinstance(one, list):
            return [change(inner) for inner in one if random.random() > 0.1] * random.choice((1, 1, 1, 2))
        if isinstance(one, dict):
            kept = [(key, change(inner)) for key, inner in one.items() if random.random() > 0.1]
            return {random.choice(names) if random.random() < 0.1 else key: inner for key, inner in kept}
        return one

    collect(value)
    return change(value)


def changed_bytes(data: bytes, random: Random) -> bytes:
    """The bytes with up to eight changes: bytes replaced, pieces cut, repeated or put in."""
    edits = [
        (random.randrange(4), random.randrange(1 << 20), random.randrange(65), random.randbytes(random.randrange(17)))
        for _ in range(random.randint(1, 8))
    ]
    return _edited(data, edits)


def mutated(seed: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with up to eight changes, drawn."""
    edit = st.tuples(st.integers(0, 3), st.integers(0, 1 << 20), st.integers(0, 64), st.binary(max_size=16))
    return st.lists(edit, max_size=8).map(lambda edits: _edited(seed, edits))


def _edited(data: bytes, edits: list[tuple[int, int, int, bytes]]) -> bytes:
    for kind, at, length, new in edits:
        start = at % (len(data) + 1)
        stop = min(len(data), start + length)
        middle = (new, b"", data[start:stop] * 2, data[start:stop] + new)[kind]
        data = data[:start] + middle + data[stop:]
    return data
