"""Rows with a mean of any size, their moments by the definition, and how far two moments differ."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def make_rows(seed, n, d, *, ratio=1.0):
    """Correlated rows whose mean is ``ratio`` times their spread."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) / np.sqrt(d) + ratio


def make_embeddings(seed=0, n=50, d=8, *, ratio=1.0):
    """Independent coordinates in float32, each with a mean of about ``ratio`` spreads."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(n, d)) + ratio * rng.normal(size=d)).astype(np.float32)


def two_pass(rows):
    """Count, mean and scatter by the definition, in extended precision."""
    x = np.asarray(rows).astype(np.longdouble)
    mean = x.mean(axis=0)
    centred = x - mean
    return float(len(x)), mean, (centred[:, :, None] * centred[:, None]).sum(0)


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


def higher_by_definition(rows):
    """Σ ‖c‖²c and Σ ‖c‖⁴ in extended precision."""
    centred = np.asarray(rows).astype(np.longdouble) - two_pass(rows)[1]
    square = (centred**2).sum(axis=1)
    return square @ centred, (square**2).sum()


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
