"""Transforms of embeddings and what they are chosen by: arrays in, arrays out. numpy only."""

from whiten_index.whitening.affine import Affine
from whiten_index.whitening.covariance import Estimator, parse_shrinkage, shrunk_covariance
from whiten_index.whitening.drift import DRIFT_THRESHOLD, Decision, Drift, Refit, decide
from whiten_index.whitening.spectrum import (
    Spectrum,
    WidthWish,
    condition_number,
    default_width,
    numerical_rank,
    unit_rows,
    variance_kept,
)
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import (
    Kind,
    Weighting,
    WhiteningConfig,
    inverse_frequency,
    zipfian,
)

__all__ = [
    "DRIFT_THRESHOLD",
    "Affine",
    "Decision",
    "Drift",
    "Estimator",
    "Kind",
    "Refit",
    "Spectrum",
    "Weighting",
    "Whitening",
    "WhiteningConfig",
    "WidthWish",
    "condition_number",
    "decide",
    "default_width",
    "inverse_frequency",
    "numerical_rank",
    "parse_shrinkage",
    "shrunk_covariance",
    "unit_rows",
    "variance_kept",
    "zipfian",
]
