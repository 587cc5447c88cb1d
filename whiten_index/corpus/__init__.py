"""``ParquetCorpus``: plans shards from the footers, streams their rows as batches."""

from whiten_index.corpus.batches import ID
from whiten_index.corpus.config import CorpusConfig
from whiten_index.corpus.expression import RowFilter
from whiten_index.corpus.parquet import ParquetCorpus, RepeatedIdsError
from whiten_index.corpus.plan import (
    SHARD_BYTES,
    SHARD_ROWS,
    RowGroup,
    Shard,
    Span,
    plan_shards,
    plan_windows,
)
from whiten_index.corpus.rows import OnBadRow
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
