"""Changes of a LanceDB table, kept aside until all of them are known."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeAlias

import pyarrow as pa

from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import Layout
from whiten_index.vectordb.lance.rows import as_stored, stored_schema
from whiten_index.vectordb.option_values import first_line
from whiten_index.vectordb.row_checks import blocks, require_rows

# Ids in one condition: some hundred kilobytes of text to parse.
_AT_ONCE = 10_000
# Their keys wait in memory: 110 bytes each where ids are short, 240 for passages.
_MOST = 2_000_000

# An id, with the number of the passage where rows are passages.
_Key: TypeAlias = "str | int | tuple[str | int, int]"


class LanceChanges:
    """Rows to put and ids to take away, in the order in which they were said.

    The rows wait in a temporary file, so that they may be more than fit in memory, and are put in
    place together; of the keys, each counts by what was said of it last. The keys wait in memory.

    Args:
        layout: of the rows.
        most: keys and ids that are taken.
    """

    def __init__(self, layout: Layout, *, most: int = _MOST) -> None:
        self.layout = layout
        self.changed = False
        self._most = most
        self._gone = set[str | int]()
        # Key -> the batch that has its row.
        self._last = dict[_Key, int]()
        # Id -> the passages that were put, where rows are passages.
        self._passages = defaultdict[str | int, set[int]](set)
        self._batches = 0
        self._schema = stored_schema(layout)
        with _on_disk():
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
            self._write = pa.ipc.new_stream(self._file, self._schema)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What it did not write yet is of no use to anybody, and the disk may be full.
        with suppress(OSError):
            self._file.close()

    def upsert(self, rows: pa.RecordBatch) -> None:
        """Put rows of the layout in place of those with their keys, or add them.

        Raises:
            DatabaseError: the rows cannot be taken, are too many, or the temporary folder is full.
        """
        require_rows(rows, self.layout)
        stored = as_stored(rows, self.layout)
        with _on_disk():
            self._write.write_batch(stored)
        for key in self._keys(rows):
            self._last[key] = self._batches
            if isinstance(key, tuple):
                self._passages[key[0]].add(key[1])
        self._batches += 1
        self.changed = True
        self._require_few()

    def delete(self, ids: Sequence[str | int]) -> None:
        """Take all rows with these ids away; those that are not there are passed over.

        Raises:
            DatabaseError: they are too many.
        """
        for each in ids:
            self._last.pop(each, None)
            for passage in self._passages.pop(each, ()):
                self._last.pop((each, passage), None)
        self._gone.update(ids)
        self.changed = True
        self._require_few()

    def apply(self, table: Any) -> None:
        """Change a table: in one commit all rows are put, then what is to go is taken away.

        In this order no reader misses a row that is to stay.
        """
        if self._last:
            reader = pa.RecordBatchReader.from_batches(self._schema, self._rows())
            merge = table.merge_insert(list(self.layout.key))
            merge.when_matched_update_all().when_not_matched_insert_all().execute(reader)
        for condition in self._conditions():
            table.delete(condition)

    def _require_few(self) -> None:
        if len(self._gone) + len(self._last) > self._most:
            raise DatabaseError(
                f"more than {self._most:,} rows and ids changed, which LanceDB's changes wait in "
                "memory for; push all rows with --full"
            )

    def _rows(self) -> Iterator[pa.RecordBatch]:
        self._file.flush()
        self._file.seek(0)
        for number in range(self._batches):
            if not number:
                reader = pa.ipc.open_stream(self._file)
            rows = reader.read_next_batch()
            last = [self._last.get(key) == number for key in self._keys(rows)]
            yield rows if all(last) else rows.filter(pa.array(last, pa.bool_()))
        # What is written next goes behind all this.
        self._file.seek(0, 2)

    def _conditions(self) -> Iterator[str]:
        """Yield what is true of the rows to take away, ids of one kind together."""
        groups = defaultdict[tuple[int, ...], list[str | int]](list)
        for each in self._gone:
            if each not in self._last:
                groups[tuple(sorted(self._passages.get(each, ())))].append(each)
        for kept, ids in groups.items():
            others = f" AND {PASSAGE} NOT IN ({', '.join(map(str, kept))})" if kept else ""
            for some in blocks(ids, _AT_ONCE):
                yield f"{with_ids(some)}{others}"

    def _keys(self, rows: pa.RecordBatch) -> Iterator[_Key]:
        ids = rows[ID].to_pylist()
        if PASSAGE not in self.layout.key:
            return iter(ids)
        return zip(ids, rows[PASSAGE].to_pylist(), strict=True)


def with_ids(ids: Sequence[str | int]) -> str:
    """Return the condition, in SQL, that a row has one of some ids."""
    return f"{ID} IN ({', '.join(map(_literal, ids))})"


def _literal(value: str | int) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(int(value))


@contextmanager
def _on_disk() -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise DatabaseError(
            f"changes cannot be kept in the temporary folder {tempfile.gettempdir()} "
            f"({first_line(error)}); make room there, or name another with the variable TMPDIR, "
            "and push again"
        ) from error
