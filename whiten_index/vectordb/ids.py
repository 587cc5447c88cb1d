"""Ids of rows as UUIDs, for databases that take no other text as the key of a row."""

from __future__ import annotations

import uuid

import pyarrow as pa

from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.vectordb.database_writer import Layout

# Never changed: rows that were pushed before are found again by it.
NAMESPACE = uuid.UUID("9d621fcd-1abb-43aa-ac44-d636e07596b2")


def row_uuid(name: str | int, passage: int | None = None) -> str:
    """Return the UUID of a row, the same on every machine (version 5, RFC 9562).

    It is made of ``s:`` and the id where that is text, of ``i:`` and its digits where it is a
    number, so ``"7"`` and ``7`` differ; the number of a passage stands before the colon.
    """
    kind = "s" if isinstance(name, str) else "i"
    number = "" if passage is None else str(passage)
    return str(uuid.uuid5(NAMESPACE, f"{kind}{number}:{name}"))


def row_uuids(rows: pa.RecordBatch, layout: Layout) -> list[str]:
    """Return the UUIDs of rows, made of the columns of their key."""
    names = rows[ID].to_pylist()
    if PASSAGE not in layout.key:
        return [row_uuid(name) for name in names]
    return [row_uuid(*key) for key in zip(names, rows[PASSAGE].to_pylist(), strict=True)]
