"""Build an index of texts, of a column of embeddings or of passages, and search it."""

import json
from pathlib import Path

import faiss
import numpy as np
import pytest

import whiten_index
from tests.acceptance.truth import SciFact, nearest, whitening


def test_scores_are_those_of_whitening_by_its_definition(
    built: Path, scifact: SciFact, embeddings: np.ndarray, query_embeddings: np.ndarray
) -> None:
    mean, matrix = whitening(embeddings, 64)
    rows, cosines = nearest((embeddings - mean) @ matrix, (query_embeddings - mean) @ matrix, 10)
    ids = scifact.ids()
    index = whiten_index.open_index(built)
    found = index.search(scifact.query_texts(), top_k=10)
    for hits, expected, scores in zip(found, rows, cosines, strict=True):
        assert [hit.score for hit in hits] == pytest.approx(scores.tolist(), abs=5e-4)
        assert len({hit.id for hit in hits} & {ids[row] for row in expected}) >= 9


def test_the_file_is_a_plain_faiss_index(
    built: Path, embeddings: np.ndarray, query_embeddings: np.ndarray
) -> None:
    """Raw embeddings go in: the transform is in the index, and float16 rounded them."""
    version = json.loads((built / "CURRENT").read_text())["version"]
    index = faiss.read_index(str(built / "versions" / version / "index.faiss"))
    assert (index.d, index.ntotal) == (384, len(embeddings))
    mean, matrix = whitening(embeddings, 64)
    rows, cosines = nearest((embeddings - mean) @ matrix, (query_embeddings - mean) @ matrix, 5)
    scores, found = index.search(query_embeddings.astype(np.float32), 5)
    np.testing.assert_allclose(scores, cosines, atol=5e-4)
    assert (found == rows).mean() > 0.95
