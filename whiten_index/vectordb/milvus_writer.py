"""Writer of collections of Milvus.

Ids are the primary keys; rows of passages have ``pk``, which is ``id#number``. Kept columns are
dynamic fields, by which users can filter (``n > 5``). A column whose name Milvus keeps for itself
gets underscores at its end.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pymilvus import DataType, MilvusClient

from whiten_index.artifacts.files import is_file, is_folder
from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.index.exact import exact_neighbours
from whiten_index.vectordb.alias_writer import METADATA_KEY, SUFFIX_BYTES, AliasWriter
from whiten_index.vectordb.database_writer import Stored
from whiten_index.vectordb.engine_options import MilvusOptions
from whiten_index.vectordb.engine_support import (
    EngineAddress,
    disk_advice,
    first_line,
    require_engine_folder,
    require_name,
)
from whiten_index.vectordb.json_rows import from_objects, to_objects
from whiten_index.vectordb.pushed_table import (
    VECTOR,
    Ids,
    Layout,
    blocks,
    vectors_array,
    vectors_of,
)

_PRIMARY = "pk"
# Names that the client or Milvus Lite keep for themselves.
_RESERVED = (_PRIMARY, "$meta", "_seq", "_partition", "count(*)")
_LONGEST_TEXT = 65_535
_EXACT_INDEXES = ("FLAT", "BRUTE_FORCE")
# A server takes 64 MB at once; JSON and base64 are longer than the columns of Arrow.
_SENT_BYTES = 16 << 20
_IDS_AT_ONCE, _QUERIES_AT_ONCE, _PAGE_ROWS = 500, 1000, 8192
# What was written is read.
_STRONG = {"consistency_level": "Strong"}
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})
_TOKEN = "MILVUS_TOKEN"
_PORT = 19530
_FORMS = (
    f"the address of Milvus is one of milvus://host:{_PORT}, milvus+https://host and "
    f"milvus:///folder/file.db; give the token, or user:password, in {_TOKEN}"
)
_CONNECT_SECONDS = 10.0

# What the client and Milvus Lite log as errors, they raise too.
for _name in ("pymilvus", "milvus_lite", "grpc"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class MilvusWriter(AliasWriter):
    """One alias of Milvus; see ``DatabaseWriter``."""

    def __init__(
        self, address: str, name: str, options: Mapping[str, str], *, make: bool = True
    ) -> None:
        super().__init__(name)
        self._options = MilvusOptions.parse(options)
        require_name(
            name, "[A-Za-z_][A-Za-z0-9_]*", engine="Milvus", longest=255 - SUFFIX_BYTES,
            rule="letters, digits and underscores, no digit first",
        )  # fmt: skip
        place = EngineAddress.parse(address, port=_PORT, tls_port=443, forms=_FORMS)
        database = self._options.db
        if place.inside and database not in ("", place.inside):
            raise ConfigError(
                f"the address names the database {place.inside!r} and --option db {database!r}"
            )
        database = database or place.inside
        self.target = f"{place.shown}, collection {name}"
        self._loaded: set[str] = set()
        self._lite = None if place.folder is None else _Lite(place.folder, make=make)
        try:
            with self._reporting("it could not be reached"):
                self._milvus: Any = MilvusClient(
                    uri=place.url if self._lite is None else self._lite.uri,
                    token=os.environ.get(_TOKEN, ""), db_name=database, dedicated=True,
                    timeout=_CONNECT_SECONDS, **place.parameters,
                )  # fmt: skip
                release = str(self._milvus.get_server_version())
        except BaseException:
            if self._lite is not None:
                self._lite.stop()
            raise
        # A server may be Lite as well.
        self._is_lite = release.startswith("milvus_lite")
        number = release.removeprefix("milvus_lite").lstrip("-")
        self.engine = f"Milvus Lite {number}" if self._is_lite else f"Milvus {release}"
        found = re.search(r"(\d+)\.(\d+)", number)
        old = found is not None and (int(found[1]), int(found[2])) < (2, 4)
        self._before_2_4 = old and not self._is_lite
        if database not in ("", "default") and self._before_2_4:
            self.close()
            raise ConfigError(
                f"{place.shown}: {self.engine} finds no aliases in the database {database!r}, "
                "which a push needs; use the database 'default', or Milvus 2.4 or later"
            )

    def close(self) -> None:
        """End the connection, and the server of Milvus Lite if it was started here."""
        self._milvus.close()
        if self._lite is not None:
            self._lite.stop()

    def _explain(self, error: Exception) -> tuple[str, str]:
        # A client that cannot connect has the server's word in the cause alone.
        below = error.__cause__ if callable(getattr(error.__cause__, "details", None)) else error
        details = getattr(below, "details", None)
        text = getattr(below, "message", "") or (details() if callable(details) else error)
        reason = first_line(text or error)
        lower = reason.lower()
        if "auth" in lower or "privilege" in lower or "permission" in lower:
            return reason, f"give user:password, or the token, in {_TOKEN}"
        if "json" in lower and "length" in lower:
            return reason, (
                "leave the longest column out of --keep, or raise the server's common.JSONMaxLength"
            )
        if "connect" in lower or "unavailable" in lower or "timeout" in lower:
            return reason, "check that the server runs and that the address is right"
        return reason, disk_advice(reason) or "push again to resume when that is mended"

    def _collections(self) -> Sequence[str]:
        return list(self._milvus.list_collections())

    def _alias_target(self) -> str | None:
        if self._name not in self._milvus.list_aliases()["aliases"]:
            return None
        return str(self._milvus.describe_alias(self._name)["collection_name"])

    def _metadata(self, collection: str) -> Mapping[str, Any]:
        properties = self._milvus.describe_collection(collection).get("properties") or {}
        try:
            found = json.loads(properties[METADATA_KEY])
        except (KeyError, TypeError, ValueError):
            return {}
        return found if isinstance(found, Mapping) else {}

    def _write_metadata(self, collection: str, metadata: Mapping[str, Any]) -> None:
        # A server of 2.3.5 loses what was written last when it is started again.
        for _ in range(2 if self._before_2_4 else 1):
            self._milvus.alter_collection_properties(collection, _properties(metadata))

    def _make(self, collection: str, layout: Layout, metadata: Mapping[str, Any]) -> None:
        if (self._is_lite or self._before_2_4) and layout.dtype == "float16":
            # A server before 2.4 takes such rows, and finds wrong ones.
            raise ConfigError(
                f"{self.engine} keeps no float16, as a Milvus server from 2.4 does; leave --dtype "
                "out, or push to a later server"
            )
        self._milvus.create_collection(
            collection, schema=collection_schema(layout), properties=_properties(metadata)
        )

    def _drop(self, collection: str) -> None:
        self._milvus.drop_collection(collection)

    def _point_alias(self, collection: str, *, replaces: bool) -> None:
        (self._milvus.alter_alias if replaces else self._milvus.create_alias)(
            collection, self._name
        )

    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        for part in parts(rows):
            self._milvus.upsert(stored.name, as_objects(part, layout))

    def _delete(self, stored: Stored, ids: Ids, layout: Layout) -> None:  # noqa: ARG002
        for some in blocks(ids, _IDS_AT_ONCE):
            self._milvus.delete(stored.name, filter=_among(some))

    def _build(self, held: Stored, layout: Layout) -> None:
        self._milvus.flush(held.name)
        if not self._index_type(held.name):
            chosen = self._options.index_params(held.table.rows)
            params = MilvusClient.prepare_index_params()
            params.add_index(
                field_name=VECTOR, index_type=self._options.index.upper(), index_name=VECTOR,
                metric_type=layout.metric.upper(),
                # The client sends each by itself; Milvus Lite sees them only as one object.
                params={"params": chosen} if self._is_lite else chosen,
            )  # fmt: skip
            self._milvus.create_index(held.name, params)
        self._load(held.name)

    def _count(self, stored: Stored) -> int:
        self._load(stored.name)
        counted = self._milvus.query(stored.name, filter="", output_fields=["count(*)"], **_STRONG)
        return int(counted[0]["count(*)"])

    def _fetch(self, stored: Stored, ids: Ids, layout: Layout) -> pa.Table:
        self._load(stored.name)
        found = list[dict[str, Any]]()
        for some in blocks(ids, _IDS_AT_ONCE):
            found += self._milvus.query(
                stored.name, filter=_among(some), output_fields=["*"], **_STRONG
            )
        return _as_table(found, layout)

    def _search(
        self, stored: Stored, vectors: NDArray[np.float32], top_k: int, *, exact: bool
    ) -> Sequence[Sequence[float]]:
        self._load(stored.name)
        index_type = self._index_type(stored.name)
        if exact and index_type not in _EXACT_INDEXES:
            # Milvus searches by the index alone.
            rows = self._pages(stored)
            scores, _ = exact_neighbours(rows, vectors, top_k)
            return [row[np.isfinite(row)].tolist() for row in scores]
        params = self._options.search_params(index_type, top_k)
        answers = list[Any]()
        for some in blocks(list(vectors.astype(stored.table.dtype)), _QUERIES_AT_ONCE):
            answers += self._milvus.search(
                stored.name, data=some, limit=top_k, anns_field=VECTOR,
                search_params={"params": params}, **_STRONG,
            )  # fmt: skip
        return [[hit["distance"] for hit in hits] for hits in answers]

    def _pages(self, stored: Stored) -> Iterator[NDArray[np.float32]]:
        """Yield all vectors, in the order of the primary keys."""
        primary = _PRIMARY if PASSAGE in stored.table.columns else ID
        # The client's own iterator quotes no key. Pages are read with no consistency, so what was
        # written is waited for before.
        self._count(stored)
        after = ""
        while page := self._milvus.query(
            stored.name, filter=after, limit=_PAGE_ROWS, output_fields=[primary, VECTOR],
            iterator="True", reduce_stop_for_best="True",
        ):  # fmt: skip
            yield _as_matrix([row[VECTOR] for row in page], stored.table.k)
            # A page ends early where a segment does; the last one is empty.
            after = f"{primary} > {_quoted(page[-1][primary])}"

    def _load(self, collection: str) -> None:
        if collection not in self._loaded:
            self._milvus.load_collection(collection)
            self._loaded.add(collection)

    def _index_type(self, collection: str) -> str:
        """Return the type of the index of a collection, empty if it has none."""
        names = self._milvus.list_indexes(collection, field_name=VECTOR)
        found = dict(self._milvus.describe_index(collection, names[0])) if names else {}
        return str(found.get("index_type", ""))


def _properties(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {METADATA_KEY: json.dumps(dict(metadata))}


def collection_schema(layout: Layout) -> Any:
    """Return the schema of a collection: the primary key, the vector, and dynamic fields."""
    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=True)
    text = {"datatype": DataType.VARCHAR, "max_length": _LONGEST_TEXT}
    whole = pa.types.is_integer(layout.schema.field(ID).type)
    passages = PASSAGE in layout.key
    if passages:
        schema.add_field(_PRIMARY, is_primary=True, **text)
    schema.add_field(
        ID, is_primary=not passages, **({"datatype": DataType.INT64} if whole else text)
    )
    vector = DataType.FLOAT16_VECTOR if layout.dtype == "float16" else DataType.FLOAT_VECTOR
    schema.add_field(VECTOR, vector, dim=layout.k)
    return schema


def _field_names(layout: Layout) -> dict[str, str]:
    """Return kept column -> dynamic field."""
    taken, found = set(layout.schema.names), dict[str, str]()
    for name in layout.kept:
        field = name
        while field in _RESERVED or (field != name and field in taken):
            field += "_"
        taken.add(field)
        found[name] = field
    return found


def as_objects(rows: pa.RecordBatch, layout: Layout) -> list[dict[str, Any]]:
    """Return rows as the client takes them."""
    fields, ids = _field_names(layout), rows[ID].to_pylist()
    vectors = vectors_of(rows).astype(layout.dtype, copy=False)
    objects = to_objects(rows, layout.kept) if fields else [{}] * len(rows)
    made = [
        {ID: name, VECTOR: vector, **{fields[each]: value for each, value in kept.items()}}
        for name, vector, kept in zip(ids, vectors, objects, strict=True)
    ]
    if PASSAGE in layout.key:
        for row, number in zip(made, rows[PASSAGE].to_pylist(), strict=True):
            row[_PRIMARY] = f"{row[ID]}#{number}"
    return made


def _as_table(found: Sequence[Mapping[str, Any]], layout: Layout) -> pa.Table:
    """Return rows that the client returned, with the schema of the layout."""
    fields = _field_names(layout)
    objects = [{name: row.get(field) for name, field in fields.items()} for row in found]
    kept = from_objects(objects, pa.schema([layout.schema.field(name) for name in layout.kept]))
    vectors = _as_matrix([row[VECTOR] for row in found], layout.k)
    columns = {
        ID: pa.array([row[ID] for row in found], layout.schema.field(ID).type),
        VECTOR: vectors_array(vectors, layout.k),
    }
    arrays = [columns[name] if name in columns else kept[name] for name in layout.schema.names]
    return pa.table(arrays, schema=layout.schema)


def _as_matrix(vectors: Sequence[Any], k: int) -> NDArray[np.float32]:
    """Return vectors (n, k) as the client gives them: lists of numbers, or bytes of halves."""
    plain = [each[0] if len(each) == 1 and isinstance(each[0], bytes) else each for each in vectors]
    if plain and isinstance(plain[0], bytes):
        halves = np.frombuffer(b"".join(plain), dtype=np.float16)
        return halves.astype(np.float32).reshape(-1, k)
    return np.array(plain, dtype=np.float32).reshape(-1, k)


def parts(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield rows in parts that a server takes at once."""
    if rows.nbytes <= _SENT_BYTES or len(rows) < 2:
        if len(rows):
            yield rows
        return
    half = len(rows) // 2
    yield from parts(rows.slice(0, half))
    yield from parts(rows.slice(half))


def _among(ids: Ids) -> str:
    """Return the filter of rows with some ids."""
    return f"{ID} in [{', '.join(map(_quoted, ids))}]"


def _quoted(value: str | int) -> str:
    return f'"{value.translate(_ESCAPES)}"' if isinstance(value, str) else str(value)


class _Lite:
    """Milvus Lite: a server of a file, in threads of this process.

    A server that another client of this process started is shared and left running.
    """

    def __init__(self, file: Path, *, make: bool) -> None:
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
        require_engine_folder(
            file, engine="Milvus Lite", marks=("collections", "LOCK", "databases"), address=shown,
            make=make,
        )  # fmt: skip
        self._file, self._manager = str(file), module.server_manager_instance
        self._shared = self._file in self._manager._servers
        self.uri = self._manager.start_and_get_uri(self._file)
        if self.uri is None:
            raise DatabaseError(
                f"Milvus Lite does not open {file}, which it locks for one process at a time and "
                "must be able to write; close the other process or change the permissions of the "
                "folder, or use a server"
            )

    def stop(self) -> None:
        if not self._shared:
            self._manager.release_server(self._file)
