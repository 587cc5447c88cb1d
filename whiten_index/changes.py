"""What became of the rows of a corpus since it was indexed last: new, changed, deleted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from whiten_index.batch import DIGEST_BYTES, ID, PASSAGE, PASSAGE_COLUMNS
from whiten_index.store import CorpusPart, CorpusRecord, EmbeddingStore

_TEXT, _COLUMNS, _NOW = "text", "columns", "_now"


class ChangeKind(Enum):
    """What became of a document; ``DOCUMENT`` means that kept columns alone changed."""

    NEW = "new"
    CHANGED = "changed"
    DOCUMENT = "document"
    DELETED = "deleted"


@dataclass(frozen=True, eq=False)
class Changes:
    """What became of the documents of a corpus.

    Attributes:
        total: documents there are now.
        counts: kind -> documents. Of a corpus without an id column, documents are told apart by
            file and content, and none is changed: one is deleted and another new.
        table: columns ``id`` and ``kind``: what a database that knows documents by their id has to
            do. Without an id column, ids count rows of a file, so that a row deleted at its top
            changes the document of every id after it.
    """

    total: int
    counts: dict[ChangeKind, int]
    table: pa.Table

    @property
    def unchanged(self) -> int:
        """Documents that are as they were, but for kept columns."""
        new, changed = self.counts[ChangeKind.NEW], self.counts[ChangeKind.CHANGED]
        return self.total - new - changed - self.counts[ChangeKind.DOCUMENT]

    def to_json(self) -> dict[str, int]:
        """Return the counts as JSON values."""
        counts = {kind.value: count for kind, count in self.counts.items()}
        return {"total": self.total, **counts, "unchanged": self.unchanged}

    def save(self, path: Path, *, base: str, whitening: str) -> None:
        """Write the table as an Arrow file, whose metadata say what it is the difference from.

        Args:
            path: of the file.
            base: the version before.
            whitening: ``keep``, or ``refit`` where the vectors of all rows are others.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        table = self.table.replace_schema_metadata({"base": base, "whitening": whitening})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        path.write_bytes(sink.getvalue())


def document_rows(documents: pa.Table, digests: NDArray[np.uint8]) -> pa.Table:
    """Return id, digest of the text and digest of the kept columns of each document, one row each.

    Args:
        documents: (n rows) id and kept columns; the passages of a document follow each other.
        digests: (n, 16) of their texts.
    """
    ids = documents[ID].combine_chunks()
    kept = [name for name in documents.column_names if name not in (ID, *PASSAGE_COLUMNS)]
    # A row without kept columns has nothing that could change.
    columns = _row_digests(documents.select(kept)) if kept else np.zeros_like(digests)
    if PASSAGE in documents.column_names:
        first = np.flatnonzero(documents[PASSAGE].to_numpy() == 0)
        ids, columns = ids.take(pa.array(first)), columns[first]
        stops = [*first[1:], len(digests)]
        joined = (digests[a:b].tobytes() for a, b in zip(first, stops, strict=True))
        digests = _digests(joined)
    names = [ID, _TEXT, _COLUMNS]
    return pa.table([ids, _binary(digests), _binary(columns)], names=names)


def stored_rows(store: EmbeddingStore, parts: Iterable[CorpusPart]) -> list[pa.Table]:
    """Return the documents of parts in a store, as ``document_rows`` does.

    Raises:
        ArtifactError: a part cannot be read.
    """
    return [
        document_rows(store.documents(part), store.shards.digests(part.shard))
        for part in parts
        if part.rows
    ]


def apart(
    before: CorpusRecord, now: CorpusRecord
) -> tuple[list[CorpusPart], list[CorpusPart], list[CorpusPart]]:
    """Return the parts that the first record alone has, the second alone, and those of both."""
    times = Counter((part.shard, part.documents) for part in before.parts)
    came, same = list[CorpusPart](), list[CorpusPart]()
    for part in now.parts:
        key = part.shard, part.documents
        (same if times[key] > 0 else came).append(part)
        times[key] -= times[key] > 0
    gone = list[CorpusPart]()
    for part in before.parts:
        key = part.shard, part.documents
        if times[key] > 0:
            gone.append(part)
            times[key] -= 1
    return gone, came, same


def count_documents(store: EmbeddingStore, parts: Iterable[CorpusPart], *, passages: bool) -> int:
    """Return how many documents there are in parts, which are their rows unless cut in passages."""
    if not passages:
        return sum(part.rows for part in parts)
    columns = (store.documents(part)[PASSAGE].to_numpy() for part in parts if part.rows)
    return sum(int(np.count_nonzero(column == 0)) for column in columns)


