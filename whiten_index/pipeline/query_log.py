"""Query log: queries without judgements, on which a transform is fitted in place of documents.

The directions in which queries differ are those that tell documents apart for them. Documents
also differ in what nobody asks for.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import reading, sha256_file
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.judgements import to_text
from whiten_index.evaluation.label_table import PARQUET, LabelTable
from whiten_index.pipeline.canary_file import raw_embedding
from whiten_index.pipeline.shard_encoding import LazyEncoder
from whiten_index.search.query_encoder import query_embeddings
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.spectrum import unit_rows

if TYPE_CHECKING:
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.encode import EncodeReport

_TEXT, _EMBEDDING = "text", "embedding"
# Of a longer log so many are drawn: beyond a hundred for each dimension moments hardly change.
_MOST = 100_000


def query_log_moments(config: "BuildConfig", encoded: "EncodeReport") -> Moments:
    """Return the moments of the queries of a log, each as often as it was asked."""
    path, dim = Path(str(config.query_log)), encoded.store.dim
    table = LabelTable.read(path, (PARQUET,), (_TEXT, _EMBEDDING))
    column = table.need((_EMBEDDING, _TEXT))
    drawn = np.random.default_rng(config.seed).permutation(len(table))[:_MOST]
    rows: NDArray[np.floating]
    if column == _EMBEDDING:
        parse = partial(raw_embedding, dim=dim)
        rows = np.array([table.parse(column, row, parse) for row in np.sort(drawn)], np.float64)
    else:
        texts = [table.parse(column, row, to_text) for row in np.sort(drawn)]
        if config.embedding_column is not None and config.model is None:
            raise ConfigError(
                f"{path} holds texts, and nothing is known to encode them with; name the model of "
                "the embedding column with --model, or give a column of embeddings"
            )
        encoder = LazyEncoder(config.encoder_config())
        rows = query_embeddings(
            encoded.store, texts, lambda some: encoder().encode_queries(some), encoded.stages
        ).astype(np.float64)
    return Moments.of(unit_rows(rows) if config.normalize_input else rows)


def log_digest(config: "BuildConfig") -> str | None:
    """Return the SHA-256 of the log, None without one."""
    if config.query_log is None:
        return None
    try:
        with reading(Path(config.query_log)):
            return sha256_file(Path(config.query_log))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise CorpusError(
            f"the query log {config.query_log} is not there ({error.strerror}); restore it, or "
            "build again without --query-log"
        ) from error
