"""Codes carried from a published index to a new one: byte for byte, in every kind that can."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whiten_index import BuildConfig, build_index
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.index import (
    IVF_DATA,
    CarriedCodes,
    gather,
    inner_index,
    inner_of,
    kind_on_disk,
    why_not_carried,
    wrap,
)
from whiten_index.versions.published import INDEX, write_index
from whiten_index.whitening import Kind, Whitening, WhiteningConfig
from whiten_index.whitening.moments import Moments

POOL, K = 900, 32
CODES = [
    "Flat", "SQfp16", "SQ8", "SQ6", "SQ4", "PQ8", "PQ8x4", "RQ4x4", "PRQ2x2x5", "RaBitQ", "RaBitQ4",
    "EDEN",
]  # fmt: skip
BLOCKS = ["PQ8x4fs", "RQ4x4fs", "PRQ2x2x4fs", "RaBitQfs", "RaBitQfs4"]
LISTS = [
    "IVF8,Flat", "IVF8,SQ8", "IVF8,PQ8", "IVF8,PQ8x6", "IVF8,RQ4x4", "IVF8,RaBitQ", "IVF8,EDEN",
    "IVF8_HNSW8,SQfp16",
]  # fmt: skip
LISTS_OF_BLOCKS = ["IVF8,PQ8x4fs", "IVF8,PQ8x4fsr", "IVF8,RaBitQfs", "IVF8,PRQ2x2x4fs"]
REFINED = [
    "SQ8,RFlat", "PQ8x4fs,RFlat", "IVF8,PQ8x4fs,RFlat", "IVF8,PQ8,Refine(SQfp16)", "RaBitQfs,RFlat",
]  # fmt: skip
SAME_AS_MADE_NEW = [*CODES, *BLOCKS, *LISTS, *LISTS_OF_BLOCKS, "HNSW16", *REFINED]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    faiss.omp_set_num_threads(1)


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
        set_other_than_usual(inner)
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


def set_other_than_usual(inner: Any) -> None:
    if isinstance(inner, faiss.IndexRefine):
        inner.k_factor = 5
        inner = faiss.downcast_index(inner.base_index)
    if isinstance(inner, faiss.IndexIVF):
        inner.nprobe = 3
    if isinstance(inner, faiss.IndexHNSW):
        inner.hnsw.efSearch, inner.hnsw.efConstruction = 77, 33


def mapped(path: Path) -> Any:
    return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)


def carried_from(path: Path, old_rows: Any, *, by_map: bool = True) -> CarriedCodes:
    read = mapped if by_map else (lambda path: faiss.read_index(str(path)))
    return CarriedCodes(read(path), read(path), np.asarray(old_rows, dtype=np.int64))


def in_blocks(rows: Any, *, of: int = 37) -> Iterator[Any]:
    return (rows[start : start + of] for start in range(0, len(rows), of))


def file_of(index: Any) -> bytes:
    data: bytes = faiss.serialize_index(index).tobytes()
    return data


def changed(rng: Any, old: int, new: int) -> Any:
    """Rows kept, moved, carried twice, and new ones among them."""
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


def as_made_new(pool: Any, old_rows: Any) -> tuple[Any, Any]:
    """Return the vectors of all rows of the new index, and of those that are new."""
    fresh = pool[500:][: np.count_nonzero(old_rows < 0)]
    rows = pool[old_rows]
    rows[old_rows < 0] = fresh
    return rows, fresh


# ------------------------------------------------------------------------------- carried in memory


@pytest.mark.parametrize("factory", SAME_AS_MADE_NEW)
def test_a_carried_index_is_the_file_of_one_made_new(
    tmp_path: Path, pool: Any, factory: str
) -> None:
    """FAISS gives a vector the same code each time, and none of the old vectors is given."""
    trained, rng = Trained(factory, pool, tmp_path), np.random.default_rng(1)
    assert why_not_carried(trained.index) is None
    old = trained.holding(pool[:500], "old.faiss")
    before = old.read_bytes()
    for name, change in CHANGES.items():
        old_rows = change(rng)
        rows, fresh = as_made_new(pool, old_rows)
        carried = carried_from(old, old_rows, by_map=name != "longer")
        np.testing.assert_array_equal(carried.new_rows, np.flatnonzero(old_rows < 0))
        index = carried.fill(in_blocks(fresh))
        assert index.ntotal == len(old_rows)
        write_index(index, tmp_path / "new.faiss")
        expected = trained.holding(rows, "expected.faiss").read_bytes()
        assert (tmp_path / "new.faiss").read_bytes() == expected, name
    assert old.read_bytes() == before


@pytest.mark.parametrize("factory", ["SQ8", "IVF8,SQ8", "HNSW16_SQ8", "IVF8,SQ8,RFlat"])
def test_a_carried_index_finds_what_brute_force_over_its_codes_finds(
    tmp_path: Path, pool: Any, factory: str
) -> None:
    trained = Trained(factory, pool, tmp_path)
    old = trained.holding(pool[:500], "old.faiss")
    old_rows = changed(np.random.default_rng(4), 500, 470)
    rows, fresh = as_made_new(pool, old_rows)
    inner = inner_of(index := carried_from(old, old_rows).fill(in_blocks(fresh)))
    assert index.ntotal == 470
    set_to_look_everywhere(inner)
    codec = faiss.index_factory(K, "SQ8", faiss.METRIC_INNER_PRODUCT)
    codec.train(pool)
    if "RFlat" not in factory and "IVF" not in factory:
        rows = codec.sa_decode(codec.sa_encode(rows))
    elif "RFlat" not in factory:
        # Lists keep what is left of a vector without its centroid.
        rows = inner.sa_decode(inner.sa_encode(rows))
    scores = pool[:100] @ rows.T
    found = inner.search(pool[:100], 5)
    np.testing.assert_allclose(found[0], -np.sort(-scores, axis=1)[:, :5], atol=2e-5)
    np.testing.assert_allclose(np.take_along_axis(scores, found[1], axis=1), found[0], atol=2e-5)


def set_to_look_everywhere(inner: Any) -> None:
    if isinstance(inner, faiss.IndexRefine):
        inner.k_factor = 60
        inner = faiss.downcast_index(inner.base_index)
    if isinstance(inner, faiss.IndexIVF):
        inner.nprobe = inner.nlist
    if isinstance(inner, faiss.IndexHNSW):
        inner.hnsw.efSearch = 1_000


# --------------------------------------------------------------------------------- carried on disk


# --------------------------------------------------------------------------------- published files


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 12,000 rows of 40 dims."""
    path = tmp_path_factory.mktemp("corpus") / "c.parquet"
    rows = np.random.default_rng(0).standard_normal((12_000, 40)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(rows.ravel(), 40)
    pq.write_table(pa.table({"id": np.arange(len(rows)), "embedding": column}), path)
    return path


@pytest.mark.parametrize(
    ("factory", "budget"),
    [
        ("Flat", None),
        ("SQ8", "0.2MB"),
        ("PQ8x4fs", None),
        ("IVF16,SQ8", None),
        ("IVF16,Flat", "1MB"),
    ],
)
def test_a_published_index_carried_whole_is_the_same_files(
    tmp_path: Path, corpus: Path, factory: str, budget: str | None
) -> None:
    out, made = tmp_path / "out", tmp_path / "made"
    build_index(
        BuildConfig(
            corpus=(str(corpus),), embedding_column="embedding", id_column="id", whiten="pca", k=32,
            factory=factory, out=str(out), store=str(corpus.parent / "store"), threads=1,
            memory_budget=budget,
        )
    )  # fmt: skip
    (version,) = (out / "versions").iterdir()
    made.mkdir()
    flags = faiss.IO_FLAG_MMAP_IFC
    if (version / IVF_DATA).exists():
        flags = faiss.IO_FLAG_ONDISK_SAME_DIR | faiss.IO_FLAG_READ_ONLY
    read = [faiss.read_index(str(version / INDEX), flags) for _ in range(2)]
    carried = CarriedCodes(*read, np.arange(12_000))
    kind = None if budget is None else kind_on_disk(inner_of(carried.index))
    if kind == "codes":
        carried.stream(iter(()), made / INDEX)
    elif kind == "lists":
        index = carried.spill(iter(()), made, most=1 << 20)
        assert (made / IVF_DATA).read_bytes() == (version / IVF_DATA).read_bytes()
        gather(inner_of(index))
        gather(inner_of(whole := faiss.read_index(str(version / INDEX), flags)))
        assert file_of(index) == file_of(whole)
        return
    else:
        write_index(carried.fill(iter(())), made / INDEX)
    assert (made / INDEX).read_bytes() == (version / INDEX).read_bytes()


# ----------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        ("NSG16", "IndexNSGFlat .*makes this graph of all its vectors in one call"),
        ("IVF8,FlatDedup", "IndexIVFFlatDedup .*equal to others are kept outside its lists"),
        ("IVF8,FlatPanorama4", "IndexIVFFlatPanorama .*in pieces, and give none back whole"),
        ("PQ8x4fs_64", "IndexPQFastScan .*blocks of 64 rows back wrongly; blocks of 32 work"),
        ("IVF8,PQ8x4fs_64,RFlat", "IndexIVFPQFastScan .*blocks of 64 rows"),
        ("MinMax,SQ8", "IndexRowwiseMinMax .*is not known here"),
    ],
)
def test_kinds_that_are_not_carried_say_why(pool: Any, factory: str, why: str) -> None:
    whitening = Whitening.fit(Moments.of(pool), WhiteningConfig(kind=Kind.NONE))
    index = wrap(inner_index(factory, K), whitening)
    with pytest.raises(ConfigError, match=why + ".*; fit and build the index again"):
        CarriedCodes(index, index, np.empty(0, dtype=np.int64))


