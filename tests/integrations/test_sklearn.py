"""The estimator of scikit-learn: scikit-learn's own checks, and agreement with ``Whitening``."""

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from tests.helpers.transforms import make_rows
from whiten_index import WhitenedTransformer, Whitening, WhiteningConfig


@parametrize_with_checks(
    [WhitenedTransformer(), WhitenedTransformer(exponent=0.5, shrinkage="oas")]
)
def test_scikit_learn_finds_no_fault(estimator, check):
    check(estimator)


@pytest.mark.parametrize(
    "options",
    [{"k": 5}, {"k": 0.9, "exponent": 0.3}, {"kind": "pca", "k": "full", "normalize_input": True}],
)
def test_it_is_the_whitening_of_the_rows_whole_or_in_pieces(options):
    rows = make_rows(ratio=3)
    truth = Whitening.fit(rows, WhiteningConfig(**options))
    whole = WhitenedTransformer(**options).fit(rows[:50]).fit(rows)
    pieces = clone(whole)
    for piece in np.split(rows, [1, 2, 90]):
        pieces.partial_fit(piece)
    vectors = truth.apply(rows)
    for made in (whole, pieces, pickle.loads(pickle.dumps(pieces))):
        np.testing.assert_allclose(made.transform(rows), vectors, rtol=0, atol=1e-10)
        back = made.inverse_transform(vectors)
        np.testing.assert_allclose(back, truth.inverse(vectors), rtol=0, atol=1e-10)
    assert whole.transform(rows.astype(np.float32)).dtype == np.float32
    # Lengths count as they were when the first rows came.
    unit = options.get("normalize_input", False)
    pieces.set_params(k=2, normalize_input=not unit).partial_fit(rows)
    truth = Whitening.fit(rows, WhiteningConfig(**options | {"k": 2}))
    np.testing.assert_allclose(abs(pieces.transform(rows)), abs(truth.apply(rows)), atol=0.05)


def test_it_is_a_step_of_a_pipeline_that_a_search_sets():
    rows = make_rows()
    steps = make_pipeline(WhitenedTransformer(exponent=0.5), Ridge()).set_output(transform="pandas")
    widths = {"whitenedtransformer__k": np.arange(1, 13)}
    best = GridSearchCV(steps, widths).fit(rows, rows[:, 3]).best_estimator_
    names = [f"whitenedtransformer{i}" for i in range(12)]
    assert list(best[0].transform(rows).columns) == list(best[0].get_feature_names_out()) == names
