"""The transforms in front of an index: what raw embeddings go through on their way in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whiten_index.index.exact import FEW_QUERIES, Vectors
from whiten_index.index.library import load_faiss

_Step = Callable[[Vectors], Vectors]


@dataclass(frozen=True, eq=False)
class Transforms:
    """Makes unit vectors of raw embeddings as an index does; a few rows without FAISS.

    FAISS takes some 100 µs for a single row, of which numpy's own products need 5.

    Attributes:
        index: behind the transforms, which live as long as it does.
    """

    index: Any
    _steps: tuple[_Step, ...] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        steps = [_step(each) for each in self._chain()]
        known = tuple(step for step in steps if step is not None)
        object.__setattr__(self, "_steps", known if len(known) == len(steps) else None)

    def __call__(self, embeddings: Vectors) -> Vectors:
        """Return the unit vectors (n, k) of raw embeddings (n, d)."""
        vectors = embeddings
        if self._steps is not None and 0 < len(embeddings) <= FEW_QUERIES:
            rows = [self._one(row) for row in embeddings]
            return rows[0][None] if len(rows) == 1 else np.stack(rows)
        for transform in self._chain():
            vectors = transform.apply(vectors)
        return vectors

    def _one(self, row: Vectors) -> Vectors:
        assert self._steps is not None
        for step in self._steps:
            row = step(row)
        return row

    def _chain(self) -> list[Any]:
        faiss, chain = load_faiss(), self.index.chain
        return [faiss.downcast_VectorTransform(chain.at(place)) for place in range(chain.size())]


def _step(transform: Any) -> _Step | None:
    """Return what a transform of FAISS does to one row, None where that is not known here."""
    faiss = load_faiss()
    if isinstance(transform, faiss.NormalizationTransform):
        return _to_length_one if transform.norm == 2.0 else None
    if isinstance(transform, faiss.CenteringTransform):
        mean = _view(transform.mean)
        return lambda row: row - mean
    if isinstance(transform, faiss.LinearTransform):
        matrix = _view(transform.A).reshape(transform.d_out, transform.d_in)
        if not transform.have_bias:
            return lambda row: matrix @ row
        bias = _view(transform.b)
        return lambda row: matrix @ row + bias
    return None


def _to_length_one(row: Vectors) -> Vectors:
    square = row @ row
    return row / np.sqrt(square) if square > 0 else row


def _view(numbers: Any) -> Vectors:
    view: Vectors = load_faiss().rev_swig_ptr(numbers.data(), numbers.size())
    return view
