"""scikit-learn: a transform of embeddings as an estimator, where ``IncrementalPCA`` may stand."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from whiten_index.whitening.moments import Moments
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import WhiteningConfig

_DTYPES = ["float64", "float32"]


class WhitenedTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Whitening, PCA or another transform of embeddings as an estimator of scikit-learn.

    ``partial_fit`` takes batches of any size, in O(d²) memory; the result is that of ``fit`` on
    all rows. Vectors are what ``Whitening.apply`` gives, not scaled to unit length, in float32 if
    the embeddings are, else in float64. ``normalize_input`` counts as it was at the first batch.

    Attributes:
        moments_: of all rows since ``fit`` or the first ``partial_fit``.
        whitening_: the ``Whitening``; after ``partial_fit`` it is fitted when it is first needed.

    Examples:
        >>> embeddings = np.random.default_rng(0).normal(size=(1000, 8))
        >>> WhitenedTransformer(k=4, exponent=0.5).fit_transform(embeddings).shape
        (1000, 4)
    """

    def __init__(
        self,
        k: str | int | float | None = None,
        *,
        exponent: str | float | None = None,
        kind: str = "whitening",
        center: bool | None = None,
        normalize_input: bool = False,
        shrinkage: str | float | None = None,
    ) -> None:
        """Take what ``WhiteningConfig`` takes under these names; it is checked by a fit."""
        self.k = k
        self.exponent = exponent
        self.kind = kind
        self.center = center
        self.normalize_input = normalize_input
        self.shrinkage = shrinkage

    def fit(self, X: ArrayLike, y: object = None) -> "WhitenedTransformer":  # noqa: ARG002
        """Fit on embeddings (n, d) alone, as ``Whitening.fit``; forget what was learnt before."""
        self._learn(X, None, ensure_min_samples=2)
        _ = self.whitening_
        return self

    def partial_fit(self, X: ArrayLike, y: object = None) -> "WhitenedTransformer":  # noqa: ARG002
        """Add embeddings (n, d) to those learnt from."""
        self._learn(X, getattr(self, "moments_", None))
        return self

    def _learn(self, X: ArrayLike, before: Moments | None, **how: Any) -> None:
        rows = validate_data(self, X, reset=before is None, dtype=_DTYPES, **how)
        if before is None:
            self._unit = self.normalize_input
        moments = Moments.of(unit_rows(rows) if self._unit else rows)
        self.moments_ = moments if before is None else before + moments
        self._fitted: Whitening | None = None

    @property
    def whitening_(self) -> Whitening:
        """The fitted transform."""
        check_is_fitted(self)
        if self._fitted is None:
            # Grids of parameters hold numpy's numbers.
            given = self.get_params(deep=False).items()
            options = {n: v.item() if isinstance(v, np.generic) else v for n, v in given}
            options["normalize_input"] = self._unit
            self._fitted = Whitening.fit(self.moments_, WhiteningConfig(**options))
        return self._fitted

    def transform(self, X: ArrayLike) -> NDArray[np.floating]:
        """Return the vectors (n, k) of embeddings (n, d)."""
        check_is_fitted(self)
        rows = validate_data(self, X, reset=False, dtype=_DTYPES)
        return self.whitening_.apply(rows).astype(rows.dtype, copy=False)

    def inverse_transform(self, X: ArrayLike) -> NDArray[np.floating]:
        """Return the embeddings (n, d) within the kept directions that give the vectors (n, k)."""
        check_is_fitted(self)
        rows = check_array(X, dtype=_DTYPES)
        return self.whitening_.inverse(rows).astype(rows.dtype, copy=False)

    @property
    def _n_features_out(self) -> int:
        return self.whitening_.k

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = _DTYPES
        return tags
