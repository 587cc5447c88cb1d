"""Numerics under stress: finite, and right against 50 digits, or a clear error."""

import mpmath
import numpy as np
import pytest

from tests.helpers.transforms import fit, make_rows
from whiten_index.errors import WhiteningError
from whiten_index.whitening.whitening_config import Kind


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(50):
        yield


def exact_covariance(rows, weights=None):
    """The covariance of the rows as they are, float64 numbers taken as exact."""
    x = mpmath.matrix(np.asarray(rows, np.float64).tolist())
    w = [mpmath.mpf(1)] * x.rows if weights is None else [mpmath.mpf(float(v)) for v in weights]
    count = sum(w)
    mean = [sum(w[i] * x[i, j] for i in range(x.rows)) / count for j in range(x.cols)]
    c = mpmath.matrix(x.rows, x.cols)
    root = [mpmath.sqrt(v) for v in w]
    for i in range(x.rows):
        for j in range(x.cols):
            c[i, j] = root[i] * (x[i, j] - mean[j])
    return c.T * c / (count - 1), c, root


def exact_vectors(rows, *, rank):
    """Inner products of the whitened rows (n, n), over the ``rank`` widest directions."""
    covariance, c, _ = exact_covariance(rows)
    values, vectors = mpmath.eigsy(covariance)
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
