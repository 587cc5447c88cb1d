"""Moments against a two-pass closed form in extended precision, and against themselves."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from whiten_index.errors import ArtifactError, ConfigError, WhiteningError
from whiten_index.moments import Moments, Products
from whiten_index.whitening import Whitening, WhiteningConfig

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def make_rows(seed, n, d, *, ratio=1.0):
    """Correlated rows whose mean is ``ratio`` times their spread."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) / np.sqrt(d) + ratio


def two_pass(rows, weights=None):
    """Count, mean and scatter by the definition, in extended precision."""
    x = np.asarray(rows).astype(np.longdouble)
    w = np.ones(len(x), np.longdouble) if weights is None else np.asarray(weights, np.longdouble)
    mean = (w[:, None] * x).sum(axis=0) / w.sum()
    centred = x - mean
    return float(w.sum()), mean, (w[:, None, None] * centred[:, :, None] * centred[:, None]).sum(0)


def distance(ours, truth):
    """Relative Frobenius distance."""
    truth = np.asarray(truth, np.longdouble)
    norm = np.sqrt((truth**2).sum())
    return float(np.sqrt(((ours - truth) ** 2).sum()) / (norm if norm > 0 else 1))


def assert_same(ours, other, *, within=1e-12, scale=None):
    scale = scale or other
    assert ours.count == pytest.approx(other.count, rel=within)
    assert np.abs(ours.mean - other.mean).max() <= within * max(1, np.abs(scale.mean).max())
    norm = np.linalg.norm(scale.scatter)
    assert np.linalg.norm(ours.scatter - other.scatter) <= within * max(norm, 1e-300)


def higher_by_definition(rows, weights=None):
    """Σ w‖c‖²c and Σ w‖c‖⁴ in extended precision."""
    w = np.ones(len(rows), np.longdouble) if weights is None else weights.astype(np.longdouble)
    centred = np.asarray(rows).astype(np.longdouble) - two_pass(rows, weights)[1]
    square = (centred**2).sum(axis=1)
    return (w * square) @ centred, (w * square**2).sum()


def assert_same_higher(ours, other, *, within=1e-12, scale=None):
    """Compare cubic and quartic, an error of the former being against its bound by Hölder."""
    scale = scale or other
    limit = within * scale.quartic + 1e-300
    assert abs(ours.quartic - other.quartic) <= limit
    bound = within * scale.quartic**0.75 * scale.count**0.25 + 1e-300
    assert np.linalg.norm(ours.cubic - other.cubic) <= bound


def assert_same_sums(ours, other, *, within=1e-12, scale=None):
    """All five."""
    assert_same(ours, other, within=within, scale=scale)
    assert_same_higher(ours, other, within=within, scale=scale)


def assert_identical(ours, other):
    assert ours.count == other.count
    for name in ("mean", "scatter", "cubic", "quartic"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(other, name))


# One pass against the definition


@pytest.mark.parametrize("ratio", [0, 1, 100, 1e4])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_covariance_is_that_of_the_definition_however_large_the_mean(ratio, dtype):
    rows = make_rows(3, 5000, 6, ratio=ratio).astype(dtype)  # more rows than one block holds
    count, mean, scatter = two_pass(rows)
    moments = Moments.of(rows)
    assert moments.count == count
    assert np.abs(moments.mean - mean).max() < 1e-15 * max(1, ratio)
    assert distance(moments.covariance(), scatter / (count - 1)) < 1e-12


def test_covariance_survives_a_mean_a_million_times_the_spread():
    rows = make_rows(5, 3000, 4, ratio=1e6)
    count, _, scatter = two_pass(rows)
    assert distance(Moments.of(rows).covariance(), scatter / (count - 1)) < 1e-11


