"""Changes of a corpus since it was indexed last: new, changed and deleted documents."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from whiten_index.corpus.arrow_types import times_as_numbers, times_of
from whiten_index.corpus.batches import DIGEST_BYTES, ID, PASSAGE, PASSAGE_COLUMNS, row_digests
from whiten_index.errors import ArtifactError
from whiten_index.store.digest_index import HashTable, Keys, digest_keys
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusPart, CorpusRecord

# Kinds of changes of documents; ``document`` means that kept columns alone changed.
_NEW, _CHANGED, _DOCUMENT, _DELETED = _KINDS = ("new", "changed", "document", "deleted")


@dataclass(frozen=True, eq=False)
class Changes:
    """Changes of the documents of a corpus."""

    total: int  # documents that the corpus has now
    counts: dict[str, int]  # kind -> documents
    # Columns `id` and `kind`. Without an id column, ids count rows of a file, so that a row deleted
    # at its top changes the document of every id after it.
    table: pa.Table

    def to_json(self) -> dict[str, int]:
        """Return the counts as JSON values."""
        unchanged = self.total - sum(self.counts.values()) + self.counts[_DELETED]
        return {"total": self.total, **self.counts, "unchanged": unchanged}

    def save(self, path: Path, *, base: str, whitening: str) -> None:
        """Write the table as an Arrow file, whose metadata name the version before.

        ``whitening`` is ``keep``, or ``refit`` if the vectors of all rows are others.
        """
        table = self.table.replace_schema_metadata({"base": base, "whitening": whitening})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        path.write_bytes(sink.getvalue())


def apart(
    before: CorpusRecord, now: CorpusRecord
) -> tuple[list[CorpusPart], list[CorpusPart], list[CorpusPart]]:
    """Return the parts that the first record alone has, the second alone, and those of both."""
    gone, _ = _split(before.parts, now.parts)
    return gone, *_split(now.parts, before.parts)


def _split(
    parts: Iterable[CorpusPart], others: Iterable[CorpusPart]
) -> tuple[list[CorpusPart], list[CorpusPart]]:
    """Return the parts that are not among the others, as often as they are not, and the rest."""
    times = Counter((part.digests, part.documents) for part in others)
    own, same = list[CorpusPart](), list[CorpusPart]()
    for part in parts:
        key = part.digests, part.documents
        (same if times[key] > 0 else own).append(part)
        times[key] -= 1
    return own, same


class Documents(NamedTuple):
    """Ids (n,) of documents, and digests (n, 16) of their texts and of their kept columns."""

    ids: pa.Array
    texts: NDArray[np.uint8]
    columns: NDArray[np.uint8]


def document_rows(documents: pa.Table, digests: NDArray[np.uint8]) -> Documents:
    """Return the documents of rows or passages, whose texts have digests (n, 16)."""
    kept = [name for name in documents.column_names if name not in (ID, *PASSAGE_COLUMNS)]
    # A row without kept columns has nothing that could change.
    columns = _row_digests(documents.select(kept)) if kept else np.zeros_like(digests)
    ids = documents[ID].combine_chunks()
    if PASSAGE in documents.column_names:
        # The passages of a document follow each other.
        first = np.flatnonzero(documents[PASSAGE].to_numpy() == 0)
        ids, columns = ids.take(pa.array(first)), columns[first]
        stops = [*first[1:], len(digests)]
        whole = (digests[a:b].tobytes() for a, b in zip(first, stops, strict=True))
        digests = row_digests(whole)
    return Documents(ids, digests, columns)


class StoredRows:
    """Documents of parts that are in a store; a part is read whenever its documents are needed."""

    def __init__(self, store: EmbeddingStore, parts: Iterable[CorpusPart]) -> None:
        self.store, self.parts = store, [part for part in parts if part.rows]

    def __iter__(self) -> Iterator[Documents]:
        digests = part_digests(self.store, self.parts)
        for part, (_, each) in zip(self.parts, digests, strict=True):
            yield document_rows(self.store.documents(part), each)

    def ids(self, number: int) -> pa.Array:
        """Return the ids of the documents of a part."""
        documents = self.store.documents(self.parts[number])
        ids = documents[ID].combine_chunks()
        if PASSAGE not in documents.column_names:
            return ids
        return ids.filter(pc.equal(documents[PASSAGE], 0).combine_chunks())


def part_digests(
    store: EmbeddingStore, parts: Iterable[CorpusPart]
) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Yield the name and the digests (n, 16) of the texts of each part that has any.

    Damaged ones are random, so that each of its documents counts as changed.

    Raises:
        ArtifactError: the documents are damaged, or a part has other rows than its record says.
    """
    for part in parts:
        if part.rows:
            try:
                yield part.digests, store.digests(part)
            except ArtifactError:
                size, rng = (len(store.documents(part)), DIGEST_BYTES), np.random.default_rng()
                yield part.digests, rng.integers(0, 256, size, dtype=np.uint8)


