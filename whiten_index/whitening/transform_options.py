"""Schema of what shapes a transform of a given kind and width. It loads nothing heavy."""

from typing import Literal

from whiten_index.options import TRANSFORM, option, schema

# Score of a document: the cosine or the inner product of its vector and the query's.
Similarity = Literal["cosine", "dot"]


@schema
class SimilarityOption:
    """The option of what ranks documents; ``auto`` is settled by ``BuildConfig.settled``."""

    similarity: Literal["auto", "cosine", "dot"] = option(
        "Rank by cosine, or by dot product; auto: as the model's configuration says, else cosine.",
        TRANSFORM,
        default="auto",
    )


@schema
class TransformShape:
    """Shape of a transform of a given kind and width; None leaves it to the kind."""

    exponent: float | None = option(
        "0 is PCA, 1 is whitening, between is soft.",
        TRANSFORM,
        default=None,
        ge=0,
        le=2,
        shown="auto chooses it; else 1, or 0 with pca",
    )
    center: bool | None = option(
        "Subtract the mean.",
        TRANSFORM,
        default=None,
        shown="auto chooses it; else yes, but not for none, truncate and the dot product",
    )
    normalize_input: bool = option("Fit on embeddings of unit length.", TRANSFORM, default=False)
    shrinkage: str | float | None = option(
        "Shrink the covariance: ledoit-wolf, oas, or a coefficient from 0 to 1.",
        TRANSFORM,
        default=None,
    )
    floor: float | None = option(
        "Drop directions whose variance is below this share of the first one's.",
        TRANSFORM,
        default=None,
        ge=0,
        lt=1,
    )
    remove_top: int | None = option("Drop the first N directions.", TRANSFORM, default=None, ge=0)
