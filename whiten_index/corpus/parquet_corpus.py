"""Parquet files read as batches, one shard at a time."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from whiten_index.artifacts.files import reading
from whiten_index.artifacts.limits import (
    LINE_BYTES,
    VECTOR_NUMBERS,
    LimitError,
    check_expanded,
    most_expanded,
)
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.artifacts.prefetch import blocks
from whiten_index.corpus.arrow_types import unpacked_bytes, without_views
from whiten_index.corpus.batches import ID, EmbeddingBatch, TextBatch, row_digests
from whiten_index.corpus.corpus_config import CorpusConfig, check_columns, check_same_types
from whiten_index.corpus.corpus_options import OnBadRow
from whiten_index.corpus.parquet_reader import (
    SpanReader,
    check_footer,
    footer_digest,
    open_parquet,
    unchanged,
)
from whiten_index.corpus.row_filter import RowFilter
from whiten_index.corpus.sharding import RowGroup, Shard, plan_shards
from whiten_index.corpus.sources import SourceFile, find_files
from whiten_index.errors import CorpusError, StorageError, require_config
from whiten_index.paths import shown

_SUSPECTS, _EXAMPLES = 1000, 3
_ID_BYTES = 1 << 14
# A footer may claim any number, and shards are planned by it.
_MOST_ROWS = 10**10
_FILE_THREADS = 8
_BLOCK_ROWS = 4096
# File systems store times in steps of up to two seconds.
_RACY_NS = 2_000_000_000


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


@dataclass(frozen=True)
class ParquetCorpus:
    """Parquet files read shard by shard, in memory bounded by one shard.

    Attributes:
        config: rows and columns.
        files: the files, in reading order.
        shards: the plan: a pure function of the files' footers.
        dim: width of the embedding column, None for a corpus of texts.
        fingerprints: of each file and of its columns read, empty if only reading it can show a
            change.

    Examples:
        >>> config = CorpusConfig(sources=("docs.parquet",), text_columns=("text",))
        >>> ParquetCorpus.open(config).rows
        60
    """

    config: CorpusConfig
    files: tuple[SourceFile, ...]
    shards: tuple[Shard, ...]
    dim: int | None
    fingerprints: tuple[str, ...]
    _filter: RowFilter | None = field(repr=False)
    _reader: SpanReader = field(default_factory=SpanReader, repr=False, compare=False)

    @classmethod
    def open(cls, config: CorpusConfig, *, dim: int | None = None) -> "ParquetCorpus":
        """Find the files, read their footers, check their columns, plan the shards.

        Args:
            config: rows and columns.
            dim: width of embeddings, by default that of the first. Others are bad rows.

        Raises:
            CorpusError: a file is missing or not Parquet, a column is missing or of a type that
                cannot be used, or there is no row.
            ConfigError: the row filter is not understood.
        """
        require_config(config, CorpusConfig)
        row_filter = RowFilter.parse(config.row_filter) if config.row_filter else None
        found = find_files(config.sources)
        columns = config.columns(*(row_filter.columns if row_filter else ()))
        now = time.time_ns()
        with ThreadPoolExecutor(_FILE_THREADS) as pool:
            read = list(pool.map(lambda file: _read_footer(file, config, columns), found))
        files = tuple(file for file, _, _ in read)
        check_same_types(files, [schema for _, _, schema in read], config)
        footers = [groups for _, groups, _ in read]
        fingerprints = tuple(_fingerprint(file, config, now=now) for file in files)
        shards = tuple(plan_shards(footers, shard_rows=config.shard_rows, limit=config.limit))
        if not shards:
            raise CorpusError(
                f"{', '.join(config.sources)} holds no rows; point to a corpus that does"
            )
        corpus = cls(config, files, shards, None, fingerprints, row_filter)
        if config.embedding_column is None:
            return corpus
        return replace(corpus, dim=dim or corpus._find_dim())

    @property
    def rows(self) -> int:
        """Rows planned, before any is skipped."""
        return sum(shard.rows for shard in self.shards)

    def require_unchanged(self) -> None:
        """Check all files, also those that another process read.

        Raises:
            CorpusError: one was written to since the corpus was opened, or is gone.
        """
        with ThreadPoolExecutor(_FILE_THREADS) as pool:
            list(pool.map(_require_unchanged, self.files))

    def batches(self) -> Iterator[TextBatch | EmbeddingBatch]:
        """Yield the whole corpus, one batch a shard; see ``require_unchanged``."""
        yield from map(self.read, self.shards)
        self.require_unchanged()

    def read(self, shard: Shard) -> TextBatch | EmbeddingBatch:
        """Read one shard, leave out what cannot be used, and count it by reason.

        Raises:
            CorpusError: the file is damaged, or a bad row is met and the choice is to stop.
        """
        columns = self.config.columns(*self._filtered)
        sieve = Sieve(
            self._read_columns(shard, columns),
            lambda row: f"row {self._row_id(shard, row)} of the corpus",
            self.config.on_bad_row,
        )
        if self._filter is not None:
            sieve.keep(self._passing(shard, sieve.table), "filtered")
        if self.config.id_column is not None:
            missing = np.asarray(sieve.table.column(self.config.id_column).is_null())
            sieve.drop(missing, "null_id", f"no {self.config.id_column}", blank=False)
        if self.config.embedding_column is not None:
            return self._embedding_batch(shard, sieve)
        return self._text_batch(shard, sieve)

    def check_ids(self) -> None:
        """Make sure that no two rows that the filter keeps share an id; needs 8 bytes a row.

        Raises:
            CorpusError: an id occurs twice, or the file is damaged.
        """
        column = self.config.id_column
        if column is None:
            return
        hashes = np.concatenate([self._id_hashes(shard) for shard in self.shards])
        hashes.sort()
        twice = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
        if len(twice):
            self._raise_duplicates(column, twice)

    def ids(self) -> Iterator[str | int]:
        """Yield the ids of the rows that the filter keeps, read without any text."""
        if self.config.id_column is not None:
            for shard in self.shards:
                yield from self._ids(shard)

    def _passing(self, shard: Shard, rows: pa.Table) -> NDArray[np.bool_]:
        assert self._filter is not None
        with reading(self.files[shard.file].path):
            return self._filter.mask(rows)

    @property
    def _filtered(self) -> tuple[str, ...]:
        return () if self._filter is None else self._filter.columns

    def _text_batch(self, shard: Shard, sieve: Sieve) -> TextBatch:
        texts = join_texts(sieve.table, self.config.text_columns)
        named = " and ".join(self.config.text_columns)
        blank = np.asarray(pc.equal(pc.utf8_length(texts), 0), dtype=bool)
        sieve.drop(blank, "blank_text", f"no text in {named}", blank=True)
        # A tokenizer takes ten times the memory of a text, before it is cut.
        long = np.asarray(pc.greater(pc.binary_length(texts), LINE_BYTES), dtype=bool)
        what = f"more than {LINE_BYTES:,} bytes of text in {named}"
        sieve.drop(long[~blank], "long_text", what, blank=False)
        kept = texts.filter(pa.array(~(blank | long))).to_pylist()
        return TextBatch(self._documents(shard, sieve), kept, shard.rows, sieve.skipped)

    def _embedding_batch(self, shard: Shard, sieve: Sieve) -> EmbeddingBatch:
        column, dim = self.config.embedding_column, self.dim
        assert column is not None
        assert dim is not None
        given = sieve.table.column(column)
        if column not in self.config.keep:
            # So that it is not held twice.
            sieve.table = sieve.table.drop_columns([column])
        array, widths = embedding_rows(given)
        empty = widths < 1
        sieve.drop(empty, "null_embedding", f"no {column}", blank=True)
        wrong = ~empty & (widths != dim)
        what = f"a {column} whose width is not {dim}, as that of other rows"
        sieve.drop(wrong[~empty], "wrong_width", what, blank=False)
        bad = empty | wrong
        matrix = embedding_matrix(array.filter(pa.array(~bad)) if bad.any() else array, dim)
        broken = rows_not_finite(matrix)
        sieve.drop(broken, "not_finite", f"a NaN or an infinity in {column}", blank=False)
        matrix = matrix[~broken] if broken.any() else matrix
        # Arrow keeps the memory of the pages it has decoded, three times that of the rows.
        pa.default_memory_pool().release_unused()
        return EmbeddingBatch(self._documents(shard, sieve), matrix, shard.rows, sieve.skipped)

    def _documents(self, shard: Shard, sieve: Sieve) -> pa.Table:
        table = sieve.table
        if self.config.id_column is not None:
            ids = _plain_ids(table.column(self.config.id_column))
        else:
            ids = pa.array([self._row_id(shard, int(row)) for row in sieve.positions], pa.string())
        names = [name for name in self.config.keep if name != ID]
        kept = [table.column(name) for name in names]
        columns = [column.cast(without_views(column.type)) for column in kept]
        return pa.table([ids, *columns], names=[ID, *names])

    def _row_id(self, shard: Shard, row: int) -> str:
        for span in shard.spans:
            if row < span.stop - span.start:
                return f"{self.files[shard.file].name}#{span.row_group}:{span.start + row}"
            row -= span.stop - span.start
        raise IndexError(row)

    def _read_columns(self, shard: Shard, columns: Sequence[str]) -> pa.Table:
        file, size, batches = self.files[shard.file], 0, list[pa.RecordBatch]()
        try:
            with unchanged(file):
                for span in shard.spans:
                    for batch in self._reader.read(file, span, columns):
                        # Damage that decodes all the same shows as text that is not UTF-8.
                        batch.validate(full=True)
                        # A filter writes out what a dictionary holds once.
                        size += max(int(batch.nbytes), unpacked_bytes(batch))
                        check_expanded(size, file.packed)
                        batches.append(batch)
            table = pa.Table.from_batches(batches) if batches else pa.table({})
            if table.num_rows != shard.rows:
                raise file.changed()
        except LimitError as error:
            self._reader.close()
            raise CorpusError(
                f"{file.path} cannot be read {shard.rows:,} rows at a time ({error}); take it out "
                "of the corpus, or pass a smaller --shard-rows"
            ) from error
        except (CorpusError, StorageError):
            self._reader.close()
            raise
        return table

    def _id_hashes(self, shard: Shard) -> np.ndarray[Any, np.dtype[np.uint64]]:
        digests = row_digests(str(value).encode() for value in self._ids(shard))
        return digests[:, :8].copy().view(np.uint64).ravel()

    def _ids(self, shard: Shard) -> list[Any]:
        assert self.config.id_column is not None
        columns = list(dict.fromkeys([self.config.id_column, *self._filtered]))
        table = self._read_columns(shard, columns)
        if self._filter is not None:
            table = table.filter(pa.array(self._passing(shard, table)))
        ids: list[Any] = _plain_ids(table.column(self.config.id_column)).drop_null().to_pylist()
        return ids

    def _raise_duplicates(self, column: str, twice: Any) -> None:
        """Look again at the few ids whose hashes met, since hashes may meet by chance."""
        times, places = Counter[Any](), dict[Any, dict[str, None]]()
        for shard in self.shards:
            suspects = np.isin(self._id_hashes(shard), twice[:_SUSPECTS])
            for value, suspect in zip(self._ids(shard), suspects, strict=True):
                if suspect:
                    times[value] += 1
                    places.setdefault(value, {})[self.files[shard.file].name] = None
        examples = [value for value, count in times.items() if count > 1][:_EXAMPLES]
        if examples:
            shown = ", ".join(map(repr, examples))
            named = list(dict.fromkeys(name for value in examples for name in places[value]))
            where = ", ".join(named[:_EXAMPLES]) + (" and others" * (len(named) > _EXAMPLES))
            raise CorpusError(
                f"{len(twice)} ids of column {column} occur more than once (such as {shown}), in "
                f"{where}; make them unique, filter the repeated rows out, or leave out --id-column"
            )

    def _find_dim(self) -> int:
        column = self.config.embedding_column
        assert column is not None
        seen = kept = 0
        columns = list(dict.fromkeys([column, *self._filtered]))
        for shard in self.shards:
            table = self._read_columns(shard, columns)
            if self._filter is not None:
                table = table.filter(pa.array(self._passing(shard, table)))
            seen, kept = seen + shard.rows, kept + table.num_rows
            _, widths = embedding_rows(table.column(column))
            if (widths > VECTOR_NUMBERS).any():
                raise CorpusError(
                    f"{self.files[shard.file].path} has more than {VECTOR_NUMBERS:,} numbers "
                    f"in a row of {column}; name a column of embeddings"
                )
            if (widths > 0).any():
                return int(widths[widths > 0][0])
        if not kept:
            raise CorpusError(
                f"none of the {seen} rows read can be used ({seen} filtered); check the row filter"
            )
        raise CorpusError(f"every value of {column} is null; name a column that holds embeddings")


def _require_unchanged(file: SourceFile) -> None:
    if file.by_fsspec:
        # Tags and dates of such servers may be of seconds alone: the footer may show a change.
        with unchanged(file), file.open() as source:
            open_parquet(file, source).close(force=True)
    file.require_unchanged()


def _read_footer(
    file: SourceFile, config: CorpusConfig, columns: Sequence[str]
) -> tuple[SourceFile, tuple[RowGroup, ...], pa.Schema]:
    file = file.identified()
    with (
        unchanged(file, fault="is not a readable Parquet file"),
        open_parquet(file, file.open()) as parquet,
    ):
        metadata, schema = parquet.metadata, parquet.schema_arrow
        check_footer(metadata)
        file = replace(file, footer=footer_digest(metadata))
        # Ids and kept columns do not count: asking for another one must not move the shards.
        wanted = {*config.text_columns, config.embedding_column or ""} - {""}
        indices = range(metadata.num_row_groups)
        groups = tuple(_describe_group(metadata.row_group(i), wanted) for i in indices)
    check_columns(file, schema, config, columns)
    rows = sum(group.rows for group in groups)
    if min((group.rows for group in groups), default=0) < 0 or rows > _MOST_ROWS:
        raise CorpusError(
            f"{file.path} is not a readable Parquet file (its footer claims {rows:,} rows, and "
            f"{_MOST_ROWS:,} is the limit for a file); restore it or split it"
        )
    size = sum(group.bytes for group in groups)
    if file.packed and size > (most := most_expanded(file.packed)):
        # A footer may claim any size, and texts of one template are packed to a thousandth: shards
        # that hold too much are refused when they are read.
        groups = tuple(replace(group, bytes=group.bytes * most // size) for group in groups)
    return file, groups, schema


def _fingerprint(file: SourceFile, config: CorpusConfig, *, now: int) -> str:
    """Return a digest that changes with a file or with the columns read."""
    # It is empty for a file so new that it may be written again under the same time.
    identity = file.identity
    assert identity is not None
    if identity.modified is None or identity.modified > now - _RACY_NS:
        return ""
    return fingerprint(
        {
            "name": file.name,
            # Another file may have the name, the size and, if it was copied, the time of this one.
            "place": file.place,
            "size": identity.size,
            "modified": identity.modified,
            "tag": identity.tag,
            # Not the inode, which some network file systems change each time.
            "changed": identity.local and identity.local[1],
            "footer": file.footer,
            "columns": config.source_identity() | {"sources": []},
            "id_column": config.id_column,
            "keep": list(config.keep),
            "on_bad_row": config.on_bad_row,
            "shard_rows": config.shard_rows,
        }
    )


def _describe_group(group: Any, wanted: set[str]) -> RowGroup:
    # A leaf of the schema may be inside a nested column.
    inside = tuple(f"{name}." for name in wanted)
    chunks = map(group.column, range(group.num_columns))
    sizes = (c.total_uncompressed_size for c in chunks if f"{c.path_in_schema}.".startswith(inside))
    return RowGroup(int(group.num_rows), int(sum(sizes)))


def _plain_ids(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return ids as int64 or string, whatever width or encoding the file chose."""
    for chunk in column.chunks if not pa.types.is_integer(column.type) else ():
        texts = chunk
        if pa.types.is_dictionary(chunk.type):
            # It may name one text in every row, or have texts of rows that were filtered out.
            texts = chunk.dictionary.take(pc.unique(chunk.indices))
        lengths = pc.binary_length(texts.cast(pa.large_string()))
        longest = pc.max(lengths).as_py() or 0
        if longest > _ID_BYTES:
            found = texts[lengths.index(longest).as_py()].as_py()
            raise CorpusError(
                f"the id {shown(found)} has {longest:,} bytes, and {_ID_BYTES:,} are the most; use "
                "shorter ids"
            )
    try:
        return column.cast(pa.int64() if pa.types.is_integer(column.type) else pa.string())
    except pa.ArrowInvalid as error:
        raise CorpusError(
            f"an id does not fit ({str(error).splitlines()[0]}); use ids below 2**63 or strings"
        ) from error


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
    found = (~np.isfinite(block).all(axis=1) for block in blocks(matrix, _BLOCK_ROWS))
    return np.concatenate([np.empty(0, dtype=np.bool_), *found])
