"""Indexes made on disk within a budget are those made in memory, and leave nothing behind."""

import builtins
import json
import sys
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.builds import write_rows
from whiten_index import BuildConfig, build_index, encode_corpus, open_index
from whiten_index.errors import ConfigError, StorageError
from whiten_index.index.factory import inner_index
from whiten_index.index.library import INDEX, write_index
from whiten_index.index.ondisk_ivf import IVF_DATA, OnDiskLists, lists_on_disk

DIM, ROWS = 40, 1_500
LISTS = ["IVF8,Flat", "IVF8,SQ8", "IVF8,PQ8", "IVF8,PQ7x6", "IVF8,RaBitQ", "IVF8_HNSW8,SQfp16"]
OTHERS = ["Flat", "SQ8", "IVF8,PQ8x4fs", "HNSW16", "IVF8,FlatPanorama4"]


def unit_rows(k: int) -> Any:
    rows = np.random.default_rng(0).standard_normal((ROWS, k)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def trained(factory: str, rows: Any) -> Any:
    inner = inner_index(factory, rows.shape[1])
    inner.train(rows)
    return inner


def assert_same(one: Any, two: Any, queries: Any) -> None:
    """Both find the same rows with the same scores, but for ties."""
    expected, found = one.search(queries, 10), two.search(queries, 10)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    assert (found[1] == expected[1]).mean() > 0.99


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("factory", LISTS)
def test_lists_joined_on_disk_are_those_in_memory(tmp_path: Path, factory: str, parts: int) -> None:
    rows = unit_rows(42 if "PQ7" in factory else 32)
    inner = trained(factory, rows)
    assert lists_on_disk(inner)
    whole, gathered = faiss.clone_index(inner), faiss.clone_index(inner)
    whole.add(rows)
    most, folder = ROWS // parts * (inner.code_size + 8), tmp_path / "made"
    folder.mkdir()
    for index, keep in ((gathered, False), (inner, True)):
        with OnDiskLists(index, folder, most=most) as writer:
            for start in range(0, ROWS, 100):
                writer.add_codes(index.sa_encode(rows[start : start + 100]))
            writer.join(keep=keep)
        assert [path.name for path in folder.iterdir()] == [IVF_DATA] * keep
        assert index.ntotal == ROWS
    assert faiss.serialize_index(gathered).tobytes() == faiss.serialize_index(whole).tobytes()
    inner.nprobe = whole.nprobe = 3
    assert_same(whole, inner, rows[:50])
    # Elsewhere, and read-only.
    write_index(inner, folder / INDEX)
    moved = tmp_path / "moved"
    folder.rename(moved)
    flags = faiss.IO_FLAG_ONDISK_SAME_DIR | faiss.IO_FLAG_READ_ONLY
    assert_same(whole, faiss.read_index(str(moved / INDEX), flags), rows[:50])


@pytest.mark.parametrize("factory", OTHERS)
def test_other_kinds_are_not_built_on_disk(factory: str) -> None:
    assert not lists_on_disk(inner_index(factory, 32))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """40,000 rows of 40 dims: 6.4 MB."""
    path = tmp_path_factory.mktemp("corpus") / "c.parquet"
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40_000, DIM)).astype(np.float32) * np.linspace(2, 0.5, DIM)
    return write_rows(path, rows.astype(np.float32))


def options(corpus: str, out: Path, **more: Any) -> dict[str, Any]:
    return {
        "corpus": [corpus], "embedding_column": "embedding", "id_column": "id", "whiten": "pca",
        "k": 32, "out": str(out), "store": str(Path(corpus).parent / "store"), "threads": 1, **more,
    }  # fmt: skip


def files_of(out: Path) -> set[str]:
    (version,) = (out / "versions").iterdir()
    return {path.name for path in version.iterdir()}


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> Path:
    """Indexes without a budget."""
    folder = tmp_path_factory.mktemp("free")
    for factory in ("IVF32,Flat", "SQ8"):
        built = build_index(BuildConfig(**options(corpus, folder / factory, factory=factory)))
        assert built.manifest["factory"]["mapped"] is False
    return folder


