"""What raw embeddings go through: a few rows by numpy as FAISS sends many."""

from __future__ import annotations

import gc
from typing import Any

import faiss
import numpy as np
import pytest

from whiten_index.index import Transforms, inner_index, wrap
from whiten_index.whitening import Kind, Whitening, WhiteningConfig
from whiten_index.whitening.moments import Moments

ROWS = np.random.default_rng(4).standard_normal((300, 12)).astype(np.float32) + 0.5


def of_faiss(factory: str) -> Any:
    index = faiss.index_factory(12, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(ROWS)
    index.add(ROWS)
    return index


def as_faiss_does(index: Any, rows: Any) -> Any:
    chain = [faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size())]
    for transform in chain:
        rows = transform.apply(rows)
    return rows


@pytest.mark.parametrize("few", [1, 2, 3, 4, 50])
@pytest.mark.parametrize(
    "factory", ["L2norm,Flat", "PCA4,L2norm,Flat", "PCAR5,Flat", "PCAW4,Flat", "OPQ4,Flat",
                "ITQ4,Flat", "L2norm,RR6,L2norm,Flat", "Pad16,Flat"],
)  # fmt: skip
def test_transforms_are_those_of_faiss(factory: str, few: int) -> None:
    index = of_faiss(factory)
    expected = as_faiss_does(index, ROWS[:few])
    np.testing.assert_allclose(Transforms(index)(ROWS[:few]), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [Kind.PCA, Kind.WHITENING, Kind.TRUNCATE, Kind.NONE])
@pytest.mark.parametrize("normalize_input", [False, True])
def test_transforms_of_our_own_are_those_of_faiss(kind: Kind, normalize_input: bool) -> None:
    k = 12 if kind is Kind.NONE else 5
    settled = {} if kind is Kind.NONE else {"k": k, "normalize_input": normalize_input}
    config = WhiteningConfig(kind=kind, **settled)
    index = wrap(inner_index("Flat", k), Whitening.fit(Moments.of(ROWS), config))
    ours = Transforms(index)(ROWS[:2])
    assert ours.dtype == np.float32
    assert ours.flags.c_contiguous
    np.testing.assert_allclose(ours, as_faiss_does(index, ROWS[:2]), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-6)


def test_a_row_of_zeros_stays_one_and_no_rows_stay_none() -> None:
    index = of_faiss("L2norm,Flat")
    transforms = Transforms(index)
    assert not transforms(np.zeros((1, 12), np.float32)).any()
    assert transforms(ROWS[:0]).shape == (0, 12)


def test_the_index_lives_as_long_as_its_transforms() -> None:
    index = of_faiss("PCA4,L2norm,Flat")
    expected = as_faiss_does(index, ROWS[:1])
    transforms = Transforms(index)
    del index
    gc.collect()
    np.testing.assert_allclose(transforms(ROWS[:1]), expected, rtol=1e-4, atol=1e-6)
