"""A second build: what it finds done, what it makes anew, what it mends, and two at once."""

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.builds import ROWS, build, index_file, random_rows, write_rows
from whiten_index import open_index
from whiten_index.errors import ConfigError


@pytest.mark.parametrize(
    "change",
    [{"k": 5}, {"exponent": 0.5}, {"whiten": "pca"}, {"center": False}, {"normalize_input": True},
     {"factory": "SQ8"}, {"keep": ("year",)}, {"id_column": None}, {"limit": 90},
     {"store_dtype": "float16"}],
    ids=str,
)  # fmt: skip
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


def test_a_second_build_reads_no_file_that_is_as_it_was(tmp_path: Path) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(18))
    os.utime(corpus, (1e9, 1e9))
    made = [build(tmp_path / "out", corpus, k=k) for k in (4, 6)]
    assert [each.encoded.counts.kept_files for each in made] == [0, 1]
    assert made[1].encoded.counts.reused == ROWS
    assert build(tmp_path / "out", corpus, store_dtype="float16").encoded.counts.encoded == ROWS
    write_rows(tmp_path / "c.parquet", random_rows(19))
    os.utime(corpus, (1e9, 1e9))
    assert build(tmp_path / "out", corpus, k=6).encoded.counts.encoded == ROWS


def test_a_file_whose_time_says_nothing_is_read_again(tmp_path: Path) -> None:
    path, memory = tmp_path / "c.parquet", fsspec.filesystem("memory")
    plain: Any = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    memory.pipe("/again/c", b"")
    for seed in (20, 21):
        table = pa.table({"id": range(ROWS), "embedding": list(random_rows(seed))})
        pq.write_table(table, path, **plain)
        os.utime(path, (1e9, 1e9))
        with memory.open("/again/c", "r+b") as file:
            file.write(path.read_bytes())
        assert build(tmp_path / "out", "memory://again/c").encoded.counts.encoded == ROWS


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


def test_a_database_of_others_in_the_folder_is_left_as_it_is(tmp_path: Path) -> None:
    """LevelDB and RocksDB have a file of that name, too."""
    corpus, out = write_rows(tmp_path / "c.parquet", random_rows(24)), tmp_path / "leveldb"
    out.mkdir()
    for name in ("CURRENT", "MANIFEST-000004"):
        (out / name).write_text("MANIFEST-000004\n")
    with pytest.raises(ConfigError, match=r"has a file CURRENT that another .*another place"):
        build(out, corpus)
    assert (out / "CURRENT").read_text() == "MANIFEST-000004\n"
    assert not (out / "store").exists()


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
