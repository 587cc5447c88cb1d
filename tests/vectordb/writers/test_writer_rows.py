"""Rows that every writer gives back and finds, against brute force."""

import re

import numpy as np
import pyarrow as pa
import pytest

from tests.vectordb.pushed_rows import COLUMNS, Rows
from tests.vectordb.writers.engines import FILES, Backend
from whiten_index.corpus.batches import PASSAGE
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.database_writer import DatabaseWriter
from whiten_index.vectordb.push import differences
from whiten_index.vectordb.pushed_table import Metric, VectorDtype

ODD_IDS = ["", " ", "'", '"', "\\", "\\'", "a;b", "x" * 1000, "é", "e\u0301", "\U0001f600", "0",
           "00", "file.parquet#0:12", "null", "NaN", "%s", "{}", "\n", "A", "a", "--"]  # fmt: skip


def test_an_empty_database(writer: DatabaseWriter) -> None:
    assert writer.published() is None
    assert writer.pending() is None
    writer.discard()
    assert writer.engine
    assert "docs" in writer.target


@pytest.mark.parametrize("kind", [pa.int64(), pa.large_string()])
@pytest.mark.parametrize("metric", ["cosine", "ip"])
def test_rows_come_back_and_are_found(
    writer: DatabaseWriter, backend: Backend, kind: pa.DataType, metric: str
) -> None:
    ids = pa.array([f"{7 * at}" for at in range(300)]).cast(kind)
    rows = Rows.make(ids=ids, metric=metric, n=pa.array(range(300)))
    if metric not in backend.metrics:
        with pytest.raises(ConfigError, match="no dot product; leave --metric out"):
            writer.begin(rows.pushed, rows.layout)
        return
    rows.fill(writer)
    rows.assert_held(writer)
    rows.assert_found(writer)
    rows.assert_found(writer, exact=False, least=0.9)
    rows.assert_clean(writer)
    assert writer.pending() is None
    assert len(writer.fetch([rows.ids[0]], rows.layout)) == 1
    assert len(writer.fetch([], rows.layout)) == 0


def test_ids_may_be_any_text(writer: DatabaseWriter) -> None:
    odd = [*ODD_IDS, *(f"{each}#{at}" for at in range(50) for each in ODD_IDS)]
    rows = Rows.make(len(odd), ids=pa.array(odd, pa.large_string()))
    rows.fill(writer, batch=1000)
    rows.assert_held(writer)
    for name in ODD_IDS:
        assert writer.fetch([name], rows.layout)["id"].to_pylist() == [name]
    left = Rows(rows.table.slice(0, 5), rows.layout)
    left.change(writer, gone=odd[5:])
    left.assert_held(writer)


def test_ids_at_the_edges_of_64_bits(writer: DatabaseWriter) -> None:
    rows = Rows.make(5, ids=pa.array([-(2**63), -1, 0, 2**53 + 1, 2**63 - 1]))
    rows.fill(writer)
    rows.assert_held(writer)
    left = Rows(rows.table.slice(1, 3), rows.layout)
    left.change(writer, gone=[rows.ids[0], rows.ids[-1]])
    left.assert_held(writer)


def test_kept_columns_of_every_type(writer: DatabaseWriter) -> None:
    columns = {name: pa.array([one, two, None], kind) for name, (kind, one, two) in COLUMNS.items()}
    rows = Rows.make(3, **columns)
    rows.fill(writer)
    rows.assert_held(writer)


FURTHER = {
    "half": pa.array([1.5, None, -2], pa.float16()), "null": pa.nulls(3),
    "bytes": pa.array([b"ab", b"cd", None], pa.binary(2)),
    "words": pa.array(["a", "b", None]).dictionary_encode(),
    "numbers": pa.array([1, 2, None]).dictionary_encode(),
    "durations": pa.array([[1], [-2], None], pa.list_(pa.duration("ns"))),
    "seconds": pa.array([1, 2, None], pa.time32("s")),
    "zone": pa.array([1, 2, None], pa.timestamp("ms", "Europe/Rome")),
    "fine": pa.array([1_000, -2_000, None], pa.timestamp("ns", "UTC")),
    "lists of bytes": pa.array([[b"a"], [None], None], pa.list_(pa.binary())),
    "date64": pa.array([86_400_000, 0, None], pa.date64()),
}  # fmt: skip


@pytest.mark.parametrize("engine", FILES, indirect=True)
def test_files_keep_columns_of_further_types(engine: Backend) -> None:
    rows = Rows.make(3, **FURTHER)
    with engine.open() as writer:
        rows.fill(writer)
        rows.assert_held(writer)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([3_000_000, None, -3_000_000], pa.date32()),
        pa.array([253_402_300_800, None, -253_402_300_800], pa.timestamp("s")),
        pa.array([2**62, None, -(2**62)], pa.timestamp("ms", "UTC")),
        pa.array([1_001, None, -1], pa.timestamp("ns")),
        pa.array([1_001, None, -1], pa.timestamp("ns", "UTC")),
        pa.array([[1_000], None, [-1]], pa.list_(pa.timestamp("ns", "UTC"))),
        pa.array([1_001, None, 1], pa.time64("ns")),
        pa.array([1_001, None, -1], pa.duration("ns")),
    ],
)
def test_far_and_fine_times_come_back_or_are_refused(engine: Backend, values: pa.Array) -> None:
    rows = Rows.make(3, day=values)
    with engine.open() as writer:
        try:
            rows.fill(writer)
        except DatabaseError as error:
            assert re.search("day|range|rows are refused|microseconds", str(error))  # noqa: PT017
            assert writer.published() is None
        else:
            rows.assert_held(writer)


