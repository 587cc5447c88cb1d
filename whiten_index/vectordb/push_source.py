"""Rows of the published version with their vectors, in the layout of a database."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.files import exists
from whiten_index.artifacts.prefetch import ahead, blocks
from whiten_index.artifacts.storage import Storage
from whiten_index.corpus.arrow_types import read_documents, unpacked_bytes, without_views
from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.encoding.spec import RemoteSpec, recorded_spec
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.progress import Progress
from whiten_index.search.query_encoder import QueryEncoder, digest_of
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.vectordb.push_config import PushConfig
from whiten_index.vectordb.pushed_table import (
    VECTOR,
    Layout,
    Metric,
    PushedTable,
    require_fitting,
    with_vectors,
)
from whiten_index.versions.documents import Documents
from whiten_index.versions.published import (
    CHANGES,
    DOCUMENTS,
    VERSIONS,
    WHITENING,
    Version,
    mending,
    read_current,
    read_version,
    version_number,
    with_published,
)
from whiten_index.versions.references import corpus_record, open_store
from whiten_index.whitening.transform import Whitening

# Vectors sent at once: a commit costs about as much as some thousand rows.
_BATCH_BYTES, _MOST_ROWS = 1 << 26, 1 << 16
# Texts in memory at once.
_TEXT_BYTES = 1 << 27
# Rows whose raw embeddings are in memory in float64.
_ROWS_AT_ONCE = 8192
_REMEDY = "name the store it was built from with --store DIR, or build the index again"


@dataclass(frozen=True, eq=False)
class PushSource:
    """Published version of an index, and the embeddings it was built from.

    ``whitening`` is as wide as the vectors to push; ``rows_at_once`` are sent, or read back.
    """

    version: Version
    documents: Documents
    whitening: Whitening
    store: EmbeddingStore
    record: CorpusRecord
    layout: Layout
    rows_at_once: int

    @classmethod
    def open(cls, config: PushConfig) -> "PushSource":
        """Open the published version, checking the checksums of all files that a push reads."""
        root, mirror = place_of(config.index)
        return with_published(root, partial(cls._opened, config), mirror)

    @classmethod
    def _opened(cls, config: PushConfig, version: Version) -> "PushSource":
        # Not the index itself, which may be the largest by far and is not read.
        fields, place = version.fields, version.place
        whitening = Whitening.load(version.file(WHITENING))
        if config.k is not None and config.k > whitening.k:
            raise ConfigError(
                f"the vectors of {place} have {whitening.k} numbers and --k asks for {config.k}; "
                "build the index with a larger --k"
            )
        recorded = recorded_spec(fields["encoder"])
        if isinstance(recorded, RemoteSpec):
            # Queries of a model that has changed since would find nothing.
            QueryEncoder(recorded).resolve()
        documents = Documents(version.file(DOCUMENTS))
        if whitening.similarity == "dot" and config.metric == "cosine":
            raise ConfigError(
                f"{place} ranks by dot product, and --metric cosine asks a database for another "
                "ranking; leave --metric out, or build the index with --similarity cosine"
            )
        if VECTOR in documents.schema.names:
            raise ConfigError(
                f"the kept column {VECTOR!r} has the name that the vectors take; rename it in the "
                "corpus, or leave it out of --keep"
            )
        store = open_store(version, given=config.store, reader="a push", remedy=_REMEDY)
        record = corpus_record(version)
        if record.rows != len(documents):
            raise ArtifactError(
                f"{version.folder} does not fit together: {record.rows} rows in the store, "
                f"{len(documents)} documents; {mending(version.root)}"
            )
        if config.k not in (None, whitening.k):
            whitening = whitening.truncate(config.k)
        metric: Metric = config.metric or ("ip" if whitening.similarity == "dot" else "cosine")
        layout = Layout(_schema(documents.schema, whitening.k), config.dtype, metric)
        by_bytes = min(_MOST_ROWS, _BATCH_BYTES // (4 * whitening.k))
        at_once = config.batch_rows or max(1, by_bytes)
        return cls(version, documents, whitening, store, record, layout, at_once)

    def __len__(self) -> int:
        return self.record.rows

    def pushed(self) -> PushedTable:
        """Return the description of a table with all rows."""
        columns = [[field.name, str(field.type)] for field in self.layout.schema]
        transform = hashlib.blake2b(digest_size=16)
        transform.update(self.version.fields["encoder_fingerprint"].encode())
        transform.update(self.whitening.digest.encode())
        transform.update(json.dumps([self.layout.metric, columns]).encode())
        return PushedTable(
            version=self.version.name,
            transform=transform.hexdigest(),
            k=self.whitening.k,
            dtype=self.layout.dtype,
            metric=self.layout.metric,
            rows=len(self),
            query_digest=digest_of(
                self.version.fields["encoder_fingerprint"],
                self.whitening,
                recorded_spec(self.version.fields["encoder"]),
            ),
            columns=tuple(self.layout.schema.names),
        )

    def _blocks(self, rows: range | NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        return map(np.asarray, blocks(rows, self.rows_at_once))

    def _parts(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], pa.Table]]:
        """Yield rows with their documents, in parts whose texts fit in memory."""
        try:
            table = self.documents.take(rows)
            size = sum(map(unpacked_bytes, table.to_batches()))
        except pa.ArrowInvalid as error:
            # Offsets of 32 bits reach 2 GiB of text.
            if len(rows) < 2 or "overflow" not in str(error):
                path = self.version.folder / DOCUMENTS
                raise ArtifactError(
                    f"{path} cannot be read ({error}); {mending(self.version.root)}"
                ) from error
            table, size = None, 1 << 31
        if len(rows) < 2 or size <= _TEXT_BYTES:
            yield rows, table
            return
        del table  # before its halves are taken
        for half in np.array_split(rows, 2):
            yield from self._parts(half)

    def _complete(self, part: tuple[NDArray[np.int64], pa.Table]) -> list[pa.RecordBatch]:
        """Return rows with their vectors, in the layout of a database."""
        rows, table = part
        found = with_vectors(table, self._vectors(rows), self.layout.schema)
        return list(found.combine_chunks().to_batches())

    def batches(
        self, rows: range | NDArray[np.int64], watcher: Progress
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows by their numbers, in that order; the next are read while these are used."""
        parts = chain.from_iterable(map(self._parts, self._blocks(rows)))
        for batches in ahead(parts, self._complete):
            for batch in batches:
                yield batch
                watcher.advance(batch.num_rows)

    def vectors(self) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors (n, k) of all rows, in order, in blocks."""
        return map(self._vectors, self._blocks(range(len(self))))

    @cached_property
    def _embeddings(self) -> CorpusEmbeddings:
        return CorpusEmbeddings(self.store, self.record)

    def _vectors(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        vectors = np.empty((len(rows), self.whitening.k), dtype=np.float32)
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            some = slice(first, first + _ROWS_AT_ONCE)
            try:
                raw = self._embeddings.at(rows[some])
            except ArtifactError as error:
                version = self.version
                current = read_current(version.root, version.mirror)
                if exists(version.folder) or current.version == version.name:
                    raise
                raise ArtifactError(
                    f"version {version.name} was pruned while it was being pushed, and "
                    f"embeddings of it are gone from {self.store.place}; push again, a newer "
                    "version is published"
                ) from error
            vectors[some] = self.whitening.vectors(raw)
        require_fitting(vectors, self.layout.dtype)
        return vectors


def _schema(schema: pa.Schema, k: int) -> pa.Schema:
    """Return the schema of rows, in plain types that every client of Arrow knows."""
    kinds = {}
    for field in schema:
        kind = (
            field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
        )
        plain = without_views(kind)
        kinds[field.name] = plain.value_type if pa.types.is_dictionary(plain) else plain
    ids = pa.int64() if pa.types.is_integer(kinds.pop(ID)) else pa.large_string()
    kinds = {ID: ids, VECTOR: pa.list_(pa.float32(), k), **kinds}
    return pa.schema(kinds.items())


# From this share of the rows on, filling a new table is faster than changing the old one, whose
# index takes each row on its own.
_MOST_CHANGED = 0.1


@dataclass(frozen=True, eq=False)
class Delta:
    """Changes to make in a database: rows to upsert, and ids of documents to delete first.

    If rows are passages, ``gone`` are all changed documents, which may have fewer passages than
    before; ``deleted`` counts those that are no longer in the corpus.
    """

    rows: NDArray[np.int64]
    gone: pa.Array
    deleted: int


def delta_since(
    source: PushSource, before: PushedTable, after: PushedTable
) -> tuple[Delta | None, str]:
    """Return the changes to make, None for all rows, and the reason."""
    total, most = len(source), int(_MOST_CHANGED * len(source))
    interrupted = before.changing.split()
    changes = _changes_between(source, before.version, [after.version, *interrupted])
    if changes is None:
        return None, f"what changed since version {before.version} is not known"
    many = f"more than a tenth of the {total:,} rows changed since version {before.version}"
    # Each list names a document once.
    if max(map(len, changes), default=0) > most:
        return None, many
    lists = [chunk for each in changes for chunk in each.cast(pa.large_string()).chunks]
    ids = pc.unique(pa.chunked_array(lists, pa.large_string()))
    if len(ids) > most:
        return None, many
    try:
        typed = ids.cast(source.layout.schema.field(ID).type)
        same = typed.cast(ids.type).equals(ids)
    except pa.ArrowInvalid:
        same = False
    if not same:
        return None, f"ids were texts since version {before.version}"
    places = source.documents.places(ids)
    rows = np.flatnonzero(places >= 0)
    deleted = np.isin(np.arange(len(ids)), places, invert=True)
    gone = typed if PASSAGE in source.layout.schema.names else typed.filter(pa.array(deleted))
    delta = Delta(rows, gone, int(np.count_nonzero(deleted)))
    touched = len(rows) + delta.deleted
    if touched > most:
        return None, many
    why = f"{touched:,} row{'s' * (touched != 1)} changed since version {before.version}"
    if interrupted:
        why += f", including those that a push to {' and '.join(interrupted)} had begun to change"
    return delta, why


def _changes_between(
    source: PushSource, was: str, others: Iterable[str]
) -> list[pa.ChunkedArray] | None:
    """Return the lists of ids that changed between a version and some others, earlier or later."""
    lists = dict[str, pa.ChunkedArray]()
    for now in others:
        other = _history(source, now, until=was)
        one = {was: None} if was in other else _history(source, was)
        common = next((name for name in other if name in one), None)
        if common is None:
            return None
        for history in (one, other):
            names = list(history)
            lists |= {name: history[name] for name in names[: names.index(common)]}
    return list(lists.values())


def _history(
    source: PushSource, version: str, *, until: str = ""
) -> dict[str, pa.ChunkedArray | None]:
    """Return the changes of a version and its predecessors, the latest first, None at the end."""
    changes = dict[str, pa.ChunkedArray | None]()
    while version not in changes:
        if version == until or not version_number(version):
            # Nobody asks what it changed, and a version in a bucket need not be fetched for it; or
            # it is no name of a version, but what a database says.
            changes[version] = None
            break
        folder, mirror = source.version.root / VERSIONS / version, source.version.mirror
        mirror.fetch(folder, names=())
        changes[version], base = _changes(folder, mirror)
        version = base or version
    return changes


def _changes(folder: Path, mirror: Storage) -> tuple[pa.ChunkedArray | None, str | None]:
    """Return the ids that an update changed and the version before it, None if that is unknown."""
    try:
        # It was pruned, or a build made it.
        if not exists(folder) or CHANGES not in (version := read_version(folder, mirror=mirror)):
            return None, None
        path = version.file(CHANGES)
        table = read_documents(path)
        base = (table.schema.metadata or {}).get(b"base", b"").decode(errors="replace")
        return (table[ID], base) if version_number(base) else (None, None)
    except ArtifactError as error:
        if not exists(folder):
            return None, None  # it was pruned meanwhile
        raise ArtifactError(f"{error}; or push all rows with --full") from error
