"""The vectors that points are over: one projection of the corpus serves every k, γ and centring."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whiten_index.fit import fit_whitening
from whiten_index.index import exact_neighbours, truth_of_rows
from whiten_index.index.trials import SharedLists
from whiten_index.progress import Stages
from whiten_index.sweep.config import AUTO, SweepConfig, Wish
from whiten_index.sweep.dataset import Dataset
from whiten_index.sweep.files import file_array
from whiten_index.sweep.grid import FAISS, RAW, Vectors, lists
from whiten_index.whitening import Kind, Whitening, WhiteningConfig, unit_rows

TOP_K = 10
_ROWS, _TRUTH_ROWS = 8_192, 1 << 16
# Kinds whose vectors are the first columns of the projected corpus, scaled.
_SLICED = (Kind.PCA, Kind.WHITENING)


@dataclass(eq=False)
class Space:
    """Unit vectors of every row and query under one transform, and what is exact among them.

    Attributes:
        whitening: the transform.
        vectors: (n, k) float32 in a file.
        truth: (q, 10) exact neighbours of the queries among these vectors.
        tuning: (t, k) float32 unit vectors that are tuned with.
        tuning_truth: (t, 10) their exact neighbours, themselves left out.
        own: (t,) row numbers of these vectors, None where they are no rows.
        seconds: that fitting the transform and making the vectors took.
    """

    whitening: Whitening
    vectors: NDArray[np.float32]
    truth: NDArray[np.int64]
    tuning: NDArray[np.float32]
    tuning_truth: NDArray[np.int64]
    own: NDArray[np.int64] | None
    seconds: float
    _lists: SharedLists | None = field(default=None, repr=False)

    def shared_lists(self, seed: int, device: str) -> SharedLists:
        """Return the inverted lists that all codecs over these vectors share, made once."""
        if self._lists is None:
            count, rng = lists(len(self.vectors)), np.random.default_rng(seed)
            self._lists = SharedLists.learn(self.vectors, count=count, rng=rng, device=device)
        return self._lists


@dataclass(eq=False)
class Spaces:
    """Makes the vectors of a dataset, one transform at a time, in files of ``folder``.

    Attributes:
        config: of the sweep.
        dataset: rows and queries.
        folder: for the files.
        stages: where the time is shown.
    """

    config: SweepConfig
    dataset: Dataset
    folder: Path
    stages: Stages
    _turned: NDArray[np.float32] | None = field(default=None, repr=False)
    _turned_seconds: float = 0.0

    def whitening(self, where: Vectors) -> Whitening:
        """Return the transform of raw embeddings to the vectors.

        Raises:
            WhiteningError: the embeddings do not allow it.
        """
        moments = self.dataset.moments
        if where.family in (RAW, FAISS):
            return Whitening.fit(moments, WhiteningConfig(kind=Kind.NONE))
        wish = Wish.parse(where.transform)
        if wish.name == AUTO:
            config = replace(self.config.build, k=where.k)
            chosen = fit_whitening(config, self.dataset.encoded, None, self.stages).whitening
            # It saw the rows held out, if there are any; the basis must not.
            setting = WhiteningConfig(
                kind=chosen.kind, k=where.k, exponent=chosen.exponent, center=chosen.center
            )
            return Whitening.fit(moments, setting)
        kind, seed = Kind(wish.name), self.config.build.seed
        asked = WhiteningConfig(kind=kind, k=where.k, exponent=wish.exponent, seed=seed)
        return Whitening.fit(moments, asked)

    def open(self, where: Vectors) -> Space:
        """Return the vectors of a transform and what is exact among them.

        Raises:
            WhiteningError: the embeddings do not allow the transform.
        """
        started = time.perf_counter()
        whitening = self.whitening(where)
        before = 0.0
        if whitening.kind in _SLICED:
            # Made once, though each of its points alone would need it.
            before = 0.0 if self._turned is None else self._turned_seconds
            self._turned_rows()
        rows = self.dataset.rows
        with self.stages.stage("vectors", rows) as watcher:
            vectors = file_array(self.folder / "vectors", np.float32, (rows, whitening.k))
            for start, block in self._projected(whitening):
                vectors[start : start + len(block)] = unit_rows(block)
                watcher.advance(len(block))
            seconds = before + time.perf_counter() - started
            return self._with_truth(whitening, vectors, seconds)

    def _with_truth(
        self, whitening: Whitening, vectors: NDArray[np.float32], seconds: float
    ) -> Space:
        """Return the vectors with the exact neighbours of what is asked and tuned with."""
        queries, tuning = (
            unit_rows(whitening.apply(rows)).astype(np.float32)
            for rows in (self.dataset.queries, self.dataset.tuning.rows)
        )
        parts = (
            np.ascontiguousarray(vectors[start : start + _TRUTH_ROWS])
            for start in range(0, len(vectors), _TRUTH_ROWS)
        )
        asked = np.concatenate([queries, tuning])
        scores, nearest = exact_neighbours(parts, asked, TOP_K + 2)
        truth, near, own = nearest[: len(queries), :TOP_K], nearest[len(queries) :, :TOP_K], None
        if self.dataset.tuning.own is not None:
            of_rows = scores[len(queries) :], nearest[len(queries) :], self.dataset.tuning.own
            near, counted = truth_of_rows(*of_rows, top_k=TOP_K)
            tuning, own = tuning[counted], self.dataset.tuning.own[counted]
        return Space(whitening, vectors, truth, tuning, near, own, seconds)

    def _projected(self, whitening: Whitening) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield blocks of the corpus under the transform, before they are scaled to length 1."""
        rows = self.dataset.rows
        sliced = whitening.kind in _SLICED
        source = self._turned_rows() if sliced else self.dataset.raw
        k, scales = whitening.k, whitening.scales().astype(np.float32)
        away = np.zeros(k, dtype=np.float32)
        if sliced and not whitening.center:
            away = (whitening.mean @ whitening.basis).astype(np.float32)
        for start in range(0, rows, _ROWS):
            block = source[start : start + _ROWS]
            if sliced:
                yield start, (block[:, :k] + away) * scales
            elif whitening.kind in (Kind.NONE, Kind.TRUNCATE) and not whitening.center:
                yield start, block[:, :k].astype(np.float32)
            else:
                yield start, whitening.apply(block).astype(np.float32)

    def _turned_rows(self) -> NDArray[np.float32]:
        """Return the centred corpus along its eigenvectors, (n, widest k), made on first need."""
        if self._turned is None:
            started = time.perf_counter()
            rank = self.dataset.spectrum.rank
            widest = max(k for k in self.config.ks if k <= rank)
            fit = Whitening.fit(self.dataset.moments, WhiteningConfig(kind=Kind.PCA, k=widest))
            mean, basis = fit.mean.astype(np.float32), fit.basis.astype(np.float32)
            raw = self.dataset.raw
            turned = file_array(self.folder / "turned", np.float32, (len(raw), widest))
            with self.stages.stage("project", len(raw)) as watcher:
                for start in range(0, len(raw), _ROWS):
                    block = raw[start : start + _ROWS].astype(np.float32)
                    turned[start : start + _ROWS] = (block - mean) @ basis
                    watcher.advance(len(block))
            self._turned, self._turned_seconds = turned, time.perf_counter() - started
        return self._turned
