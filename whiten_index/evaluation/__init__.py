"""What embeddings and vectors are worth, measured on arrays. numpy only."""

from whiten_index.evaluation.geometry import (
    Geometry,
    effective_rank,
    hubness,
    isoscore,
    isotropy,
    mean_cosine,
    uniformity,
)

__all__ = [
    "Geometry",
    "effective_rank",
    "hubness",
    "isoscore",
    "isotropy",
    "mean_cosine",
    "uniformity",
]
