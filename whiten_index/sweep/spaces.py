"""The vectors that points are over: a transform of the corpus, and what is exact among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from whiten_index.index import exact_neighbours
from whiten_index.pipeline.fit import fit_whitening
from whiten_index.progress import Stages
from whiten_index.sweep.config import AUTO, SweepConfig, Wish
from whiten_index.sweep.dataset import Dataset
from whiten_index.sweep.grid import FAISS, RAW, Vectors
from whiten_index.whitening import Kind, Whitening, WhiteningConfig, unit_rows

TOP_K = 10


@dataclass(frozen=True, eq=False)
class Space:
    """The unit vectors of the corpus under one transform.

    Attributes:
        whitening: the transform.
        truth: (q, 10) exact neighbours of the queries among these vectors.
    """

    whitening: Whitening
    truth: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Spaces:
    """Fits the transforms of a sweep, and finds what is exact under each.

    Attributes:
        config: of the sweep.
        dataset: rows and queries.
        stages: where the time is shown.
    """

    config: SweepConfig
    dataset: Dataset
    stages: Stages

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
        """Return a transform and what is exact among its vectors, computed by numpy.

        Raises:
            WhiteningError: the embeddings do not allow the transform.
        """
        whitening = self.whitening(where)
        with self.stages.stage("exact neighbours", self.dataset.rows) as watcher:

            def vectors(raw: NDArray[np.floating]) -> NDArray[np.float32]:
                watcher.advance(len(raw))
                return unit_rows(whitening.apply(raw)).astype(np.float32)

            queries = unit_rows(whitening.apply(self.dataset.queries)).astype(np.float32)
            blocks = map(vectors, self.dataset.blocks())
            return Space(whitening, exact_neighbours(blocks, queries, TOP_K)[1])
