"""Weights of rows by frequency: their mean, their order, and whitening that is by occurrence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.transforms import cosines, fit, make_rows, quick
from whiten_index.errors import ConfigError
from whiten_index.whitening.whitening_config import WEIGHTINGS, inverse_frequency, zipfian


@quick
@given(counts=st.lists(st.integers(0, 10**6), min_size=1).filter(any))
def test_weights_by_frequency_have_mean_one_and_order_rows_by_it(counts):
    relative = np.array(counts) / np.mean(counts)
    rare, often = inverse_frequency(counts), zipfian(counts)
    for name, weights in (("inverse-frequency", rare), ("zipfian", often)):
        np.testing.assert_array_equal(WEIGHTINGS[name](np.array(counts)), weights)
    assert rare.mean() == pytest.approx(1)
    assert often.mean() == pytest.approx(1)
    np.testing.assert_allclose(rare / rare[0] * (1 + relative), 1 + relative[0], rtol=1e-9)
    np.testing.assert_allclose(often, relative, rtol=1e-9)


def test_zipfian_whitening_is_that_of_the_text_itself():
    """A row a word, weighted by occurrences, gives what a row an occurrence gives (Yokoi 2024)."""
    words, counts = make_rows(ratio=2), np.random.default_rng(0).geometric(0.2, size=200)
    ours = fit(words, weights=zipfian(counts), k=6).apply(words)
    text = words.repeat(counts, axis=0)
    truth = fit(text, k=6).apply(words)
    np.testing.assert_allclose(cosines(ours), cosines(truth), atol=1e-9)


@pytest.mark.parametrize("weigh", [inverse_frequency, zipfian])
@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([1, -1], "not negative"),
        ([1, np.nan], "finite"),
        ([np.inf], "finite"),
        ([0, 0], "all counts are zero"),
        ([], "one number a row"),
        ([[1, 2]], "one number a row"),
    ],
)
def test_counts_that_weigh_nothing_are_refused(weigh, counts, said):
    with pytest.raises(ConfigError, match=said):
        weigh(counts)