def count_documents(store: EmbeddingStore, parts: Iterable[CorpusPart], *, passages: bool) -> int:
    """Return the number of documents in parts: their rows, unless they were cut in passages."""
    if not passages:
        return sum(part.rows for part in parts)
    columns = (store.documents(part)[PASSAGE].to_numpy() for part in parts if part.rows)
    return sum(int(np.count_nonzero(column == 0)) for column in columns)


def compare(before: StoredRows, now: Iterable[Documents], *, same: int) -> Changes:
    """Compare the documents of two states of a corpus, in each of which an id occurs once.

    Memory holds one table at a time, the ids of what changed, and 41 bytes for each document
    before (48 while they are sorted).

    Args:
        before: the documents then; the ids of deleted ones are read a second time.
        now: today's documents.
        same: documents of parts that both states have, which are in neither.
    """
    then = _Before(before)
    ids: dict[str, list[pa.Array]] = {kind: [] for kind in _KINDS}
    total, types = same, then.types
    for documents in now:
        total += len(documents.ids)
        types.add(documents.ids.type)
        for kind, mask in then.meet(documents).items():
            ids[kind].append(documents.ids.filter(pa.array(mask)))
    for number, rows in then.not_met():
        ids[_DELETED].append(before.ids(number).take(pa.array(rows)))
    counts = {kind: sum(map(len, each)) for kind, each in ids.items()}
    # If the column holds other ids than it did, 7 and "7" name the same document.
    return Changes(total, counts, _table(ids, types.pop() if len(types) == 1 else pa.string()))


class _Before:
    """The documents of a state before, which those of another meet, block after block.

    A document is known by the digest of its id, and its text and columns by 64 bits each of their
    digests, which are compared under the same id alone: of 10⁸ documents, a change is missed with
    a chance of about 10⁻¹¹.
    """

    def __init__(self, blocks: Iterable[Documents]) -> None:
        ids = list[Keys]()
        texts, columns = list[NDArray[np.uint64]](), list[NDArray[np.uint64]]()
        self.types: set[pa.DataType] = set()
        for block in blocks:
            self.types.add(block.ids.type)
            ids.append(_keys(block.ids))
            texts.append(_half(block.texts))
            columns.append(_half(block.columns))
        self._stops = np.cumsum([len(each) for each in texts], dtype=np.int64)
        self._texts, self._columns = _drained(texts), _drained(columns)
        self._ids = HashTable(ids)
        self._met = np.zeros(len(self._ids), dtype=np.bool_)

    def meet(self, block: Documents) -> dict[str, NDArray[np.bool_]]:
        """Return which documents (n,) of a block are new or not as they were."""
        row = self._ids.find(_keys(block.ids))
        known = row >= 0
        row = row[known]
        self._met[row] = True
        changed, other = np.zeros((2, len(known)), dtype=np.bool_)
        changed[known] = self._texts[row] != _half(block.texts)[known]
        other[known] = self._columns[row] != _half(block.columns)[known]
        return {_NEW: ~known, _CHANGED: changed, _DOCUMENT: other & ~changed}

    def not_met(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the number of each block with documents that were not met, and their rows."""
        rows = np.flatnonzero(~self._met)
        stops = np.searchsorted(rows, self._stops)
        for number, found in enumerate(np.split(rows, stops[:-1])[: len(stops)]):
            if len(found):
                yield number, found - (self._stops[number - 1] if number else 0)


def _row_digests(table: pa.Table) -> NDArray[np.uint8]:
    columns: list[list[Any]] = [
        [value for chunk in column.chunks for value in times_as_numbers(chunk).to_pylist()]
        for column in table.columns
    ]
    if times := [str(leaf) for kind in table.schema.types for leaf in times_of(kind)]:
        # The same number is another moment in another unit or zone.
        columns.append([times] * len(table))
    # What repr gives can be encoded: it escapes what cannot be printed, lone surrogates too.
    return row_digests(map(str.encode, map(repr, zip(*columns, strict=True))))


def _keys(ids: pa.Array) -> Keys:
    """Return the keys (2, n) of ids, of integers by their decimal digits."""
    texts = ids.cast(pa.large_string()).to_pylist()
    return digest_keys(row_digests(map(str.encode, texts)))


def _half(digests: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return digests[:, :8].copy().view(np.uint64).ravel()


def _drained(blocks: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """Return the blocks as one, and hold them no longer."""
    whole = np.concatenate([np.empty(0, dtype=np.uint64), *blocks])
    blocks.clear()
    return whole


def _table(ids: Mapping[str, list[pa.Array]], id_type: pa.DataType) -> pa.Table:
    if pa.types.is_string(id_type):
        # Sorted as one, they may take more than two gigabytes.
        id_type = pa.large_string()
    tables = []
    for kind, arrays in ids.items():
        column = pa.chunked_array([each.cast(id_type) for each in arrays if len(each)], id_type)
        tables.append(pa.table({ID: column, "kind": pa.repeat(kind, len(column))}))
    return pa.concat_tables(tables).sort_by([(ID, "ascending")])