@pytest.mark.parametrize("how", ["fill", "spill"])
@pytest.mark.parametrize(
    ("number", "told"), [(600, "list 3 holds rows beyond 500"), (7, "500 rows, 499 of them the")]
)
def test_damaged_lists_are_told(
    tmp_path: Path, pool: Any, how: str, number: int, told: str
) -> None:
    old = Trained("IVF8,SQ8", pool, tmp_path).holding(pool[:500], "old.faiss")
    index = faiss.read_index(str(old))
    lists = inner_of(index).invlists
    ids = faiss.rev_swig_ptr(lists.get_ids(3), lists.list_size(3))
    ids[1 if ids[0] == 7 else 0] = number
    carried = CarriedCodes(index, mapped(old), np.arange(500))
    arguments = {"folder": tmp_path, "most": 1_000} if how == "spill" else {}
    with pytest.raises(ArtifactError, match=told + ".*restore it from a copy, or build again"):
        getattr(carried, how)(iter(()), **arguments)


# ------------------------------------------------------------------------------------------ memory

_CHILD = """
import sys
from pathlib import Path
import faiss, numpy as np
from whiten_index.index import CarriedCodes

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10

folder, lists = Path(sys.argv[1]), sys.argv[2] == "lists"
flags = faiss.IO_FLAG_MMAP_IFC
old, again = (faiss.read_index(str(folder / "old.faiss"), flags) for _ in range(2))
old_rows = np.where(np.arange(old.ntotal) % 50 == 7, -1, np.arange(old.ntotal))
rng, peak = np.random.default_rng(0), 0

def vectors():
    global peak
    for start in range(0, np.count_nonzero(old_rows < 0), 256):
        rows = rng.standard_normal((min(256, 4_000 - start), old.d), dtype=np.float32)
        peak = max(peak, held())
        yield rows

faiss.omp_set_num_threads(1)
before = held()
carried = CarriedCodes(old, again, old_rows)
if lists:
    carried.spill(vectors(), folder, most=1 << 20)
else:
    carried.stream(vectors(), folder / "new.faiss")
print(max(peak, held()) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize(("factory", "kind"), [("SQ8", "codes"), ("IVF64,SQ8", "lists")])
def test_codes_carried_on_disk_are_not_held(tmp_path: Path, factory: str, kind: str) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((200_000, 256), dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    inner = inner_index(factory, 256)
    inner.train(rows[:10_000])
    index = wrap(inner, Whitening.fit(Moments.of(rows[:5_000]), WhiteningConfig(kind=Kind.NONE)))
    inner.add(rows)
    index.ntotal = inner.ntotal
    write_index(index, tmp_path / "old.faiss")
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path), kind],
        cwd=Path(__file__).resolve().parents[1], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Row numbers, and blocks of rows on their way: the codes have 51 MB.
    assert int(done.stdout) < 25_000_000
