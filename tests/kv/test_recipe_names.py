"""Markers of recipes. Keys of blocks and what is written of recipes are held by tests/test_wire.py."""

import pytest

from ragcache.errors import ConfigError
from ragcache.kv.block_key import Recipe


def test_one_marker_on_each_side_is_a_pair_of_ids():
    assert Recipe(markers=(5, 6)) == Recipe(markers=((5,), (6,))) == Recipe(markers=[[5], [6]])
    assert Recipe(markers=((), ())) == Recipe()
    assert Recipe(markers=((), (6,))) != Recipe()


def test_what_a_block_holds_and_what_of_it_is_the_chunk():
    recipe = Recipe(markers=((5, 6), (7,)))
    assert recipe.marked([1, 2]) == [5, 6, 1, 2, 7]
    assert recipe.unmarked([5, 6, 1, 2, 7]) == [1, 2]
    assert Recipe().unmarked([1, 2]) == [1, 2]
    for other in ([1, 2], [5, 6, 7, 8], [6, 5, 1, 7], [5, 6], []):
        with pytest.raises(ConfigError, match="markers 5 to 6 and 7 does not begin"):
            recipe.unmarked(other)


@pytest.mark.parametrize("markers", [5, (5,), (5, 6, 7), (5, "6"), (5, True), ((5,), (1.5,)), "ab"])
def test_what_are_no_markers_is_named(markers):
    with pytest.raises(ConfigError, match="are no pair"):
        Recipe(markers=markers)
