"""Rows of the published version with their vectors, in the layout of a database."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.artifacts.files import exists
from whiten_index.artifacts.prefetch import ahead
from whiten_index.corpus.arrow_types import without_views
from whiten_index.corpus.batches import ID
from whiten_index.encoding.spec import recorded_spec
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.progress import Progress
from whiten_index.search.query_encoder import digest_of
from whiten_index.store.digest_index import HashTable, string_keys
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.vectordb.push_config import PushConfig
from whiten_index.vectordb.pushed_table import VECTOR, Layout, PushedTable, vectors_array
from whiten_index.versions.documents import Documents
from whiten_index.versions.provenance import corpus_record, open_store
from whiten_index.versions.published import (
    DOCUMENTS,
    WHITENING,
    Version,
    mending,
    read_current,
    with_published,
)
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.transform import Whitening

# Rows whose raw embeddings are in memory in float64.
_ROWS_AT_ONCE = 8192
# Ids that are looked up at once.
_IDS_AT_ONCE = 1 << 16
_REMEDY = "name the store it was built from with --store DIR, or build the index again"


@dataclass(frozen=True, eq=False)
class PushSource:
    """Published version of an index, and the embeddings it was built from.

    ``whitening`` is as wide as the vectors to push; ``rows_at_once`` are sent, or read back.
    """

    root: Path
    folder: Path
    fields: Mapping[str, Any]
    documents: Documents
    whitening: Whitening
    store: EmbeddingStore
    record: CorpusRecord
    layout: Layout
    rows_at_once: int

    @classmethod
    def open(cls, config: PushConfig) -> PushSource:
        """Open the published version, checking the checksums of all files that a push reads."""
        root = Path(config.index)
        return with_published(root, lambda version: cls._opened(root, version, config))

    @classmethod
    def _opened(cls, root: Path, version: Version, config: PushConfig) -> PushSource:
        # Not the index itself, which may be the largest by far and is not read.
        folder, fields = version.folder, version.fields
        whitening = Whitening.load(version.file(WHITENING))
        if config.k is not None and config.k > whitening.k:
            raise ConfigError(
                f"the vectors of {root} have {whitening.k} numbers and --k asks for {config.k}; "
                "build the index with a larger --k"
            )
        documents = Documents(version.file(DOCUMENTS))
        if VECTOR in documents.schema.names:
            raise ConfigError(
                f"the kept column {VECTOR!r} has the name that the vectors take; rename it in the "
                "corpus, or leave it out of --keep"
            )
        store = open_store(root, fields, given=config.store, reader="a push", remedy=_REMEDY)
        record = corpus_record(version)
        if record.rows != len(documents):
            raise ArtifactError(
                f"{folder} does not fit together: {record.rows} rows in the store, "
                f"{len(documents)} documents; {mending(root)}"
            )
        if config.k is not None:
            whitening = whitening.truncate(config.k)
        layout = _layout(documents.schema, whitening.k, config)
        at_once = config.rows_at_once(whitening.k)
        return cls(root, folder, fields, documents, whitening, store, record, layout, at_once)

    def __len__(self) -> int:
        return self.record.rows

    def pushed(self) -> PushedTable:
        """Return the description of a table with all rows."""
        return PushedTable(
            version=self.folder.name,
            transform=self.transform,
            k=self.whitening.k,
            dtype=self.layout.dtype,
            metric=self.layout.metric,
            rows=len(self),
            query_digest=digest_of(
                self.fields["encoder_fingerprint"],
                self.whitening,
                recorded_spec(self.fields["encoder"]),
            ),
            columns=tuple(self.layout.schema.names),
        )

    @cached_property
    def transform(self) -> str:
        """Fingerprint of encoder, transform and layout.

        Rows of two versions with equal fingerprint, id and content are equal in a database.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.fields["encoder_fingerprint"].encode())
        digest.update(self.whitening.digest.encode())
        columns = [[field.name, str(field.type)] for field in self.layout.schema]
        digest.update(json.dumps([self.layout.metric, columns]).encode())
        return digest.hexdigest()

    def blocks(self, start: int = 0) -> Iterator[NDArray[np.int64]]:
        """Yield the numbers of all rows from ``start`` on, in order, in blocks."""
        for first in range(start, len(self), self.rows_at_once):
            yield np.arange(first, min(first + self.rows_at_once, len(self)))

    def at(self, rows: NDArray[np.int64]) -> list[pa.RecordBatch]:
        """Return rows by their numbers, in that order, as few batches as can hold their texts."""
        try:
            table = self.documents.take(rows)
        except pa.ArrowInvalid as error:
            # Offsets of 32 bits reach 2 GiB of text.
            if len(rows) < 2 or "offset overflow" not in str(error):
                raise ArtifactError(
                    f"{self.folder / DOCUMENTS} cannot be read ({error}); {mending(self.root)}"
                ) from error
            half = len(rows) // 2
            return [*self.at(rows[:half]), *self.at(rows[half:])]
        vectors = vectors_array(self._vectors(rows), self.whitening.k)
        schema = self.layout.schema
        columns = [
            vectors if field.name == VECTOR else table[field.name].cast(field.type)
            for field in schema
        ]
        return list(pa.table(columns, schema=schema).combine_chunks().to_batches())

    def batches(self, start: int, watcher: Progress) -> Iterator[pa.RecordBatch]:
        """Yield all rows from ``start`` on, in order; the next are read while these are used."""
        for batches in ahead(self.blocks(start), self.at):
            for batch in batches:
                yield batch
                watcher.advance(batch.num_rows)

    def batches_of(self, wanted: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """Yield rows by their numbers, in that order, in batches."""
        for first in range(0, len(wanted), self.rows_at_once):
            yield from self.at(wanted[first : first + self.rows_at_once])

    def vectors(self) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors (n, k) of all rows, in order, in blocks."""
        for block in self.blocks():
            yield self._vectors(block)

    def rows_of(self, ids: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the rows of documents, in order, and a mask of the ids that have any."""
        table = HashTable([string_keys(ids)])
        there = np.zeros(len(ids), dtype=np.bool_)
        found = list[NDArray[np.int64]]()
        for first in range(0, len(self), _IDS_AT_ONCE):
            some = self.documents.id_column(first, min(first + _IDS_AT_ONCE, len(self)))
            at = table.find(string_keys(some.combine_chunks()))
            found.append(first + np.flatnonzero(at >= 0))
            there[at[at >= 0]] = True
        return np.concatenate([np.empty(0, dtype=np.int64), *found]), there

    @cached_property
    def _embeddings(self) -> CorpusEmbeddings:
        return CorpusEmbeddings(self.store, self.record)

    def _vectors(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors (n, k) of rows."""
        vectors = np.empty((len(rows), self.whitening.k), dtype=np.float32)
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            some = slice(first, first + _ROWS_AT_ONCE)
            vectors[some] = self._few_vectors(rows[some])
        return vectors

    def _few_vectors(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        try:
            raw = self._embeddings.at(rows)
        except ArtifactError as error:
            if not self._is_pruned():
                raise
            raise ArtifactError(
                f"version {self.folder.name} was pruned while it was being pushed, and embeddings "
                f"of it are gone from {self.store.place}; push again, a newer version is published"
            ) from error
        if not np.isfinite(raw).all():
            raise ArtifactError(
                f"the store {self.store.place} holds NaN or infinity; encode the corpus again"
            )
        return unit_rows(self.whitening.apply(raw))

    def _is_pruned(self) -> bool:
        return not exists(self.folder) and read_current(self.root).version != self.folder.name


def _layout(schema: pa.Schema, k: int, config: PushConfig) -> Layout:
    ids = schema.field(ID).type
    kept = [pa.field(field.name, _taken(field.type)) for field in schema if field.name != ID]
    return Layout(
        pa.schema(
            [
                pa.field(ID, pa.int64() if pa.types.is_integer(ids) else pa.large_string()),
                pa.field(VECTOR, pa.list_(pa.float32(), k)),
                *kept,
            ]
        ),
        config.dtype,
        config.metric,
    )


def _taken(kind: pa.DataType) -> pa.DataType:
    """Return the plain type of a kept column, which every client of Arrow knows."""
    plain = without_views(kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind)
    return plain.value_type if pa.types.is_dictionary(plain) else plain
