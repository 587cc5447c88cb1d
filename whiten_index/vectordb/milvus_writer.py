"""Writer of collections of Milvus.

Ids are the primary keys; rows of passages have ``pk``, which is ``id#number``. Kept columns are
dynamic fields, by which users can filter (``n > 5``).
"""

import importlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pymilvus import DataType, MilvusClient, MilvusException

from whiten_index.artifacts.files import is_file, is_folder, list_folder, size_of, walk_files
from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.errors import ConfigError, DatabaseError, first_line
from whiten_index.index.exact import Vectors, exact_neighbours
from whiten_index.vectordb.alias_writer import AliasWriter
from whiten_index.vectordb.database_writer import Find, Hit, Stored
from whiten_index.vectordb.engine_options import Effort, MilvusOptions
from whiten_index.vectordb.engine_support import EngineAddress, advice, require_engine_folder
from whiten_index.vectordb.json_rows import table_of, to_objects
from whiten_index.vectordb.pushed_table import METADATA, VECTOR, Ids, Layout, vectors_of

_PRIMARY = "pk"
_LONGEST_TEXT = 65_535
_NOT_IN_LITE = ("ivf_pq", "ivf_rabitq", "scann")
_EXACT_INDEXES = ("FLAT", "BRUTE_FORCE")
# A server takes 64 MB at once; JSON and base64 are longer than the columns of Arrow.
_SENT_BYTES = 16 << 20
_PAGE_ROWS = 8192
# What was written is read.
_STRONG = {"consistency_level": "Strong"}
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})
_TOKEN = "MILVUS_TOKEN"
_CONNECT_SECONDS, _ANSWER_SECONDS = 10.0, 300.0
# Calls that take as long as the rows do.
_LONG = ("create_index", "flush", "load_collection")

