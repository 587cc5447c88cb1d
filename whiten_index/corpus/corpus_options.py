"""Schema of the rows and columns of a corpus. Importing it loads nothing heavy."""

from typing import Literal

from whiten_index.corpus.sharding import SHARD_ROWS
from whiten_index.options import CORPUS, Positive, option, schema

OnBadRow = Literal["blank", "skip", "error"]


@schema
class CorpusColumns:
    """Rows and columns of a corpus."""

    text_columns: tuple[str, ...] = option(
        "Text to encode; may be repeated, and is joined by a space.",
        CORPUS,
        default=(),
        flag="--text-column",
        needed=("embedding_column",),
    )
    embedding_column: str | None = option(
        "List column of floats that takes the place of the encoder.", CORPUS, default=None
    )
    id_column: str | None = option(
        "String or integer column that names the rows.", CORPUS, default=None
    )
    keep: tuple[str, ...] = option(
        "Metadata column kept with the index; may be repeated.", CORPUS, default=()
    )
    row_filter: str | None = option(
        "Use only rows that satisfy this, e.g. \"lang == 'en'\".",
        CORPUS,
        default=None,
        flag="--filter",
    )
    limit: Positive | None = option(
        "Read only the first N rows, before --filter.", CORPUS, default=None
    )
    on_bad_row: OnBadRow = option(
        "skip or stop at unusable rows; blank skips rows without content and stops at damaged "
        "ones (null id, NaN, wrong width).",
        CORPUS,
        default="blank",
    )
    shard_rows: Positive = option(
        "Rows of a shard at most: the unit of resume and reuse.", CORPUS, default=SHARD_ROWS
    )
