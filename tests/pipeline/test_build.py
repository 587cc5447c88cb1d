"""Builds compared with numpy, and builds of an existing index: reused, rebuilt or repaired."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import whiten_index
from tests.helpers import builds
from tests.helpers.builds import (
    DIM,
    ROWS,
    TOP,
    assert_ranked_by,
    build,
    index_file,
    random_rows,
    write_rows,
)
from whiten_index import open_index
from whiten_index.errors import ConfigError, WhiteningError


@pytest.mark.parametrize("whiten", ["whitening", "pca"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_mean_100_times_the_spread_costs_nothing(
    tmp_path: Path, whiten: str, dtype: type[np.floating]
) -> None:
    rows = random_rows(3, mean=100.0).astype(dtype)
    build(tmp_path / "out", write_rows(tmp_path / "c.parquet", rows), whiten=whiten)
    expected = builds.closed_form(rows, k=6, exponent=float(whiten == "whitening"))
    found = open_index(tmp_path / "out").search_embeddings(rows[:20], top_k=TOP)
    for hits, row in zip(found, builds.cosines(expected[:20], expected), strict=True):
        assert_ranked_by(hits, row, tolerance=2e-5)


def test_a_row_of_zeros_gets_a_score_and_no_nan(tmp_path: Path) -> None:
    rows = random_rows(10)
    rows[7] = 0
    build(tmp_path / "out", write_rows(tmp_path / "c.parquet", rows), whiten="none", k=None)
    hits = open_index(tmp_path / "out").search_embeddings(rows[:1], top_k=ROWS)[0]
    assert len(hits) == ROWS
    assert next(hit.score for hit in hits if hit.id == 7) == 0


def test_a_width_nobody_gives_is_a_third(tmp_path: Path) -> None:
    report = build(tmp_path / "out", write_rows(tmp_path / "c.parquet", random_rows(11)), k=None)
    assert report.manifest["whitening"]["k"] == DIM // 3


@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_vectors_whose_squares_leave_float32_are_refused(tmp_path: Path, factor: float) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(31).astype(np.float64) * factor)
    with pytest.raises(ConfigError, match=r"too long or too short for float32.*scale"):
        build(tmp_path / "out", corpus, whiten="none", k=None)
    assert not (tmp_path / "out" / "CURRENT").exists()


def test_a_transform_of_numbers_beyond_float32_is_refused(tmp_path: Path) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(31) * np.float32(1e-42))
    with pytest.raises(WhiteningError, match="numbers beyond float32, as of embeddings"):
        build(tmp_path / "out", corpus)
    assert not (tmp_path / "out" / "CURRENT").exists()


@pytest.mark.parametrize("factor", [1e20, 1e-24])
@pytest.mark.parametrize("options", [
    {"whiten": "none", "k": None}, {"whiten": "pca", "normalize_input": True},
])  # fmt: skip
def test_one_row_of_another_scale_is_refused(
    tmp_path: Path, factor: float, options: dict[str, Any]
) -> None:
    rows = random_rows(31, rows=1000).astype(np.float64)
    rows[1] *= factor
    corpus = write_rows(tmp_path / "c.parquet", rows)
    with pytest.raises(ConfigError, match=r"too long or too short for float32.*scale"):
        build(tmp_path / "out", corpus, factory="Flat", **options)


@pytest.mark.parametrize("factory", ["SQfp16", "IVF4,SQfp16", "HNSW8_SQfp16"])
def test_numbers_that_codes_of_float16_cannot_hold_are_refused(
    tmp_path: Path, factory: str
) -> None:
    rows = random_rows(31, rows=300)
    rows[1] *= 1e5
    corpus = write_rows(tmp_path / "c.parquet", rows)
    options: dict[str, Any] = {"whiten": "none", "k": None, "similarity": "dot"}
    with pytest.raises(ConfigError, match="numbers beyond 65,504, which codes of float16"):
        build(tmp_path / "out", corpus, factory=factory, **options)
    build(tmp_path / "out", corpus, factory="Flat", **options)


def test_the_names_of_the_package_are_there_and_documented() -> None:
    names = {
        *("build_index", "encode_corpus", "open_index", "BuildConfig", "CorpusConfig"),
        *("ParquetCorpus", "load_encoder", "Moments", "Whitening", "EmbeddingStore"),
        "WhitenIndexError",
    }
    assert names <= set(whiten_index.__all__) == set(dir(whiten_index))
    for name in names:
        assert getattr(whiten_index, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = whiten_index.nothing


@pytest.mark.parametrize("given", ["docs.parquet", {"index": "index"}])
@pytest.mark.parametrize(
    ("take", "kind"),
    [
        (lambda given: whiten_index.build_index(given), "BuildConfig"),
        (lambda given: whiten_index.encode_corpus(given), "BuildConfig"),
        (lambda given: whiten_index.update_index(given), "UpdateConfig"),
        (lambda given: whiten_index.certify_index(given), "CertifyConfig"),
        (lambda given: whiten_index.push_index(given), "PushConfig"),
        (lambda given: whiten_index.run_sweep(given), "SweepConfig"),
        (lambda given: whiten_index.train_encoder(given), "TrainingConfig"),
        (lambda given: whiten_index.evaluate_sts(given, []), "EvalConfig"),
        (lambda given: whiten_index.ParquetCorpus.open(given), "CorpusConfig"),
        (lambda given: whiten_index.Whitening.fit(np.eye(9), given), "WhiteningConfig"),
    ],
)
def test_a_path_is_no_config(take: Callable[[Any], Any], kind: str, given: object) -> None:
    with pytest.raises(ConfigError, match=f"takes a {kind}, not a {type(given).__name__}"):
        take(given)


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
