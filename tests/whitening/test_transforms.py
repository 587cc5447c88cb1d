"""Every kind of transform: against closed forms, and the properties that hold for all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.transforms import SLICED, few, fit, make_rows, seeds
from whiten_index.whitening.whitening_config import Kind

FITTED = [kind for kind in Kind if kind is not Kind.NONE]


def centred(rows):
    return rows - rows.mean(axis=0)


@pytest.mark.parametrize("kind", SLICED)
@few
@given(seed=seeds, data=st.data())
def test_truncating_is_slicing(kind, seed, data):
    rows = make_rows(seed)
    full = fit(rows, kind=kind, k="full")
    k = data.draw(st.integers(1, full.k))
    cut = full.truncate(k)
    np.testing.assert_array_equal(cut.basis, full.basis[:, :k])
    np.testing.assert_array_equal(cut.matrix(), full.matrix()[:, :k])
    np.testing.assert_allclose(cut.apply(rows), full.apply(rows)[:, :k], rtol=0, atol=1e-12)
    fitted = fit(rows, kind=kind, k=k)
    np.testing.assert_allclose(cut.apply(rows), fitted.apply(rows), rtol=0, atol=1e-12)
    assert cut.describe() == pytest.approx(fitted.describe())


@pytest.mark.parametrize("kind", FITTED)
@pytest.mark.parametrize("n", [200, 7])
@few
@given(seed=seeds, ratio=st.sampled_from([0, 10]), center=st.sampled_from([None, True, False]))
def test_the_inverse_undoes_within_the_kept_directions(kind, n, seed, ratio, center):
    rows = make_rows(seed, n, condition=10, ratio=ratio)
    whitening = fit(rows, kind=kind, center=center)
    vectors = whitening.apply(rows)
    found = whitening.inverse(vectors)
    np.testing.assert_allclose(whitening.apply(found), vectors, atol=1e-8)
    # The nearest point: what is missing is at a right angle to all that is kept.
    np.testing.assert_allclose((rows - found) @ whitening.basis, 0, atol=1e-8)


@pytest.mark.parametrize("kind", [Kind.PCA, Kind.WHITENING, Kind.ALL_BUT_THE_TOP])
def test_directions_below_the_floor_weigh_nothing(kind):
    rows = make_rows(condition=1e6)
    none, floored = (fit(rows, kind=kind, k="full", floor=floor) for floor in (0, 1e-3))
    live = none.variances > 1e-3 * none.eigenvalues[0]
    assert 0 < live.sum() < len(live)
    np.testing.assert_array_equal(floored.basis, none.basis[:, live])
    np.testing.assert_array_equal(floored.scales(), none.scales()[live])
    facts = floored.describe()
    assert facts["floor"] == 1e-3
    assert facts["k"] == live.sum()
    assert "floor" not in none.describe()
