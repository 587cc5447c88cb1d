"""Spectral Tempering, which benchmarks compare ``auto`` with: its exponents by the formula."""

import numpy as np
import pytest

from benchmarks.spectral_tempering import spectral_tempering

PLACES = np.arange(1.0, 61)
# The knees of SNR are those of the package kneed 0.9.0 with S = 0.5, counted from 1.
SPECTRA = {
    "power law": (PLACES**-1.2, 7),
    "exponential": (np.exp(-PLACES / 8) + 0.01, 17),
    "two shoulders": (
        np.r_[np.linspace(50, 44, 4), np.linspace(20, 18, 26), np.linspace(6, 1, 30)], 5
    ),
    "random": (np.sort(np.random.default_rng(0).exponential(size=60) ** 2)[::-1], 3),
    "line": (100 - PLACES, 57),
}  # fmt: skip
# Kneedle takes no end of the curve for a knee.
SHORT = {"concave": (np.array([9, 8.5, 7.5, 6, 4, 1]), None), "flat": (np.ones(6), None)}


def by_formula(eigenvalues, k, knee):
    noise = eigenvalues[int(0.9 * len(eigenvalues) + 1e-9) :].mean()
    snr = [max(0, value / noise - 1) for value in eigenvalues]
    at_knee = snr[(k // 2 if knee is None else knee) - 1]
    return min(1, snr[k - 1] / at_knee) if at_knee > 1e-6 else 0


@pytest.mark.parametrize("name", [*SPECTRA, *SHORT])
@pytest.mark.parametrize("zeros", [0, 10])
def test_the_exponent_is_that_of_the_formula(name, zeros):
    eigenvalues, knee = (SPECTRA | SHORT)[name]
    rank = len(eigenvalues)
    for k in (2, 4, *(k for k in (8, 20, 40) if k < rank), rank):
        found = spectral_tempering(np.r_[eigenvalues, np.zeros(zeros)], k)
        assert found == pytest.approx(by_formula(eigenvalues, k, knee), abs=1e-6)