# What the client and Milvus Lite log as errors, they raise too.
for _name in ("pymilvus", "milvus_lite", "grpc"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class MilvusWriter(AliasWriter):
    """One alias of Milvus; see ``DatabaseWriter``."""

    # The client or Milvus Lite keep some names for themselves.
    column_form = r"(?!(?:pk|\$meta|_seq|_partition|count\(\*\))$)[^\0]+"

    def __init__(self, address: str, name: str, options: MilvusOptions, *, make: bool) -> None:
        super().__init__(name)
        self._options = options
        place = EngineAddress.parse(address, MilvusOptions)
        database = options.db or place.inside
        self.target = f"{place.shown}, collection {name}"
        self._loaded: set[str] = set()
        self._local = place.folder is not None
        inside = Path("databases", database) if database not in ("", "default") else Path()
        self._collections_folder = place.folder and place.folder / inside / "collections"
        self.process = os.getpid() if self._local else None
        with ExitStack() as opened:
            uri = place.url
            if place.folder is not None:
                uri = opened.enter_context(_lite(place.folder, make=make))
            with self._reporting("it could not be reached"):
                self._milvus: Any = MilvusClient(
                    uri=uri, token=os.environ.get(_TOKEN, ""), db_name=database, dedicated=True,
                    timeout=_CONNECT_SECONDS, **place.parameters,
                )  # fmt: skip
                opened.callback(self._milvus.close)
                if not self._local:
                    self._milvus = _Bounded(self._milvus, options.index_timeout)
                release = str(self._milvus.get_server_version())
            self._opened = opened.pop_all()
        # A server may be Lite as well.
        self._is_lite = release.startswith("milvus_lite")
        number = release.removeprefix("milvus_lite").lstrip("-")
        self.engine = f"Milvus Lite {number}" if self._is_lite else f"Milvus {release}"
        self._before_2_4 = not self._is_lite and bool(re.match(r"v?2\.[0-3]\b", number))
        if database not in ("", "default") and self._before_2_4:
            self.close()
            raise ConfigError(
                f"{place.shown}: {self.engine} finds no aliases in the database {database!r}, "
                "which a push needs; use the database 'default', or Milvus 2.4 or later"
            )

    def close(self) -> None:
        """End the connection, and the server of Milvus Lite if it was started here."""
        self._opened.close()

    def _explain(self, error: Exception) -> tuple[str, str]:
        # A client that cannot connect has the server's word in the cause alone.
        below = error.__cause__ if callable(getattr(error.__cause__, "details", None)) else error
        details = getattr(below, "details", None)
        text = getattr(below, "message", "") or (details() if callable(details) else error)
        reason = first_line(text or error)
        return reason, advice(reason, credentials="" if self._local else _TOKEN)

    def _collections(self) -> Sequence[str]:
        listed = list(self._milvus.list_collections())
        if self._collections_folder is None:
            return listed
        # Milvus Lite does not list what it cannot read.
        folders = list_folder(self._collections_folder)
        return [each.name for each in folders if is_file(each / "schema.json")]

    def _alias_target(self) -> str | None:
        if self._name not in self._milvus.list_aliases()["aliases"]:
            return None
        return str(self._milvus.describe_alias(self._name)["collection_name"])

    def _aliases_of(self, collection: str) -> Sequence[str]:
        return list(self._milvus.list_aliases(collection_name=collection)["aliases"])

    def _metadata(self, collection: str) -> Any:
        return (self._milvus.describe_collection(collection).get("properties") or {}).get(METADATA)

    def _describe(self, stored: Stored) -> None:
        # A server of 2.3.5 loses what was written last when it is started again.
        for _ in range(2 if self._before_2_4 else 1):
            description = {METADATA: stored.table.text}
            self._milvus.alter_collection_properties(stored.name, description)

    def _make(self, collection: str, layout: Layout, description: str) -> None:
        if (self._is_lite or self._before_2_4) and layout.dtype == "float16":
            # A server before 2.4 takes such rows, and finds wrong ones.
            raise ConfigError(
                f"{self.engine} keeps no float16, as a Milvus server from 2.4 does; leave --dtype "
                "out, or push to a later server"
            )
        if self._is_lite and self._options.index in _NOT_IN_LITE:
            raise ConfigError(
                f"{self.engine} has no index {self._options.index}; give another with --option "
                "index=NAME, or push to a Milvus server"
            )
        self._milvus.create_collection(
            collection, schema=collection_schema(layout), properties={METADATA: description}
        )

    def _drop(self, collection: str) -> None:
        self._milvus.drop_collection(collection)

    def _point_alias(self, collection: str | None, *, replaces: bool) -> None:
        if collection is None:
            self._milvus.drop_alias(self._name)
        else:
            point = self._milvus.alter_alias if replaces else self._milvus.create_alias
            point(collection, self._name)

    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        for part in parts(rows):
            self._milvus.upsert(stored.name, as_objects(part, layout))
        if self._is_lite:
            # An index that could not be written shows only when it is loaded.
            self._milvus.release_collection(stored.name)
            self._loaded.discard(stored.name)

    def _delete(self, stored: Stored, ids: Ids, layout: Layout) -> None:  # noqa: ARG002
        self._milvus.delete(stored.name, filter=_among(ids))

    def _build(self, held: Stored, layout: Layout) -> None:
        self._milvus.flush(held.name)
        if not self._index_type(held.name):
            chosen = self._options.index_params(held.table.rows, layout.k)
            self._index(held.name, self._options.index.upper(), layout.metric.upper(), chosen)
        self._load(held.name)

    def _index(self, collection: str, kind: str, metric: str, chosen: Mapping[str, Any]) -> None:
        params = MilvusClient.prepare_index_params()
        params.add_index(
            field_name=VECTOR, index_type=kind, index_name=VECTOR, metric_type=metric,
            # The client sends each by itself; Milvus Lite sees them only as one object.
            params={"params": chosen} if self._is_lite else chosen,
        )  # fmt: skip
        self._milvus.create_index(collection, params)

    def _count(self, stored: Stored) -> int:
        self._load(stored.name)
        counted = self._milvus.query(stored.name, filter="", output_fields=["count(*)"], **_STRONG)
        return int(counted[0]["count(*)"])

    def _sizes(self, stored: Stored) -> dict[str, int]:
        if self._collections_folder is None:
            return {}
        folder = self._collections_folder / stored.name
        index = sum(size_of(path) for path in walk_files(folder) if path.suffix == ".idx")
        return {"table": size_of(folder) - index, "index": index}

    def _fetch(self, stored: Stored, ids: Ids, layout: Layout) -> pa.Table:
        self._load(stored.name)
        found = self._milvus.query(stored.name, filter=_among(ids), output_fields=["*"], **_STRONG)
        return table_of(found, _as_matrix([row[VECTOR] for row in found], layout.k), layout)

    @contextmanager
    def _searching(self, stored: Stored, *, exact: bool, effort: Effort | None) -> Iterator[Find]:
        self._load(stored.name)
        index_type = self._index_type(stored.name)
        by_index = not exact or index_type in _EXACT_INDEXES
        if effort is None:
            # Options given later shape no table that is there.
            ours = index_type == self._options.index.upper()
            effort = self._options.usual_effort(stored.table.rows) if ours else {}
        params = {"params": dict(effort)}

        def find(vectors: Vectors, top_k: int) -> list[list[Hit]]:
            if not by_index:
                return self._exactly(stored, vectors, top_k)
            answers = self._milvus.search(
                stored.name, data=list(vectors.astype(stored.table.dtype)), limit=top_k,
                anns_field=VECTOR, search_params=params, output_fields=[ID], **_STRONG,
            )  # fmt: skip
            return [[Hit(hit["entity"][ID], hit["distance"]) for hit in hits] for hits in answers]

        yield find

    def _exactly(self, stored: Stored, vectors: Vectors, top_k: int) -> list[list[Hit]]:
        """Search all vectors, which are read: Milvus searches by the index alone."""
        ids = list[Any]()

        def matrices() -> Iterator[Vectors]:
            for page in self._pages(stored):
                ids.extend(row[ID] for row in page)
                yield _as_matrix([row[VECTOR] for row in page], stored.table.k)

        scores, rows = exact_neighbours(matrices(), vectors, top_k)
        return [
            [Hit(ids[row], score) for row, score in zip(*each, strict=True) if row >= 0]
            for each in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    def _pages(self, stored: Stored) -> Iterator[Sequence[Mapping[str, Any]]]:
        """Yield the ids and vectors of all rows, in the order of the primary keys."""
        primary = _PRIMARY if PASSAGE in stored.table.columns else ID
        # Pages are read with no consistency, so what was written is waited for before.
        self._count(stored)
        # The client's own iterator quotes no key.
        after = ""
        while page := self._milvus.query(
            stored.name, filter=after, limit=_PAGE_ROWS, output_fields=[primary, ID, VECTOR],
            iterator="True", reduce_stop_for_best="True",
        ):  # fmt: skip
            yield page
            # A page ends early where a segment does; the last one is empty.
            after = f"{primary} > {_quoted(page[-1][primary])}"

    def _load(self, collection: str) -> None:
        if collection in self._loaded:
            return
        if self._is_lite:
            # Counted twice otherwise: rows in the log of a process that was killed.
            self._milvus.flush(collection)
        try:
            self._milvus.load_collection(collection)
        except MilvusException:
            if not self._is_lite:
                raise
            # Lite never replaces the part of an index that a full disk or a kill left.
            found = self._milvus.describe_index(collection, VECTOR)
            self._milvus.drop_index(collection, VECTOR)
            self._index(collection, found["index_type"], found["metric_type"], found["params"])
            self._milvus.load_collection(collection)
        self._loaded.add(collection)

    def _index_type(self, collection: str) -> str:
        names = self._milvus.list_indexes(collection, field_name=VECTOR)
        found = dict(self._milvus.describe_index(collection, names[0])) if names else {}
        return str(found.get("index_type", ""))


class _Bounded:
    """A client of a server, of which each call ends after a time; it tries for ever otherwise."""

    def __init__(self, client: MilvusClient, seconds: int) -> None:
        self._client, self._seconds = client, seconds

    def __getattr__(self, name: str) -> Any:
        seconds = self._seconds if name in _LONG else _ANSWER_SECONDS
        return partial(getattr(self._client, name), timeout=seconds)


def collection_schema(layout: Layout) -> Any:
    """Return the schema of a collection: the primary key, the vector, and dynamic fields."""
    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=True)
    text = {"datatype": DataType.VARCHAR, "max_length": _LONGEST_TEXT}
    whole = pa.types.is_integer(layout.schema.field(ID).type)
    passages = PASSAGE in layout.key
    if passages:
        schema.add_field(_PRIMARY, is_primary=True, **text)
    kind = {"datatype": DataType.INT64} if whole else text
    schema.add_field(ID, is_primary=not passages, **kind)
    vector = DataType.FLOAT16_VECTOR if layout.dtype == "float16" else DataType.FLOAT_VECTOR
    schema.add_field(VECTOR, vector, dim=layout.k)
    return schema


def as_objects(rows: pa.RecordBatch, layout: Layout) -> list[dict[str, Any]]:
    """Return rows as the client takes them."""
    objects = to_objects(rows, (ID, *layout.kept))
    vectors = vectors_of(rows).astype(layout.dtype, copy=False)
    for row, vector in zip(objects, vectors, strict=True):
        row[VECTOR] = vector
        if PASSAGE in layout.key:
            row[_PRIMARY] = f"{row[ID]}#{row[PASSAGE]}"
    return objects


def _as_matrix(vectors: Sequence[Any], k: int) -> Vectors:
    """Return vectors (n, k) as the client gives them: lists of numbers, or bytes of halves."""
    plain = [each[0] if len(each) == 1 and isinstance(each[0], bytes) else each for each in vectors]
    if plain and isinstance(plain[0], bytes):
        halves = np.frombuffer(b"".join(plain), dtype=np.float16)
        return halves.astype(np.float32).reshape(-1, k)
    return np.array(plain, dtype=np.float32).reshape(-1, k)


def parts(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield rows in parts that a server takes at once."""
    if rows.nbytes > _SENT_BYTES and (half := len(rows) // 2):
        yield from parts(rows.slice(0, half))
        yield from parts(rows.slice(half))
    elif len(rows):
        yield rows


def _among(ids: Ids) -> str:
    return f"{ID} in [{', '.join(map(_quoted, ids))}]"


def _quoted(value: str | int) -> str:
    return f'"{value.translate(_ESCAPES)}"' if isinstance(value, str) else str(value)


@contextmanager
def _lite(file: Path, *, make: bool) -> Iterator[str]:
    """Run Milvus Lite, a server of a file in threads of this process; yield its address."""
    # A server that another client of this process started is shared and left running.
    shown = f"milvus://{file}"
    try:
        module = importlib.import_module("milvus_lite.server_manager")
    except ImportError as error:
        raise ConfigError(
            f"a file needs Milvus Lite, which is not installed ({error}); run pip install "
            "'milvus-lite>=3.2.2'"
        ) from error
    if file.suffix != ".db" or is_file(file) or not is_folder(file.parent):
        raise ConfigError(
            f"{shown}: Milvus Lite makes a folder of that name inside a folder that exists; "
            f"name another that ends in .db, or make {file.parent}"
        )
    marks = ("collections", "LOCK", "databases")
    require_engine_folder(file, engine="Milvus Lite", marks=marks, address=shown, make=make)
    manager = module.server_manager_instance
    shared = str(file) in manager._servers
    uri = manager.start_and_get_uri(str(file))
    if uri is None:
        raise DatabaseError(
            f"Milvus Lite does not open {file}, which it locks for one process at a time and "
            "must be able to write; close the other process or change the permissions of the "
            "folder, or use a server"
        )
    try:
        yield uri
    finally:
        if not shared:
            manager.release_server(str(file))
