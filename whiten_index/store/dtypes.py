"""Types of stored embeddings: float16 unless that would show."""

from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.prefetch import blocks
from whiten_index.errors import ConfigError

# A relative error r of each coordinate costs r²/2 of cosine: 1/256 keeps it above 0.99999.
_FLOAT16_ERROR = 1 / 256
_NEGLIGIBLE_VARIANCE = 1e-10
_LOOKED_AT_ROWS = 2048
# The numpy names of the types that embeddings are kept in.
EmbeddingsType = Literal["float16", "float32", "float64"]


class StoreDtype(Enum):
    """Type of stored embeddings; ``OWN`` keeps the precision they came with."""

    FLOAT16 = "float16"
    FLOAT32 = "float32"
    OWN = "own"


def as_kept(
    embeddings: NDArray[np.floating],
    dtype: StoreDtype,
    *,
    variances: NDArray[np.float64] | None = None,
) -> NDArray[np.floating]:
    """Return embeddings (n, d) in the type they are kept in."""
    if dtype is StoreDtype.OWN:
        return embeddings
    if dtype is StoreDtype.FLOAT16 and fits_float16(embeddings, variances=variances):
        return embeddings.astype(np.float16)
    with np.errstate(over="ignore"):
        single = embeddings.astype(np.float32)
    if np.isinf(single).any() and np.isfinite(embeddings).all():
        raise ConfigError(
            "some embeddings are beyond float32; use --store-dtype own, or scale the column down"
        )
    return single


def fits_float16(
    embeddings: NDArray[np.floating], *, variances: NDArray[np.float64] | None = None
) -> bool:
    """Return whether rounding (n, d) to float16 is small against the spread of each coordinate.

    Coordinates whose variance is below 1e-10 of the largest carry nothing and do not count.
    """
    if embeddings.dtype == np.float16 or (not len(embeddings) and variances is not None):
        return True
    if len(embeddings) < 2 and variances is None:
        return False
    mean = embeddings.mean(axis=0, dtype=np.float64)
    noise, spread = np.zeros_like(mean), np.zeros_like(mean)
    for block in blocks(embeddings, _LOOKED_AT_ROWS):
        with np.errstate(over="ignore"):
            half = block.astype(np.float16)
        if not np.isfinite(half).all():
            return False
        noise += np.square(half.astype(np.float64) - block).sum(axis=0)
        spread += np.square(block - mean).sum(axis=0)
    if variances is not None:
        spread = variances * len(embeddings)
    matters = spread > _NEGLIGIBLE_VARIANCE * spread.max()
    return bool((noise[matters] <= _FLOAT16_ERROR**2 * spread[matters]).all())


def keeps_moments(rows: int, dim: int) -> bool:
    """Return whether a segment of so many rows keeps its moments in a file.

    The moments of fewer rows than d are larger than the rows, and slower to read than to compute.
    """
    return rows >= dim
