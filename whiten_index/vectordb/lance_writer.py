"""Writer of tables of LanceDB, in a folder or a prefix of an object store.

Users query the table of the name alone: ``id``, ``vector`` and the kept columns, each of its Arrow
type. LanceDB has no rename, so a push fills a table ``<name>__pending``, each append a commit, and
publishes it by one commit that overwrites the table of the name with its rows. A table that is open
keeps its version, for ``keep_days``; who opens it has the old rows or the new ones. An overwrite
drops indexes, so the index is built on the pending table, which is checked, and again on the
published one. Until then searches read all vectors. A swap that was cut off there is completed by
the next push, in ``discard``.

Each batch of changed rows is a commit, and deletions come last, so that no reader misses a row that
stays; an error restores the version before. The table is marked with the version to come first, so
after a kill the next push sends what differs from either version.

The engine has no locks, but it makes no commit on top of a ``restore`` or an overwrite that its
writer has not seen. A push that takes over a table writes its own lease and restores the version
that the table has: the engine refuses what another push has under way, and the lease what it tries
later.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import lancedb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.database_writer import (
    VECTOR,
    DatabaseWriter,
    Layout,
    Neighbours,
    PushedTable,
    RowChanges,
    new_lease,
    not_begun,
    padded_scores,
    require_rows,
    taken_over,
)
from whiten_index.vectordb.engine_options import LanceOptions
from whiten_index.vectordb.engine_support import (
    disk_advice,
    first_line,
    reporting,
    reports,
    require_engine_folder,
    require_name,
)
from whiten_index.vectordb.lance_table import (
    as_stored,
    from_stored,
    has_files,
    read_metadata,
    read_slices,
    stored_schema,
    take_over,
    with_ids,
    with_metadata,
    write_metadata,
)

_PENDING = "__pending"
_DISTANCES = {"cosine": "cosine", "ip": "dot"}
_INDEXES = {
    "ivf_flat": "IvfFlat", "ivf_sq": "IvfSq", "ivf_pq": "IvfPq", "ivf_hnsw_sq": "HnswSq",
}  # fmt: skip
_REFUSED = re.compile(r"incompatible with concurrent transaction|[Cc]ommit conflict")
_SMALL_FILES = 10
# The engine warns if no age is given.
_NO_AGE = timedelta(milliseconds=1)


@dataclass(frozen=True)
class _Held:
    """A pending table that this writer fills.

    Its handle sees its own commits alone, so the engine refuses the next one if another push took
    the table over.
    """

    handle: Any
    table: PushedTable
    layout: Layout


class LanceChanges(RowChanges):
    """Changes of a table: rows are put at once, and ids deleted at the end or before a look."""

    def __init__(self, writer: LanceWriter, handle: Any, layout: Layout) -> None:
        self._writer, self.handle, self._layout = writer, handle, layout
        self._deleted = set[str | int]()
        # Id -> number of its rows now, if some were put.
        self._put = Counter[str | int]()

    def upsert(self, rows: pa.RecordBatch) -> None:
        """Add rows, or replace those with the same keys."""
        require_rows(rows, self._layout)
        with self._writer.reporting("cannot be changed"):
            merge = self.handle.merge_insert(list(self._layout.key))
            merge.when_matched_update_all().when_not_matched_insert_all().execute(
                pa.Table.from_batches([as_stored(rows, self._layout)])
            )
        passages = PASSAGE in self._layout.key
        numbers = rows[PASSAGE].to_pylist() if passages else [0] * len(rows)
        for name, number in zip(rows[ID].to_pylist(), numbers, strict=True):
            self._put[name] = max(self._put[name], number + 1)

    def delete(self, ids: Sequence[str | int]) -> None:
        """Delete all rows with these ids but those that are put; missing ones are ignored."""
        self._deleted.update(ids)

    def apply(self) -> None:
        """Delete what is to be deleted."""
        ids_by_rows = defaultdict[int, list[str | int]](list)
        for name in self._deleted:
            ids_by_rows[self._put[name]].append(name)
        self._deleted.clear()
        for rows, ids in ids_by_rows.items():
            if rows and PASSAGE not in self._layout.key:
                continue
            kept = f" AND {PASSAGE} >= {rows}" if rows else ""
            for condition in with_ids(ids):
                self.handle.delete(condition + kept)


class LanceWriter(DatabaseWriter):
    """One table of LanceDB; see ``DatabaseWriter``."""

    def __init__(
        self, address: str, name: str, options: Mapping[str, str], *, make: bool = True
    ) -> None:
        self._options = LanceOptions.parse(options)
        require_name(
            name, rf"(?!.*{_PENDING}$)[A-Za-z0-9_.-]+", engine="LanceDB", longest=200,
            rule=f"letters and digits of ASCII, _, - and ., and another end than {_PENDING}",
        )  # fmt: skip
        folder = _folder_of(address)
        self._local = "://" not in folder
        shown = f"lancedb://{folder}" if self._local else address.rstrip("/")
        self.engine, self.target = f"LanceDB {lancedb.__version__}", f"{shown}, table {name}"
        self._name, self._pending_name = name, name + _PENDING
        if self._local:
            require_engine_folder(
                Path(folder), engine="LanceDB", marks=("*.lance",), address=shown, make=make
            )
        with self.reporting("cannot be opened"):
            self._database = lancedb.connect(
                folder, storage_options=dict(self._options.storage) or None
            )
        self._held: _Held | None = None
        self._changes: LanceChanges | None = None
        # Returned by ``published``: a push decides by it what to change.
        self._seen: PushedTable | None = None

    def close(self) -> None:
        """Close the connection, which the engine has none of."""

    def explain(self, error: Exception) -> tuple[str, str]:
        """Return the reason of an error of the engine, and what to do."""
        if _REFUSED.search(str(error)):
            raise taken_over(self.target) from None
        # Without the place in the engine's sources.
        reason = re.sub(r",? ?/\S+\.rs:\d+(:\d+)?.*$", "", first_line(error))
        advice = disk_advice(reason) if self._local else ""
        return reason, advice or "push again to resume when that is mended"

    def reporting(self, doing: str) -> AbstractContextManager[None]:
        """Raise ``DatabaseError`` in place of any error of the engine."""
        return reporting(self.target, doing, self.explain)

    def published(self) -> PushedTable | None:
        """Return what the table of the name holds, else None."""
        found = self._open(self._name)
        self._seen = None if found is None else found[1]
        return self._seen

    @reports("cannot be read")
    def pending(self) -> PushedTable | None:
        """Return the pending table of an earlier push, else None."""
        found = self._open(self._pending_name)
        if found is None or not found[1].lease or not has_files(found[0]):
            return None
        return replace(found[1], done=int(found[0].count_rows()))

    @reports("cannot be filled")
    def begin(self, pushed: PushedTable, layout: Layout) -> None:
        """Make an empty pending table in place of any other one."""
        self._open(self._name)
        there = self._open(self._pending_name)
        made = replace(pushed, name=self._pending_name, done=0, changing="", lease=new_lease())
        # If it were dropped first, what another push has under way could end up in the new one.
        handle = self._database.create_table(
            self._pending_name,
            schema=with_metadata(stored_schema(layout), made),
            mode="create" if there is None else "overwrite",
        )
        if there is not None:
            handle.optimize(cleanup_older_than=_NO_AGE)
        self._held = _Held(handle, made, layout)

    @reports("cannot be filled")
    def resume(self, layout: Layout) -> None:
        """Take over the pending table; a push that held it before is refused from now on."""
        found = self._open(self._pending_name)
        if found is None:
            raise not_begun(self.target)
        handle, there = found
        self._require_layout(handle, layout)
        taken = replace(take_over(handle, there), done=int(handle.count_rows()))
        self._held = _Held(handle, taken, layout)

    def append(self, rows: pa.RecordBatch) -> None:
        """Add rows to the pending table, in one commit."""
        held = self._require_held()
        require_rows(rows, held.layout)
        with self._writing(held, "refuses rows"):
            if len(rows):
                held.handle.add(as_stored(rows, held.layout))
        counted = replace(held.table, done=held.table.done + len(rows))
        self._held = replace(held, table=counted)

    def finish(self) -> None:
        """Build the index of the pending table."""
        held = self._require_held()
        with self._writing(held, "cannot be indexed"):
            self._index(held.handle, held.table)

    def swap(self) -> None:
        """Overwrite the table of the name with the pending rows in one commit, and index it."""
        held, published = self._require_held(), self._open(self._name)
        made = replace(held.table, name=self._name)
        schema = with_metadata(held.handle.schema, made)

        def rows() -> Iterator[pa.RecordBatch]:
            yield from read_slices(held.handle, made.done, schema)
            # The commit comes next.
            self._require_lease(held)

        with self._writing(held, "cannot be overwritten"):
            self._database.create_table(
                self._name,
                data=pa.RecordBatchReader.from_batches(schema, rows()),
                mode="create" if published is None else "overwrite",
            )
        self._held, self._seen = None, made
        self._complete_swap(made)
        self._drop_pending(made.lease)

    def discard(self) -> None:
        """Drop the pending table; complete a swap that was cut off.

        A pending table that another push took over from this one is left to it.
        """
        held, self._held = self._held, None
        pending, published = self._open(self._pending_name), self._open(self._name)
        if pending is None:
            return
        if published is not None:
            self._complete_swap(published[1])
        self._drop_pending(None if held is None else held.table.lease)

    @contextmanager
    def changing(self, after: PushedTable, layout: Layout) -> Iterator[RowChanges]:
        """Open the published table for changes; an error restores the version before."""
        found = self._open(self._name)
        if found is None:
            raise DatabaseError(f"{self.target} is not there; push all rows to it first")
        handle, before = found
        if self._seen not in (None, before):
            raise taken_over(self.target)
        self._require_layout(handle, layout)
        with self.reporting("cannot be changed"):
            version = handle.version
            marked = take_over(handle, before.changing_to(after))
        self._changes = changes = LanceChanges(self, handle, layout)
        try:
            yield changes
            with self.reporting("cannot be changed"):
                changes.apply()
                now = replace(
                    after, done=after.rows, name=self._name, changing="", lease=marked.lease
                )
                write_metadata(handle, now)
        except BaseException:
            self._restore(handle, version, marked)
            raise
        finally:
            self._changes = None
        self._seen = now
        if handle.stats()["fragment_stats"]["num_small_fragments"] > _SMALL_FILES:
            self._tidy(handle)

    def _restore(self, handle: Any, version: int, marked: PushedTable) -> None:
        with suppress(Exception):
            found = self._open(self._name)
            # Another push may have changed the table since.
            if found is not None and found[1] == marked:
                handle.restore(version)

    @reports("cannot be read")
    def count(self, *, pending: bool = False) -> int:
        """Return the number of rows of the published or the pending table."""
        return int(self._readable(pending=pending).count_rows())

    @reports("cannot be read")
    def fetch(self, ids: Sequence[str | int], layout: Layout, *, pending: bool = False) -> pa.Table:
        """Return the rows with these ids, in any order."""
        table = self._readable(pending=pending)
        found = [table.search().where(some).limit(None).to_arrow() for some in with_ids(ids)]
        return pa.concat_tables(
            [layout.schema.empty_table(), *(from_stored(each, layout) for each in found)]
        )

    @reports("cannot be searched")
    def search(
        self,
        vectors: NDArray[np.float32],
        top_k: int,
        *,
        exact: bool = False,
        pending: bool = False,
    ) -> Neighbours:
        """Return the nearest rows of queries (q, k): exactly, or by the index."""
        table = self._readable(pending=pending)
        pushed = read_metadata(table)
        distance = _DISTANCES[pushed.metric if pushed else "cosine"]
        tuning = {} if exact else self._options.search_params(int(table.count_rows()))
        scores, ids = list[list[float]](), list[list[str | int]]()
        for vector in vectors:
            query = table.search(vector, vector_column_name=VECTOR)
            query = query.distance_type(distance).select([ID, "_distance"])
            query = query.bypass_vector_index() if exact else query
            for name, value in tuning.items():
                query = getattr(query, name)(value)
            found = query.limit(top_k).to_arrow()
            ids.append(found[ID].to_pylist())
            scores.append((1 - found["_distance"].to_numpy()).tolist())
        return Neighbours(ids, padded_scores(scores, top_k))

    @reports("cannot be opened")
    def _open(self, name: str) -> tuple[Any, PushedTable] | None:
        """Return a new handle of a table and what it holds, None if there is no such table."""
        try:
            table = self._database.open_table(name)
        except ValueError as error:
            if "not found" in str(error):
                return None
            raise
        pushed = read_metadata(table)
        if pushed is None:
            raise DatabaseError(
                f"{self.target}: there is a table {name} that no push made; give another name "
                "with --table, or drop it yourself"
            )
        return table, pushed

    def _readable(self, *, pending: bool) -> Any:
        """Return a table as it is now; within changes, as it will be."""
        if self._changes is not None and not pending:
            self._changes.apply()
            return self._changes.handle
        found = self._open(self._pending_name if pending else self._name)
        if found is None:
            raise not_begun(self.target)
        return found[0]

    def _require_held(self) -> _Held:
        if self._held is None:
            raise not_begun(self.target)
        return self._held

    @contextmanager
    def _writing(self, held: _Held, doing: str) -> Iterator[None]:
        """Write to the pending table."""
        self._require_lease(held)
        try:
            with self.reporting(doing):
                yield
        except DatabaseError:
            self._require_lease(held)
            raise

    def _require_lease(self, held: _Held) -> None:
        # A new handle: one that is brought up to date misses a table that was made again.
        found = self._open(self._pending_name)
        if found is None or found[1].lease != held.table.lease:
            raise taken_over(self.target)

    def _require_layout(self, handle: Any, layout: Layout) -> None:
        there, wanted = (
            [(field.name, field.type) for field in each]
            for each in (handle.schema, stored_schema(layout))
        )
        if there != wanted:
            raise DatabaseError(
                f"{self.target} has rows of another layout; push all rows with --full"
            )

    def _index(self, handle: Any, pushed: PushedTable) -> None:
        """Build the index of a table that has none."""
        rows = int(handle.count_rows())
        kind = self._options.index_kind(rows)
        if kind == "none" or any(VECTOR in each.columns for each in handle.list_indices()):
            return
        made = getattr(importlib.import_module("lancedb.index"), _INDEXES[kind])
        params = self._options.index_params(rows)
        handle.create_index(VECTOR, config=made(distance_type=_DISTANCES[pushed.metric], **params))

    @reports("cannot be tidied")
    def _tidy(self, handle: Any) -> None:
        """Merge small files, take new rows into the index, drop old versions."""
        age = max(timedelta(days=self._options.keep_days), _NO_AGE)
        handle.optimize(cleanup_older_than=age)

    @reports("cannot be indexed")
    def _complete_swap(self, pushed: PushedTable) -> None:
        handle = self._readable(pending=False)
        # Before there is an index: tidying would divide it by the engine's own measure.
        self._tidy(handle)
        self._index(handle, pushed)

    @reports("cannot be dropped")
    def _drop_pending(self, lease: str | None) -> None:
        """Drop the pending table if its lease is the one given; None for any lease."""
        found = self._open(self._pending_name)
        if found is not None and lease in (None, "", found[1].lease):
            # Cut off midway, it is not taken for a whole one.
            write_metadata(found[0], replace(found[1], lease=""))
            self._database.drop_table(self._pending_name)


def _folder_of(address: str) -> str:
    """Return the folder, or the URL of an object store, that an address names."""
    parts = urlsplit(address)
    scheme = parts.scheme.partition("+")[2]
    if scheme and not parts.netloc:
        raise ConfigError(f"{address} names no bucket; write {parts.scheme}://bucket/prefix")
    if scheme:
        return f"{scheme}://{parts.netloc}{unquote(parts.path)}"
    if parts.netloc or not parts.path.strip("/"):
        raise ConfigError(
            f"{address} names no folder; write the folder from the root on, with three slashes: "
            "lancedb:///data/vectors"
        )
    return unquote(parts.path)
