"""Files of queries without judgements: canary queries, and a query log.

A new version must answer canary queries before it is published. A transform is fitted on a log in
place of documents: the directions in which queries differ are those that separate documents for
them, and documents also differ in subjects that nobody searches for.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from numpy.typing import NDArray

from whiten_index.artifacts.files import open_file, reading, sha256_file
from whiten_index.artifacts.limits import check_expanded
from whiten_index.corpus.arrow_types import unpacked_bytes
from whiten_index.corpus.parquet_reader import SpanReader, check_footer
from whiten_index.corpus.sharding import Span
from whiten_index.corpus.sources import SourceFile
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.label_table import PARQUET, LabelTable, reading_parquet, to_text
from whiten_index.paths import cut

if TYPE_CHECKING:
    from whiten_index.pipeline.build_config import BuildConfig

TEXT, EMBEDDING, _EXPECTED = "text", "embedding", "expected"
# Of a longer log so many are drawn: beyond a hundred for each dimension moments hardly change.
_MOST = 100_000
# Each query is compared with every row of the index.
_MOST_QUERIES = 10_000
# A search squares numbers in float32, and sums them up.
_LARGEST = 1e15


@dataclass(frozen=True, eq=False)
class CanaryFile:
    """Canary queries, as texts or raw embeddings (q, d), and the ids that each must find."""

    texts: tuple[str, ...] | None
    embeddings: NDArray[np.float32] | None
    expected: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.expected)

    @classmethod
    def read(cls, path: Path | str, *, dim: int) -> "CanaryFile":
        """Read the column ``text`` or ``embedding`` (of width ``dim``), and ``expected`` if any.

        ``expected`` holds an id, or a list of ids, strings or integers as in the index.
        """
        table = LabelTable.read(Path(path), (PARQUET,), (TEXT, EMBEDDING, _EXPECTED))
        asked = [column for column in (TEXT, EMBEDDING) if column in table.columns]
        if len(asked) != 1:
            has = "both columns" if asked else "neither column"
            raise table.lacks(f"{has} {TEXT} and {EMBEDDING}, of which queries need one")
        if odd := [column for column in table.names if column not in table.columns]:
            # A column of ids under another name would be thought to be looked at.
            raise CorpusError(
                f"{path} has {', '.join(odd)}, which no gate reads; ids that a query must find "
                f"come in column {_EXPECTED}: rename or drop it"
            )
        if len(table) > _MOST_QUERIES:
            raise CorpusError(f"{path} holds {len(table)} queries; keep {_MOST_QUERIES} at most")
        rows = range(len(table))
        expected: tuple[tuple[str, ...], ...] = ((),) * len(table)
        if _EXPECTED in table.columns:
            expected = tuple(table.parse(_EXPECTED, row, _ids) for row in rows)
            if not any(expected):
                raise CorpusError(
                    f"column {_EXPECTED} of {path} names no document; fill or drop it"
                )
        if asked == [TEXT]:
            return cls(tuple(table.parse(TEXT, row, to_text) for row in rows), None, expected)
        parse = partial(raw_embedding, dim=dim)
        embeddings = np.array([table.parse(EMBEDDING, row, parse) for row in rows], np.float32)
        return cls(None, embeddings, expected)

    def query_name(self, place: int) -> str:
        """Return the name of a query in messages."""
        said = "" if self.texts is None else f" ({cut(' '.join(self.texts[place].split()))!r})"
        return f"row {place + 1} of the canary file{said}"


def raw_embedding(value: Any, *, dim: int) -> NDArray[np.float64]:
    """Return a raw embedding (dim,) of a query; raise ``ValueError`` for anything else."""
    numbers = isinstance(value, list) and all(isinstance(each, float | int) for each in value)
    if not numbers or len(value) != dim:
        raise ValueError(f"{dim} numbers, as the embeddings of the index have")
    row = np.array(value, dtype=np.float64)
    with np.errstate(over="ignore"):
        if not np.linalg.norm(row) < _LARGEST:
            raise ValueError("numbers that float32 can be searched with")
    return row


def _ids(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(each, bool) or not isinstance(each, str | int) for each in values):
        raise ValueError("ids that are strings or integers")
    return tuple(dict.fromkeys(map(str, values)))


def check_log(config: "BuildConfig") -> tuple[SourceFile, pq.FileMetaData, str]:
    """Return the file of a log, its footer and the column that is read: embedding, or else text."""
    path = Path(str(config.query_log))
    with reading_parquet(path):
        open_file(path).close()  # refuses a pipe, which would wait
        source = SourceFile(path.name, str(path), pafs.LocalFileSystem()).identified()
        with pq.ParquetFile(path) as file:
            metadata, names = file.metadata, file.schema_arrow.names
        check_footer(metadata)
    columns = {name: list[Any]() for name in (EMBEDDING, TEXT) if name in names}
    column = LabelTable(path, columns, names, range(metadata.num_rows)).need((EMBEDDING, TEXT))
    if column == TEXT and config.embedding_column is not None and config.model is None:
        raise ConfigError(
            f"{path} holds texts, and nothing is known to encode them with; name the model of "
            "the embedding column with --model, or give a column of embeddings"
        )
    return source, metadata, column


def read_log(config: "BuildConfig") -> Iterator[LabelTable]:
    """Yield the one column that is read, of the queries drawn, in parts that fit in memory."""
    source, metadata, column = check_log(config)
    rng, rows = np.random.default_rng(config.seed), metadata.num_rows
    numbers = np.sort(rng.choice(rows, min(rows, _MOST), replace=False))
    path, start, size = Path(source.path), 0, 0
    with reading_parquet(path), contextlib.closing(SpanReader()) as reader:
        for group in range(metadata.num_row_groups):
            span = Span(group, 0, metadata.row_group(group).num_rows)
            for batch in reader.read(source, span, [column]):
                first, last = np.searchsorted(numbers, (start, start + len(batch)))
                taken = batch.take(pa.array(numbers[first:last] - start))
                check_expanded(size := size + unpacked_bytes(taken), source.packed)
                if len(taken):
                    found = {column: taken[column].to_pylist()}
                    yield LabelTable(path, found, [column], numbers[first:last].tolist())
                start += len(batch)
        if start != rows:
            raise OSError(f"its footer says {rows:,} rows, and it has {start:,}")


def log_digest(config: "BuildConfig") -> str | None:
    """Return the SHA-256 of the log, None without one."""
    if config.query_log is None:
        return None
    with reading(Path(config.query_log)):
        return sha256_file(Path(config.query_log))
