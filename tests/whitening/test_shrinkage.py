"""Shrinkage from streaming sums, against scikit-learn, which sees the rows."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.transforms import few, fit, make_rows, seeds
from whiten_index import Moments, Whitening, WhiteningConfig
from whiten_index.errors import ConfigError, WhiteningError
from whiten_index.whitening.whitening_config import parse_shrinkage

sklearn_covariance = pytest.importorskip("sklearn.covariance")

NAMED = ["ledoit-wolf", "oas"]


def coefficient(rows, name):
    moments = rows if isinstance(rows, Moments) else Moments.of(rows)
    return Whitening.fit(moments, WhiteningConfig(k="full", shrinkage=name)).shrinkage


def by_scikit_learn(rows, name):
    fitted = {"ledoit-wolf": sklearn_covariance.ledoit_wolf, "oas": sklearn_covariance.oas}[name]
    return fitted(rows)


@pytest.mark.parametrize("name", NAMED)
@few
@given(seed=seeds, n=st.integers(2, 60), d=st.integers(2, 30), ratio=st.sampled_from([0, 3, 1e4]))
def test_covariance_and_coefficient_are_those_of_scikit_learn(name, seed, n, d, ratio):
    rows = make_rows(seed, n, d, ratio=ratio)
    truth, rho = by_scikit_learn(rows, name)
    fitted = Whitening.fit(Moments.of(rows), WhiteningConfig(k="full", shrinkage=name))
    assert fitted.shrinkage == pytest.approx(rho, rel=1e-6, abs=1e-9)
    spectrum = np.linalg.eigvalsh(truth)[::-1] * n / (n - 1)
    np.testing.assert_allclose(fitted.eigenvalues, spectrum, rtol=0, atol=1e-6 * spectrum.sum())


@pytest.mark.parametrize("name", [*NAMED, 0.1])
def test_fewer_rows_than_dims_get_every_direction(name):
    rows = make_rows(0, 6, ratio=2)
    whitening = fit(rows, k="full", shrinkage=name)
    assert whitening.rank == whitening.basis.shape[1] == 12
    assert np.isfinite(whitening.apply(make_rows(1))).all()
    np.testing.assert_allclose(whitening.inverse(whitening.apply(rows)), rows, atol=1e-9)


@pytest.mark.parametrize("quartic", [0.0, 1e-300, np.inf, np.nan, -1.0])
def test_fourth_powers_that_cannot_be_right_are_an_error(quartic):
    moments = dataclasses.replace(Moments.of(make_rows()), quartic=quartic)
    with pytest.raises(WhiteningError, match="does not fit the scatter"):
        coefficient(moments, "ledoit-wolf")


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("scale", [1e-120, 1e120])
def test_numbers_at_the_limits_are_right_or_a_clear_error(name, scale):
    rows = make_rows(0, 30)
    try:
        rho = coefficient(rows * scale, name)
    except WhiteningError as error:
        assert "--shrinkage oas" in str(error)  # noqa: PT017
        assert name == "ledoit-wolf"
    else:
        assert rho == pytest.approx(coefficient(rows, name))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (None, ("empirical", 0)),
        (" Ledoit-Wolf ", ("ledoit-wolf", 0)),
        ("OAS", ("oas", 0)),
        ("0.25", ("fixed", 0.25)),
        (1, ("fixed", 1)),
        (0, ("empirical", 0)),
    ],
)
def test_a_shrinkage_is_a_name_or_a_coefficient(text, parsed):
    assert parse_shrinkage(text) == parsed


@pytest.mark.parametrize("text", ["", "lw", "fixed", "1.1", -0.1, np.nan, "inf"])
def test_what_is_no_shrinkage_is_refused_with_what_would_be(text):
    with pytest.raises(
        ConfigError, match=r"finite number|not understood; give empirical, ledoit-w"
    ):
        WhiteningConfig(shrinkage=text)
