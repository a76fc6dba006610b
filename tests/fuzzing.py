"""Settings of tests that take random input: some in every run, 100,000 in `scripts/test --all`."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

counts = pytest.mark.parametrize(
    "count", [200, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(0)])]
)
"""Parametrises a test by its number of inputs."""


def inputs(count: int) -> Callable[[Any], Any]:
    """Run a test of `given` with so many inputs, the same in every short run. One that takes over 5 s fails."""
    short, checks = count < 1000, list(HealthCheck)
    return settings(max_examples=count, deadline=5000, database=None, derandomize=short, suppress_health_check=checks)


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


def mutated(seed: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with up to eight changes: bytes replaced, pieces cut, repeated or put in."""

    def change(data: bytes, edits: list[tuple[int, int, int, bytes]]) -> bytes:
        for kind, at, length, new in edits:
            start = at % (len(data) + 1)
            stop = min(len(data), start + length)
            middle = (new, b"", data[start:stop] * 2, data[start:stop] + new)[kind]
            data = data[:start] + middle + data[stop:]
        return data

    edit = st.tuples(st.integers(0, 3), st.integers(0, 1 << 20), st.integers(0, 64), st.binary(max_size=16))
    return st.lists(edit, max_size=8).map(lambda edits: change(seed, edits))
