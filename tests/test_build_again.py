"""A second build: what it finds done, what it makes anew, what it mends, and two at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from tests.build_helpers import ROWS, build, index_file, random_rows, write_rows
from whiten_index import open_index
from whiten_index.errors import BusyError


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    faiss.omp_set_num_threads(1)


def test_a_second_build_is_up_to_date_and_another_k_is_a_new_version(tmp_path: Path) -> None:
    rows = random_rows(16)
    corpus = write_rows(tmp_path / "c.parquet", rows)
    out = tmp_path / "out"
    first = build(out, corpus)
    before = Path(index_file(out)).read_bytes()
    again = build(out, corpus)
    assert (first.up_to_date, again.up_to_date) == (False, True)
    assert again.version == first.version
    other = build(out, corpus, k=4)
    assert other.version != first.version
    assert not other.up_to_date
    assert other.encoded.counts.encoded == 0
    assert open_index(out).bundle.whitening.k == 4
    assert (out / "versions" / first.version / "index.faiss").read_bytes() == before
    # The old choice again: its version is still whole, so it is taken up and not made anew.
    back = build(out, corpus)
    assert back.version == first.version
    assert open_index(out).bundle.whitening.k == 6


@pytest.mark.parametrize(
    "change",
    [
        {"k": 5},
        {"exponent": 0.5},
        {"whiten": "pca"},
        {"center": False},
        {"normalize_input": True},
        {"factory": "SQ8"},
        {"keep": ("year",)},
        {"id_column": None},
        {"limit": 50},
        {"store_dtype": "float16"},
    ],
    ids=str,
)
def test_whatever_changes_the_index_makes_a_new_version(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    rows = random_rows(17, rows=100)
    corpus = write_rows(tmp_path / "c.parquet", rows, year=np.arange(100))
    out = tmp_path / "out"
    first = build(out, corpus)
    changed = build(out, corpus, **change)
    assert changed.version != first.version
    assert not changed.up_to_date
    assert len(open_index(out)) == changed.encoded.record.rows


def test_two_indexes_may_share_a_store(tmp_path: Path) -> None:
    rows = random_rows(18)
    corpus = write_rows(tmp_path / "c.parquet", rows)
    build(tmp_path / "a", corpus, store=str(tmp_path / "store"))
    second = build(tmp_path / "b", corpus, store=str(tmp_path / "store"), k=3)
    assert second.encoded.counts.encoded == 0
    assert second.encoded.counts.reused == ROWS
    assert not (tmp_path / "b" / "store").exists()


@contextmanager
def held_by_another_process(folder: Path) -> Iterator[int]:
    """Hold the build lock of a folder in another process."""
    script = (
        "import pathlib, sys\n"
        "from whiten_index.artifacts.lock import only_writer\n"
        "with only_writer(pathlib.Path(sys.argv[1]), what='index'):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=-1, stdout=-1, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process.pid
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def test_a_second_build_at_once_is_refused_and_the_index_stays_searchable(tmp_path: Path) -> None:
    rows = random_rows(21)
    corpus = write_rows(tmp_path / "c.parquet", rows)
    first = build(tmp_path / "out", corpus)
    with held_by_another_process(tmp_path / "out") as pid:
        with pytest.raises(BusyError, match=f"being written by process {pid} .*another folder"):
            build(tmp_path / "out", corpus, k=3)
        opened = open_index(tmp_path / "out")
        assert opened.bundle.version == first.version
        assert opened.search_embeddings(rows[:1], top_k=1)[0][0].id == 0
    assert build(tmp_path / "out", corpus, k=3).version != first.version


def test_the_lock_of_a_dead_process_does_not_hold(tmp_path: Path) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(22))
    script = (
        "import os, pathlib, sys\n"
        "from whiten_index.artifacts.lock import only_writer\n"
        "with only_writer(pathlib.Path(sys.argv[1]), what='index'):\n"
        "    os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")])
    assert done.returncode == 9
    build(tmp_path / "out", corpus)
    assert len(open_index(tmp_path / "out")) == ROWS


@pytest.mark.parametrize("damage", ["garbage", "empty", "missing", "names nothing"])
def test_the_same_build_mends_a_damaged_current(tmp_path: Path, damage: str) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(23))
    out = tmp_path / "out"
    build(out, corpus)
    if damage == "missing":
        (out / "CURRENT").unlink()
    else:
        gone = json.dumps({"version": "000009-gone", "manifest_sha256": "0" * 64})
        text = {"garbage": "\x00garbage", "empty": "", "names nothing": gone}[damage]
        (out / "CURRENT").write_text(text)
    build(out, corpus)
    assert len(open_index(out)) == ROWS


@pytest.mark.parametrize(
    "name",
    ["index.faiss", "documents.arrow", "whitening.safetensors", "moments.safetensors"],
)
def test_the_same_build_mends_a_damaged_version(tmp_path: Path, name: str) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(24))
    out = tmp_path / "out"
    build(out, corpus)
    path = Path(index_file(out)).with_name(name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    report = build(out, corpus)
    assert not report.up_to_date
    assert len(open_index(out, verify="full")) == ROWS


@pytest.mark.parametrize("key", ["files", "whitening", "encoder", "rows"])
def test_a_manifest_that_someone_changed_is_not_taken_for_up_to_date(
    tmp_path: Path, key: str
) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(25))
    out = tmp_path / "out"
    first = build(out, corpus)
    path = Path(index_file(out)).with_name("manifest.json")
    fields = json.loads(path.read_text())
    del fields[key]
    path.write_text(json.dumps(fields))
    report = build(out, corpus)
    assert not report.up_to_date
    assert report.version != first.version
    assert set(open_index(out).bundle.manifest) == set(fields) | {key}


def test_a_build_leaves_no_temporary_files(tmp_path: Path) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(26))
    build(tmp_path / "out", corpus, shard_rows=50)
    build(tmp_path / "out", corpus, shard_rows=50, k=3)
    assert not list((tmp_path / "out").rglob("*tmp*"))
