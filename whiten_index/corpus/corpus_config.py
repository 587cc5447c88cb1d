"""Rows and columns of a corpus, and checks that a file has them."""

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from whiten_index.corpus.arrow_types import is_strange, repeated_field
from whiten_index.corpus.batches import ID, PASSAGE_COLUMNS, PASSAGE_TEXT
from whiten_index.corpus.corpus_options import CorpusColumns
from whiten_index.corpus.sources import SourceFile, canonical
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.options import schema


@schema
class CorpusConfig(CorpusColumns):
    """Rows and columns of a corpus.

    Attributes:
        sources: Parquet files, folders, globs or URIs.
        passages: tokens and overlap of the passages that texts are cut into after reading, None
            for whole texts; no text column is then kept.

    Examples:
        >>> CorpusConfig(sources=("docs.parquet",), text_columns=("title", "text")).passages is None
        True
    """

    sources: tuple[str, ...]
    passages: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if bool(self.text_columns) == bool(self.embedding_column):
            both = ", not both" if self.text_columns else ""
            raise ConfigError(
                f"name what to read: --text-column (one or more) or --embedding-column{both}"
            )
        if len(set(self.keep)) < len(self.keep):
            twice = next(name for name in self.keep if self.keep.count(name) > 1)
            raise ConfigError(f"--keep names {twice} more than once; name each column once")
        if ID in self.keep and self.id_column != ID:
            raise ConfigError(
                "a kept column cannot be called 'id', the name of the id itself; "
                "pass --id-column id, or rename the column"
            )
        # Also without passages: readers detect passages by these names.
        if taken := [name for name in self.keep if name in PASSAGE_COLUMNS]:
            raise ConfigError(
                f"a kept column cannot be called {taken[0]!r}: --passage-tokens adds columns named "
                f"{', '.join(PASSAGE_COLUMNS)}; rename yours, or leave it out of --keep"
            )
        if self.passages is not None and self.embedding_column is not None:
            raise ConfigError(
                f"--passage-tokens cuts texts, and --embedding-column {self.embedding_column} has "
                "none; name a --text-column, or leave --passage-tokens out"
            )
        # Kept columns are repeated with each passage; a long text would grow quadratically.
        texts = [name for name in self.keep if name in self.text_columns]
        if self.passages is not None and texts:
            raise ConfigError(
                f"--keep {texts[0]} would repeat the whole text beside each of its passages; leave "
                "it out of --keep: --passage-tokens keeps each passage's own text as "
                f"{PASSAGE_TEXT}"
            )

    def source_identity(self) -> dict[str, Any]:
        """Return the identity of a corpus in a store."""
        passages = {} if self.passages is None else {"passages": list(self.passages)}
        return {
            "sources": [canonical(source) for source in self.sources],
            "text_columns": list(self.text_columns),
            "embedding_column": self.embedding_column,
            "row_filter": self.row_filter,
            "limit": self.limit,
            **passages,
        }

    def columns(self, *filtered: str) -> list[str]:
        """Return the columns to read, each once, with those of the row filter."""
        single = [name for name in (self.id_column, self.embedding_column) if name is not None]
        return list(dict.fromkeys((*single, *self.text_columns, *self.keep, *filtered)))


def check_columns(
    file: SourceFile, schema: pa.Schema, config: CorpusConfig, columns: Sequence[str]
) -> None:
    """Check that a file has the columns, of types that can be used."""
    for name in columns:
        if schema.names.count(name) != 1:
            has = "more than one column" if name in schema.names else "no column"
            raise CorpusError(
                f"{file.path} has {has} {name!r}; its columns are {', '.join(schema.names)}"
            )
    own = {config.id_column, config.embedding_column, *config.text_columns}
    for name in set(columns) - own:
        if is_strange(schema.field(name).type):
            raise CorpusError(
                f"column {name!r} of {file.path} is {schema.field(name).type}, which no index has; "
                "rewrite it in plain types, or leave it out of --keep and --filter"
            )
    for name in config.keep:
        if (field := repeated_field(schema.field(name).type)) is not None:
            raise CorpusError(
                f"column {name!r} of {file.path} holds records with two fields {field!r}, which "
                "nothing could tell apart; rename one of them, or leave the column out of --keep"
            )
    wanted: list[tuple[str | None, Callable[[pa.DataType], bool], str]] = [
        *((name, _is_text, "a text column takes strings") for name in config.text_columns),
        (
            config.id_column,
            lambda kind: _is_text(kind) or pa.types.is_integer(kind),
            "an id column takes strings or integers",
        ),
        (
            config.embedding_column,
            _is_embedding,
            "an embedding column takes lists of float16, float32 or float64",
        ),
    ]
    for column, fits, hint in wanted:
        if column is not None and not fits(schema.field(column).type):
            fitting = [field.name for field in schema if fits(field.type)]
            offer = f"columns that fit: {', '.join(fitting)}" if fitting else "no column of it fits"
            raise CorpusError(
                f"column {column!r} of {file.path} is {schema.field(column).type}; {hint}; {offer}"
            )


def check_same_types(
    files: Sequence[SourceFile], schemas: Sequence[pa.Schema], config: CorpusConfig
) -> None:
    """Check that ids and kept columns have one type in all files, before any is encoded."""

    def kept_type(schema: pa.Schema, name: str) -> Any:
        kind = schema.field(name).type
        # Ids are kept as int64 or string, whatever their width.
        return bool(pa.types.is_integer(kind)) if name == config.id_column else kind

    ids = () if config.id_column is None else (config.id_column,)
    for name in dict.fromkeys((*ids, *config.keep)):
        for file, found in zip(files, schemas, strict=True):
            if kept_type(found, name) != kept_type(schemas[0], name):
                raise CorpusError(
                    f"column {name!r} is {schemas[0].field(name).type} in {files[0].path} and "
                    f"{found.field(name).type} in {file.path}; rewrite the files with one type"
                )


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _is_embedding(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in lists) and bool(pa.types.is_floating(kind.value_type))