@pytest.mark.parametrize(
    ("factory", "budget", "mapped"),
    [("IVF32,Flat", "4MB", True), ("IVF32,Flat", "8MB", False), ("SQ8", "2MB", False)],
)
def test_a_build_within_a_budget_finds_what_one_without_finds(
    tmp_path: Path, corpus: str, free: Path, factory: str, budget: str, mapped: bool
) -> None:
    report = build_index(
        BuildConfig(**options(corpus, tmp_path / "out", factory=factory, memory_budget=budget))
    )
    assert report.manifest["factory"]["mapped"] is mapped
    lists = factory.startswith("IVF")
    assert (IVF_DATA in files_of(tmp_path / "out")) is (mapped and lists)
    assert set(report.manifest["files"]) >= files_of(tmp_path / "out") - {"manifest.json"}
    sizes = report.manifest["bytes"]
    assert sizes["index"]["total"] == pytest.approx(sizes["index_file"], rel=0.01)
    queries = np.random.default_rng(1).standard_normal((30, DIM)).astype(np.float32)
    places = (free / factory, tmp_path / "out")
    both = [open_index(place).bundle.search(queries, 10) for place in places]
    if factory.startswith("IVF"):
        # What is held out differs with the sample, and so do centroids.
        shared = [len({*a} & {*b}) for a, b in zip(both[0][1], both[1][1], strict=True)]
        assert np.mean(shared) > 9
    else:
        np.testing.assert_array_equal(both[0][1], both[1][1])


@pytest.mark.parametrize(("factory", "budget"), [("Flat", "5MB"), ("HNSW16", "10MB")])
def test_a_named_index_larger_than_the_budget_is_refused(
    tmp_path: Path, corpus: str, factory: str, budget: str
) -> None:
    config = BuildConfig(**options(corpus, tmp_path / "out", factory=factory, memory_budget=budget))
    expected = rf"{factory} is made in memory.*--memory-budget .*use a budget of .*IVF1024,Flat"
    with pytest.raises(ConfigError, match=expected):
        build_index(config)
    assert not (tmp_path / "out" / "CURRENT").exists()


def test_a_full_disk_is_told_and_leaves_nothing(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(OnDiskLists, "_join", full)
    config = BuildConfig(
        **options(corpus, tmp_path / "out", factory="IVF32,Flat", memory_budget="4MB")
    )
    with pytest.raises(StorageError, match=r"cannot write .*: the disk is full; free space"):
        build_index(config)
    assert list((tmp_path / "out" / "versions").iterdir()) == []
    monkeypatch.undo()
    assert build_index(config).manifest["factory"]["mapped"]


def child(config_json: str) -> None:
    """Build, and print the most memory of its own that the process held while it added rows."""
    peak = 0

    def look(*_: Any) -> None:
        nonlocal peak
        lines = Path("/proc/self/status").read_text().splitlines()
        held = next(line for line in lines if line.startswith("RssAnon"))
        peak = max(peak, int(held.split()[1]) << 10)

    watcher = Mock(start=look, advance=look, finish=look)
    build_index(BuildConfig(**json.loads(config_json)), progress=watcher)
    builtins.print(peak)


def peak_of(config: dict[str, Any]) -> int:
    from tests.helpers.bad_input import run_python

    # A fixed threshold makes glibc return large blocks to the system when they are freed.
    allocator = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    return int(run_python(__file__, json.dumps(config), **allocator).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_memory_stays_within_the_budget_over_that_of_a_small_build(tmp_path: Path) -> None:
    dim, budget = 256, 32 << 20
    rng = np.random.default_rng(0)

    def store_of(rows: int) -> str:
        path, store = tmp_path / f"{rows}.parquet", str(tmp_path / f"store{rows}")
        flat = rng.standard_normal(rows * dim, dtype=np.float32)
        table = pa.table({"id": np.arange(rows), "e": pa.FixedSizeListArray.from_arrays(flat, dim)})
        pq.write_table(table, path, row_group_size=4_000)
        encode_corpus(
            BuildConfig(
                corpus=(str(path),), embedding_column="e", id_column="id", store=store,
                shard_rows=4_000,
            )
        )  # fmt: skip
        return store

    def peak(store: str, factory: str, **more: Any) -> int:
        out = tmp_path / uuid.uuid4().hex
        common = {"store": store, "out": str(out), "whiten": "pca", "k": 200, "threads": 1}
        return peak_of({**common, "factory": factory, **more})

    small, large = store_of(4_000), store_of(60_000)
    base = peak(small, "Flat")
    kept, free = (peak(large, "IVF256,Flat", **more) for more in ({"memory_budget": budget}, {}))
    print(f"MiB base {base >> 20}, within budget {kept >> 20}, free {free >> 20}")
    # The index alone has 46 MiB.
    assert kept <= base + budget < free
    # Flat codes are in memory: 12 MiB, next to blocks of rows.
    assert peak(large, "SQ8", memory_budget=budget) <= base + budget


if __name__ == "__main__":
    child(sys.argv[1])
