"""``ParquetCorpus``: plans shards from the footers, streams their rows as batches."""

from whiten_index.corpus.batches import ID
from whiten_index.corpus.corpus_config import CorpusConfig
from whiten_index.corpus.parquet_corpus import ParquetCorpus, RepeatedIdsError
from whiten_index.corpus.row_checks import OnBadRow
from whiten_index.corpus.row_filter import RowFilter
from whiten_index.corpus.sharding import (
    SHARD_BYTES,
    SHARD_ROWS,
    RowGroup,
    Shard,
    Span,
    plan_shards,
    plan_windows,
)
from whiten_index.corpus.sources import find_files, require_reachable

__all__ = [
    "ID",
    "SHARD_BYTES",
    "SHARD_ROWS",
    "CorpusConfig",
    "OnBadRow",
    "ParquetCorpus",
    "RepeatedIdsError",
    "RowFilter",
    "RowGroup",
    "Shard",
    "Span",
    "find_files",
    "plan_shards",
    "plan_windows",
    "require_reachable",
]
