"""Recipes by name: keys of blocks that exist stay as they are, whatever recipes learn."""

import pytest

from ragcache.errors import ConfigError
from ragcache.kv.block_key import Recipe, block_key

# sha256sum of the canonical JSON, written by hand; all but the last three are of the format before packets.
KEYS = [
    (Recipe(), (), "", "ff78671a07e90ddbe205ee5a162fa322af794d9b3421e924f9868150f925da8b"),
    (Recipe(markers=(5, 6)), (), "", "0e888fec7b2f3ea3759e69d1f06c74a375756e74875128c109e6c569b98244f9"),
    (
        Recipe("prefix", markers=(5, 6)),
        (9,),
        "salt",
        "b7a35323293b0ff13d99787343e3230247384607a6524e269d6cf615d1860892",
    ),
    (Recipe(kept=0.25, task="names"), (), "", "6257beef17cff74c95633cd854ecc8cb0d60a2ca40e331b010db3c6712af0505"),
    (Recipe(markers=((5, 6), (7,))), (), "", "c69ad8a33cbf78733bc2ab1d2fd58b131002cb7eb2a13e17722a8a178edf01e3"),
]


@pytest.mark.parametrize(("recipe", "prefix", "tenant", "key"), KEYS)
def test_keys_are_these_digests(recipe, prefix, tenant, key):
    assert block_key("model", recipe, prefix, [1, 2], tenant) == key


def test_one_marker_on_each_side_is_a_pair_of_ids():
    assert Recipe(markers=(5, 6)) == Recipe(markers=((5,), (6,))) == Recipe(markers=[[5], [6]])
    assert Recipe(markers=((), ())) == Recipe()
    assert Recipe(markers=((), (6,))) != Recipe()


@pytest.mark.parametrize("markers", [(5, 6), ((5, 6), (7,)), ((), (7, 8)), None])
def test_a_recipe_survives_json(markers):
    recipe = Recipe("prefix", markers=markers)
    assert Recipe.from_json(recipe.to_json()) == recipe


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
