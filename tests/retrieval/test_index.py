"""VectorIndex against NumPy brute force, and its file against every kind of damage."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from waiting import beside

from ragcache.errors import ConfigError, DamagedIndexError
from ragcache.retrieval.mmr import maximal_marginal_relevance
from ragcache.retrieval.vector_index import VectorIndex

DIMENSION = 4
KINDS = ["flat", "hnsw"]


# Small whole numbers: float32 sums are exact, so equal scores are truly equal and ties are common.
whole = st.integers(-3, 3).map(float)
matrices = st.integers(0, 30).flatmap(lambda n: hnp.arrays(np.float32, (n, DIMENSION), elements=whole))


def filled(kind: str, vectors: np.ndarray, first_id: int = 100) -> tuple[VectorIndex, dict[int, np.ndarray]]:
    index = VectorIndex(DIMENSION, kind=kind, embedder="e")
    ids = [first_id + 7 * row for row in range(len(vectors))]
    index.add(ids, vectors)
    return index, dict(zip(ids, vectors, strict=True))


def assert_is_top_k(result, rows: dict[int, np.ndarray], query: np.ndarray, k: int) -> None:
    """The result's scores are the k best of brute force, and every id has the score it is listed with."""
    best = sorted((float(row @ query) for row in rows.values()), reverse=True)[:k]
    assert result.scores.tolist() == best
    assert [float(rows[i] @ query) for i in result.ids.tolist()] == best
    assert len(set(result.ids.tolist())) == len(best)
    listed = list(zip((-result.scores).tolist(), result.ids.tolist(), strict=True))
    assert listed == sorted(listed)


@settings(max_examples=150, deadline=None)
@given(matrices, hnp.arrays(np.float32, DIMENSION, elements=whole), st.integers(1, 40), st.data())
def test_flat_equals_brute_force_after_removals_and_under_a_filter(vectors, query, k, data):
    index, rows = filled("flat", vectors)
    gone = data.draw(st.sets(st.sampled_from(sorted(rows)))) if rows else set()
    assert index.remove(gone | {1}) == len(gone)
    for vector_id in gone:
        del rows[vector_id]
    assert_is_top_k(index.search(query, k), rows, query, k)
    allowed = data.draw(st.sets(st.sampled_from(sorted(rows)))) | {2, *gone} if rows else {2}
    kept = {i: row for i, row in rows.items() if i in allowed}
    assert_is_top_k(index.search(query, k, allowed), kept, query, k)


@settings(max_examples=60, deadline=None)
@given(matrices, hnp.arrays(np.float32, DIMENSION, elements=whole), st.integers(1, 40), st.data())
def test_hnsw_returns_exactly_k_live_allowed_ids_with_their_true_scores(vectors, query, k, data):
    index, rows = filled("hnsw", vectors)
    gone = data.draw(st.sets(st.sampled_from(sorted(rows)))) if rows else set()
    index.remove(gone)
    allowed = (data.draw(st.sets(st.sampled_from(sorted(rows)))) if rows else set()) | {3}
    result = index.search(query, k, allowed)
    eligible = (set(rows) - gone) & allowed
    assert len(result.ids) == min(k, len(eligible))
    assert set(result.ids.tolist()) <= eligible
    assert [float(rows[i] @ query) for i in result.ids.tolist()] == result.scores.tolist()
    assert result.scores.tolist() == sorted(result.scores.tolist(), reverse=True)


