"""The geometry of a corpus before and after its transform, on a sample of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from whiten_index.draw import drawn_rows, embeddings_of
from whiten_index.errors import ConfigError
from whiten_index.evaluation import Geometry
from whiten_index.store import CorpusRecord, EmbeddingStore
from whiten_index.whitening import Kind, Whitening, unit_rows

_ROWS = 2_048


def geometry(
    store: EmbeddingStore, record: CorpusRecord, whitening: Whitening, *, seed: int
) -> dict[str, Any] | None:
    """Return the geometry of the embeddings, ``raw``, and of the ``vectors`` made of them.

    Both are measured on the same 2,048 rows at most; IsoScore and effective rank are those of the
    whole spectrum where that is known. None where too few rows differ from 0.

    Args:
        store: holds the embeddings.
        record: the corpus.
        whitening: the transform.
        seed: of the sample.
    """
    rows = np.sort(drawn_rows(record, _ROWS, np.random.default_rng(seed)))
    raw = embeddings_of(store, record, rows)
    vectors = unit_rows(whitening.apply(raw))
    shrunk = whitening.shrinkage > 0
    spectrum = None if shrunk or whitening.normalize_input else whitening.eigenvalues
    after = None
    if whitening.kind in (Kind.PCA, Kind.WHITENING, Kind.ALL_BUT_THE_TOP) and not shrunk:
        after = whitening.variances * whitening.scales() ** 2
    try:
        return {
            "raw": Geometry.of(raw, eigenvalues=spectrum).to_json(),
            "vectors": Geometry.of(vectors, eigenvalues=after).to_json(),
        }
    except ConfigError:
        return None
