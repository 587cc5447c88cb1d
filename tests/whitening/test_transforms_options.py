"""Options of every kind of transform: what goes with what, with the width, and with the rows."""

import numpy as np
import pytest

from tests.helpers.transforms import SLICED, fit, make_rows
from whiten_index.errors import ConfigError, WhiteningError
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Kind.PCA, {"shrinkage": "oas"}, r"scales nothing, so --shrinkage cannot.*use --whiten wh"),
        (Kind.NONE, {"remove_top": 2}, r"so --remove-top cannot.*pca or whitening or all-but-the-"),
        (Kind.NONE, {"k": 0.9}, r"as it is, so --k cannot.*or use --whiten pca"),
        (Kind.TRUNCATE, {"exponent": 1, "k": 2, "remove_top": 1}, r"--exponent and --remove-top"),
        (Kind.ALL_BUT_THE_TOP, {"exponent": 1}, r"so --exponent cannot apply; .*whitening"),
        (Kind.TRUNCATE, {"k": 0.9}, r"so --k as a share of variance cannot apply"),
        (Kind.TRUNCATE, {"shrinkage": 0.1, "floor": 0.1}, r"so --shrinkage and --floor cannot"),
        (Kind.PCA, {"remove_top": 2.5}, "--remove-top takes a whole number; 2.5"),
        (Kind.WHITENING, {"floor": float("nan")}, "--floor takes a finite number; nan"),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_what_would(kind, options, said):
    with pytest.raises(ConfigError, match=said):
        WhiteningConfig(kind=kind, **options)


def test_what_the_width_forbids_is_known_before_and_at_the_fit():
    for refused in (
        lambda: fit(make_rows(), kind=Kind.TRUNCATE, k=13),
        lambda: WhiteningConfig(kind=Kind.TRUNCATE, k=13).require_dim(12),
    ):
        with pytest.raises(ConfigError, match=r"--k 13 is more than the 12 dims .*use --k 12 or"):
            refused()


@pytest.mark.parametrize("kind", SLICED[:3])
def test_what_does_needs_two_and_says_what_else_there_is(kind):
    with pytest.raises(WhiteningError, match=r"there are 1; .*or use --whiten none"):
        fit(make_rows(0, 1), kind=kind)
    with pytest.raises(WhiteningError, match=r"embeddings are equal.*--whiten none"):
        fit(np.ones((5, 12)), kind=kind)
