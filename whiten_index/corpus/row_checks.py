"""Checks of the Arrow rows of a shard: join texts, skip and count rows that cannot be used."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from whiten_index.corpus.corpus_options import OnBadRow
from whiten_index.errors import CorpusError

_BLOCK_ROWS = 4096


@dataclass
class Sieve:
    """Drops rows of a table by reason, or stops with an error that names the row."""

    table: pa.Table  # the rows still in
    where: Callable[[int], str]  # row number in the shard -> name of that row in an error
    on_bad_row: OnBadRow
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> rows dropped

    def __post_init__(self) -> None:
        # Row numbers (n,) in the shard of the rows still in.
        self.positions: NDArray[np.int64] = np.arange(self.table.num_rows)

    def keep(self, passing: NDArray[np.bool_], reason: str) -> None:
        """Keep the rows marked in ``passing`` (n,), and count the others."""
        if dropped := len(passing) - int(passing.sum()):
            self.skipped[reason] = self.skipped.get(reason, 0) + dropped
            self.table = self.table.filter(pa.array(passing))
            self.positions = self.positions[passing]

    def drop(self, bad: NDArray[np.bool_], reason: str, what: str, *, blank: bool) -> None:
        """Drop the rows marked in ``bad`` (n,), or stop at the first of them."""
        skips = self.on_bad_row == "skip" or (blank and self.on_bad_row == "blank")
        if not skips and bad.any():
            row = int(self.positions[int(bad.argmax())])
            raise CorpusError(
                f"{self.where(row)} has {what}; mend the row, or pass --on-bad-row skip to leave "
                "out and count such rows"
            )
        self.keep(~bad, reason)


def join_texts(table: pa.Table, columns: tuple[str, ...]) -> pa.Array:
    """Return the columns of each row, trimmed, blanks left out, joined by one space.

    A row with nothing but nulls and blanks becomes the empty string.
    """
    parts = []
    for name in columns:
        column = table.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        trimmed = pc.utf8_trim_whitespace(column.cast(pa.large_string()))
        blank = pc.equal(pc.utf8_length(trimmed), 0)
        parts.append(pc.if_else(blank, pa.scalar(None, pa.large_string()), trimmed))
    separator = pa.scalar(" ", pa.large_string())
    # The empty string in front keeps a row of nulls a row: a join of nulls alone yields none.
    empty = pa.scalar("", pa.large_string())
    joined = pc.binary_join_element_wise(empty, *parts, separator, null_handling="skip")
    return pc.utf8_ltrim_whitespace(joined).combine_chunks()


def embedding_rows(column: pa.ChunkedArray) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return an embedding column as one array and the width of each row, −1 for null."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_fixed_size_list(array.type):
        widths = np.full(len(array), array.type.list_size, dtype=np.int64)
    else:
        widths = np.array(pc.fill_null(pc.list_value_length(array), 0), dtype=np.int64)
    widths[np.asarray(array.is_null())] = -1
    return array, widths


def embedding_matrix(array: pa.Array, dim: int) -> NDArray[np.floating]:
    """Return rows of one width as (n, dim) in the column's own float type; null items are NaN."""
    values = array.flatten()
    flat = values.to_numpy(zero_copy_only=False)
    if values.null_count:
        flat = flat.astype(values.type.to_pandas_dtype())
    return np.ascontiguousarray(flat.reshape(-1, dim))


def rows_not_finite(matrix: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Return which rows (n,) of a matrix (n, d) hold NaN or infinity."""
    found = np.empty(len(matrix), dtype=bool)
    for start in range(0, len(matrix), _BLOCK_ROWS):
        part = slice(start, start + _BLOCK_ROWS)
        found[part] = ~np.isfinite(matrix[part]).all(axis=1)
    return found
