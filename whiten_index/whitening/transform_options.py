"""Schema of what shapes a transform of a given kind and width. It loads nothing heavy."""

from typing import Annotated

from pydantic import Field

from whiten_index.options import TRANSFORM, Option, schema


@schema
class TransformShape:
    """Shape of a transform of a given kind and width; None leaves it to the kind."""

    exponent: Annotated[
        float | None,
        Field(ge=0, le=2),
        Option(
            "0 is PCA, 1 is whitening, between is soft.",
            TRANSFORM,
            default="auto chooses it; else 1, or 0 with pca",
        ),
    ] = None
    center: Annotated[
        bool | None,
        Option(
            "Subtract the mean.",
            TRANSFORM,
            default="auto chooses it; else yes, but not for none, random and truncate",
        ),
    ] = None
    normalize_input: Annotated[bool, Option("Fit on embeddings of unit length.", TRANSFORM)] = False
    groups: Annotated[
        int | None, Field(ge=1), Option("Groups of channels for --whiten group.", TRANSFORM)
    ] = None
    group_size: Annotated[
        int | None, Field(ge=1), Option("Channels of a group, instead of --groups.", TRANSFORM)
    ] = None
    shuffle: Annotated[bool, Option("Permute the channels before grouping them.", TRANSFORM)] = (
        False
    )
    shrinkage: Annotated[
        str | float | None,
        Option("Shrink the covariance: ledoit-wolf, oas, or a coefficient from 0 to 1.", TRANSFORM),
    ] = None
    floor: Annotated[
        float | None,
        Field(ge=0, lt=1),
        Option("Drop directions whose variance is below this share of the first one's.", TRANSFORM),
    ] = None
    remove_top: Annotated[
        int | None, Field(ge=0), Option("Drop the first N directions.", TRANSFORM)
    ] = None