def test_passages_have_keys_of_two_columns(writer: DatabaseWriter) -> None:
    """Documents, each of which loses another number of passages."""
    names = [f"d{number}" for number in range(200) for _ in range(5)]
    numbers = pa.array([passage for _ in range(200) for passage in range(5)], pa.int32())
    rows = Rows.make(1000, ids=pa.array(names, pa.large_string()), **{PASSAGE: numbers})
    rows.fill(writer)
    rows.assert_held(writer)
    assert len(writer.fetch(["d7"], rows.layout)) == 5
    stays = [row for row in range(1000) if row % 5 < row // 5 % 6]
    now = Rows(pa.Table.from_batches([rows.take(stays)]), rows.layout)
    now.change(writer, rows.take(stays), gone=sorted(set(names)))
    now.assert_held(writer)


def test_halves(writer: DatabaseWriter, backend: Backend) -> None:
    rows = Rows.make(dtype="float16")
    if not backend.halves:
        with pytest.raises(ConfigError, match="keeps no float16"):
            writer.begin(rows.pushed, rows.layout)
        return
    rows.fill(writer)
    rows.assert_held(writer)
    rows.assert_found(writer)


def test_few_rows_and_none(writer: DatabaseWriter) -> None:
    for size in (1, 0):
        Rows.make(size).fill(writer)
        assert writer.count() == size
        found = writer.search(Rows.make(2, seed=3).vectors, 10, exact=True)
        assert np.isfinite(found[:, :size]).all()
        assert np.isnan(found[:, size:]).all()


def test_vectors_of_zeros(engine: Backend) -> None:
    """They come back, and a search finds the others as it would without them."""
    forms: list[tuple[VectorDtype, Metric]] = [("float32", metric) for metric in engine.metrics]
    forms += [("float16", "cosine")] * engine.halves
    for dtype, metric in forms:
        rows = Rows.make(50, dtype=dtype, metric=metric).with_zeros(7, 49)
        with engine.open() as writer:
            rows.fill(writer)
            rows.assert_held(writer)
            for exact in (True, False):
                with writer.searching(exact=exact) as find:
                    *hits, none = find(rows.vectors[:8], 50)
                for query, each in zip(rows.vectors, hits, strict=False):
                    found = {hit.id: hit.score for hit in each if hit.id not in (7, 49)}
                    assert len(found) == 48
                    scores = rows.vectors[list(found)] @ query
                    lost = 3e-3 if dtype == "float16" else 2e-5
                    assert np.abs(scores - list(found.values())).max() < lost
                # By a query of zeros nothing is near.
                assert all(not hit.score > 0 for hit in none)


@pytest.mark.parametrize("engine", FILES, indirect=True)
@pytest.mark.parametrize("columns", [("Lang", "lang"), ("ID",), ("a", "Vector")])
def test_names_of_columns_that_differ_by_case_alone(
    engine: Backend, columns: tuple[str, ...]
) -> None:
    """DuckDB renames one of them."""
    one = Rows.make(2, **dict.fromkeys(columns, pa.array(["a", "b"])))
    kept = Rows.make(2, **dict.fromkeys("\xc4\xe4", pa.array(["a", "b"])))
    message = f"column '{columns[-1]}' differs from another by case alone"
    with engine.open() as writer:
        with pytest.raises(ConfigError, match=message):
            writer.begin(one.pushed, one.layout)
        assert writer.pending() is None
        kept.fill(writer)
        kept.assert_held(writer)


@pytest.mark.parametrize("name", ["", "a\0b", "a.b"])
def test_names_that_an_engine_cannot_give_to_columns(writer: DatabaseWriter, name: str) -> None:
    """LanceDB takes a dot for a step into a struct."""
    rows = Rows.make(2, **{name: pa.array(["a", "b"])})
    if name == "a.b" and not writer.engine.startswith("LanceDB"):
        rows.fill(writer)
        rows.assert_held(writer)
    else:
        with pytest.raises(ConfigError, match="cannot give a column the name"):
            writer.begin(rows.pushed, rows.layout)
        assert writer.pending() is None


def test_sizes_and_removal(writer: DatabaseWriter) -> None:
    rows = Rows.make(2000, k=32)
    writer.remove()
    rows.fill(writer, batch=1000)
    sizes = writer.sizes()
    assert "table" not in sizes or 2000 * 32 * 4 < sizes["table"] < 2000 * 32 * 4 * 4
    assert sizes.get("index", 0) < 2000 * 32 * 4 * 6
    writer.remove()
    assert writer.published() is None
    assert writer.pending() is None
    rows.fill(writer, batch=1000)
    rows.assert_held(writer)


@pytest.mark.service
def test_many_real_vectors(writer: DatabaseWriter, wikinews: Rows) -> None:
    rows = wikinews
    rows.fill(writer, batch=1024)
    assert writer.count() == 2000
    some = np.random.default_rng(0).choice(2000, 500, replace=False)
    sample = Rows(rows.table.take(pa.array(some)), rows.layout)
    assert differences(sample.table, writer.fetch(sample.ids, rows.layout), rows.layout) == []
    rows.assert_found(writer, queries=50)
    rows.assert_found(writer, exact=False, least=0.95, queries=200)
