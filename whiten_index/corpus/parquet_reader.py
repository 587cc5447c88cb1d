"""Reading of Parquet files, with a check that nothing writes to them meanwhile."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from whiten_index.artifacts.files import reading
from whiten_index.corpus.sharding import Span
from whiten_index.corpus.sources import SourceFile
from whiten_index.errors import CorpusError

_BATCH_ROWS = 4096
_BUFFER = 1 << 20


@contextlib.contextmanager
def unchanged(file: SourceFile, *, fault: str = "is damaged") -> Iterator[None]:
    """Check after the block that a file is still the one that was listed; for all reading.

    Args:
        file: with its identity.
        fault: what to say of a file that cannot be read.

    Raises:
        CorpusError: the file changed since its identity was taken, or is damaged.
        StorageError: the system does not let it be read.
    """
    try:
        with reading(file.path):
            yield
    except (OSError, pa.ArrowException) as error:
        # What is half of one file and half of another looks damaged.
        file.require_unchanged()
        raise CorpusError(
            f"{file.path} {fault} ({str(error).splitlines()[0][:160]}); restore the file or take "
            "it out of the corpus, then run the same command again"
        ) from error
    file.require_unchanged()


def open_parquet(file: SourceFile) -> pq.ParquetFile:
    """Open a file so that its columns are streamed, not loaded a row group at a time.

    Raises:
        CorpusError: the footer is not the one that was read first.
    """
    source = file.filesystem.open_input_file(file.path)
    parquet = pq.ParquetFile(
        source, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True
    )
    # Another process has no ctime to go by.
    weak = file.identity is None or file.identity.local is None
    if file.footer and weak and footer_digest(parquet.metadata) != file.footer:
        parquet.close(force=True)
        raise file.changed()
    return parquet


def footer_digest(metadata: pq.FileMetaData) -> str:
    """Return a digest of all that a footer says."""
    footer = pa.BufferOutputStream()
    metadata.write_metadata_file(footer)
    return hashlib.sha256(footer.getvalue()).hexdigest()


class SpanReader:
    """Reads spans in order in one pass; an earlier span is read from the start of its row group.

    One open file and one batch are held between calls. Not to be shared between threads.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._file: pq.ParquetFile | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._pending: pa.RecordBatch | None = None
        self._position = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # An open file stays behind: another process opens its own reader.
        return SpanReader, ()

    def read(
        self, file: SourceFile, span: Span, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ``span``, ``columns`` in the order given."""
        key = (file.place, span.row_group, tuple(columns))
        if key != self._key or span.start < self._position:
            self._open(file, span, columns, key)
        while self._position < span.stop:
            batch = self._pending if self._pending is not None else next(self._batches, None)
            if batch is None:
                return
            end = self._position + batch.num_rows
            start, stop = max(span.start, self._position), min(span.stop, end)
            if start < stop:
                yield batch.slice(start - self._position, stop - start).select(list(columns))
            used = max(min(span.stop, end) - self._position, 0)
            self._pending = batch.slice(used) if used < batch.num_rows else None
            self._position += used

    def close(self) -> None:
        """Let go of the open file."""
        if self._file is not None:
            self._file.close()
        self._key = self._file = self._pending = None

    def _open(self, file: SourceFile, span: Span, columns: Sequence[str], key: Any) -> None:
        self.close()
        self._file = open_parquet(file)
        self._batches = self._file.iter_batches(
            batch_size=_BATCH_ROWS, row_groups=[span.row_group], columns=list(columns)
        )
        self._position, self._key = 0, key
