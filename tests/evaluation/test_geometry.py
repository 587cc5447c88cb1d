"""Geometry and alignment against closed forms and other implementations."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whiten_index.errors import ConfigError
from whiten_index.evaluation.geometry_scores import alignment, geometry, uniformity

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=15, deadline=None, derandomize=True, database=None)


def make_rows(seed=0, n=120, d=16, *, shift=1.0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) * np.geomspace(1, 1 / 30, d) + shift * rng.normal(size=d)


def units_of(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def pairs_of(rows):
    """Cosines and squared distances of all pairs of distinct rows, one by one."""
    units = units_of(rows)
    first, second = np.triu_indices(len(units), 1)
    cosines = np.array([a @ b for a, b in zip(units[first], units[second], strict=True)])
    return cosines, ((units[first] - units[second]) ** 2).sum(axis=1)


def published_isoscore(rows):
    """Steps 2 to 8 of Algorithm 1 of Rudman et al. (2022), on points (n, d)."""
    centred = rows - rows.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=True)
    d = rows.shape[1]
    diagonal = np.cov((centred @ directions.T).T).diagonal()
    scaled = np.sqrt(d) * diagonal / np.linalg.norm(diagonal)
    defect = np.linalg.norm(scaled - np.ones(d)) / np.sqrt(2 * (d - np.sqrt(d)))
    share = (d - defect**2 * (d - np.sqrt(d))) ** 2 / d**2
    return (d * share - 1) / (d - 1)


@quick
@given(seed=seeds, d=st.integers(2, 24), n=st.integers(3, 60))
def test_isotropy_follows_the_published_steps(seed, d, n):
    rows = make_rows(seed, n, d)
    assert geometry(rows)["isoscore"] == pytest.approx(published_isoscore(rows), abs=1e-9)


@quick
@given(seed=seeds, n=st.integers(3, 60), d=st.integers(1, 20), shift=st.sampled_from([0, 1, 30]))
def test_mean_cosine_and_uniformity_equal_brute_force(seed, n, d, shift):
    rows = make_rows(seed, n, d, shift=shift)
    cosines, distances = pairs_of(rows)
    assert geometry(rows)["mean_cosine"] == pytest.approx(cosines.mean(), abs=1e-12)
    assert uniformity(rows) == pytest.approx(np.log(np.exp(-2 * distances).mean()), abs=1e-12)


def test_zero_rows_are_left_out_and_counted():
    rows = make_rows()
    mixed = np.insert(rows, [0, 5, 5, 120], 0.0, axis=0)
    found = geometry(mixed)
    assert (found["rows"], found["zero_rows"]) == (120, 4)
    assert found == pytest.approx({**geometry(rows), "zero_rows": 4})


@pytest.mark.parametrize("measure", [geometry, uniformity])
def test_what_cannot_be_measured_is_said(measure):
    rows = make_rows()
    for bad in (np.nan, np.inf):
        with pytest.raises(ConfigError, match="hold NaN or infinity"):
            measure(np.where(np.eye(120, 16), bad, rows))
    with pytest.raises(ConfigError, match=r"takes \(n, d\) vectors; these have shape \(16,\)"):
        measure(rows[0])
    with pytest.raises(ConfigError, match="rows that are not zero, and there are 1 of 4"):
        measure(np.vstack([rows[:1], np.zeros((3, 16))]))
    with pytest.raises(ConfigError, match="there are 0 of 0"):
        measure(np.empty((0, 16)))


def make_pairs(seed=0):
    rng = np.random.default_rng(seed)
    first = rng.normal(size=(40, 7)) + 2
    return first, first + rng.normal(size=(40, 7))


def by_loops(first, second):
    """Sum of squared coordinates of the differences of unit rows, one by one."""
    total = 0.0
    for u, v in zip(first.tolist(), second.tolist(), strict=True):
        long_u, long_v = math.hypot(*u), math.hypot(*v)
        total += sum((a / long_u - b / long_v) ** 2 for a, b in zip(u, v, strict=True))
    return total / len(first)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_alignment_is_the_mean_squared_distance_of_unit_rows(dtype):
    first, second = (rows.astype(dtype) for rows in make_pairs())
    assert alignment(first, second) == pytest.approx(by_loops(first, second), rel=1e-12)


def test_pairs_with_a_row_of_zeros_are_left_out():
    first, second = make_pairs(seed=3)
    first[4], second[9] = 0, 0
    kept = np.setdiff1d(np.arange(len(first)), [4, 9])
    assert alignment(first, second) == pytest.approx(by_loops(first[kept], second[kept]))
