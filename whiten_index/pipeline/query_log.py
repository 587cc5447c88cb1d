"""Query log: queries without judgements, on which a transform is fitted in place of documents.

The directions in which queries differ are those that separate documents for them. Documents also
differ in subjects that nobody searches for.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from whiten_index.artifacts.files import open_file, reading, sha256_file
from whiten_index.artifacts.limits import check_expanded
from whiten_index.corpus.arrow_types import unpacked_bytes
from whiten_index.corpus.parquet_reader import SpanReader, check_footer
from whiten_index.corpus.sharding import Span
from whiten_index.corpus.sources import SourceFile
from whiten_index.errors import ConfigError
from whiten_index.evaluation.label_table import LabelTable, reading_parquet

if TYPE_CHECKING:
    from whiten_index.pipeline.build_config import BuildConfig

TEXT, EMBEDDING = "text", "embedding"
# Of a longer log so many are drawn: beyond a hundred for each dimension moments hardly change.
_MOST = 100_000


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


def log_digest(config: "BuildConfig") -> str | None:
    """Return the SHA-256 of the log, None without one."""
    if config.query_log is None:
        return None
    with reading(Path(config.query_log)):
        return sha256_file(Path(config.query_log))
