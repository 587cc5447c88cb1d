"""Schema of the rows and columns of a corpus. Importing it loads nothing heavy."""

from typing import Annotated, Literal

from whiten_index.corpus.sharding import SHARD_ROWS
from whiten_index.options import CORPUS, Option, Positive, schema

OnBadRow = Literal["blank", "skip", "error"]


@schema
class CorpusColumns:
    """Rows and columns of a corpus."""

    text_columns: Annotated[
        tuple[str, ...],
        Option(
            "Text to encode; may be repeated, and is joined by a space.",
            CORPUS,
            flag="--text-column",
            needed=("embedding_column",),
        ),
    ] = ()
    embedding_column: Annotated[
        str | None, Option("List column of floats that takes the place of the encoder.", CORPUS)
    ] = None
    id_column: Annotated[
        str | None, Option("String or integer column that names the rows.", CORPUS)
    ] = None
    keep: Annotated[
        tuple[str, ...], Option("Metadata column kept with the index; may be repeated.", CORPUS)
    ] = ()
    row_filter: Annotated[
        str | None,
        Option("Use only rows that satisfy this, e.g. \"lang == 'en'\".", CORPUS, flag="--filter"),
    ] = None
    limit: Annotated[
        Positive | None, Option("Read only the first N rows, before --filter.", CORPUS)
    ] = None
    on_bad_row: Annotated[
        OnBadRow,
        Option(
            "skip or stop at unusable rows; blank skips rows without content and stops at damaged "
            "ones (null id, NaN, wrong width).",
            CORPUS,
        ),
    ] = "blank"
    shard_rows: Annotated[
        Positive, Option("Rows of a shard at most: the unit of resume and reuse.", CORPUS)
    ] = SHARD_ROWS
