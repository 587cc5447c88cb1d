"""Alignment against a double loop and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from whiten_index.evaluation.geometry_scores import alignment


def make_pairs(n=40, d=7, seed=0):
    rng = np.random.default_rng(seed)
    first = rng.normal(size=(n, d)) + 2
    return first, first + rng.normal(size=(n, d))


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
