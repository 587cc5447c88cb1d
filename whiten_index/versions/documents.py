"""Row number to id and kept columns: an Arrow file that is mapped, never loaded."""

import contextlib
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from whiten_index.artifacts.limits import LimitError, check_expanded
from whiten_index.corpus.arrow_types import (
    read_documents,
    times_as_numbers,
    times_of,
    unpacked_bytes,
)
from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.corpus.row_filter import RowFilter
from whiten_index.errors import ArtifactError, ConfigError, CorpusError, NotFoundError, first_line
from whiten_index.index.vector_search import Selection
from whiten_index.paths import shown
from whiten_index.store.records import REMEDY

# Filters whose rows are remembered, as a caller's queries tend to share one: a bit a row each, and
# 8 bytes a row that passes where these were listed.
_REMEMBERED = 4
# Ids that are looked up at once.
_IDS_AT_ONCE = 1 << 20
_CUT = pa.time64("ns")


def write_documents(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write tables of one schema one after the other, with the texts of dictionaries written out.

    Raises:
        CorpusError: a dictionary names long texts in so many rows that the file would be too large.
        ArtifactError: the kept columns of the tables differ.
    """
    writer: Any = None
    size = packed = 0
    # Through a file of Python's, as all else: Arrow's own hides which error the disk reports.
    with contextlib.ExitStack() as open_files:
        for table in tables:
            packed += int(table.nbytes)
            size += sum(map(unpacked_bytes, table.to_batches()))
            try:
                check_expanded(size, packed)
            except LimitError as error:
                raise CorpusError(
                    f"the rows of the kept columns repeat long texts ({error}); leave their column "
                    "out of --keep"
                ) from error
            if writer is None:
                schema, file = _plain(table.schema), open_files.enter_context(path.open("wb"))
                writer = open_files.enter_context(pa.ipc.new_file(file, schema))
            # Views may differ from part to part; types were compared before.
            try:
                for batch in table.cast(schema).combine_chunks().to_batches():
                    writer.write_batch(batch)
            except (ValueError, NotImplementedError) as error:
                raise ArtifactError(
                    f"the kept columns of parts of the store differ ({first_line(error)}); {REMEDY}"
                ) from error


def _plain(schema: pa.Schema) -> pa.Schema:
    return pa.schema(
        [
            each.with_type(each.type.value_type) if pa.types.is_dictionary(each.type) else each
            for each in schema
        ],
        schema.metadata,
    )


class Documents:
    """The rows of an index."""

    def __init__(self, path: Path, *, full: bool = True) -> None:
        table = read_documents(path, full=full)
        self.schema, self._batches = table.schema, table.to_batches()
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        # Their chunks are found in less time than a batch is searched for here.
        self._columns = dict(zip(table.column_names, table.columns, strict=True))
        self._cut = {n for n, each in self._columns.items() if _CUT in times_of(each.type)}
        self.columns = tuple(name for name in self._columns if name != ID)
        # Of the batches and not of this object, which would keep itself, and the map, alive.
        selected = functools.partial(_selected, self._batches)
        self._selected = functools.lru_cache(_REMEMBERED)(selected)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all columns in memory, ids too."""
        return sum(batch.nbytes for batch in self._batches)

    def get(self, row: int) -> dict[str, Any]:
        """Return the id and the kept columns of a row.

        Dates and times that Python does not know come as the numbers that Arrow keeps: those after
        the year 9999, in an unknown zone, times of day of parts of a microsecond and, without
        pandas, all others of such parts.
        """
        return {n: _as_python(each, row, cut=n in self._cut) for n, each in self._columns.items()}

    def ids(self, rows: Sequence[int]) -> list[str | int]:
        """Return the ids of rows."""
        return [self._columns[ID][row].as_py() for row in rows]

    def take(self, rows: NDArray[np.int64]) -> pa.Table:
        """Return the id and the kept columns of rows (n,), in the order given."""
        batches = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(batches, kind="stable")
        found = [
            self._batches[batch].take(pa.array(rows[of_batch] - self._starts[batch]))
            for batch in np.unique(batches)
            for of_batch in [order[batches[order] == batch]]
        ]
        table = pa.Table.from_batches(found, self.schema)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return table if np.array_equal(order, back) else table.take(pa.array(back))

    def id_column(self, start: int, stop: int) -> pa.ChunkedArray:
        """Return the ids of rows ``start`` … ``stop`` − 1, or of as many as there are."""
        return self._columns[ID].slice(start, max(stop - start, 0))

    def places(self, ids: pa.Array) -> NDArray[np.int64]:
        """Return the place (n,) of each row's id among distinct ``ids``, as texts; −1 for none."""
        blocks = (self.id_column(i, i + _IDS_AT_ONCE) for i in range(0, len(self), _IDS_AT_ONCE))
        found = (pc.index_in(each.cast(pa.large_string()), value_set=ids) for each in blocks)
        known = [each.fill_null(-1).to_numpy().astype(np.int64) for each in found]
        return np.concatenate([np.empty(0, dtype=np.int64), *known])

    def first_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, of rows (n,) that are passages, the row of the first one of the same document."""
        numbers = np.empty(len(rows), dtype=np.int64)
        batches = np.searchsorted(self._starts, rows, side="right") - 1
        for batch in np.unique(batches):
            of_batch = batches == batch
            column = self._batches[batch].column(PASSAGE).to_numpy(zero_copy_only=False)
            numbers[of_batch] = column[rows[of_batch] - self._starts[batch]]
        return rows - numbers

    def passages_from(self, row: int) -> range:
        """Return the rows of a document's passages, ``row`` being the first."""
        stop, numbers = row + 1, self._columns[PASSAGE]
        while stop < len(self) and numbers[stop].as_py():
            stop += 1
        return range(row, stop)

    def find(self, wanted: str | int) -> int:
        """Return the row of an id, the first of several."""
        kind = self.schema.field(ID).type
        try:
            scalar = pa.scalar(wanted).cast(kind)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):
            scalar = None
        position = -1 if scalar is None else int(pc.index(self._columns[ID], scalar).as_py())
        if position >= 0:
            return position
        raise NotFoundError(
            f"no document has the id {shown(wanted)}; ids here are {kind}, the first being "
            f"{shown(self.ids([0])[0])}"
        )

    def matching(self, row_filter: RowFilter) -> Selection:
        """Return the rows that pass a condition on the id and the kept columns."""
        unknown = [name for name in row_filter.columns if name not in self.schema.names]
        if unknown:
            raise ConfigError(
                f"the filter {row_filter.text!r} reads {', '.join(unknown)}, which this index "
                f"does not keep; its columns are {', '.join(self.schema.names)} (id has the ids, "
                "whatever their column is called in the corpus); put a text in quotes, or name "
                "another column with --keep when the index is built, which takes the embeddings "
                "from its store"
            )
        return self._selected(row_filter.text)


def _as_python(column: pa.ChunkedArray, row: int, *, cut: bool) -> Any:
    with contextlib.suppress(OverflowError, ValueError):
        value = column[row].as_py()
        # Python cuts a time of day to microseconds.
        if not cut or pa.scalar(value, column.type).equals(column[row]):
            return value
    return times_as_numbers(column.slice(row, 1).combine_chunks())[0].as_py()


def _selected(batches: list[pa.RecordBatch], text: str) -> Selection:
    row_filter = RowFilter.parse(text)
    masks = [row_filter.mask(batch) for batch in batches]
    return Selection.of(np.concatenate([np.empty(0, dtype=np.bool_), *masks]))
