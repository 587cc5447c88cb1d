"""Whitening-k and what it is chosen by: arrays in, arrays out. numpy only."""

from whiten_index.whitening.spectrum import (
    Spectrum,
    WidthWish,
    condition_number,
    default_width,
    numerical_rank,
    variance_kept,
)
from whiten_index.whitening.transform import Kind, Whitening, WhiteningConfig, unit_rows

__all__ = [
    "Kind",
    "Spectrum",
    "Whitening",
    "WhiteningConfig",
    "WidthWish",
    "condition_number",
    "default_width",
    "numerical_rank",
    "unit_rows",
    "variance_kept",
]
