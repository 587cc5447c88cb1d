"""What embeddings and vectors are worth, measured on arrays. numpy, scikit-learn where needed."""

from whiten_index.evaluation.entailment import EntailmentScore, score_entailment
from whiten_index.evaluation.geometry import (
    POSITIVE_ABOVE,
    Geometry,
    alignment,
    effective_rank,
    hubness,
    isoscore,
    isotropy,
    mean_cosine,
    uniformity,
)
from whiten_index.evaluation.sts import (
    AGGREGATIONS,
    MEASURES,
    Correlation,
    correlate,
    pair_cosines,
)
from whiten_index.evaluation.transfer import TransferScore, pair_features, score_transfer

__all__ = [
    "AGGREGATIONS",
    "MEASURES",
    "POSITIVE_ABOVE",
    "Correlation",
    "EntailmentScore",
    "Geometry",
    "TransferScore",
    "alignment",
    "correlate",
    "effective_rank",
    "hubness",
    "isoscore",
    "isotropy",
    "mean_cosine",
    "pair_cosines",
    "pair_features",
    "score_entailment",
    "score_transfer",
    "uniformity",
]