def compare(
    before: Sequence[pa.Table], now: Sequence[pa.Table], *, same: int, by_content: bool
) -> Changes:
    """Compare the documents of two states of a corpus.

    Args:
        before: as ``document_rows`` gives them.
        now: likewise.
        same: documents of parts that both states have, which are in neither.
        by_content: count by file and content, since ids are file, row group and row.
    """
    some = next(iter((*before, *now)), None)
    if some is None:
        return Changes(same, dict.fromkeys(ChangeKind, 0), _table(pa.array([], pa.string()), []))
    empty = some.slice(0, 0)
    if len({table[ID].type for table in (*before, *now)}) > 1:
        # The column holds other ids than it did: 7 and "7" name the same document.
        empty, *named = (_named_by_strings(each) for each in (empty, *before, *now))
        before, now = named[: len(before)], named[len(before) :]
    then, today = (pa.concat_tables([empty, *each]) for each in (before, now))
    joined = then.join(today, ID, join_type="full outer", right_suffix=_NOW)
    came, went = pc.is_null(joined[_TEXT]), pc.is_null(joined[_TEXT + _NOW])
    differs = pc.fill_null(pc.not_equal(joined[_TEXT], joined[_TEXT + _NOW]), False)
    other = pc.fill_null(pc.not_equal(joined[_COLUMNS], joined[_COLUMNS + _NOW]), False)
    of_kind = {
        ChangeKind.NEW: came,
        ChangeKind.CHANGED: differs,
        ChangeKind.DOCUMENT: pc.and_(other, pc.invert(differs)),
        ChangeKind.DELETED: went,
    }
    counts = {kind: int(pc.sum(mask).as_py() or 0) for kind, mask in of_kind.items()}
    ids = {kind: joined[ID].filter(mask).combine_chunks() for kind, mask in of_kind.items()}
    table = pa.concat_tables([_table(each, [kind.value] * len(each)) for kind, each in ids.items()])
    if by_content:
        counts = _by_content(then, today)
    return Changes(same + len(today), counts, table.sort_by([(ID, "ascending")]))


def _named_by_strings(table: pa.Table) -> pa.Table:
    return table.set_column(0, ID, table[ID].cast(pa.string()))


def _by_content(before: pa.Table, now: pa.Table) -> dict[ChangeKind, int]:
    """Count by file and content: a document that is there twice counts twice."""
    then, today = (Counter(_contents(each)) for each in (before, now))
    counts = dict.fromkeys(ChangeKind, 0)
    counts[ChangeKind.NEW] = (today - then).total()
    counts[ChangeKind.DELETED] = (then - today).total()
    return counts


def _contents(table: pa.Table) -> Iterable[tuple[str, bytes, bytes]]:
    files = [name.rpartition("#")[0] for name in table[ID].to_pylist()]
    return zip(files, table[_TEXT].to_pylist(), table[_COLUMNS].to_pylist(), strict=True)


def _row_digests(table: pa.Table) -> NDArray[np.uint8]:
    columns = [column.cast(_without_times(column.type)).to_pylist() for column in table.columns]
    return _digests(repr(row).encode(errors="surrogatepass") for row in zip(*columns, strict=True))


def _without_times(kind: pa.DataType) -> pa.DataType:
    """Return a type with numbers for dates and times, of which Python knows fewer than Arrow."""
    if pa.types.is_temporal(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if pa.types.is_dictionary(kind):
        return _without_times(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([_field(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_field(kind.key_field), _field(kind.item_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_field(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_field(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(_field(kind.value_field))
    return kind


def _field(field: pa.Field) -> pa.Field:
    return field.with_type(_without_times(field.type))


def _digests(rows: Iterable[bytes]) -> NDArray[np.uint8]:
    joined = b"".join(hashlib.blake2b(row, digest_size=DIGEST_BYTES).digest() for row in rows)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, DIGEST_BYTES)


def _binary(digests: NDArray[np.uint8]) -> pa.Array:
    data = pa.py_buffer(np.ascontiguousarray(digests).tobytes())
    return pa.Array.from_buffers(pa.binary(DIGEST_BYTES), len(digests), [None, data])


def _table(ids: Any, kinds: list[str]) -> pa.Table:
    return pa.table({ID: ids, "kind": pa.array(kinds, pa.string())})
