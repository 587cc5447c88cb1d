"""Configuration of a push. Importing it loads nothing heavy."""

import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from whiten_index.errors import ConfigError
from whiten_index.options import CORPUS, Positive, Share, option, schema
from whiten_index.paths import as_place
from whiten_index.vectordb.registry import require_database

PARQUET, ARROW, NPY = ENDINGS = (".parquet", ".arrow", ".npy")
DATABASE, _ROWS = "Database", "Rows"


@schema
class PushConfig:
    """Configuration of a push.

    Attributes:
        index: folder of the index, whose published version is pushed.
        options: of the database's index and load, such as ``{"m": 16}``.

    The other attributes are the options of ``whiten-index push``.

    Examples:
        >>> PushConfig(index="index", to="vectors.parquet").dtype
        'float32'
    """

    index: str
    to: str = option(
        "postgresql://user@host/database, qdrant://host:6333, qdrant:///folder, "
        "lancedb:///folder, milvus://host:19530, milvus:///file.db, duckdb:///file.duckdb, "
        "sqlite:///file.sqlite; qdrant+https:// and milvus+https:// for TLS; or a file .parquet, "
        ".arrow or .npy.",
        DATABASE,
    )
    table: str | None = option(
        "Table that users query; a database needs it.", DATABASE, default=None
    )
    store: str | None = option(
        "Folder of the raw embeddings.", CORPUS, default=None, shown="where they were"
    )
    k: Positive | None = option(
        "Push the first N numbers of each vector.", _ROWS, default=None, shown="all"
    )
    dtype: Literal["float32", "float16"] = option(
        "Precision of the vectors there.", _ROWS, default="float32"
    )
    metric: Literal["cosine", "ip"] | None = option(
        "Similarity that ranks rows.",
        _ROWS,
        default=None,
        shown="cosine; ip for an index by dot product",
    )
    full: bool = option("Push all rows where the changed ones would do.", _ROWS, default=False)
    check: int = option("Rows compared before the swap; 0: counted.", _ROWS, default=100, ge=0)
    max_shrink: Share = option(
        "Share of the rows there that may be gone, else nothing is pushed.", _ROWS, default=0.2
    )
    batch_rows: Positive | None = option(
        "Rows sent at once.", _ROWS, default=None, shown="64 MB of vectors"
    )
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check address and options together, without the client of the database."""
        as_place(self.index, what="the index")
        options = {name: _text(f"--option {name}", value) for name, value in self.options.items()}
        object.__setattr__(self, "options", options)
        _text("--to", self.to)
        _text("--table", self.table or "none")
        if self.to_file:
            self._require_file_options()
            return
        require_database(self.to, options)
        if not self.table:
            raise ConfigError(
                "a database needs the name of a table or collection; give --table NAME"
            )

    @property
    def to_file(self) -> bool:
        """True if rows go to a file rather than a database."""
        return "://" not in self.to and Path(self.to).suffix.lower() in ENDINGS

    def _require_file_options(self) -> None:
        if ":" in self.to.split("/", 1)[0]:
            raise ConfigError(
                "an address with a colon before its first slash names no file; give a database as "
                "scheme://…, or write ./ before a path that has a colon"
            )
        given = {
            "--table": self.table is not None,
            "--option": bool(self.options),
            "--full": self.full,
            "--check": self.check != 100,
            "--metric": self.metric is not None,
        }
        if useless := [name for name, value in given.items() if value]:
            raise ConfigError(f"{self.to} is a file, which takes no {' and no '.join(useless)}")


def _text(what: str, value: object) -> str:
    """Return a value as text, which is not shown: it may be a secret."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{what} takes text, a number, true or false")
    # A lone surrogate has no form in UTF-8.
    if re.search("[\0\ud800-\udfff]", text := str(value)) or not text:
        raise ConfigError(f"{what} is empty, or no text of UTF-8 without NUL; check how it is made")
    return text
