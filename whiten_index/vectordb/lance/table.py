"""A table of LanceDB: what its metadata tell of its rows, and its rows in their order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.errors import DatabaseError
from whiten_index.store.digest_index import Keys, KeyTable, string_keys
from whiten_index.vectordb.database_writer import Layout, Metric, PushedTable
from whiten_index.vectordb.local_folders import remedy_of
from whiten_index.vectordb.option_values import first_line
from whiten_index.vectordb.row_checks import taken_over

_STATE = "whiten_index"
_SLICE_ROWS = 16_384
# Rows whose keys are compared at once, in some 300 MB; of more the keys are read several times.
_KEYS_AT_ONCE = 8_000_000
# A commit is not made on top of one of these by another, which its writer has not seen.
_REFUSED = re.compile(r"incompatible with concurrent transaction|[Cc]ommit conflict")


@dataclass(frozen=True)
class TableState:
    """What a table holds, as the metadata of its field ``id`` tell.

    Attributes:
        pushed: of the rows.
        metric: by which they are ranked.
        dropped: whether the table is being taken away.
    """

    pushed: PushedTable
    metric: Metric
    dropped: bool = False

    @classmethod
    def of(cls, table: Any) -> TableState | None:
        """Return what a table's metadata tell, None where no push made it."""
        fields = table.schema
        told = fields.field(ID).metadata if ID in fields.names else None
        try:
            value = json.loads((told or {})[_STATE.encode()])
            return cls(
                PushedTable.from_json(value["pushed"]),
                Metric(value["metric"]),
                bool(value["dropped"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            return None

    def mark(self, table: Any) -> None:
        """Let a table's metadata tell this, in a commit of its own.

        The engine refuses it where another marked the table since this handle saw it.
        """
        table.update_field_metadata({"path": ID, "metadata": self._metadata()})

    def take(self, table: Any) -> None:
        """Mark a table, and let the engine refuse what others have under way in it.

        They are refused too whose handle saw this mark, but not the ``restore`` after it.
        """
        self.mark(table)
        table.restore(table.version)

    def schema(self, of: pa.Schema) -> pa.Schema:
        """Return the schema of a table whose metadata tell this from its first commit on."""
        number = of.get_field_index(ID)
        return of.set(number, of.field(ID).with_metadata(self._metadata()))

    def as_dropped(self) -> TableState:
        """Return what tells that the table is worth nothing."""
        return replace(self, dropped=True)

    def same_rows(self, other: TableState) -> bool:
        """Tell whether both are of the rows of one version, wherever they are."""
        one, two = (replace(each.pushed, name="", done=0, lease="") for each in (self, other))
        return one == two

    def _metadata(self) -> dict[str, str]:
        told = {
            "pushed": self.pushed.to_json(),
            "metric": self.metric.value,
            "dropped": self.dropped,
        }
        return {_STATE: json.dumps(told)}


def slices(table: Any, rows: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield all rows in their order; a scan of all at once reads far ahead, into memory."""
    for first in range(0, rows, _SLICE_ROWS):
        for batch in table.search().offset(first).limit(_SLICE_ROWS).to_batches():
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def key_that_comes_twice(
    table: Any, layout: Layout, *, at_once: int = _KEYS_AT_ONCE
) -> tuple[int, Any] | None:
    """Return how many keys several rows have and the id of one, None where no key is.

    Args:
        table: to read.
        layout: names the columns of the key.
        at_once: rows whose keys are compared at once; the table is read once for as many.
    """
    parts = max(1, -(-table.count_rows() // at_once))
    count, row = 0, None
    for part in range(parts):
        keys, rows = _keys_of(table, layout, part, parts)
        twice = np.flatnonzero(KeyTable(keys).counts() > 1)
        count += len(twice)
        if row is None and len(twice):
            row = int(np.concatenate(rows)[twice[0]])
    if row is None:
        return None
    found = table.search().select([ID]).offset(row).limit(1).to_arrow()
    return count, found[ID][0].as_py()


def is_readable(table: Any) -> bool:
    """Tell whether the files of a table's rows are there.

    A commit that was under way when its table was dropped leaves a table without them.
    """
    try:
        table.head(1)
    except (RuntimeError, OSError, ValueError) as error:
        if "not found" in str(error).lower():
            return False
        raise
    return True


@contextmanager
def as_database_error(target: str, what: str, *, on_disk: bool = False) -> Iterator[None]:
    """Turn the engine's errors into one line, in which no secret is.

    Args:
        target: as it may be shown.
        what: went wrong.
        on_disk: whether the table is in a folder of this machine.

    Raises:
        DatabaseError: the engine refused, or another push took the table over.
    """
    try:
        yield
    except (
        RuntimeError, ValueError, OSError, KeyError, TypeError, OverflowError, pa.ArrowException
    ) as error:  # fmt: skip
        # The error itself may tell what is not to be shown.
        if _REFUSED.search(str(error)):
            raise taken_over(target) from None
        line = first_line(error)
        # Where in its sources the engine found out.
        line = re.sub(r",? ?/\S+\.rs:\d+(:\d+)?.*$", "", line)
        remedy = remedy_of(line) if on_disk else None
        remedy = remedy or "see to it, and push again: it goes on"
        raise DatabaseError(f"{target} {what} ({line}); {remedy}") from None


def _keys_of(
    table: Any, layout: Layout, part: int, parts: int
) -> tuple[list[Keys], list[np.ndarray[Any, np.dtype[np.int64]]]]:
    """Return the keys of the rows that are in one of several parts, and the rows' numbers."""
    found, rows, first = list[Keys](), [np.empty(0, dtype=np.int64)], 0
    for batch in table.search().select(list(layout.key)).to_batches(_SLICE_ROWS):
        if not len(batch):
            continue
        keys = _keys(batch)
        mine = np.flatnonzero(keys[1] % np.uint64(parts) == part)
        found.append(keys[:, mine])
        rows.append(first + mine)
        first += len(batch)
    return found, rows


def _keys(batch: pa.RecordBatch) -> Keys:
    ids = batch[ID]
    if PASSAGE in batch.schema.names:
        # The digits behind the last of these cannot be taken for a part of the id.
        ids, numbers = (batch[name].cast(pa.large_string()) for name in (ID, PASSAGE))
        ids = pc.binary_join_element_wise(ids, numbers, pa.scalar("\0", pa.large_string()))
    return string_keys(ids)
