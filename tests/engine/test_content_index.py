"""The content index against a search token by token."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.engine.content_index import EDGE, WINDOW, ContentIndex


def inner(ids):
    """Tokens that have to stand in a prompt."""
    edge = min(EDGE, (len(ids) - WINDOW) // 2)
    return ids[edge : len(ids) - edge]


def searched(row, passages):
    """The same by comparing at every place: the longest of those that begin first."""
    found, at = [], 0
    while at < len(row):
        here = [
            (len(inner(ids)), name)
            for name, ids in passages.items()
            if len(ids) >= WINDOW and row[at : at + len(inner(ids))] == inner(ids)
        ]
        if here:
            length, name = max(here)
            found.append((at, at + length, name))
            at += length
        else:
            at += 1
    return found


def index_of(passages):
    index = ContentIndex()
    index.add(passages.items())
    return index


FEW = st.lists(st.integers(0, 2), max_size=20)


@settings(max_examples=300, deadline=None)
@given(passages=st.lists(FEW, max_size=6), order=st.lists(st.tuples(st.integers(0, 9), FEW), max_size=8))
def test_every_passage_is_found_where_it_stands_and_nowhere_else(passages, order):
    known = dict(enumerate(passages))
    row = [id for which, between in order for id in [*known.get(which, []), *between]]
    index = ContentIndex()
    for name, ids in known.items():  # in several batches, with looks between
        index.add([(name, ids)])
        index.find(row)
    assert [tuple(one) for one in index.find(row)] == searched(row, known)


def test_what_is_cleared_is_found_no_more():
    index = index_of({1: list(range(30))})
    assert len(index.find(range(40))) == len(index) == 1
    index.clear()
    assert index.find(range(40)) == []
    assert len(index) == 0


def test_a_saved_index_is_the_same_and_a_damaged_one_is_none(tmp_path):
    known = {name: list(range(name, name + 30)) for name in range(0, 400, 40)}
    file, row = tmp_path / "passages.npz", [*known[40], *known[0], *known[360]]
    index_of(known).save(file, 7)
    again = index_of({9: list(range(2000, 2040))})
    assert again.load(file) == 7
    assert again.find(row) == index_of(known).find(row)
    assert again.find(range(2000, 2040)) == []
    whole = file.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"PK" + whole[2:40], b"no zip"):
        file.write_bytes(damaged)
        assert again.load(file) is None
    np.savez(
        file, version=2, last=1, **{name: np.zeros(1) for name in ("anchors", "cores", "offsets", "lengths", "names")}
    )
    assert again.load(file) is None
    assert again.load(tmp_path / "none") is None
    assert len(again) == len(known)


def test_a_thousand_near_copies_are_told_apart():
    random = np.random.default_rng(0)
    copies = np.tile(random.integers(0, 50000, 200), (1000, 1))
    copies[np.arange(1000), random.integers(10, 190, 1000)] += np.arange(1000) + 1
    index = index_of(dict(enumerate(copies)))
    chosen = random.permutation(1000)[:60].tolist()
    row = np.concatenate([copies[name] for name in chosen])
    assert [one.name for one in index.find(row)] == chosen


def test_passages_of_one_token_and_of_none_cost_nothing():
    index = index_of({name: [7] * (name % WINDOW) for name in range(1000)})
    assert len(index) == 0
    assert index.find([7] * 16000) == []
    index.add((name, [7] * 300) for name in range(1000))
    assert all(one.end - one.start == 300 - 2 * EDGE for one in index.find([7] * 16000))
