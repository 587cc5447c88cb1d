"""Codes of a published index reused in a new one, byte for byte."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from whiten_index import Moments, Whitening, WhiteningConfig
from whiten_index.errors import ArtifactError
from whiten_index.index.codes import remove_rows, reuse_codes, why_not_reusable
from whiten_index.index.factory import inner_index, inner_of
from whiten_index.index.library import write_index
from whiten_index.index.ondisk_ivf import OnDiskLists
from whiten_index.index.transforms import wrap
from whiten_index.whitening.whitening_config import Kind

POOL, K = 900, 32
KINDS = [
    "Flat", "SQfp16", "SQ8", "SQ6", "SQ4", "PQ8", "PQ8x4", "RaBitQ", "RaBitQ4", "IVF8,Flat",
    "IVF8,SQ8", "IVF8,PQ8", "IVF8,PQ8x6", "IVF8,RaBitQ", "IVF8_HNSW8,SQfp16",
]  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Any:
    rows = np.random.default_rng(0).standard_normal((POOL, K)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class Trained:
    """An index of some factory, trained once; copies are read from its file."""

    def __init__(self, factory: str, pool: Any, path: Path) -> None:
        inner = inner_index(factory, K)
        inner.train(pool)
        whitening = Whitening.fit(Moments.of(pool), WhiteningConfig(kind=Kind.NONE))
        self.index, self.path = wrap(inner, whitening), path
        if isinstance(inner, faiss.IndexIVF):
            inner.nprobe = 3
        write_index(self.index, path / "trained.faiss")

    def holding(self, rows: Any, name: str) -> Path:
        """Write an index with these vectors in it, added at once, and return its file."""
        index = faiss.read_index(str(self.path / "trained.faiss"))
        inner = inner_of(index)
        if len(rows):
            inner.add(rows)
        index.ntotal = inner.ntotal
        write_index(index, self.path / name)
        return self.path / name


def reused(path: Path, old_rows: Any, fresh: Any, *, by_map: bool = True) -> Any:
    """Return a new index in memory, of the file of an old one."""
    flags = faiss.IO_FLAG_MMAP_IFC if by_map else 0
    old, new = (faiss.read_index(str(path), flags) for _ in range(2))
    remove_rows(new)
    reuse_codes(old, new, np.asarray(old_rows, dtype=np.int64), in_blocks(fresh))
    return new


def in_blocks(rows: Any) -> Iterator[Any]:
    return (rows[start : start + 37] for start in range(0, len(rows), 37))


def changed(rng: Any, old: int, new: int) -> Any:
    """Rows kept, moved, reused twice, and new ones among them."""
    rows = np.sort(rng.choice(old, new, replace=False))
    rows[rng.random(new) < 0.3] = -1
    moved = rng.choice(new, 40, replace=False)
    rows[moved] = rng.permutation(rows[moved])
    rows[-3:] = rows[np.flatnonzero(rows >= 0)[:3]]
    return rows


CHANGES = {
    "changed": lambda rng: changed(rng, 500, 470),
    "none new": lambda rng: np.sort(rng.choice(500, 333, replace=False)),
    "all new": lambda rng: np.full(321, -1),
    "longer": lambda rng: np.concatenate([np.arange(500), np.full(77, -1)]),
    "one": lambda rng: np.array([499]),
    "nothing": lambda rng: np.empty(0, dtype=np.int64),
}


def as_built(pool: Any, old_rows: Any) -> tuple[Any, Any]:
    """Return the vectors of all rows of the new index, and of those that are new."""
    fresh = pool[500:][: np.count_nonzero(old_rows < 0)]
    rows = pool[old_rows]
    rows[old_rows < 0] = fresh
    return rows, fresh


@pytest.mark.parametrize("factory", KINDS)
def test_an_index_of_reused_codes_is_the_file_of_one_built_afresh(
    tmp_path: Path, pool: Any, factory: str
) -> None:
    """FAISS gives a vector the same code each time, and none of the old vectors is given."""
    trained, rng = Trained(factory, pool, tmp_path), np.random.default_rng(1)
    assert why_not_reusable(trained.index) is None
    old = trained.holding(pool[:500], "old.faiss")
    before = old.read_bytes()
    for name, change in CHANGES.items():
        old_rows = change(rng)
        rows, fresh = as_built(pool, old_rows)
        index = reused(old, old_rows, fresh, by_map=name != "longer")
        assert index.ntotal == len(old_rows)
        expected = trained.holding(rows, "expected.faiss").read_bytes()
        write_index(index, tmp_path / "new.faiss")
        assert (tmp_path / "new.faiss").read_bytes() == expected, name
    assert old.read_bytes() == before


@pytest.mark.parametrize(
    "factory",
    ["HNSW16", "IVF8,FlatDedup", "IVF8,FlatPanorama4", "PQ8x4fs", "IVF8,PQ8x4fs", "RQ4x4"],
)  # fmt: skip
def test_other_kinds_are_named(factory: str) -> None:
    inner = inner_index(factory, K)
    kind = type(faiss.downcast_index(inner)).__name__
    whitening = Whitening.fit(np.eye(K), WhiteningConfig(kind=Kind.NONE))
    why = f"codes of an {kind} cannot be reused in another"
    assert why_not_reusable(wrap(inner, whitening)) == why


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("number", [600, 7])
def test_damaged_lists_are_reported(tmp_path: Path, pool: Any, number: int, on_disk: bool) -> None:
    old = Trained("IVF8,SQ8", pool, tmp_path).holding(pool[:500], "old.faiss")
    index, new = (faiss.read_index(str(old)) for _ in range(2))
    lists = inner_of(index).invlists
    ids = faiss.rev_swig_ptr(lists.get_ids(3), lists.list_size(3))
    ids[1 if ids[0] == 7 else 0] = number
    remove_rows(new)
    writer = OnDiskLists(inner_of(new), tmp_path, most=1_000) if on_disk else None
    with pytest.raises(ArtifactError, match=r"hold 499 of 500 rows; restore it from a copy"):
        reuse_codes(index, new, np.arange(500), iter(()), on_disk=writer)
