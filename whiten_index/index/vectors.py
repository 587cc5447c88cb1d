"""The vectors of rows, as far as a kind of index gives them back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError
from whiten_index.index.library import load_faiss


def vectors_of(inner: Any, rows: range) -> NDArray[np.float32]:
    """Return the vectors of n rows as the index keeps them, (n, k).

    Raises:
        ConfigError: this kind of index gives no vectors back.
    """
    faiss = load_faiss()
    if isinstance(inner, faiss.IndexRefine):
        inner = faiss.downcast_index(inner.refine_index)
    lists = (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer, faiss.IndexIVFPQ)
    # Others are not asked: some of FAISS's fast-scan indexes crash on it.
    if not isinstance(inner, (faiss.IndexFlatCodes, faiss.IndexHNSW, *lists)):
        raise ConfigError(
            f"an index of kind {type(inner).__name__} gives no vectors back, so it has no "
            "neighbours of a document; search by text, add --rerank, which takes the document's "
            "embedding from the store, or build with another --factory"
        )
    if isinstance(inner, lists):
        inner.make_direct_map()
    return np.stack([inner.reconstruct(row) for row in rows])