@pytest.mark.parametrize("ratio", [0, 1, 100, 1e4])
def test_higher_moments_are_those_of_the_definition_however_large_the_mean(ratio):
    rows, weights = make_rows(3, 5000, 6, ratio=ratio), np.random.default_rng(0).uniform(0, 3, 5000)
    for weight in (None, weights):
        moments = Moments.of(rows, weights=weight)
        cubic, quartic = higher_by_definition(rows, weight)
        assert moments.quartic == pytest.approx(float(quartic), rel=1e-12)
        assert distance(moments.cubic, cubic) < 1e-11  # it is small: the rows are hardly skewed


@pytest.mark.parametrize("every", [2, 16, 256, 4096])
@pytest.mark.parametrize("products", Products)
def test_no_order_of_the_rows_spoils_the_covariance(every, products):
    rows = make_rows(3, 9000, 6)
    rows[::every] += 1e5  # to mislead whoever takes a few rows, or the first, for all
    rows = rows if products is Products.FLOAT64 else np.sort(rows, axis=0).astype(np.float32)
    count, _, scatter = two_pass(rows)
    covariance = Moments.of(rows, products=products).covariance()
    limit = 1e-12 if products is Products.FLOAT64 else 1e-6
    assert distance(covariance, scatter / (count - 1)) < limit


def test_rows_too_large_for_a_fourth_power_have_a_covariance_all_the_same():
    rows = make_rows(0, 50, 3)
    huge = Moments.of(rows * 1e100)
    assert (huge.cubic, huge.quartic) == (None, None)
    assert distance(huge.scatter / 1e200, Moments.of(rows).scatter) < 1e-12


@pytest.mark.parametrize("ddof", [0, 1, 3])
def test_ddof_divides_the_scatter(ddof):
    rows = make_rows(1, 30, 3)
    np.testing.assert_allclose(
        Moments.of(rows).covariance(ddof=ddof), np.cov(rows.T, ddof=ddof), rtol=1e-12, atol=1e-13
    )


def test_covariance_is_symmetric_to_the_bit():
    parts = [Moments.of(make_rows(i, 50, 7, ratio=i), weights=np.arange(50)) for i in range(4)]
    covariance = (Moments.total(parts) - parts[2]).covariance()
    np.testing.assert_array_equal(covariance, covariance.T)


def test_constant_coordinates_have_no_variance_at_all():
    rows = make_rows(2, 9001, 4)
    rows[:, 1] = np.float32(0.1)
    scatter = Moments.of(rows).scatter
    assert np.abs(scatter[1]).max() < 1e-25


@pytest.mark.parametrize("layout", [np.asfortranarray, lambda x: x[::-1][::-1], np.ndarray.tolist])
def test_memory_layout_does_not_matter(layout):
    rows = make_rows(4, 60, 5)
    assert_same(Moments.of(layout(rows)), Moments.of(rows), within=1e-14)


@pytest.mark.parametrize("scale", [1.0, 6e4])
def test_float16_rows_count_as_the_float64_rows_of_the_same_values(scale):
    rows = (np.random.default_rng(0).uniform(0.5, 1, size=(5000, 5)) * scale).astype(np.float16)
    assert_identical(Moments.of(rows), Moments.of(rows.astype(np.float64)))


def test_whole_numbers_are_rows_too():
    moments = Moments.of([[1, 2], [3, 6]])
    np.testing.assert_array_equal(moments.mean, [2, 4])
    np.testing.assert_array_equal(moments.covariance(), [[2, 4], [4, 8]])


def test_rows_and_weights_are_left_as_they_were():
    rows, weights = make_rows(6, 20, 3), np.linspace(0, 1, 20)
    before = rows.copy(), weights.copy()
    Moments.of(rows, weights=weights)
    np.testing.assert_array_equal(rows, before[0])
    np.testing.assert_array_equal(weights, before[1])


# Merging


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


@pytest.mark.parametrize("ratio", [100, 1e4])
def test_a_thousand_shards_with_a_large_mean_equal_one_pass(ratio):
    rows = make_rows(8, 5000, 4, ratio=ratio)
    merged = Moments.total(Moments.of(shard) for shard in np.array_split(rows, 1000))
    assert distance(merged.scatter, two_pass(rows)[2]) < 1e-12


