"""Writer of tables of LanceDB, in a folder or a prefix of an object store.

Users query the table of the name alone: ``id``, ``vector`` and the kept columns, each of its Arrow
type. LanceDB has no rename, so a push fills a table ``<name>__pending``, each append a commit, and
publishes it by one commit that overwrites the table of the name with its rows. A table that is open
keeps its version, for ``keep_days``; who opens it has the old rows or the new ones. An overwrite
drops indexes, so the index is built on the pending table, which is checked, and again on the
published one. Until then searches read all vectors. A swap that was cut off there is completed by
the next push, in ``discard``. Each batch of changed rows is a commit, too; an error restores the
version before.

The engine has no locks, but it makes no commit on top of a ``restore`` or an overwrite that its
writer has not seen. A push that takes over a table writes its own lease and restores the version
that the table has: the engine refuses what another push has under way, and the lease what it tries
later.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import lancedb
import numpy as np
import pyarrow as pa
from lancedb import index as indexes
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import discard
from whiten_index.artifacts.files import list_folder, size_of
from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, DatabaseError, first_line
from whiten_index.vectordb.database_writer import DatabaseWriter, Find, Hit, Stored, taken_over
from whiten_index.vectordb.engine_options import Effort, LanceOptions
from whiten_index.vectordb.engine_support import advice, literal, require_engine_folder
from whiten_index.vectordb.pushed_table import (
    METADATA,
    VECTOR,
    Ids,
    Layout,
    PushedTable,
    vectors_of,
    with_vectors,
)

_PENDING = "__pending"
_DISTANCES = {"cosine": "cosine", "ip": "dot"}
_INDEXES = {
    "ivf_flat": indexes.IvfFlat, "ivf_sq": indexes.IvfSq, "ivf_pq": indexes.IvfPq,
    "ivf_rq": indexes.IvfRq, "ivf_hnsw_sq": indexes.HnswSq,
    "ivf_hnsw_flat": indexes.HnswFlat,
}  # fmt: skip
_REFUSED = re.compile(r"incompatible with concurrent transaction|[Cc]ommit conflict")
_SLICE_ROWS = 16_384
_SMALL_FILES = 10
# The engine warns if no age is given.
_NO_AGE = timedelta(milliseconds=1)
_ALL_DAYS = 36_500
_PARTS, _DAY = ("data", "_transactions", "_versions"), 86_400


class LanceWriter(DatabaseWriter):
    """One table of LanceDB; see ``DatabaseWriter``."""

    adds_and_counts = True
    column_form = r"[^.\0]+"
    # In one condition: some hundred kilobytes of text to parse.
    ids_at_once = 10_000

    def __init__(self, address: str, name: str, options: LanceOptions, *, make: bool) -> None:
        super().__init__()
        self._options, self.process = options, os.getpid()
        folder = _folder_of(address)
        self._local = None if "://" in folder else Path(folder)
        shown = f"lancedb://{folder}" if self._local else address.rstrip("/")
        self.engine, self.target = f"LanceDB {lancedb.__version__}", f"{shown}, table {name}"
        self._name, self._pending_name = name, name + _PENDING
        if self._local:
            require_engine_folder(
                self._local, engine="LanceDB", marks=("*.lance",), address=shown, make=make
            )
        with self._reporting("it could not be opened"):
            self._database = lancedb.connect(folder)

    def close(self) -> None:
        """Close the connection, which the engine has none of."""

    def _explain(self, error: Exception) -> tuple[str, str]:
        if _REFUSED.search(str(error)):
            raise taken_over(self.target) from None
        # Without the place in the engine's sources.
        reason = re.sub(r",? ?/\S+\.rs:\d+(:\d+)?.*$", "", first_line(error))
        return reason, advice(reason)

    def _find(self, *, pending: bool) -> Stored | None:
        found = self._open(self._pending_name if pending else self._name)
        if found is None or not pending:
            return found
        if not found.table.lease or not has_files(found.handle):
            return None
        return found.described(done=int(found.handle.count_rows()))

    def _create(self, made: PushedTable, layout: Layout) -> Stored:
        parts = self._options.num_sub_vectors or 1
        if (self._options.index == "ivf_rq" and layout.k % 8) or layout.k % parts:
            wanted = "8" if self._options.index == "ivf_rq" else f"num_sub_vectors ({parts})"
            raise ConfigError(
                f"--option index={self._options.index} needs vectors whose width {wanted} divides, "
                f"and they have {layout.k} numbers; give another --k or another index"
            )
        before = self._open(self._pending_name)
        made = replace(made, name=self._pending_name)
        # If it were dropped first, what another push has under way could end up in the new one.
        handle = self._database.create_table(
            made.name,
            schema=with_metadata(stored_schema(layout), made),
            mode="create" if before is None else "overwrite",
        )
        if before is not None:
            self._tidy(handle)  # of what that push wrote
        return Stored(made, pending=True, handle=handle)

    def _describe(self, stored: Stored) -> None:
        write_metadata(stored.handle, stored.table)

    def _take_over(self, found: Stored) -> Stored:
        taken = super()._take_over(found)
        taken.handle.restore(taken.handle.version)
        return taken.described(done=int(taken.handle.count_rows()))

    def _add(self, held: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        # The handle sees its own commits alone, so the engine refuses the next one if another push
        # took the table over.
        if len(rows):
            held.handle.add(as_stored(rows, layout))

    def _build(self, held: Stored, layout: Layout) -> None:  # noqa: ARG002
        self._index(held.handle, held.table)

    def _publish(self, held: Stored) -> None:
        """Overwrite the table of the name with the pending rows in one commit, and index it."""
        published = self._open(self._name)
        made = replace(held.table, name=self._name)
        schema = with_metadata(held.handle.schema, made)

        def rows() -> Iterator[pa.RecordBatch]:
            yield from read_slices(held.handle, made.done, schema)
            # The commit comes next.
            self._require_lease(held)
            self._require_replaceable()

        try:
            self._database.create_table(
                self._name,
                data=pa.RecordBatchReader.from_batches(schema, rows()),
                schema=schema,  # inferred otherwise, in the thread that `rows` waits for
                mode="create" if published is None else "overwrite",
            )
        except Exception:
            self._require_lease(held)
            raise
        self._complete_swap(made)
        self._drop_pending(made.lease)

    def _added(self, published: Stored) -> list[str]:
        table, own = published.handle, published.table.columns
        columns = [f"column {name}" for name in table.schema.names if name not in own]
        others = [each.name for each in table.list_indices() if VECTOR not in each.columns]
        return columns + [f"index {name}" for name in others]

    def _discard(self, held: Stored | None) -> None:
        """Drop the pending table, if it is ours still; complete a swap that was cut off."""
        pending, published = self._open(self._pending_name), self._open(self._name)
        if pending is None:
            # A push that was killed may have left a part of the folder.
            self._database.drop_table(self._pending_name, ignore_missing=True)
            return
        if published is not None:
            self._complete_swap(published.table)
        self._drop_pending(None if held is None else held.table.lease)

    def _end_changes(self, changed: Stored) -> None:
        if changed.handle.stats()["fragment_stats"]["num_small_fragments"] > _SMALL_FILES:
            self._tidy(changed.handle)

    def _remove(self, published: Stored) -> None:
        self._database.drop_table(published.name)

    def _upsert(self, stored: Stored, rows: pa.RecordBatch, layout: Layout) -> None:
        merge = stored.handle.merge_insert(list(layout.key))
        merge.when_matched_update_all().when_not_matched_insert_all().execute(
            as_stored(rows, layout)
        )

    def _delete(self, stored: Stored, ids: Ids, layout: Layout) -> None:  # noqa: ARG002
        stored.handle.delete(with_ids(ids))

    def _count(self, stored: Stored) -> int:
        return int(stored.handle.count_rows())

    def _sizes(self, stored: Stored) -> dict[str, int]:
        if self._local is None:
            return {"table": int(stored.handle.stats()["total_bytes"])}
        folder = self._local / f"{stored.name}.lance"
        index = size_of(folder / "_indices")
        return {"table": size_of(folder) - index, "index": index}

    def _fetch(self, stored: Stored, ids: Ids, layout: Layout) -> pa.Table:
        found = stored.handle.search().where(with_ids(ids)).limit(None).to_arrow()
        numbers = found[VECTOR].combine_chunks().flatten().to_numpy().astype(np.float32, copy=False)
        return with_vectors(found, numbers.reshape(-1, layout.k), layout.schema)

    @contextmanager
    def _searching(self, stored: Stored, *, exact: bool, effort: Effort | None) -> Iterator[Find]:
        table, distance = stored.handle, _DISTANCES[stored.table.metric]
        usual = self._options.usual_effort
        settings = usual(int(table.count_rows())) if effort is None else effort

        def find(vectors: NDArray[np.float32], top_k: int) -> list[list[Hit]]:
            hits = list[list[Hit]]()
            for vector in vectors:
                query = table.search(vector, vector_column_name=VECTOR)
                query = query.distance_type(distance).select([ID, "_distance"])
                for name, value in settings.items():
                    query = getattr(query, name)(value)
                query = query.bypass_vector_index() if exact else query
                found = query.limit(top_k).to_arrow()
                scores = (1 - found["_distance"].to_numpy()).tolist()
                hits.append(list(map(Hit, found[ID].to_pylist(), scores)))
            return hits

        yield find

    def _open(self, name: str) -> Stored | None:
        """Return a table with a new handle, None if there is no such table."""
        try:
            handle = self._database.open_table(name)
        except ValueError as error:
            if "not found" in str(error):
                return None
            raise
        if b"embedding_functions" in (handle.schema.metadata or {}):
            raise DatabaseError(
                f"{self.target}: table {name} names embedding functions of LanceDB, whose code a "
                "write would run; no push wrote them: drop the table, or push under another name"
            )
        pushed = read_metadata(handle)
        if pushed is None:
            raise self._not_pushed(f"a table {name}")
        # A copy of a table, or one whose folder was renamed, describes itself by another name.
        return Stored(replace(pushed, name=name), name == self._pending_name, handle)

    def _has_lease(self, stored: Stored) -> bool:
        # A new handle: one that is brought up to date misses a table that was made again.
        found = self._open(stored.name)
        return found is not None and found.table.lease == stored.table.lease

    def _index(self, handle: Any, pushed: PushedTable) -> None:
        rows = int(handle.count_rows())
        kind = self._options.index_kind(rows)
        if kind == "none" or any(VECTOR in each.columns for each in handle.list_indices()):
            return
        distance, params = _DISTANCES[pushed.metric], self._options.index_params(rows)
        handle.create_index(VECTOR, config=_INDEXES[kind](distance_type=distance, **params))

    def _tidy(self, handle: Any) -> None:
        """Merge small files, take new rows into the index, drop old versions if none is tagged."""
        # The engine refuses to drop a version that a user tagged.
        days = _ALL_DAYS if handle.tags.list() else self._options.keep_days
        handle.optimize(cleanup_older_than=max(timedelta(days=days), _NO_AGE))
        # What a killed writer was uploading the engine leaves; a day old, it is nobody's.
        folder = Path(self._local or "", f"{handle.name}.lance")
        for name in _PARTS if self._local else ():
            for each in list_folder(folder / name, ".tmp*"):
                with suppress(FileNotFoundError):
                    if time.time() - each.lstat().st_mtime > _DAY:
                        discard(each)

    def _complete_swap(self, pushed: PushedTable) -> None:
        published = self._require(pending=False)
        # Before there is an index: tidying would divide it by the engine's own measure.
        self._tidy(published.handle)
        self._index(published.handle, pushed)

    def _drop_pending(self, lease: str | None) -> None:
        """Drop the pending table if its lease is the one given; None for any lease."""
        found = self._open(self._pending_name)
        if found is not None and lease in (None, "", found.table.lease):
            # Cut off midway, it is not taken for a whole one.
            write_metadata(found.handle, replace(found.table, lease=""))
            self._database.drop_table(self._pending_name)


def _folder_of(address: str) -> str:
    """Return the folder, or the URL of an object store, that an address names."""
    parts = urlsplit(address)
    scheme = parts.scheme.partition("+")[2]
    if bool(scheme) != bool(parts.netloc) or not (scheme or parts.path.strip("/")):
        raise ConfigError(
            f"{address} names no folder or bucket; write lancedb:///folder, with three slashes, or "
            "lancedb+s3://bucket/prefix"
        )
    # The engine decodes a URL itself.
    return f"{scheme}://{parts.netloc}{parts.path}" if scheme else unquote(parts.path)


def read_metadata(table: Any) -> PushedTable | None:
    """Return what a table holds, as its handle sees it, None if no push made it."""
    # Kept with the field ``id``, so in the same commit as the rows.
    schema = table.schema
    metadata = schema.field(ID).metadata if ID in schema.names else None
    return PushedTable.read((metadata or {}).get(METADATA.encode()))


def write_metadata(table: Any, pushed: PushedTable) -> None:
    """Write what a table holds, unless another push wrote this since the handle saw it."""
    table.update_field_metadata({"path": ID, "metadata": {METADATA: pushed.text}})


def with_metadata(schema: pa.Schema, pushed: PushedTable) -> pa.Schema:
    """Return a schema that says what a table holds."""
    number = schema.get_field_index(ID)
    return schema.set(number, schema.field(ID).with_metadata({METADATA: pushed.text}))


def has_files(table: Any) -> bool:
    """Return whether the files of the rows exist.

    A commit that was under way when its table was dropped leaves a table without them.
    """
    try:
        table.head(1)
    except (RuntimeError, OSError, ValueError) as error:
        if "not found" in str(error).lower():
            return False
        raise
    return True


def stored_schema(layout: Layout) -> pa.Schema:
    """Return the columns of a table: those of the layout, but for types that LanceDB cannot keep.

    An id that is a ``large_string`` becomes a ``string``, of which the engine has indexes. A list
    of fixed size of other things than numbers, which crashes the engine, becomes a list.
    """
    number = pa.float16() if layout.dtype == "float16" else pa.float32()

    def stored(field: pa.Field) -> pa.DataType:
        kind = field.type
        if field.name == VECTOR:
            return pa.list_(number, layout.k)
        if field.name == ID:
            return kind if pa.types.is_integer(kind) else pa.string()
        if pa.types.is_fixed_size_list(kind) and not pa.types.is_primitive(kind.value_type):
            return pa.list_(kind.value_type)
        return kind

    return pa.schema([pa.field(each.name, stored(each)) for each in layout.schema])


def as_stored(rows: pa.RecordBatch, layout: Layout) -> pa.Table:
    """Return rows of the layout as a table takes them; single-precision vectors are not copied."""
    vectors = vectors_of(rows).astype(layout.dtype, copy=False)
    return with_vectors(rows, vectors, stored_schema(layout))


def read_slices(table: Any, rows: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield all rows in order; one scan of the whole table reads far ahead, into memory."""
    for first in range(0, rows, _SLICE_ROWS):
        for batch in table.search().offset(first).limit(_SLICE_ROWS).to_batches():
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def with_ids(ids: Ids) -> str:
    """Return the condition, in SQL, that a row has one of some ids."""
    # The least integer is read as minus a number that no integer holds, which is a float.
    least = {-(1 << 63): f"({1 - (1 << 63)} - 1)"}
    values = (
        literal(each) if isinstance(each, str) else least.get(each, str(each)) for each in ids
    )
    return f"{ID} IN ({', '.join(values)})"
