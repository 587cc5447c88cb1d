"""Bad folders: files in the way, damaged indexes and stores, two builds at once, full disks."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.helpers import bad_input
from tests.helpers.bad_input import (
    ARTIFACT,
    DISK,
    EMBEDDED,
    ROWS,
    Place,
    assert_one_error,
    assert_refused,
    file_size_limit,
    numbers,
    run,
    table,
)

place = bad_input.place


def test_a_damaged_store_without_a_corpus_to_mend_it_from(place: Place) -> None:
    path = next((place.out / "store").rglob("embeddings.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    arguments = ("build", "--store", place.out / "store", "--k", 2, "--out", place.out)
    assert_refused(place, arguments, ARTIFACT, "damaged; run the same encode or build with the")


@pytest.mark.parametrize("store", ["gone", "good"])
def test_a_store_that_is_none(place: Place, store: str) -> None:
    arguments = ("build", "--store", place.root / store, "--out", place.out)
    assert_refused(place, arguments, ARTIFACT, "holds no store of embeddings")


def test_a_store_of_two_corpora_asks_which(place: Place) -> None:
    corpus = place.write(
        table(id=[f"x{i}" for i in range(ROWS)], e=list(numbers(4))), "b/b.parquet"
    )
    store = place.out / "store"
    status, _, stderr = run("encode", corpus, *EMBEDDED, "--store", store)
    assert status == 0, stderr
    arguments = ("build", "--store", store, "--k", 2, "--out", place.out)
    assert_refused(place, arguments, ARTIFACT, "2 corpora .*good.*name the corpus")


# Other sizes fail in other places: embeddings, rows, moments, whitening, FAISS's file, manifest.
@pytest.mark.parametrize("size", [0, 100, 300, 500, 700, 900, 1200, 1800, 3000])
@pytest.mark.parametrize("store", ["filled", "new"])
def test_a_disk_that_takes_no_more(place: Place, size: int, store: str) -> None:
    more = () if store == "filled" else ("--store-dtype", "float16")
    build = ("build", place.root / "good", *EMBEDDED, *more, "--k", "full", "--out", place.out)
    with file_size_limit(size):
        status, stdout, stderr = run(*build)
    assert status == DISK, (stdout, stderr)
    assert_one_error(stderr, match="cannot write .*larger than.*run the same command again")
    place.assert_unharmed()
    assert run(*build)[0] == 0


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 128 kB, where the tests may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount).returncode:
        if os.environ.get("CI"):
            pytest.fail("a small disk cannot be mounted: run CI as root, where nothing is skipped")
        pytest.skip("mounting a tmpfs needs root; the file size limit above stands in")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("filling", ["store", "index"])
def test_a_full_disk(place: Place, tiny_disk: Path, filling: str) -> None:
    big = np.random.default_rng(5).standard_normal((2000, 16)).astype(np.float32)
    rows = pa.table({"id": [f"d{i}" for i in range(2000)], "e": list(big)})
    corpus = place.write(rows)
    shutil.copytree(place.out, tiny_disk / "out", ignore=shutil.ignore_patterns("store"))
    on_disk = Place(tiny_disk, place.found)
    store = tiny_disk / "store" if filling == "store" else place.root / "elsewhere"
    build = ("build", corpus, *EMBEDDED, "--k", "full", "--store", store)
    status, stdout, stderr = run(*build, "--out", tiny_disk / "out")
    assert status == DISK, (stdout, stderr)
    assert_one_error(stderr, match=f"cannot write {tiny_disk}.*the disk is full; free space")
    on_disk.assert_unharmed()
    # With room elsewhere the same embeddings are taken up, none is lost.
    status, stdout, _ = run(*build[:-1], place.root / "elsewhere", "--out", place.out, "--json")
    assert status == 0
    assert json.loads(stdout)["rows"] == 2000
