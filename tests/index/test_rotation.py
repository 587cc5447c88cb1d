"""A rotation leaves cosines as they are and makes lossy codes more precise."""

from __future__ import annotations

import numpy as np
import pytest

from whiten_index.index.factory import inner_index
from whiten_index.index.transforms import random_rotation
from whiten_index.whitening.spectrum import unit_rows


@pytest.mark.parametrize("k", [1, 2, 33])
def test_a_rotation_is_orthogonal_and_of_its_seed(k: int) -> None:
    turned = random_rotation(k, seed=3)
    np.testing.assert_allclose(turned @ turned.T, np.eye(k), atol=1e-12)
    np.testing.assert_array_equal(turned, random_rotation(k, seed=3))
    if k > 2:
        assert not np.allclose(turned, random_rotation(k, seed=4))


@pytest.mark.parametrize("factory", ["SQ4", "PQ8", "PQ16x4fs", "RaBitQ"])
def test_codes_of_uneven_directions_become_more_precise(factory: str) -> None:
    rng = np.random.default_rng(0)
    scale = np.arange(1, 33) ** -0.8
    rows, queries = (
        unit_rows(rng.standard_normal((n, 32)) * scale).astype(np.float32) for n in (4000, 200)
    )
    truth = np.argsort(-(queries @ rows.T), axis=1)[:, :10]

    def recall(matrix: np.ndarray) -> float:
        index = inner_index(factory, 32)
        turned = (rows @ matrix).astype(np.float32)
        index.train(turned)
        index.add(turned)
        found = index.search((queries @ matrix).astype(np.float32), 10)[1]
        pairs = zip(found, truth, strict=True)
        return float(np.mean([len(set(a) & set(b)) / 10 for a, b in pairs]))

    assert recall(random_rotation(32, seed=0)) > recall(np.eye(32)) + 0.02
