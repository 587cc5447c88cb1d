"""How embeddings are kept: in float16 where rows still point where they pointed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.moments import make_embeddings, quick, seeds
from whiten_index import Moments, Whitening, WhiteningConfig
from whiten_index.store.dtypes import StoreDtype, as_kept


def cosines(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


def with_coordinate(change):
    embeddings = make_embeddings(n=500)
    change(embeddings)
    return embeddings


@pytest.mark.parametrize(
    "embeddings",
    [
        np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32) + 100,
        with_coordinate(lambda x: np.add(x[:, 3], 300, out=x[:, 3])),
        *(with_coordinate(lambda x, v=v: x[7].fill(v)) for v in (1e5, -1e5, 65520.0)),
        make_embeddings() * np.float32(1e-7),
    ],
    ids=["mean", "mean of one coordinate", "high", "low", "just too high", "vanishing"],
)
@pytest.mark.filterwarnings("error")
def test_what_float16_cannot_hold_is_kept_as_float32(embeddings):
    kept = as_kept(embeddings, StoreDtype.FLOAT16)
    assert kept.dtype == np.float32
    np.testing.assert_array_equal(kept, embeddings)


@quick
@given(
    seed=seeds,
    n=st.integers(1, 80),
    d=st.integers(16, 40),
    ratio=st.sampled_from([0, 1, 5, 20, 100]),
    span=st.sampled_from([0, 1, 3]),
)
def test_kept_rows_point_where_they_pointed(seed, n, d, ratio, span):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-span, span / 2, d)
    rows = (scale * (rng.normal(size=(n, d)) + ratio)).astype(np.float32)
    kept = as_kept(rows, StoreDtype.FLOAT16).astype(np.float64)
    assert cosines(kept, rows).min() >= 0.99999
    if n > 1:
        # Scaled to one spread, so that small coordinates count as much as large ones.
        mean, spread = rows.mean(axis=0, dtype=float), rows.std(axis=0, dtype=float)
        assert cosines((kept - mean) / spread, (rows - mean) / spread).mean() >= 0.99999


@pytest.mark.parametrize("condition", [10, 1e3])
def test_whitened_rows_point_where_they_pointed(condition):
    # Correlated coordinates: the least direction is far below the spread of any coordinate.
    rng = np.random.default_rng(0)
    rotation, _ = np.linalg.qr(rng.normal(size=(24, 24)))
    rows = rng.normal(size=(500, 24)) * np.geomspace(1, condition**-0.5, 24) @ rotation.T
    rows = rows.astype(np.float32)
    kept = as_kept(rows, StoreDtype.FLOAT16)
    whitening = Whitening.fit(Moments.of(kept), WhiteningConfig(k="full"))
    assert cosines(whitening.apply(kept), whitening.apply(rows)).mean() >= 0.99999