@quick
@given(seed=seeds, n=st.integers(2, 700), ratio=st.sampled_from([0, 1, 100]))
def test_the_order_of_the_rows_does_not_matter(seed, n, ratio):
    rows, weights = make_rows(seed, n, 5, ratio=ratio), np.random.default_rng(seed).random(n)
    order = np.random.default_rng(seed).permutation(n)
    for weight, mixed in ((None, None), (weights, weights[order])):
        one, other = Moments.of(rows, weights=weight), Moments.of(rows[order], weights=mixed)
        assert_same_sums(one, other)


@quick
@given(seed=seeds, n=st.integers(2, 300), d=st.integers(1, 9), ratio=st.sampled_from([0, 1, 100]))
def test_moments_turn_with_the_rows(seed, n, d, ratio):
    rows = make_rows(seed, n, d, ratio=ratio)
    R = np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))[0]
    plain, turned = Moments.of(rows), Moments.of(rows @ R)
    expected = Moments(
        plain.count, plain.mean @ R, R.T @ plain.scatter @ R, plain.cubic @ R, plain.quartic
    )
    # Turning the rows rounds them, by an ulp of their mean.
    assert_same_sums(turned, expected, within=1e-12 * max(1, ratio))


def without_higher(moments):
    return Moments(moments.count, moments.mean, moments.scatter)


def test_a_part_without_higher_moments_gives_a_sum_without():
    a, b = Moments.of(make_rows(0, 9, 3)), Moments.of(make_rows(1, 8, 3))
    for found, expected in (
        (without_higher(a) + b, a + b),
        (a + without_higher(b), a + b),
        (without_higher(a) - b, a - b),
        (a - without_higher(b), a - b),
    ):
        assert_identical(found, without_higher(expected))
    for zero in (Moments.empty(3), without_higher(Moments.empty(3))):
        for same in (a + zero, zero + a, a - zero):
            assert_identical(same, a)


def test_update_adds_rows():
    rows = make_rows(9, 100, 4)
    grown = Moments.empty(4)
    for batch in np.array_split(rows, 7):
        grown = grown.update(batch, weights=np.full(len(batch), 2.0))
    assert_same_sums(grown, Moments.of(np.repeat(rows, 2, axis=0)))


def test_merging_changes_neither_part():
    a, b = Moments.of(make_rows(1, 9, 3)), Moments.of(make_rows(2, 8, 3))
    before = copy.deepcopy((a, b))
    _ = a + b, a - Moments.empty(3), (a + b) - b
    for now, then in zip((a, b), before, strict=True):
        assert_identical(now, then)


def test_the_empty_sum_is_the_zero_of_plus_and_minus():
    moments, zero = Moments.of(make_rows(0, 12, 3)), Moments.empty(3)
    for same in (moments + zero, zero + moments, moments - zero):
        assert_identical(same, moments)
    assert_identical(zero + zero, zero)
    assert_identical(moments - moments, zero)


@pytest.mark.parametrize("weights", [None, []])
def test_no_rows_are_the_empty_sum(weights):
    assert_identical(Moments.of(np.empty((0, 4)), weights=weights), Moments.empty(4))


@pytest.mark.parametrize(("rows", "ddof"), [(0, 0), (0, 1), (1, 1), (3, 3)])
def test_too_few_rows_have_no_covariance(rows, ddof):
    moments = Moments.of(make_rows(0, rows, 3))
    with pytest.raises(
        WhiteningError, match=rf"ddof={ddof} needs more than {ddof} rows.*are {rows};"
    ):
        moments.covariance(ddof=ddof)


# Taking away


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


weights_apart = st.one_of(
    st.floats(0.01, 10), st.floats(1e-8, 1e-6), st.floats(1e6, 1e8), st.integers(1, 9).map(float)
)