def unit_rows(count: int, dimension: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_hnsw_finds_nearly_all_true_neighbours_before_and_after_removals():
    rows = unit_rows(2000, 32)
    index = VectorIndex(32, kind="hnsw")
    index.add(np.arange(2000), rows)
    for removed in (0, 300):
        index.remove(range(removed))
        hits = 0
        for query in unit_rows(50, 32, seed=1):
            true = set((np.argsort(-(rows[removed:] @ query))[:10] + removed).tolist())
            hits += len(true & set(index.search(query, 10).ids.tolist()))
        assert hits >= 0.97 * 50 * 10


def test_hnsw_keeps_tombstones_until_a_quarter_is_gone_and_then_rebuilds():
    index = VectorIndex(8, kind="hnsw")
    rows = unit_rows(100, 8)
    index.add(np.arange(100), rows)
    index.remove(range(25))
    assert index._index.ntotal == 100
    assert not set(range(25)) & set(index.search(rows[3], 100).ids.tolist())
    index.remove([25])
    assert index._index.ntotal == 74
    assert index.ids == frozenset(range(26, 100))
    np.testing.assert_array_equal(index.vectors_present(np.array([26, 99]))[1], rows[[26, 99]])


def test_hnsw_takes_an_id_back_that_it_had_removed():
    index = VectorIndex(8, kind="hnsw")
    rows = unit_rows(20, 8)
    index.add(np.arange(20), rows)
    index.remove([4])
    index.add([4], rows[5:6])
    np.testing.assert_array_equal(index.vectors_present(np.array([4]))[1], rows[5:6])
    assert sorted(index.search(rows[5], 20).ids.tolist()) == list(range(20))


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_keep_everything(kind, tmp_path):
    rows = unit_rows(60, 8)
    index = VectorIndex(8, kind=kind, embedder="some/model")
    index.add(np.arange(60), rows)
    index.remove([7, 8])
    index.generation = 41
    index.save(tmp_path / "index.faiss")
    loaded = VectorIndex.load(tmp_path / "index.faiss")
    assert (loaded.kind, loaded.embedder, loaded.generation, loaded.ids) == (kind, "some/model", 41, index.ids)
    for query in unit_rows(5, 8, seed=2):
        assert loaded.search(query, 9).ids.tolist() == index.search(query, 9).ids.tolist()
    loaded.add([7], rows[7:8])
    loaded.remove([9])
    assert loaded.ids == (index.ids | {7}) - {9}
    assert [p.name for p in tmp_path.iterdir()] == ["index.faiss"]


def test_an_empty_index_can_be_saved_and_searched(tmp_path):
    VectorIndex(8).save(tmp_path / "i")
    loaded = VectorIndex.load(tmp_path / "i")
    assert len(loaded) == 0
    assert loaded.search(np.ones(8, np.float32), 3).ids.tolist() == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_byte_and_every_cut_is_refused(kind, tmp_path):
    path = tmp_path / "index.faiss"
    index = VectorIndex(8, kind=kind, embedder="m")
    index.add(np.arange(12), unit_rows(12, 8))
    index.save(path)
    good = path.read_bytes()
    random = np.random.default_rng(5)
    damaged = [good + b"\0", *(good[:length] for length in (0, 1, 8, 31, 32, 40, *random.integers(0, len(good), 50)))]
    for offset in {*range(60), *random.integers(0, len(good), 200).tolist(), len(good) - 1}:
        damaged.append(bytearray(good))
        damaged[-1][offset] ^= 1 << int(random.integers(8))
    for bad in damaged:
        path.write_bytes(bad)
        with pytest.raises(DamagedIndexError, match=r"index\.faiss"):
            VectorIndex.load(path)
    path.unlink()
    with pytest.raises(DamagedIndexError):
        VectorIndex.load(path)


def test_a_killed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "index.faiss"
    old = VectorIndex(8)
    old.add(np.arange(3), unit_rows(3, 8))
    old.save(path)
    new = VectorIndex(8)
    new.add(np.arange(50), unit_rows(50, 8))
    child = os.fork()
    if child == 0:
        os.replace = lambda *_args, **_options: os._exit(9)
        new.save(path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(tmp_path.iterdir())) == 2
    assert VectorIndex.load(path).ids == frozenset(range(3))
    old.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["index.faiss"]


def test_wrong_arguments_are_refused_and_change_nothing():
    index = VectorIndex(4)
    index.add([1, 2], np.eye(4, dtype=np.float32)[:2])
    one, two = np.ones(4, np.float32), np.ones((2, 4), np.float32)
    for call, words in (
        (lambda: index.search(one, 0), "k is 0"),
        (lambda: index.search(one, -1), "k is -1"),
        (lambda: index.search(np.ones(5, np.float32), 1), "shape"),
        (lambda: index.add([3], np.full((1, 4), np.nan, np.float32)), "NaN"),
        (lambda: index.add([3, 2], two), "already"),
        (lambda: index.add([3, 3], two), "twice"),
        (lambda: index.add([3, -1], two), "below 0"),
        (lambda: VectorIndex(4, kind="annoy"), "annoy"),
        (lambda: VectorIndex(0), "dimension"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()
    rows, found = index.vectors_present(np.array([3, 2, 9]))
    assert (rows.tolist(), found.tolist()) == ([1], [[0, 1, 0, 0]])
    assert index.ids == frozenset({1, 2})
    assert len(index.search(one, 1000).ids) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_readers_beside_a_writer_see_only_whole_states(kind):
    """Ids come and go in pairs with the same vector: a reader sees both of a pair or none."""
    index = VectorIndex(8, kind=kind)
    rows = unit_rows(40, 8)

    def read() -> None:
        found = set(index.search(rows[0], 100).ids.tolist())
        assert {i ^ 1 for i in found} == found

    with beside(read, read, read):
        for pair in range(40):
            index.add([2 * pair, 2 * pair + 1], rows[[pair, pair]])
            if pair % 3 == 2:
                index.remove([2 * (pair - 1), 2 * (pair - 1) + 1])


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 12).flatmap(lambda n: hnp.arrays(np.float32, (n, 3), elements=whole)),
    st.integers(1, 14),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)
def test_mmr_chooses_what_its_definition_says(vectors, k, weight):
    query = np.array([1, 2, -1], np.float32)
    scores = vectors @ query
    chosen = maximal_marginal_relevance(scores, vectors, k, weight)
    assert len(chosen) == len(set(chosen)) == min(k, len(vectors))
    for step, picked in enumerate(chosen):
        before, left = chosen[:step], [i for i in range(len(vectors)) if i not in chosen[:step]]

        def value(i: int, before: list[int] = before) -> float:
            if not before:
                return float(scores[i])
            return weight * float(scores[i]) - (1 - weight) * max(float(vectors[i] @ vectors[j]) for j in before)

        assert picked == max(left, key=lambda i: (value(i), -i))
