"""Whitening against an SVD, against what it means, and under stress against 50 digits."""

import mpmath
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


@mpmath.workdps(50)
def exact_vectors(rows, *, rank):
    """Inner products of the whitened rows (n, n), over the ``rank`` widest directions.

    The rows are taken as they are, float64 numbers as exact.
    """
    x = mpmath.matrix(np.asarray(rows, np.float64).tolist())
    mean = [sum(x[i, j] for i in range(x.rows)) / x.rows for j in range(x.cols)]
    c = mpmath.matrix(x.rows, x.cols)
    for i in range(x.rows):
        for j in range(x.cols):
            c[i, j] = x[i, j] - mean[j]
    values, vectors = mpmath.eigsy(c.T * c / (x.rows - 1))
    kept = range(len(values) - rank, len(values))
    z = c * mpmath.matrix([[vectors[i, j] for j in kept] for i in range(vectors.rows)])
    for row in range(z.rows):
        for column, j in enumerate(kept):
            z[row, column] /= mpmath.sqrt(values[j])
    spectrum = np.array([float(value) for value in values])[::-1]
    return np.array((z * z.T).tolist(), dtype=float), spectrum


@pytest.mark.parametrize("ratio", [0, 1e4])
@pytest.mark.parametrize("condition", [1e2, 1e8, 1e11, 1e14])
def test_what_is_kept_is_right_to_the_digits_there_are(condition, ratio):
    rows = make_rows(3, 14, 6, condition=condition, ratio=ratio)
    whitening = fit(rows, k="full")
    rank = whitening.basis.shape[1]
    truth, spectrum = exact_vectors(rows, rank=rank)
    # An eigenvalue λ in float64 is off by about ε·λ₁, so that λ₁/λ digits are lost.
    lost = 1e-14 * spectrum[0] / spectrum[rank - 1]
    # Centring rows far from zero costs digits of theirs as well: the mean's, against the spread.
    lost += 1e-15 * ratio * np.sqrt(spectrum[0] / spectrum[rank - 1])
    assert lost < 1e-3
    np.testing.assert_allclose(whitening.variances, spectrum[:rank], rtol=max(lost, 1e-12))
    vectors = whitening.apply(rows)
    np.testing.assert_allclose(vectors @ vectors.T, truth, rtol=0, atol=max(lost, 1e-12) * 14)
    # What is dropped is what float64 cannot tell from nothing.
    assert (spectrum[rank:] < 2e-10 * spectrum[0]).all()
    assert (rank == 6) == (spectrum[-1] > 1e-10 * spectrum[0])


@pytest.mark.parametrize("condition", [1e2, 1e9, 1e14])
@pytest.mark.parametrize("ratio", [0, 1e4])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_no_number_is_ever_not_finite(condition, ratio, dtype):
    rows = make_rows(0, condition=condition, ratio=ratio).astype(dtype)
    for some in (rows, rows[:5], np.tile(rows[:5], (9, 1)), rows * (np.arange(12) % 3 > 0)):
        whitening = fit(some.astype(dtype), k="full")
        vectors = whitening.apply(some)
        for array in (vectors, whitening.matrix(), whitening.inverse(vectors)):
            assert np.isfinite(array).all()
        assert np.abs(vectors).max() < 100  # standard scores, not noise blown up
        facts = whitening.describe()
        assert all(np.isfinite(value) for value in facts.values() if isinstance(value, float))
        assert np.isfinite(whitening.export().matrix).all()


@pytest.mark.parametrize(
    "wish",
    [*({"kind": kind} for kind in Kind if kind is not Kind.NONE),
     {"kind": Kind.WHITENING, "exponent": 2}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("scale", [1e-140, 1e-60, 1e60, 1e140])
def test_rows_of_any_size_are_mapped_or_refused(wish, scale):
    rows = make_rows()
    try:
        vectors = fit(rows * scale, **wish).apply(rows * scale)
    except WhiteningError as error:
        assert "scale them up" in str(error)  # noqa: PT017
        return
    assert np.isfinite(vectors).all()
    truth = fit(rows, **wish).apply(rows)
    size = np.linalg.norm(vectors / np.abs(vectors).max()) / np.linalg.norm(
        truth / np.abs(truth).max()
    )
    np.testing.assert_allclose(
        vectors / np.abs(vectors).max(), truth / np.abs(truth).max(), atol=1e-7
    )
    assert size == pytest.approx(1)