@quick
@given(
    seed=seeds,
    weights=st.lists(weights_apart, min_size=2, max_size=40),
    kept=st.booleans(),
    data=st.data(),
)
def test_fractional_weights_are_taken_away_to_nothing_in_any_grouping(
    tmp_path_factory, seed, weights, kept, data
):
    rows, weight = make_rows(seed, len(weights), 3, ratio=1), np.array(weights)

    def drawn():
        order = np.array(data.draw(st.permutations(range(len(rows)))))
        cuts = data.draw(st.sets(st.integers(1, len(rows) - 1)))
        parts = np.split(order, sorted(cuts))
        return [Moments.of(rows[part], weights=weight[part]) for part in parts]

    left = Moments.total(drawn())
    if kept:
        path = tmp_path_factory.mktemp("moments") / "m.safetensors"
        left.save(path)
        left = Moments.load(path)
    for part in drawn():
        left = left - part
    assert_identical(left, Moments.empty(3))
    # Nothing is the zero of plus, and no rows can be taken from it.
    more = Moments.of(rows, weights=weight)
    assert_identical(left + more, more)
    with pytest.raises(WhiteningError, match="cannot take"):
        _ = left - more


@pytest.mark.parametrize("left", [1e-9, 1e-3, 0.5])
def test_a_row_of_little_weight_is_not_taken_for_rounding(left):
    rows, weights = make_rows(0, 50, 3), np.r_[np.linspace(0.1, 3.1, 49), left]
    found = Moments.of(rows, weights=weights) - Moments.of(rows[:49], weights=weights[:49])
    assert found.count == pytest.approx(left, rel=1e-4)
    assert np.abs(found.mean - rows[49]).max() < 1e-4


def test_whole_numbers_are_counted_to_the_row():
    many = Moments(2.0**50, np.zeros(2), np.eye(2))
    assert (many - Moments(2.0**50 - 1, np.zeros(2), np.eye(2))).count == 1
    with pytest.raises(
        WhiteningError, match="cannot take 1125899906842624 rows away from 11258999"
    ):
        _ = Moments(2.0**50 - 1, np.zeros(2), np.eye(2)) - many


def test_taking_away_a_little_more_weight_than_there_is_is_an_error():
    rows = make_rows(0, 9, 3)
    less, more = (Moments.of(rows, weights=np.full(9, w)) for w in (0.3, 0.3 * (1 + 1e-9)))
    with pytest.raises(WhiteningError, match=r"cannot take 2\.70000000\d+ rows away from 2\."):
        _ = less - more


# Weights


@quick
@given(
    seed=seeds,
    weights=st.lists(st.integers(0, 5), min_size=2, max_size=40).filter(lambda w: sum(w) > 1),
)
def test_whole_weights_are_repeated_rows(seed, weights):
    rows = make_rows(seed, len(weights), 4, ratio=10)
    repeated = Moments.of(np.repeat(rows, weights, axis=0))
    assert_same_sums(Moments.of(rows, weights=weights), repeated, scale=Moments.of(rows))


def test_fractional_weights_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    rows, weights = make_rows(0, 6000, 4, ratio=100), rng.uniform(0, 3, 6000)
    count, mean, scatter = two_pass(rows, weights)
    moments = Moments.of(rows, weights=weights)
    assert moments.count == pytest.approx(count, rel=1e-14)
    assert distance(moments.mean, mean) < 1e-14
    assert distance(moments.scatter, scatter) < 1e-12


def test_rows_of_no_weight_are_not_there():
    rows = make_rows(0, 9000, 3)
    weights = np.r_[np.zeros(5000), np.ones(4000)]  # a whole block of nothing
    assert_same(Moments.of(rows, weights=weights), Moments.of(rows[5000:]))
    assert_identical(Moments.of(rows, weights=np.zeros(9000)), Moments.empty(3))


