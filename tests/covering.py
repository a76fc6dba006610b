"""Few cases of a wide product: those that the commit run keeps, the others marked slow."""

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[int, Any, int, Any]
LEFT_OUT = False
"""Whether the run that is starting leaves slow cases out: then they are not made, which saves their collection."""


def covering(
    *axes: Iterable[Any], together: Iterable[tuple[int, int]] = (), where: Callable[..., bool] = lambda *case: True
) -> list[Any]:
    """Every case of the product for `parametrize`. Unmarked are few that have each value of each axis, and each pair of
    values of two axes that work `together` (axes by their places); the others are slow."""
    cases = [case for case in product(*map(list, axes)) if where(*case)]
    places = range(len(axes))
    wanted = pairs_of(cases, {(place, place) for place in places} | set(together))
    mixed = pairs_of(cases, set(combinations(places, 2)))
    left: set[Pair] = set().union(*wanted)
    met_by_chance: set[Pair] = set()
    kept: set[int] = set()
    while left:
        # How much of what must be covered it adds, then how much that is as well, so that the others are mixed.
        best = max(range(len(cases)), key=lambda n: (len(wanted[n] & left), len(mixed[n] - met_by_chance), -n))
        kept.add(best)
        left -= wanted[best]
        met_by_chance |= mixed[best]
    if LEFT_OUT:
        return [cases[number] for number in sorted(kept)]
    return [
        case if number in kept else pytest.param(*case, marks=pytest.mark.slow) for number, case in enumerate(cases)
    ]


def few(kept: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Values for `parametrize`: those that the commit run keeps, and others, which are slow."""
    return [*kept, *([] if LEFT_OUT else [pytest.param(one, marks=pytest.mark.slow) for one in others])]


def pairs_of(cases: list[tuple[Any, ...]], pairs: set[tuple[int, int]]) -> list[set[Pair]]:
    """By case, its values at these pairs of places."""
    names = [[repr(value) for value in case] for case in cases]
    return [{(one, name[one], two, name[two]) for one, two in pairs} for name in names]
