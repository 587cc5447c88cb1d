"""Moments of one pass or of shards, added and taken away, against two passes of longdouble."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.moments import (
    assert_identical,
    assert_same_higher,
    assert_same_sums,
    distance,
    higher_by_definition,
    make_rows,
    quick,
    seeds,
    two_pass,
)
from whiten_index.errors import ConfigError, WhiteningError
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


@quick
@given(
    seed=seeds,
    sizes=st.lists(st.integers(0, 40), min_size=2, max_size=9).filter(lambda s: sum(s) > 2),
    ratio=st.sampled_from([0, 1, 100]),
    data=st.data(),
)
def test_any_order_and_any_grouping_of_shards_equal_one_pass(seed, sizes, ratio, data):
    rows = make_rows(seed, sum(sizes), 5, ratio=ratio)
    shards = np.split(rows, np.cumsum(sizes)[:-1])
    parts = [Moments.of(shards[i]) for i in data.draw(st.permutations(range(len(shards))))]
    while len(parts) > 1:
        at = data.draw(st.integers(0, len(parts) - 2))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    whole = Moments.of(rows)
    count, mean, scatter = two_pass(rows)
    assert parts[0].count == whole.count == count
    assert np.abs(parts[0].mean - mean).max() < 1e-12 * max(1, ratio)
    assert distance(parts[0].scatter, whole.scatter) < 1e-12
    assert distance(parts[0].scatter, scatter) < 1e-12
    assert_same_higher(parts[0], whole)
    variance = np.diag(scatter).astype(float)
    limit = 1e-11 * np.sqrt(np.outer(variance, variance))
    assert (np.abs(parts[0].scatter - scatter) <= limit).all()


@pytest.mark.parametrize(("rows", "ddof"), [(0, 0), (0, 1), (1, 1), (3, 3)])
def test_too_few_rows_have_no_covariance(rows, ddof):
    moments = Moments.of(make_rows(0, rows, 3))
    with pytest.raises(
        WhiteningError, match=rf"ddof={ddof} needs more than {ddof} rows.*are {rows};"
    ):
        moments.covariance(ddof=ddof)


@quick
@given(
    seed=seeds,
    stay=st.integers(1, 60),
    leave=st.integers(1, 60),
    ratio=st.sampled_from([0, 1, 100]),
)
def test_minus_undoes_plus(seed, stay, leave, ratio):
    a = Moments.of(make_rows(seed, stay, 4, ratio=ratio))
    b = Moments.of(make_rows(seed + 1, leave, 4, ratio=-ratio))
    # What cancels is as large as the sum, so that is what the error is measured against.
    assert_same_sums((a + b) - b, a, within=1e-12, scale=a + b)


def test_taking_away_more_rows_than_there_are_is_an_error():
    few, many = Moments.of(make_rows(0, 3, 2)), Moments.of(make_rows(0, 5, 2))
    with pytest.raises(WhiteningError, match="cannot take 5 rows away from 3"):
        _ = few - many


@pytest.mark.parametrize("combine", [Moments.__add__, Moments.__sub__])
@pytest.mark.parametrize("other", [Moments.of(make_rows(0, 9, 4)), Moments.empty(4)])
def test_moments_of_other_dims_do_not_combine(combine, other):
    with pytest.raises(ConfigError, match="moments of 3 and of 4 dims do not combine"):
        combine(Moments.of(make_rows(0, 9, 3)), other)