@quick
@given(seed=seeds, there=st.lists(st.booleans(), min_size=2, max_size=600), weighted=st.booleans())
def test_zero_weights_are_absent_rows(seed, there, weighted):
    rows, mask = make_rows(seed, len(there), 4, ratio=10), np.array(there)
    weights = np.random.default_rng(seed).random(len(there)) if weighted else np.ones(len(there))
    found = Moments.of(rows, weights=weights * mask)
    assert_same_sums(found, Moments.of(rows[mask], weights=weights[mask]), scale=Moments.of(rows))


@pytest.mark.parametrize("weights", [np.ones(3), np.ones((4, 1)), 1.0])
def test_weights_need_the_shape_of_the_rows(weights):
    with pytest.raises(ConfigError, match="4 rows need 4 weights"):
        Moments.of(np.ones((4, 2)), weights=weights)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_weights_must_be_finite_and_not_negative(bad):
    with pytest.raises(ConfigError, match="finite and not negative"):
        Moments.of(np.ones((2, 2)), weights=[1.0, bad])


# Products in float32


@quick
@given(
    seed=seeds,
    n=st.integers(2, 9000),
    d=st.integers(1, 40),
    ratio=st.sampled_from([0, 1, 10, 100]),
    dtype=st.sampled_from([np.float32, np.float64]),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    weighted=st.booleans(),
)
def test_float32_products_are_within_a_millionth(seed, n, d, ratio, dtype, scale, weighted):
    rows = (make_rows(seed, n, d, ratio=ratio) * scale).astype(dtype)
    weights = np.random.default_rng(seed).random(n) if weighted else None
    found = Moments.of(rows, weights=weights, products="float32")
    exact = Moments.of(rows, weights=weights)
    assert found.count == exact.count
    spread = np.sqrt(np.trace(exact.scatter) / exact.count)
    assert np.linalg.norm(found.mean - exact.mean) <= 1e-6 * spread
    assert distance(found.scatter, exact.scatter) <= 1e-6
    assert_same_higher(found, exact, within=4e-6)
    np.testing.assert_array_equal(found.scatter, found.scatter.T)


@pytest.mark.parametrize("ratio", [100, 1e4])
def test_float32_products_in_many_dims_with_a_large_mean(ratio):
    rows = make_rows(0, 6000, 256, ratio=ratio).astype(np.float32)
    found, exact = Moments.of(rows, products=Products.FLOAT32), Moments.of(rows)
    assert distance(found.covariance(), exact.covariance()) < 1e-6


@pytest.mark.parametrize("scale", [0, 1e-30, 1e-15, 1e15, 1e30, 1e60])
def test_rows_that_float32_does_not_hold_are_multiplied_in_float64(scale):
    rows = make_rows(0, 300, 3) * scale
    assert_identical(Moments.of(rows, products="float32"), Moments.of(rows))
    single = Moments.of(rows).update(rows, products="float32")
    assert_identical(single, Moments.of(rows).update(rows))


def test_an_unknown_precision_names_the_known():
    with pytest.raises(ConfigError, match=r"products in 'float16' are unknown; use float64, float"):
        Moments.of(np.ones((2, 2)), products="float16")


# Rows that cannot be


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("at", [0, 4999])
def test_a_number_that_is_not_finite_is_an_error(bad, dtype, at):
    rows = np.ones((5000, 3), dtype)
    rows[at, 1] = bad
    for products in Products:
        with pytest.raises(ConfigError, match="NaN or infinity"):
            Moments.of(rows, products=products)


@pytest.mark.parametrize("products", Products)
@pytest.mark.parametrize("weights", [None, np.full(300, 2.0)])
def test_rows_too_large_for_their_products_are_an_error(weights, products):
    rows = make_rows(0, 300, 3) * 1e200
    with pytest.raises(ConfigError, match="too large for their products in float64; scale them"):
        Moments.of(rows, weights=weights, products=products)


