"""The geometry of a corpus before and after its transform, on a sample of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from whiten_index.draw import drawn_rows, embeddings_of
from whiten_index.evaluation import Geometry
from whiten_index.store import CorpusRecord, EmbeddingStore
from whiten_index.whitening import Whitening, unit_rows

_ROWS, _LEAST_ROWS = 2_048, 3


def geometry(
    store: EmbeddingStore, record: CorpusRecord, whitening: Whitening, *, seed: int
) -> dict[str, Any] | None:
    """Return the geometry of the embeddings, ``raw``, and of the ``vectors`` made of them.

    All figures of both are measured on the same n rows, 2,048 at most, at unit length: a search by
    cosine sees directions only. IsoScore and effective rank are those of the sample, and lower than
    those of a larger corpus, the more so the wider the rows are: where all d directions are even
    IsoScore reads about n/(n + d), 0.73 for d = 768 and 0.94 for k = 128 at 2,048 rows.

    None where fewer than three rows of either differ from 0.

    Args:
        store: holds the embeddings.
        record: the corpus.
        whitening: the transform.
        seed: of the sample.
    """
    rows = np.sort(drawn_rows(record, _ROWS, np.random.default_rng(seed)))
    raw = embeddings_of(store, record, rows)
    units = {"raw": unit_rows(raw), "vectors": unit_rows(whitening.apply(raw))}
    if min(np.count_nonzero(unit.any(axis=1)) for unit in units.values()) < _LEAST_ROWS:
        return None
    return {name: Geometry.of(unit).to_json() for name, unit in units.items()}
