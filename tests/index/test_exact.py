"""Exact search over vectors in memory against sorting every score; ties, blocks, few and many."""

import numpy as np
import pytest

from whiten_index.index import exact
from whiten_index.index.exact import exact_neighbours, exact_search


def by_sorting(scores: np.ndarray, count: int) -> np.ndarray:
    return np.lexsort((np.arange(len(scores)), -scores))[:count]


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    # Products of small integers have no rounding, so that the truth has the same ties.
    return np.random.default_rng(0).integers(-3, 4, (3000, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    return np.random.default_rng(1).integers(-3, 4, (9, 6)).astype(np.float32)


@pytest.mark.parametrize("held", [1 << 24, 4000, 100, 1])
@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("among", [None, "few", "one", "half", "a run", "every"])
def test_exact_search_is_a_full_sort(
    monkeypatch: pytest.MonkeyPatch,
    vectors: np.ndarray,
    queries: np.ndarray,
    among: str | None,
    count: int,
    held: int,
) -> None:
    if held == 1:
        vectors = vectors[:60]
    monkeypatch.setattr(exact, "_HELD", held)
    every = np.arange(len(vectors))
    rows = {
        None: every,
        "every": every,
        "few": every[3::13],
        "one": every[41:42],
        "half": every[::2],
        "a run": every[7:29],
    }[among]
    scores, found = exact_search(
        vectors, queries[:count], 50, among=None if among is None else rows
    )
    for query, mine, numbers in zip(queries, scores, found, strict=False):
        truth = vectors[rows] @ query
        best = by_sorting(truth, 50)
        assert numbers.tolist() == rows[best].tolist()
        assert mine.tolist() == truth[best].tolist()


@pytest.mark.parametrize("block", [1, 7, 500, 3000])
def test_neighbours_do_not_depend_on_blocks(
    vectors: np.ndarray, queries: np.ndarray, block: int
) -> None:
    blocks = (vectors[start : start + block] for start in range(0, 3000, block))
    scores, rows = exact_neighbours(blocks, queries, 10)
    every = queries @ vectors.T
    np.testing.assert_array_equal(scores, -np.sort(-every, axis=1)[:, :10])
    np.testing.assert_array_equal(np.take_along_axis(every, rows, axis=1), scores)
    assert all(len(set(near)) == 10 for near in rows.tolist())


def test_fewer_rows_than_neighbours_are_filled_up(vectors: np.ndarray) -> None:
    scores, rows = exact_neighbours([vectors[:3]], vectors[:2], 5)
    assert set(rows[:, :3].ravel()) == {0, 1, 2}
    assert (rows[:, 3:] == -1).all()
    assert np.isneginf(scores[:, 3:]).all()