@pytest.mark.parametrize("weights", [[1.0, 0.0], [0.0, 0.0]])
def test_no_weight_hides_a_nan(weights):
    with pytest.raises(ConfigError, match="NaN or infinity"):
        Moments.of([[1.0, 2.0], [np.nan, 1.0]], weights=weights)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4)])
def test_rows_are_a_table(shape):
    with pytest.raises(ConfigError, match=r"\(n, d\) array; this one has shape"):
        Moments.of(np.zeros(shape))


# On disk


@quick
@given(seed=seeds, n=st.integers(0, 30), d=st.integers(1, 9), scale=st.sampled_from([1, 1e-150]))
def test_save_and_load_keep_every_bit(tmp_path_factory, seed, n, d, scale):
    path = tmp_path_factory.mktemp("moments") / "moments.safetensors"
    saved = Moments.of(make_rows(seed, n, d, ratio=3) * scale, weights=np.full(n, 1 / 3))
    saved.save(path)
    assert_identical(Moments.load(path), saved)


def test_a_file_without_higher_moments_is_read(tmp_path):
    moments = without_higher(Moments.of(make_rows(0, 9, 3)))
    moments.save(tmp_path / "m.safetensors")
    assert set(load_file(tmp_path / "m.safetensors")) == {"count", "mean", "scatter_upper"}
    assert_identical(Moments.load(tmp_path / "m.safetensors"), moments)


# Damaged files: moments and whitenings are read alike


READERS = {"moments": Moments, "whitening": Whitening}
NEWEST = {"moments": 1, "whitening": 2}


@pytest.fixture(params=READERS)
def kind(request):
    return request.param


@pytest.fixture
def saved(tmp_path, kind):
    path, moments = tmp_path / f"{kind}.safetensors", Moments.of(make_rows(0, 20, 3))
    (moments if kind == "moments" else Whitening.fit(moments, WhiteningConfig(k=2))).save(path)
    return path


def everything_in(path, kind):
    found = READERS[kind].load(path)
    return {name: np.asarray(value).tolist() for name, value in vars(found).items()}


def assert_unreadable(path, kind):
    with pytest.raises(
        ArtifactError, match=rf"{path.name} cannot be read as (a )?{kind}\b.*; restore it"
    ):
        READERS[kind].load(path)


def rewrite(path, tensors=None, *, without=None, **facts):
    """Write a file anew with other tensors, with one less, with other facts (None: without)."""
    with safe_open(path, framework="numpy") as file:
        facts = {k: v for k, v in (file.metadata() | facts).items() if v is not None}
    kept = {k: v for k, v in (load_file(path) | (tensors or {})).items() if k != without}
    save_file(kept, path, facts or None)


def test_a_missing_file_or_a_folder_is_named(tmp_path, kind):
    assert_unreadable(tmp_path / "nowhere.safetensors", kind)
    assert_unreadable(tmp_path, kind)


def test_a_file_cut_anywhere_is_an_error(saved, kind):
    whole = saved.read_bytes()
    for size in range(len(whole)):
        saved.write_bytes(whole[:size])
        assert_unreadable(saved, kind)


@pytest.mark.parametrize("data", [b"", b"\0" * 200, b"not safetensors at all", b"{" * 50])
def test_other_bytes_are_an_error(saved, kind, data):
    saved.write_bytes(data)
    assert_unreadable(saved, kind)


def test_a_header_with_a_flipped_bit_is_an_error_or_harmless(saved, kind):
    whole, expected = bytearray(saved.read_bytes()), everything_in(saved, kind)
    header = 8 + int.from_bytes(whole[:8], "little")
    seen = []
    for at in range(header):
        flipped = whole.copy()
        flipped[at] ^= 1
        saved.write_bytes(flipped)
        with contextlib.suppress(ArtifactError):
            if everything_in(saved, kind) != expected:
                seen.append(bytes(flipped[max(0, at - 20) : at + 20]))
    assert not seen, f"{len(seen)} flips change what is read, the first is in {seen[0]}"


