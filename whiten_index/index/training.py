"""Training of an index: rows to train with, rows to hold out, and the training itself."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError
from whiten_index.index.choice import HELD_OUT_SHARE, IndexPlan
from whiten_index.index.factory import inner_index, is_exact, lists_of
from whiten_index.index.gpu import DeviceIndex
from whiten_index.index.library import first_line, load_faiss
from whiten_index.progress import Stages

if TYPE_CHECKING:
    from whiten_index.index.transforms import VectorSource

_HELD_OUT = 1_000
_MOST_TRAINING_BYTES = 1 << 30


def train_index(
    vectors: "VectorSource", plan: IndexPlan, stages: Stages
) -> tuple[DeviceIndex, NDArray[np.int64]]:
    """Return the trained index, and the rising numbers of the rows held out of the training."""
    inner = inner_index(plan.built, vectors.k)
    sample, held_out = _draw_rows(inner, vectors, plan)
    # This changes settings of the training, so it comes before the copy to a GPU.
    if len(sample):
        _switch_off_warnings(inner)
    index = DeviceIndex.place(inner, plan.device, note=stages.watcher.note)
    if len(sample):
        with stages.whole("train", len(sample)):
            drawn = vectors.at(sample)
            with index.working() as each:
                train(each, drawn, plan.built)
    return index, held_out


def _draw_rows(
    inner: Any, vectors: "VectorSource", plan: IndexPlan
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rising row numbers to train with and to tune with: no row is in both."""
    rows, work, least = vectors.rows, plan.work_bytes, least_training_rows(inner)
    held = 0 if is_exact(inner) else min(_HELD_OUT, rows // HELD_OUT_SHARE, rows - least)
    size = 0
    if not inner.is_trained:
        lists = lists_of(inner)
        wanted = max(256 * (0 if lists is None else int(lists.nlist)), 1 << 16)
        # FAISS's clustering copies a sample once.
        most = _MOST_TRAINING_BYTES if work is None else min(work // 4, _MOST_TRAINING_BYTES)
        size = min(rows - held, wanted, max(most // (4 * vectors.k), least))
    drawn = np.random.default_rng(plan.seed).choice(rows, size + held, replace=False)
    return np.sort(drawn[:size]), np.sort(drawn[size:])


def least_training_rows(inner: Any) -> int:
    """Return the fewest rows that FAISS can train ``inner`` with: one a centroid or code."""
    if inner.is_trained:
        return 0
    lists = lists_of(inner)
    codes = (values for values, _ in _codebooks(inner))
    return max(1, 0 if lists is None else int(lists.nlist), *codes)


def require_training_rows(inner: Any, factory: str, *, rows: int) -> None:
    """Refuse a factory that learns more centroids than there are rows."""
    least = least_training_rows(inner)
    if rows < least:
        raise ConfigError(
            f"FAISS cannot train {factory!r} on {rows} rows: it learns {least} centroids and needs "
            "a row for each at least; use --factory Flat or SQ8, fewer lists, or codes of fewer "
            "bits such as PQ16x4"
        )


def _switch_off_warnings(inner: Any) -> None:
    """Switch off FAISS's own warnings of small samples, which name none of the user's options."""
    lists = lists_of(inner)
    clusterings = [clustering for _, clustering in _codebooks(inner) if clustering is not None]
    for clustering in (*clusterings, *([] if lists is None else [lists.cp])):
        clustering.min_points_per_centroid = 1


def train(inner: Any, sample: NDArray[np.float32], factory: str) -> None:
    """Train an index on vectors (m, k)."""
    try:
        inner.train(sample)
    except RuntimeError as error:
        raise ConfigError(
            f"FAISS cannot train {factory!r} on {len(sample)} rows ({first_line(error)}); "
            "use --factory Flat, or fewer lists and codes"
        ) from error


def _codebooks(inner: Any) -> list[tuple[int, Any]]:
    """Return values of a code, and clustering if any, of the codebooks inside."""
    faiss = load_faiss()
    found = list[tuple[int, Any]]()
    if (storage := getattr(inner, "storage", None)) is not None:
        found += _codebooks(faiss.downcast_index(storage))
    if (product := getattr(inner, "pq", None)) is not None:
        found.append((2 ** int(product.nbits), product.cp))
    if (additive := getattr(inner, "aq", None)) is not None:
        quantizer = faiss.downcast_Quantizer(additive)
        bits = int(faiss.vector_to_array(quantizer.nbits).max(initial=0))
        found.append((2**bits, getattr(quantizer, "cp", None)))
    return found
