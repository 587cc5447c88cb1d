"""Reading of Parquet files, with a check that nothing writes to them meanwhile."""

import contextlib
import hashlib
import io
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from whiten_index.artifacts.limits import check_expanded
from whiten_index.corpus.arrow_types import unpacked_bytes
from whiten_index.corpus.sharding import Span
from whiten_index.corpus.sources import SourceFile, asking, to_parquet
from whiten_index.errors import CorpusError, StorageError

_BATCH_ROWS, _FEW_ROWS = 4096, 16
# A batch of texts has at most this size, however often it names one text.
_BATCH_BYTES = 64 << 20
# Lists and wide rows may take this much.
_UNPACKED_BYTES = 1 << 30
_BUFFER = 1 << 20
# Bytes of a number by its type in Parquet; 8 by any other.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}


@contextlib.contextmanager
def unchanged(file: SourceFile, *, fault: str = "is damaged") -> Iterator[None]:
    """Check after the block that a file is still the one that was listed."""
    try:
        with asking(file.path, content=True):
            yield
    except StorageError:
        # A server that has another file by now may not have its ranges.
        file.require_unchanged()
        raise
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        # Half of one file and half of another looks damaged.
        file.require_unchanged()
        if isinstance(error, FileNotFoundError):
            raise file.changed() from error
        if converted := to_parquet(file.filesystem, file.path):
            raise CorpusError(f"{file.path} is not a Parquet file{converted}") from error
        raise CorpusError(
            f"{file.path} {fault} ({str(error).splitlines()[0][:160]}); restore the file or take "
            "it out of the corpus, then run the same command again"
        ) from error
    file.require_unchanged()


def _streamed(source: pa.NativeFile, **options: Any) -> pq.ParquetFile:
    """Open a file whose columns are streamed, not loaded a row group at a time."""
    return pq.ParquetFile(
        source, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True, **options
    )


def open_parquet(file: SourceFile, source: pa.NativeFile) -> pq.ParquetFile:
    """Return the Parquet file in an open file."""
    parquet = _streamed(source)
    # Another process has no ctime to go by.
    weak = file.identity is None or file.identity.local is None
    if file.footer and weak and footer_digest(parquet.metadata) != file.footer:
        parquet.close(force=True)
        raise file.changed()
    return parquet


class _Unread(io.BytesIO):
    """A large source that ends where it is read."""

    def tell(self) -> int:
        return 1 << 62

    def read(self, _: int | None = -1) -> bytes:
        raise EOFError


def check_footer(metadata: pq.FileMetaData) -> None:
    """Raise ``OSError`` for a footer with a column that is encrypted or contradicts itself.

    To describe such a column ends the process. To plan its reading, which is done here, does not.
    """
    with contextlib.suppress(EOFError):
        next(pq.ParquetFile(_Unread(), metadata=metadata, pre_buffer=True).iter_batches(), None)


def chunks_of(
    metadata: pq.RowGroupMetaData, names: Collection[str]
) -> Iterator[tuple[int, pq.ColumnChunkMetaData]]:
    """Yield number and chunk of all leaves below these columns, whose names may have dots."""
    starts = tuple(f"{name}." for name in names)
    for index in range(metadata.num_columns):
        chunk = metadata.column(index)
        if f"{chunk.path_in_schema}.".startswith(starts):
            yield index, chunk


def footer_digest(metadata: pq.FileMetaData) -> str:
    """Return a digest of a whole footer."""
    footer = pa.BufferOutputStream()
    metadata.write_metadata_file(footer)
    return hashlib.sha256(footer.getvalue()).hexdigest()


