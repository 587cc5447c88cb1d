"""Exact search of the raw embeddings, and of every width of one fit, in a single pass.

The score of a row x for a query is a product of x with a vector that the query and the width give:
one matrix product has the scores of each width, and those of the raw embeddings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ArtifactError, ConfigError, WhiteningError
from whiten_index.index.exact import Rows, Scores
from whiten_index.index.vector_search import search_documents
from whiten_index.search.search_index import Hits, Opened, hits_of
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.versions.published import MOMENTS
from whiten_index.versions.references import corpus_record, open_store
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.selection import widths
from whiten_index.whitening.spectrum import Spectrum, numerical_rank, unit_rows
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import Kind

Array = NDArray[np.float32]
_REMEDY = "name it with --store DIR"
# Of unit vectors; one fit gives the same directions again to far more digits.
_SAME = 1e-6


@dataclass(frozen=True, eq=False)
class Comparison:
    """The raw embeddings of a version."""

    opened: Opened
    fit: Whitening  # the index's transform, of as many directions as its moments still give
    rows: Array  # (n, d) embeddings, scaled to unit length if the fit asks for it, less its mean
    lengths: Mapping[int, Array]  # width -> length of each row's vector, (n,)
    raw_scale: Array  # (n,) by which a raw product becomes a score

    @classmethod
    def of(cls, opened: Opened, store: Path | str | None, most_bytes: int) -> "Comparison":
        """Read the embeddings of a version.

        Raises:
            ArtifactError: the store cannot be found, or lacks embeddings of the version.
            ConfigError: they would take more than ``most_bytes``.
        """
        bundle = opened.bundle
        rows, dim = len(bundle), bundle.dim
        fit = _whole(opened)
        ks = tuple(sorted({*widths(fit.k), bundle.whitening.k}))
        if (needed := 4 * rows * (dim + len(ks) + 1)) > most_bytes:
            raise ConfigError(
                f"the comparison with raw embeddings would hold {needed:,} bytes and may hold "
                f"{most_bytes:,}; raise --compare-memory"
            )
        version = bundle.source
        found = open_store(version, given=store, reader="the comparison", remedy=_REMEDY)
        record = corpus_record(version)
        if record.rows != rows:
            raise ArtifactError(f"the index has {rows} rows and its record {record.rows}")
        embeddings = CorpusEmbeddings(found, record)
        held, raw_scale = np.empty((rows, dim), np.float32), np.empty(rows, np.float32)
        lengths, start = {k: np.empty(rows, np.float32) for k in ks}, 0
        for some in embeddings.blocks():
            x = some.astype(np.float64)
            if not np.isfinite(x).all():
                raise ArtifactError(
                    f"the store {found.place} holds NaN or infinity; encode the corpus again"
                )
            part = slice(start, start + len(x))
            taken = unit_rows(x) if fit.normalize_input else x
            own = 1.0 if fit.similarity == "cosine" else np.linalg.norm(x, axis=1)
            raw_scale[part] = _ratio(own, np.linalg.norm(taken, axis=1))
            held[part] = taken - _mean(fit)
            squares = np.cumsum(fit.apply(x) ** 2, axis=1)
            for k, of_rows in lengths.items():
                of_rows[part] = np.sqrt(squares[:, k - 1])
            start += len(x)
        return cls(opened, fit, held, lengths, raw_scale)

    def search(self, embedding: NDArray[np.floating], top_k: int) -> tuple[Hits, dict[int, Hits]]:
        """Return the hits of a query's raw embedding (d,): of raw embeddings, and of each width."""
        fit, cosine = self.fit, self.fit.similarity == "cosine"
        q = np.asarray(embedding, dtype=np.float64)
        vector, matrix = fit.apply(q[None])[0], fit.basis * fit.scales()
        weights = [q, *(matrix[:, :k] @ vector[:k] for k in self.lengths)]
        raw, *columns = (self.rows @ np.stack(weights, axis=1).astype(np.float32)).T
        raw = (raw + np.float32(_mean(fit) @ q)) * self.raw_scale
        if cosine:
            raw /= np.float32(np.linalg.norm(q) or 1)
        found = dict[int, Hits]()
        for (k, lengths), scores in zip(self.lengths.items(), columns, strict=True):
            if cosine:
                scores = _ratio(scores, lengths * float(np.linalg.norm(vector[:k])))
            found[k] = self._hits(scores, top_k)
        return self._hits(raw, top_k), found

    def _hits(self, scores: Array, top_k: int) -> Hits:
        """Return the documents of the best scores (n,)."""
        bundle, rows = self.opened.bundle, len(scores)

        def best(_: object, most: int) -> tuple[Scores, Rows]:
            near = np.argpartition(-scores, min(most, rows - 1))[:most]
            near = near[np.lexsort((near, -scores[near]))]
            return scores[None, near], near[None].astype(np.int64)

        if bundle.grouped:
            query, of = np.zeros((1, 1), np.float32), bundle.documents.first_rows
            found = search_documents(best, of, query, top_k=min(top_k, rows), rows=rows)
        else:
            found = best(None, min(top_k, rows))
        return hits_of(bundle, found[0][0], found[1][0])


def _whole(opened: Opened) -> Whitening:
    """Return the transform with all its directions, if the version's moments still give the same.

    They do not after an update that kept the transform: then it has the index's own.
    """
    own = opened.bundle.whitening
    if own.kind not in (Kind.WHITENING, Kind.PCA) or own.estimator != "empirical" or own.remove_top:
        return own
    moments = Moments.load(opened.bundle.source.file(MOMENTS))
    try:
        spectrum = Spectrum.of(moments.covariance())
    except WhiteningError:
        return own
    values = spectrum.eigenvalues
    basis = spectrum.eigenvectors[:, : numerical_rank(values, floor=own.floor)]
    whole = replace(own, mean=moments.mean, eigenvalues=values, basis=basis)
    same = whole.k >= own.k and np.allclose(whole.basis[:, : own.k], own.basis, atol=_SAME)
    return whole if same and np.allclose(whole.mean, own.mean, atol=_SAME) else own


def _mean(fit: Whitening) -> NDArray[np.float64]:
    return fit.mean if fit.center else np.zeros(fit.dim)


def _ratio(above: NDArray[np.floating] | float, below: NDArray[np.floating]) -> Array:
    """Return the quotient, 0 where a length is 0."""
    safe = np.where(below > 0, below, 1)
    return np.where(below > 0, above / safe, 0).astype(np.float32)
