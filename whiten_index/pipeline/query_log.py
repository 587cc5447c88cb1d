"""Query log: queries without judgements, on which a transform is fitted in place of documents.

The directions in which queries differ are those that separate documents for them. Documents also
differ in subjects that nobody searches for.
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from whiten_index.artifacts.files import open_file, reading, sha256_file
from whiten_index.artifacts.limits import check_expanded
from whiten_index.corpus.parquet_reader import SpanReader, check_footer, unpacked_bytes
from whiten_index.corpus.sharding import Span
from whiten_index.corpus.sources import SourceFile
from whiten_index.errors import ConfigError
from whiten_index.evaluation.label_table import LabelTable, reading_parquet

if TYPE_CHECKING:
    from whiten_index.pipeline.build_config import BuildConfig

_TEXT, EMBEDDING = "text", "embedding"
# Of a longer log so many are drawn: beyond a hundred for each dimension moments hardly change.
_MOST = 100_000


def read_log(config: "BuildConfig", *, whole: bool = True) -> LabelTable:
    """Return the column ``embedding``, or else ``text``, of the queries drawn; or only check it."""
    path = Path(str(config.query_log))
    with reading_parquet(path), contextlib.closing(SpanReader()) as reader:
        open_file(path).close()  # refuses a pipe, which would wait
        source = SourceFile(path.name, str(path), pafs.LocalFileSystem()).identified()
        with pq.ParquetFile(path) as file:
            metadata, names = file.metadata, file.schema_arrow.names
        check_footer(metadata)
        columns = {name: list[Any]() for name in (EMBEDDING, _TEXT) if name in names}
        table = LabelTable(path, columns, names, range(metadata.num_rows))
        column = table.need((EMBEDDING, _TEXT))
        if column == _TEXT and config.embedding_column is not None and config.model is None:
            raise ConfigError(
                f"{path} holds texts, and nothing is known to encode them with; name the model of "
                "the embedding column with --model, or give a column of embeddings"
            )
        if not whole:
            return table
        rng, most = np.random.default_rng(config.seed), min(len(table), _MOST)
        numbers = np.sort(rng.choice(len(table), most, replace=False))
        start, size, values = 0, 0, list[Any]()
        for group in range(metadata.num_row_groups):
            span = Span(group, 0, metadata.row_group(group).num_rows)
            for batch in reader.read(source, span, [column]):
                first, last = np.searchsorted(numbers, (start, start + len(batch)))
                taken = batch.take(pa.array(numbers[first:last] - start))
                check_expanded(size := size + unpacked_bytes(taken), source.packed)
                values += taken[column].to_pylist()
                start += len(batch)
    return LabelTable(path, {column: values}, names, numbers.tolist())


def log_digest(config: "BuildConfig") -> str | None:
    """Return the SHA-256 of the log, None without one."""
    if config.query_log is None:
        return None
    with reading(Path(config.query_log)):
        return sha256_file(Path(config.query_log))
