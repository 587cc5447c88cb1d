"""Whitening against an SVD of the centred rows, and against what whitening means."""

import numpy as np
import pytest

from tests.helpers.transforms import covariance_of, fit, make_rows
from whiten_index.errors import ConfigError, WhiteningError
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig, WidthSpec


def closed_form(rows, k, *, exponent=1.0):
    """Whitened rows by the SVD of the centred rows: no covariance, no eigenvectors."""
    x = np.asarray(rows, np.float64)
    centred = x - x.mean(axis=0)
    _, singular, vt = np.linalg.svd(centred, full_matrices=False)
    deviation = singular[:k] / np.sqrt(len(x) - 1)
    return centred @ vt[:k].T * deviation**-exponent


@pytest.mark.parametrize("wish", [0, 0.5, 0.8, 1, 1.5, 2, Kind.PCA])
@pytest.mark.parametrize("k", [1, 5, 12])
def test_vectors_are_those_of_the_closed_form(wish, k):
    rows = make_rows()
    pca = wish is Kind.PCA
    vectors = fit(rows, k=k, **({"kind": wish} if pca else {"exponent": wish})).apply(rows)
    truth = closed_form(rows, k, exponent=0 if pca else wish)
    truth *= np.sign((vectors * truth).sum(axis=0))  # eigenvectors know no sign
    assert np.abs(vectors - truth).max() < 1e-9 * np.abs(truth).max()


@pytest.mark.parametrize("seed", range(5))
def test_signs_are_fixed_by_the_largest_entry_of_each_direction(seed):
    basis = fit(make_rows(seed), k="full").basis
    largest = np.abs(basis).argmax(axis=0)
    assert (np.take_along_axis(basis, largest[None], axis=0) > 0).all()
    assert "directions" not in fit(make_rows(seed)).describe()


def deficient_rows():
    """Name -> (rows, their rank)."""
    rng = np.random.default_rng(0)
    full = rng.normal(size=(60, 8)) + 3
    constant = full.copy()
    constant[:, [1, 4, 6]] = [0.1, -7.3, 0.0]
    far_constant = full.copy()
    far_constant[:, 2] = 1e4 / 3
    doubled = np.hstack([full[:, :5], full[:, :3]])
    whole = rng.integers(-9, 9, (60, 6)).astype(float)  # so that float32 holds the sums too
    dependent = np.hstack([whole, whole @ rng.integers(-3, 3, (6, 2))])
    return {
        "constant coordinates": (constant, 5),
        "a constant far from zero": (far_constant, 7),
        "coordinates twice": (doubled, 5),
        "coordinates that depend on others": (dependent, 6),
        "fewer rows than dims": (full[:4], 3),
        "as many rows as dims": (full[:8], 7),
        "two rows": (full[:2], 1),
        "few rows many times": (np.tile(full[:3], (20, 1)), 2),
        "one wild row": (np.vstack([np.tile(full[:1], (30, 1)), full[1:2] * 1e6]), 1),
    }


@pytest.mark.parametrize("name", deficient_rows())
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rank_is_right_and_every_number_finite(name, dtype):
    rows, rank = deficient_rows()[name]
    rows = rows.astype(dtype)
    whitening = fit(rows, k="full")
    assert whitening.rank == whitening.k == rank
    vectors = whitening.apply(rows)
    for array in (vectors, whitening.matrix(), whitening.scales(), whitening.inverse(vectors)):
        assert np.isfinite(array).all()
    assert np.abs(covariance_of(vectors) - np.eye(rank)).max() < 1e-3
    for k in (rank + 1, 8, 1000):
        with pytest.raises(WhiteningError, match=rf"k = {k} is above the rank {rank} .*--k full"):
            fit(rows, k=k)


@pytest.mark.parametrize(
    ("texts", "wish"),
    [
        (["128", 128, 128.0, " 128 ", np.int64(128)], WidthSpec(number=128)),
        (["full", "FULL", " Full "], WidthSpec(full=True)),
        (["0.95", 0.95, ".95"], WidthSpec(variance=0.95)),
    ],
)
def test_a_width_is_a_number_full_or_a_share_of_variance(texts, wish):
    assert [WidthSpec.parse(text) for text in texts] == [wish] * len(texts)


@pytest.mark.parametrize(
    "text",
    [
        *("", "half", "95%", "full rank", "12,8", "1.5", "-3", "0"),
        *("inf", "-inf", "nan", "1e999", np.inf, np.nan, 128.5, -3, 0),
    ],
)
def test_what_is_no_width_is_refused_with_what_would_be(text):
    said = r"--k (takes a finite number|.*not understood; give a whole number.*'full')"
    with pytest.raises(ConfigError, match=said):
        WhiteningConfig(k=text)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_embedding_that_is_not_finite_is_refused(kind, bad):
    rows = make_rows()
    whitening = fit(rows, kind=kind)
    rows[3, 2] = bad
    with pytest.raises(ConfigError, match="NaN or infinity"):
        whitening.apply(rows)
    for unit in (False, kind is not Kind.NONE):
        with pytest.raises(ConfigError, match="NaN or infinity"):
            Whitening.fit(rows, WhiteningConfig(kind=kind, normalize_input=unit))


def test_a_row_whose_length_is_beyond_its_type_is_normalised():
    rows = make_rows()
    large = np.where(np.arange(len(rows))[:, None] < 9, rows * 1e25, rows).astype(np.float32)
    config = WhiteningConfig(normalize_input=True)
    np.testing.assert_allclose(
        Whitening.fit(large, config).mean, Whitening.fit(rows, config).mean, atol=1e-6
    )


@pytest.mark.parametrize("bad", [make_rows() + 1j, np.ma.masked_less(make_rows(), 0)])
def test_what_numpy_would_make_numbers_of_is_refused(bad):
    whitening, refused = fit(make_rows(), k="full"), "numbers, and these are [mo][af]"
    for take in (fit, whitening.apply, whitening.inverse):
        with pytest.raises(ConfigError, match=refused):
            take(bad)


def test_long_rows_of_float16_are_scaled_as_those_of_float32():
    """A sum of their squares is beyond the largest number of float16."""
    rows = (12 * np.random.default_rng(0).standard_normal((300, 640))).astype(np.float16)
    config = WhiteningConfig(normalize_input=True, k=8)
    half, full = (Whitening.fit(some, config) for some in (rows, rows.astype(np.float32)))
    np.testing.assert_allclose(half.mean, full.mean, atol=1e-6)
