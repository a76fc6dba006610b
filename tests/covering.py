"""Few cases of a wide product: those that the commit run keeps, the others marked slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[int, Any, int, Any]


def covering(
    *axes: Iterable[Any],
    together: Iterable[tuple[int, int]] = (),
    where: Callable[..., bool] = lambda *case: True,
) -> list[Any]:
    """Every case of the product for `parametrize`. Unmarked are few that have each value of each axis, and each pair of
    values of two axes that work `together` (axes by their places); the others are slow."""
    cases = [case for case in product(*map(list, axes)) if where(*case)]
    places = range(len(axes))
    pairs = {(place, place) for place in places} | set(together)

    def covered(case: tuple[Any, ...]) -> set[Pair]:
        return {(one, repr(case[one]), two, repr(case[two])) for one, two in pairs}

    def new(case: tuple[Any, ...]) -> tuple[int, int]:
        """How much of what must be covered it adds, then how much that is as well, so that the others are mixed."""
        return len(covered(case) - met), len(mixed(case) - met_by_chance)

    def mixed(case: tuple[Any, ...]) -> set[Pair]:
        return {(one, repr(case[one]), two, repr(case[two])) for one, two in combinations(places, 2)}

    met: set[Pair] = set()
    met_by_chance: set[Pair] = set()
    wanted = set().union(*map(covered, cases))
    kept: set[int] = set()
    while met != wanted:
        best = max(range(len(cases)), key=lambda number: (new(cases[number]), -number))
        kept.add(best)
        met |= covered(cases[best])
        met_by_chance |= mixed(cases[best])
    return [
        case if number in kept else pytest.param(*case, marks=pytest.mark.slow) for number, case in enumerate(cases)
    ]
