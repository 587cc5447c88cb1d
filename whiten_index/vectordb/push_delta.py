"""Which rows of a table changed since the version that it has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.corpus.batches import PASSAGE
from whiten_index.vectordb.database_writer import PushedTable
from whiten_index.vectordb.push_changes import changed_ids
from whiten_index.vectordb.push_source import PushSource

# From this share of the rows on a new table is filled sooner than the old one is changed, whose
# index takes every row one by one.
_MOST_CHANGED = 0.1


@dataclass(frozen=True, eq=False)
class Delta:
    """What is to be changed in a database.

    Attributes:
        rows: (n,) numbers of those to put.
        gone: ids of documents to take away first, as text; where rows are passages, of all that
            changed, since they may be fewer than they were.
        deleted: documents that are there no more.
    """

    rows: NDArray[np.int64]
    gone: pa.Array
    deleted: int

    @property
    def touched(self) -> int:
        """How many rows that is, a deleted document counted as one."""
        return len(self.rows) + self.deleted


def delta_since(
    source: PushSource, before: PushedTable, after: PushedTable
) -> tuple[Delta | None, str]:
    """Return what to change, None for all rows, and why."""
    total, most = len(source), int(_MOST_CHANGED * len(source))
    # Of these versions rows may be that a push was cut off over.
    cut_off = before.changing.split()
    others = [after.version, *cut_off]
    changes = changed_ids(source.root, before.version, others, most=most)
    if not changes.known:
        return None, f"what changed since version {before.version} is not known"
    many = f"more than a tenth of the {total:,} rows changed since version {before.version}"
    if changes.ids is None:
        return None, many
    rows, there = source.rows_of(changes.ids)
    passages = PASSAGE in source.layout.schema.names
    gone = changes.ids if passages else changes.ids.filter(pa.array(~there))
    delta = Delta(rows, gone, int(np.count_nonzero(~there)))
    if delta.touched > most:
        return None, many
    rows_changed = f"{delta.touched:,} row{'s' * (delta.touched != 1)} changed"
    why = f"{rows_changed} since version {before.version}"
    if cut_off:
        why += f", those among them that a push to {' and '.join(cut_off)} had begun to change"
    return delta, why
