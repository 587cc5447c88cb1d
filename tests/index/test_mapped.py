"""Indexes read from their file as they are searched: the same hits, wherever the folder is."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.helpers.builds import build_of, put_lists_on_disk
from whiten_index import open_index

ROWS, DIM = 600, 16
FACTORIES = ["Flat", "SQ8", "PQ8x4", "PQ8x4fs", "RaBitQ", "HNSW8"]
FACTORIES += [f"IVF6,{code}" for code in ("Flat", "SQ8", "PQ8x4fs", "RaBitQ")]


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)


def build(folder: Path, rows: np.ndarray, **options: Any) -> Path:
    table = pa.table({"id": np.arange(len(rows)), "e": list(rows), "even": np.arange(ROWS) % 2})
    return build_of(table, folder, **{"whiten": "none", "keep": "even", **options})


def hits_of(opened: Any, rows: np.ndarray, **options: Any) -> list[list[tuple[int, float]]]:
    found = opened.search_embeddings(rows, **options)
    return [[(hit.row, round(hit.score, 5)) for hit in hits] for hits in found]


def read_only(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_mapped_index_finds_the_same(tmp_path: Path, rows: np.ndarray, factory: str) -> None:
    out = build(tmp_path, rows, factory=factory)
    opened = open_index(out)
    asked = [(rows[:9], {}), (rows[:9], {"row_filter": "even == 1"}), (rows[:1], {})]
    expected = [hits_of(opened, some, **how) for some, how in asked]
    shutil.rmtree(out / "store")
    out.rename(tmp_path / "moved")
    read_only(tmp_path / "moved")
    mapped = open_index(tmp_path / "moved", mapped=True)
    assert [hits_of(mapped, some, **how) for some, how in asked] == expected
    if "fs" not in factory and factory != "IVF6,RaBitQ":
        assert [h.row for h in mapped.search_like(5)] == [h.row for h in opened.search_like(5)]


def test_the_vectors_of_a_mapped_index_are_not_read_when_it_is_opened(
    tmp_path: Path, rows: np.ndarray
) -> None:
    out = build(tmp_path, rows)
    (file,) = out.glob("versions/*/index.faiss")
    mapped = open_index(out, mapped=True)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(file.resolve()) in maps.read_text()
    del mapped
    opened = open_index(out)
    if maps.exists():
        assert str(file.resolve()) not in maps.read_text()
    assert len(opened) == ROWS


@pytest.fixture
def on_disk(tmp_path: Path, rows: np.ndarray) -> Path:
    """An index whose lists are in a file of their own, as FAISS writes them."""
    out = build(tmp_path, rows, factory="IVF6,SQ8")
    put_lists_on_disk(out)
    shutil.rmtree(out / "store")
    return out


def test_lists_in_a_file_of_their_own_are_found_after_a_move(
    tmp_path: Path, on_disk: Path, rows: np.ndarray
) -> None:
    expected = hits_of(open_index(build(tmp_path / "same", rows, factory="IVF6,SQ8")), rows[:5])
    for verify in ("manifest", "full"):
        assert hits_of(open_index(on_disk, verify=verify), rows[:5]) == expected
    on_disk.rename(tmp_path / "moved")
    read_only(tmp_path / "moved")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "moved").rglob("*")}
    opened = open_index(tmp_path / "moved")
    assert hits_of(opened, rows[:5]) == expected
    (hits,) = opened.search_embeddings(rows[:1], row_filter="id == 599")
    assert [hit.row for hit in hits] == [599]
    assert len(opened.search_like(3, top_k=ROWS)) > 10
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "moved").rglob("*")}
    assert after == before
