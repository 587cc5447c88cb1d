"""Rows with a known spectrum, and one fit of every kind."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from whiten_index import Moments, Whitening, WhiteningConfig
from whiten_index.whitening.whitening_config import Kind

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=30, deadline=None, derandomize=True, database=None)
few = settings(quick, max_examples=8)  # where a property is tried for every kind

SLICED = [Kind.PCA, Kind.WHITENING, Kind.ALL_BUT_THE_TOP, Kind.TRUNCATE]


def make_rows(seed=0, n=200, d=12, *, condition=100.0, ratio=1.0):
    """Rows with a known falling spectrum in a random basis, and a mean beside zero."""
    rng = np.random.default_rng(seed)
    rotation, _ = np.linalg.qr(rng.normal(size=(d, d)))
    spread = np.geomspace(1, condition**-0.5, d)
    return rng.normal(size=(n, d)) * spread @ rotation.T + ratio * rng.normal(size=d)


def fit(rows, **options):
    return Whitening.fit(Moments.of(rows), WhiteningConfig(**options))


def covariance_of(vectors):
    return np.atleast_2d(np.cov(vectors.T))


def cosines(vectors):
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T