DAMAGES = [
    *(("moments", "count", array) for array in (np.empty(0), np.array(1.0), np.array([np.nan]))),
    ("moments", "mean", np.array(1.0)),
    ("moments", "mean", np.zeros(4)),
    ("moments", "mean", np.array([0, np.nan, 0])),
    *(("moments", "scatter_upper", a) for a in (np.zeros(5), np.zeros(1), np.full(6, np.nan))),
    *(("moments", "cubic", a) for a in (np.zeros(4), np.array(0.0), np.full(3, np.inf))),
    *(("moments", "quartic", a) for a in (np.array(1.0), np.zeros(2), np.array([np.nan]))),
    ("whitening", "mean", np.zeros(5)),
    *(("whitening", "basis", np.zeros(shape)) for shape in ((2, 2), (3,), (3, 2, 1))),
    ("whitening", "basis", np.full((3, 2), np.inf)),
    *(("whitening", "eigenvalues", array) for array in (np.ones(2), np.full(3, np.nan))),
    *(("whitening", name, np.empty(0)) for name in ("exponent", "count")),
]


@pytest.mark.parametrize(("kind", "name", "array"), DAMAGES, indirect=["kind"])
def test_tensors_that_do_not_belong_together_are_an_error(saved, kind, name, array):
    rewrite(saved, {name: array})
    assert_unreadable(saved, kind)


def test_a_missing_tensor_is_an_error(saved, kind):
    whole = saved.read_bytes()
    for name in load_file(saved):
        rewrite(saved, without=name)
        assert_unreadable(saved, kind)
        saved.write_bytes(whole)


@pytest.mark.parametrize(
    "facts",
    [{"kind": "zca"}, {"kind": None}, {"format_version": "99"}, {"kind": None, "transform": None}],
)
def test_another_kind_or_a_later_format_is_refused(saved, kind, facts):
    rewrite(saved, **facts)
    held = rf"holds {facts.get('kind', kind)} of format {facts.get('format_version', 1)}"
    message = rf"{saved.name} {held}, and {kind} up to format {NEWEST[kind]} is needed; .*upgrade"
    with pytest.raises(ArtifactError, match=message):
        READERS[kind].load(saved)


def test_one_kind_is_not_read_as_the_other(saved, kind):
    (other,) = set(READERS) - {kind}
    message = f"holds {kind} .* {other} up to format {NEWEST[other]} is needed"
    with pytest.raises(ArtifactError, match=message):
        READERS[other].load(saved)


@pytest.mark.parametrize("version", [None, "", "one"])
def test_a_format_that_is_no_number_is_an_error(saved, kind, version):
    rewrite(saved, format_version=version)
    assert_unreadable(saved, kind)


@pytest.mark.parametrize("kind", ["whitening"], indirect=True)
@pytest.mark.parametrize(
    "facts",
    [{"transform": None}, {"transform": "zca"}, {"center": None}, {"normalize_input": None}],
)
def test_a_whitening_without_its_choices_is_an_error(saved, kind, facts):
    rewrite(saved, **facts)
    assert_unreadable(saved, kind)


@pytest.mark.parametrize("kind", ["whitening"], indirect=True)
@pytest.mark.parametrize("name", ["center", "normalize_input"])
def test_a_choice_that_is_neither_true_nor_false_is_an_error(saved, kind, name):
    rewrite(saved, **{name: "maybe"})
    assert_unreadable(saved, kind)


@pytest.mark.parametrize("n", [0, 1, 5000, 9000])
def test_moments_on_a_device_are_the_same(n):
    import torch

    from whiten_index.encoding.device_moments import moments_on_device

    rows = np.random.default_rng(0).normal(100, 1, size=(n, 24)).astype(np.float16)
    found, expected = moments_on_device(torch.from_numpy(rows)), Moments.of(rows)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-14)
    assert_same_sums(found, expected)
    np.testing.assert_array_equal(found.scatter, found.scatter.T)
