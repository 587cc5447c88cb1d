"""Bring whitened vectors to a file or a database, and keep them up to date there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import whiten_index
from tests.acceptance.commands import done, refused
from tests.acceptance.truth import unit
from tests.acceptance.vectors import Place, Vectors, checksums, some, whitened

# Id -> title and vector.
Held = dict[str, tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Indexed(Place):
    """A corpus of 400 rows in two files, and the index that was built from it."""

    def expected(self, rows: Vectors, **options: Any) -> np.ndarray:
        return whiten_index.QueryTransform.of(self.index, **options).reduce(rows.rows)

    def change(self) -> Vectors:
        rows = super().change()
        done("update", self.index, "--refit", "never")
        return rows

    def push(self, to: object, *options: object) -> dict[str, Any]:
        return json.loads(done("push", self.index, "--to", to, *options, "--json"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Indexed:
    return Indexed(tmp_path_factory.mktemp("made") / "work", some(400)).made()


def read(path: Path) -> Held:
    if path.suffix == ".npy":
        table = pq.read_table(path.with_suffix(".documents.parquet"))
        vectors = np.load(path)
    else:
        if path.suffix == ".parquet":
            table = pq.read_table(path)
        else:
            with pa.ipc.open_file(path) as file:
                table = file.read_all()
        vectors = np.array(table["vector"].to_pylist())
    titles = table["title"].to_pylist()
    return dict(
        zip(table["id"].to_pylist(), zip(titles, vectors, strict=True), strict=True)
    )  # fmt: skip


def assert_holds(held: Held, rows: Vectors, vectors: np.ndarray, *, atol: float = 1e-5) -> None:
    assert set(held) == set(rows.ids)
    for each, title, vector in zip(rows.ids, rows.titles(), vectors, strict=True):
        assert held[each][0] == title
        np.testing.assert_allclose(held[each][1], vector, atol=atol)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".npy"])
def test_a_file_has_what_queries_are_reduced_to(place: Indexed, suffix: str) -> None:
    path = place.work / f"vectors{suffix}"
    assert place.push(path)["rows"] == 400
    held = read(path)
    assert list(held) == place.rows.ids
    assert_holds(held, place.rows, place.expected(place.rows))
    vectors = np.array([vector for _, vector in held.values()])
    exact = whitened(place.rows, place.rows)
    np.testing.assert_allclose(vectors @ vectors.T, exact @ exact.T, atol=1e-5)
    today = place.change()
    place.push(path)
    after = read(path)
    assert_holds(after, today, place.expected(today))
    for each in place.rows.ids[:150] + place.rows.ids[165:]:
        assert held[each][1].tobytes() == after[each][1].tobytes()


def test_fewer_numbers_and_halves(place: Indexed) -> None:
    path = place.work / "vectors.parquet"
    place.push(path, "--k", 3, "--dtype", "float16")
    field = pq.read_schema(path).field("vector").type
    assert (field.list_size, field.value_type) == (3, pa.float16())
    first = unit(place.expected(place.rows)[:, :3])
    assert_holds(read(path), place.rows, first, atol=1e-3)
    assert_holds(read(path), place.rows, place.expected(place.rows, k=3), atol=1e-3)


def test_a_database_that_is_not_there(place: Indexed) -> None:
    # The client is of the group service, which CI installs before all tests.
    pytest.importorskip("psycopg")
    before = checksums(place.work)
    address = "postgresql://me@127.0.0.1:1/db"
    assert "127.0.0.1" in refused(10, "push", place.index, "--to", address, "--table", "docs")
    assert checksums(place.work) == before
