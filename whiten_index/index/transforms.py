"""The transforms in front of an index: from raw embeddings of d dims to vectors of k dims.

A random rotation follows the whitening if the codes of the index are lossy. Kept directions differ
in variance, and codes of a fixed number of bits for each coordinate, or each group of them, waste
bits on narrow ones. An orthogonal matrix spreads the variance evenly, as RaBitQ assumes (Gao and
Long 2024) and OPQ starts from (Ge et al. 2013). Inner products stay as they are. The rotation is
multiplied into the matrix of the transform, so that it costs neither bytes nor time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError, WhiteningError
from whiten_index.index.exact import FEW_QUERIES, Rows, Vectors
from whiten_index.index.library import load_faiss
from whiten_index.progress import Stages
from whiten_index.whitening.whitening_config import Kind

if TYPE_CHECKING:
    from whiten_index.store.sampling import CorpusEmbeddings
    from whiten_index.whitening.transform import Whitening

# Rows of a block, and the fewest within a budget.
_BLOCK_ROWS, _LEAST_ROWS = 8192, 256
_SMALL, _LARGE, _LARGEST_HALF = np.finfo(np.float32).tiny, np.finfo(np.float32).max, 65_504.0
_UNIT_ERROR = 1e-3


def wrap(
    inner: Any, whitening: "Whitening", *, rotation: NDArray[np.floating] | None = None
) -> Any:
    """Return ``inner`` behind the transforms: raw d-dim rows in, k-dim vectors inside.

    The mean is subtracted by a separate transform. Folded into the bias of the matrix it would
    cost float32 digits if the mean is large against the spread. A rotation (k, k) of the vectors is
    multiplied into the matrix.
    """
    faiss = load_faiss()
    chain: list[Any] = []
    if whitening.normalize_input:
        chain.append(faiss.NormalizationTransform(whitening.dim, 2.0))
    if whitening.center:
        centering = faiss.CenteringTransform(whitening.dim)
        faiss.copy_array_to_vector(whitening.mean.astype(np.float32), centering.mean)
        centering.is_trained = True
        chain.append(centering)
    if whitening.kind is not Kind.NONE or rotation is not None:
        linear = faiss.LinearTransform(whitening.dim, whitening.k, False)
        whole = whitening.matrix() if rotation is None else whitening.matrix() @ rotation
        with np.errstate(over="ignore"):
            matrix = np.ascontiguousarray(whole.T, dtype=np.float32)
        if not np.isfinite(matrix).all():
            raise WhiteningError(
                "the transform has numbers beyond float32, as of embeddings that are almost zero; "
                "scale the embeddings"
            )
        faiss.copy_array_to_vector(matrix.ravel(), linear.A)
        linear.is_trained = True
        chain.append(linear)
    if whitening.similarity == "cosine":
        chain.append(faiss.NormalizationTransform(whitening.k, 2.0))
    index = faiss.IndexPreTransform(inner)
    for transform in reversed(chain):
        index.prepend_transform(transform)
    return index


class Transforms:
    """Vectors of raw embeddings, computed as the index does."""

    def __init__(self, index: Any) -> None:
        """Take an index behind transforms, which live as long as it does."""
        self._index = index

    def __call__(self, embeddings: Vectors) -> Vectors:
        """Return the vectors (n, k) of raw embeddings (n, d)."""
        if 1 < len(embeddings) <= FEW_QUERIES:
            # Products of several rows are rounded in another way than those of one.
            return np.concatenate([self(row[None]) for row in embeddings])
        faiss, chain = load_faiss(), self._index.chain
        vectors = embeddings
        for place in range(chain.size()):
            vectors = faiss.downcast_VectorTransform(chain.at(place)).apply(vectors)
        return vectors


def rotation_for(inner: Any, k: int, *, seed: int) -> NDArray[np.float64] | None:
    """Return the rotation (k, k) before the codes of an index, None if these are not lossy.

    It is uniformly distributed over all orthogonal matrices (Mezzadri 2007).
    """
    if not is_lossy(inner):
        return None
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((k, k)))
    turned: NDArray[np.float64] = q * np.sign(np.diag(r))
    return turned


def is_lossy(inner: Any) -> bool:
    """Return whether the codes of an index, or of the one inside it, lose precision."""
    faiss = load_faiss()
    inner = faiss.downcast_index(inner)
    if isinstance(inner, faiss.IndexHNSW):
        return is_lossy(inner.storage)
    if isinstance(inner, faiss.IndexFlat | faiss.IndexIVFFlat):
        return False
    if isinstance(inner, faiss.IndexScalarQuantizer | faiss.IndexIVFScalarQuantizer):
        half = (faiss.ScalarQuantizer.QT_fp16, faiss.ScalarQuantizer.QT_bf16)
        return inner.sq.qtype not in half
    return True


def largest_number(inner: Any) -> float:
    """Return the largest number that the codes of an index take; infinite where it is float32's."""
    faiss = load_faiss()
    inner = faiss.downcast_index(inner)
    if isinstance(inner, faiss.IndexHNSW):
        return largest_number(inner.storage)
    scalar = isinstance(inner, faiss.IndexScalarQuantizer | faiss.IndexIVFScalarQuantizer)
    half = scalar and inner.sq.qtype == faiss.ScalarQuantizer.QT_fp16
    return _LARGEST_HALF if half else np.inf


