"""Bytes told before an index is made, and counted on a filled one, against FAISS's own file."""

from typing import Any

import faiss
import numpy as np
import pytest

from whiten_index import Moments, Whitening, WhiteningConfig
from whiten_index.index.factory import inner_index
from whiten_index.index.sizes import expected_bytes, measured_bytes
from whiten_index.index.transforms import wrap
from whiten_index.whitening.whitening_config import Kind

DIM, K, ROWS = 48, 32, 3_000
FACTORIES = [
    "Flat", "SQfp16", "SQbf16", "SQ8", "SQ6", "SQ4", "PQ8", "PQ8x4", "PQ16x4fs", "RaBitQ",
    "RaBitQ4", "RaBitQfs", "RQ2x6", "IVF16,Flat", "IVF16,SQ8", "IVF16,PQ8", "IVF16,PQ16x4fs",
    "IVF16,RaBitQ", "IVF16,RaBitQfs", "IVF16_HNSW8,SQ8", "HNSW16", "HNSW16_SQ8",
]  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> Any:
    return np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)


def filled(factory: str, rows: Any) -> Any:
    """Return an index behind a transform, with all rows in it."""
    whitening = Whitening.fit(Moments.of(rows), WhiteningConfig(kind=Kind.PCA, k=K))
    inner = inner_index(factory, K)
    vectors = whitening.apply(rows).astype(np.float32)
    inner.train(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    index = wrap(inner, whitening)
    index.add(rows)
    return index


@pytest.mark.parametrize("factory", FACTORIES)
def test_bytes_are_those_of_the_file(factory: str, rows: Any) -> None:
    index = filled(factory, rows)
    written = len(faiss.serialize_index(index))
    # What is left over is the head of the file: kinds, widths, settings.
    assert abs(measured_bytes(index).total - written) < 800
    expected = expected_bytes(factory, rows=ROWS, dim=DIM, k=K)
    # The neighbours of a graph and the last blocks of lists are known in the mean.
    spread = 0.02 if "HNSW" in factory or "fs" in factory else 0.0
    assert abs(expected.total - written) < 800 + spread * written


@pytest.mark.parametrize(
    ("factory", "split"),
    [
        ("Flat", {"codes": 4 * K * ROWS}),
        ("SQ8", {"codes": K * ROWS, "codebooks": 2 * 4 * K}),
        ("PQ8", {"codes": 8 * ROWS, "codebooks": 4 * 256 * K}),
        ("RaBitQ", {"codes": (K // 8 + 8) * ROWS, "codebooks": 4 * K}),
        ("IVF16,SQ8",
            {"codes": K * ROWS, "ids": 8 * ROWS, "lists": 8 * 16, "codebooks": 2 * 4 * K,
            "centroids": 4 * 16 * K}),
    ],
)  # fmt: skip
def test_the_split_is_the_closed_form(factory: str, split: dict[str, int], rows: Any) -> None:
    matrix = 4 * (DIM + DIM * K)
    total = sum(split.values()) + matrix
    whole = {**dict.fromkeys(("codes", "ids", "lists", "graph", "codebooks", "centroids"), 0)}
    whole |= {"matrix": matrix, "total": total, **split}
    assert expected_bytes(factory, rows=ROWS, dim=DIM, k=K).to_json() == whole
    assert measured_bytes(filled(factory, rows)).to_json() == whole
