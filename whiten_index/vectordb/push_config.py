"""Configuration of a push. Importing it loads nothing heavy."""

import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from whiten_index.errors import ConfigError
from whiten_index.options import CORPUS, Option, Positive, Share, schema
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
    to: Annotated[
        str,
        Option(
            "postgresql://user@host/database, qdrant://host:6333, qdrant:///folder, "
            "lancedb:///folder, milvus://host:19530, milvus:///file.db; qdrant+https:// and "
            "milvus+https:// for TLS; or a file .parquet, .arrow or .npy.",
            DATABASE,
        ),
    ]
    table: Annotated[
        str | None, Option("Table that users query; a database needs it.", DATABASE)
    ] = None
    store: Annotated[
        str | None, Option("Folder of the raw embeddings.", CORPUS, default="where they were")
    ] = None
    k: Annotated[
        Positive | None, Option("Push the first N numbers of each vector.", _ROWS, default="all")
    ] = None
    dtype: Annotated[
        Literal["float32", "float16"], Option("Precision of the vectors there.", _ROWS)
    ] = "float32"
    metric: Annotated[Literal["cosine", "ip"], Option("Similarity that ranks rows.", _ROWS)] = (
        "cosine"
    )
    full: Annotated[bool, Option("Push all rows where the changed ones would do.", _ROWS)] = False
    check: Annotated[
        int, Field(ge=0), Option("Rows compared before the swap; 0: counted.", _ROWS)
    ] = 100
    max_shrink: Annotated[
        Share, Option("Share of the rows there that may be gone, else nothing is pushed.", _ROWS)
    ] = 0.2
    batch_rows: Annotated[
        Positive | None, Option("Rows sent at once.", _ROWS, default="64 MB of vectors")
    ] = None
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
            "--metric": self.metric != "cosine",
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