class SpanReader:
    """Reads spans in order in one pass; an earlier span is read from the start of its row group.

    One open file and one batch are held between calls. Not to be shared between threads. The first
    batch of a file has one row, and rows are added as long as batches stay small: what a footer
    says of sizes, encodings and dictionaries may be wrong.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._source: pa.NativeFile | None = None
        self._file: pq.ParquetFile | None = None  # in the source
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._pending: pa.RecordBatch | None = None
        self._position = 0
        self._rows = self._most = 1  # of a batch

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens its own file.
        return SpanReader, ()

    def read(
        self, file: SourceFile, span: Span, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ``span``, ``columns`` in the order given."""
        key = (file.place, span.row_group, tuple(columns))
        if key != self._key or span.start < self._position:
            # A footer may name a hundred thousand row groups, and takes long to read.
            if self._source is None or self._key is None or self._key[0] != file.place:
                self.close()
                self._source = file.open()
            if self._key is None or self._key[::2] != key[::2]:
                self._rows = 1
            self._key, self._pending = None, None
            self._file = self._file or open_parquet(file, self._source)
            group, names = span.row_group, list(columns)
            self._most = _rows_at_once(file, self._source, self._file, group, names)
            self._rows = min(self._rows, self._most)
            self._batches = self._file.iter_batches(self._rows, row_groups=[group], columns=names)
            self._position, self._key = 0, key
        while self._position < span.stop:
            batch = self._pending if self._pending is not None else self._next()
            if batch is None:
                return
            end = self._position + batch.num_rows
            start, stop = max(span.start, self._position), min(span.stop, end)
            if start < stop:
                yield batch.slice(start - self._position, stop - start).select(list(columns))
            used = max(min(span.stop, end) - self._position, 0)
            self._pending = batch.slice(used) if used < batch.num_rows else None
            self._position += used

    def _next(self) -> pa.RecordBatch | None:
        batch = next(self._batches, None)
        if self._file is not None and batch is not None:
            # See below of dictionaries that stay.
            kinds = enumerate(batch.schema.types)
            plain = batch.select([i for i, kind in kinds if not pa.types.is_dictionary(kind)])
            fitting = int(_BATCH_BYTES * batch.num_rows / max(unpacked_bytes(plain), 1))
            self._rows = max(1, min(_FEW_ROWS * self._rows, fitting, self._most))
            # An iterator of batches asks for their rows each time.
            self._file.reader.set_batch_size(self._rows)
        return batch

    def close(self) -> None:
        """Close the open file."""
        self._batches = iter(())
        if self._source is not None:
            # The Parquet file leaves a source open that it was given.
            self._source.close()
        self._key = self._source = self._file = self._pending = None


def _rows_at_once(
    file: SourceFile, source: pa.NativeFile, parquet: pq.ParquetFile, group: int, wanted: list[str]
) -> int:
    """Return the rows of a batch: fewer if they are wide, or have long texts or dictionaries."""
    # A few bytes of a file name a value of its dictionary thousands of times. The first row is
    # decoded together with the dictionary of each column of texts, without a copy for each row.
    metadata, rows = parquet.metadata.row_group(group), _BATCH_ROWS
    stay = [each.name for each in parquet.schema_arrow if pa.types.is_dictionary(each.type)]
    texts, lists, values, listed, width = list[str](), list[str](), 1.0, 0, 0.0
    for index, chunk in chunks_of(metadata, wanted):
        each = chunk.num_values / max(metadata.num_rows, 1)
        if chunk.physical_type == "BYTE_ARRAY":
            # Each row may repeat the row before, which no row of the column is longer than.
            same = 1 if "DELTA_BYTE_ARRAY" in chunk.encodings else metadata.num_rows
            most = _BATCH_BYTES * same // max(chunk.total_uncompressed_size, 1)
            rows = min(rows, max(_FEW_ROWS, most))
            # Each batch has a copy of a dictionary that stays one: fewer rows would take more.
            if chunk.has_dictionary_page and chunk.path_in_schema not in stay:
                (lists if each > 1 else texts).append(chunk.path_in_schema)
                values = max(values, each)
                listed = max(listed, chunk.num_values if each > 1 else 0)
            continue
        size = parquet.schema.column(index).length or _WIDTHS.get(chunk.physical_type, 8)
        width += size * each
        if each > 1:
            # One row may have them all.
            check_expanded(chunk.num_values * size, file.packed)
    # What a footer says of the size of a column may be wrong.
    packed = _streamed(source, metadata=parquet.metadata, read_dictionary=texts + lists)
    longest = [_longest_of(packed, group, some) if some else 0 for some in (texts, lists)]
    if longest[1] * listed > _UNPACKED_BYTES:
        # One row may have them all.
        again = packed.iter_batches(_BATCH_ROWS, row_groups=[group], columns=lists)
        check_expanded(sum(map(unpacked_bytes, again)), file.packed)
    rows = min(rows, int(_BATCH_BYTES / max(sum(longest) * values, 1)))
    if width * rows > _UNPACKED_BYTES:
        rows = int(_BATCH_BYTES / width)
    return max(1, rows)


def _longest_of(packed: pq.ParquetFile, group: int, columns: list[str]) -> int:
    """Return the bytes of the longest texts of the dictionaries of a row group."""
    first = packed.iter_batches(batch_size=1, row_groups=[group], columns=columns)
    return sum(_longest(array) for batch in itertools.islice(first, 1) for array in batch.columns)


def _longest(array: pa.Array) -> int:
    """Return the bytes of the longest text of a dictionary, at any depth."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return pc.max(pc.binary_length(array.dictionary)).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(_longest, array.flatten()))
    return _longest(array.values) if pa.types.is_nested(kind) else 0
