"""A random rotation before lossy codes: cosines stay as they are, codes become more precise.

Kept directions differ in variance, and codes of a fixed number of bits for each coordinate, or
each group of them, waste bits on narrow ones. An orthogonal matrix spreads the variance evenly, as
RaBitQ assumes (Gao and Long 2024) and OPQ starts from (Ge et al. 2013). It is multiplied into the
matrix of the transform, so that it costs neither bytes nor time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.index.library import load_faiss


def rotation_for(inner: Any, k: int, *, seed: int) -> NDArray[np.float64] | None:
    """Return the rotation (k, k) before the codes of an index, None where they gain nothing."""
    return random_rotation(k, seed=seed) if gains_by_rotation(inner) else None


def gains_by_rotation(inner: Any) -> bool:
    """Return whether the codes of an index, or of one inside it, lose precision."""
    faiss = load_faiss()
    inner = faiss.downcast_index(inner)
    if isinstance(inner, faiss.IndexRefine):
        return gains_by_rotation(inner.base_index)
    if isinstance(inner, faiss.IndexHNSW | faiss.IndexNSG):
        return gains_by_rotation(inner.storage)
    if isinstance(inner, faiss.IndexFlat | faiss.IndexIVFFlat):
        return False
    if isinstance(inner, faiss.IndexScalarQuantizer | faiss.IndexIVFScalarQuantizer):
        half = (faiss.ScalarQuantizer.QT_fp16, faiss.ScalarQuantizer.QT_bf16)
        return inner.sq.qtype not in half
    return True


def random_rotation(k: int, *, seed: int) -> NDArray[np.float64]:
    """Return an orthogonal matrix (k, k), uniformly distributed (Mezzadri 2007)."""
    drawn = np.random.default_rng(seed).standard_normal((k, k))
    q, r = np.linalg.qr(drawn)
    turned: NDArray[np.float64] = q * np.sign(np.diag(r))
    return turned
