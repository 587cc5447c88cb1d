"""Moments of one pass against a two-pass closed form in extended precision."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.moments import (
    assert_identical,
    distance,
    higher_by_definition,
    make_rows,
    quick,
    seeds,
    two_pass,
)
from whiten_index.errors import ConfigError
from whiten_index.whitening.moments import Moments


@pytest.mark.parametrize("ratio", [0, 1, 100, 1e4])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_covariance_is_that_of_the_definition_however_large_the_mean(ratio, dtype):
    rows = make_rows(3, 5000, 6, ratio=ratio).astype(dtype)  # more rows than one block holds
    count, mean, scatter = two_pass(rows)
    moments = Moments.of(rows)
    assert moments.count == count
    assert np.abs(moments.mean - mean).max() < 1e-15 * max(1, ratio)
    assert distance(moments.covariance(), scatter / (count - 1)) < 1e-12


@pytest.mark.parametrize("ratio", [0, 1, 100, 1e4])
def test_higher_moments_are_those_of_the_definition_however_large_the_mean(ratio):
    rows = make_rows(3, 5000, 6, ratio=ratio)
    moments = Moments.of(rows)
    cubic, quartic = higher_by_definition(rows)
    assert moments.quartic == pytest.approx(float(quartic), rel=1e-12)
    assert distance(moments.cubic, cubic) < 1e-11  # it is small: the rows are hardly skewed


@pytest.mark.parametrize("every", [2, 16, 256, 4096])
def test_no_order_of_the_rows_spoils_the_covariance(every):
    rows = make_rows(3, 9000, 6)
    rows[::every] += 1e5  # to mislead whoever takes a few rows, or the first, for all
    count, _, scatter = two_pass(rows)
    assert distance(Moments.of(rows).covariance(), scatter / (count - 1)) < 1e-12


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("at", [0, 4999])
def test_a_number_that_is_not_finite_is_an_error(bad, dtype, at):
    rows = np.ones((5000, 3), dtype)
    rows[at, 1] = bad
    with pytest.raises(ConfigError, match="NaN or infinity"):
        Moments.of(rows)


@quick
@given(seed=seeds, n=st.integers(0, 30), d=st.integers(1, 9), scale=st.sampled_from([1, 1e-150]))
def test_save_and_load_keep_every_bit(tmp_path_factory, seed, n, d, scale):
    path = tmp_path_factory.mktemp("moments") / "moments.safetensors"
    saved = Moments.of(make_rows(seed, n, d, ratio=3) * scale)
    saved.save(path)
    assert_identical(Moments.load(path), saved)