@dataclass(frozen=True, eq=False)
class VectorSource:
    """The vectors that an index keeps of a corpus."""

    embeddings: "CorpusEmbeddings"  # the raw embeddings
    whitening: "Whitening"  # the transform
    # (k, k) random rotation, None if the codes gain nothing by one.
    rotation: NDArray[np.float64] | None = None
    work_bytes: int | None = None  # memory for blocks of rows, None for no limit
    most: float = np.inf  # largest number that the codes of the index take

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.embeddings.rows

    @property
    def k(self) -> int:
        """Width of a vector."""
        return self.whitening.k

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        if self.work_bytes is None:
            return _BLOCK_ROWS
        # In the worst case raw, in float32 and centred, projected and scaled.
        a_row = 4 * (3 * self.whitening.dim + 3 * self.whitening.k)
        return min(max(self.work_bytes // 8 // a_row, _LEAST_ROWS), _BLOCK_ROWS)

    def wrap(self, inner: Any) -> Any:
        """Return an index behind the transforms."""
        return wrap(inner, self.whitening, rotation=self.rotation)

    def at(self, rows: Rows) -> Vectors:
        """Return the vectors (n, k) of rows (n,), computed in float64."""
        found = np.empty((len(rows), self.k), dtype=np.float32)
        for start in range(0, len(rows), _LEAST_ROWS * 4):
            part = slice(start, start + _LEAST_ROWS * 4)
            vectors = self.whitening.vectors(self.embeddings.at(rows[part]))
            found[part] = vectors if self.rotation is None else vectors @ self.rotation
        return found

    def blocks(
        self, stages: Stages, stage: str, *, rows: Rows | None = None, index: Any = None
    ) -> Iterator[Vectors]:
        """Yield the vectors of all rows, or of rows (n,), in blocks, as FAISS's transforms do.

        The stage lasts until the last block is used. An ``index`` that has the transforms saves
        making them.
        """
        if index is None:
            index = self.wrap(load_faiss().IndexFlatIP(self.k))
        transforms, step = Transforms(index), self.block_rows
        blocks: Iterator[NDArray[np.floating]] = self.embeddings.blocks(step)
        if rows is not None:
            parts = (rows[start : start + step] for start in range(0, len(rows), step))
            blocks = (self.embeddings.at(part) for part in parts)
        with stages.stage(stage, self.rows if rows is None else len(rows)) as watcher:
            for block in blocks:
                narrow = _as_float32(block)
                vectors = transforms(narrow)
                self._require_lengths(block, narrow, vectors)
                yield vectors
                watcher.advance(len(block))

    def _require_lengths(
        self, rows: NDArray[np.floating], narrow: Vectors, vectors: Vectors
    ) -> None:
        """Refuse rows that FAISS scaled to length 1 wrongly, or that its codes cannot hold."""
        if np.isfinite(self.most) and np.abs(vectors).max(initial=0.0) > self.most:
            raise ConfigError(
                f"some vectors have numbers beyond {self.most:,g}, which codes of float16 cannot "
                "hold; take another --factory, such as Flat, or scale the embeddings down"
            )
        squares = _squares(vectors)
        odd = ~np.isfinite(squares)
        if self.whitening.similarity == "cosine":
            odd |= ~(np.abs(squares - 1) < _UNIT_ERROR)
        if self.whitening.normalize_input:
            own = _squares(narrow)
            odd |= ~((own >= _SMALL) & (own <= _LARGE))
        if not odd.any():
            return
        # Rows of zeros are odd too.
        some = rows[odd]
        lengths = [np.linalg.norm(self.whitening.apply(some), axis=1)]
        if self.whitening.normalize_input:
            lengths.append(np.linalg.norm(some.astype(np.float64), axis=1))
        least, most = _SMALL**0.5, _LARGE**0.5
        if any(((each > 0) & ((each < least) | (each > most))).any() for each in lengths):
            raise ConfigError(
                "some vectors are too long or too short for float32, which FAISS computes in; "
                "scale the embeddings to a length near 1"
            )


def _squares(rows: Vectors) -> NDArray[np.float32]:
    """Return the squares of the lengths (n,) of rows (n, k)."""
    with np.errstate(over="ignore", invalid="ignore"):
        found: NDArray[np.float32] = np.einsum("ij,ij->i", rows, rows)
    return found


def _as_float32(rows: NDArray[np.floating]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(rows, dtype=np.float32)
    if not np.isfinite(narrow).all():
        raise ConfigError(
            "some embeddings are beyond float32, which FAISS computes in; scale the column down"
        )
    return narrow
