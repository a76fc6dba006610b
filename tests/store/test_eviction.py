"""What every eviction policy keeps, and that each picks what its name says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.errors import ConfigError
from ragcache.store.eviction import ADMISSIONS, LRU, POLICIES, Entry, EvictionPolicy, get_policy

KEYS = st.sampled_from("abcdef")
OPERATIONS = st.lists(st.tuples(st.sampled_from(["insert", "touch", "remove", "evict"]), KEYS, st.integers(1, 100)))


def apply(policy: EvictionPolicy, held: dict[str, int], operation: tuple[str, str, int]) -> None:
    """Do one operation, as a tier would: `insert` only for keys that are not held."""
    name, key, size = operation
    if name == "insert" and key not in held:
        policy.insert(Entry(key, size, size))
        held[key] = size
    elif name == "touch":
        policy.touch(key)
    elif name in ("remove", "evict"):
        getattr(policy, name)(key)
        held.pop(key, None)


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("name", sorted(POLICIES))
@given(operations=OPERATIONS)
def test_victims_are_the_keys_held_each_once(name: str, admission: str, operations: list[tuple[str, str, int]]) -> None:
    policy, held = get_policy(name, admission), {}
    for operation in operations:
        apply(policy, held, operation)
        victims = list(policy.victims())
        assert sorted(victims) == sorted(held)
        assert list(policy.victims()) == victims, "asking for victims changes nothing"


@given(operations=OPERATIONS)
def test_lru_gives_up_the_key_whose_last_use_is_longest_ago(operations: list[tuple[str, str, int]]) -> None:
    policy, held = LRU(), {}
    last_use: dict[str, int] = {}
    for time, operation in enumerate(operations):
        name, key, _ = operation
        if key in held if name == "touch" else key not in held:
            last_use[key] = time
        apply(policy, held, operation)
    assert list(policy.victims()) == sorted(held, key=lambda key: last_use[key])


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_share_nothing(name: str) -> None:
    one, other = get_policy(name), get_policy(name)
    one.insert(Entry("a", 1, 1))
    assert list(other.victims()) == []


def test_unknown_policy_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'random'.*lru"):
        get_policy("random")


def test_unknown_admission_filter_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'bouncer'.*all, tinylfu"):
        get_policy("lru", "bouncer")
