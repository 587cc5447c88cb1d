"""Configuration of a push."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whiten_index.errors import ConfigError
from whiten_index.paths import require_folder, require_no_secret
from whiten_index.vectordb.database_writer import Metric, VectorDtype
from whiten_index.vectordb.registry import require_address, shaping_options
from whiten_index.vectordb.vector_files import is_file, require_file_name

# Vectors sent at once: a commit costs about as much as some thousand rows.
_BATCH_BYTES, _MOST_ROWS = 1 << 26, 1 << 16
CHECKED = 100
# As of an update: fewer rows look like the wrong index, or half of a corpus.
MAX_SHRINK = 0.2


@dataclass(frozen=True, kw_only=True)
class PushConfig:
    """Configuration of a push.

    Attributes:
        index: folder of the index, whose published version is pushed.
        to: URL of the database, or a file that ends in .parquet, .arrow or .npy.
        table: table or collection that users query; None for a file.
        store: folder of the raw embeddings; by default that of the build.
        k: leading coordinates of the vectors to push, scaled to unit length; all by default.
        dtype: precision of the vectors in the database, ``float32`` or ``float16``.
        metric: similarity by which it ranks them, ``cosine`` or ``ip``.
        full: push all rows even if only some changed.
        check: rows to compare before the table is published, 100 by default; 0 only counts them.
        batch_rows: rows sent at once; by default 64 MB of vectors, at most 65,536 rows.
        max_shrink: share of the rows in the table that may disappear.
        seed: of the sample of rows to compare.
        options: of the database's index and load.

    Example:
        >>> PushConfig(index="index", to="vectors.parquet").dtype
        'float32'
    """

    index: str
    to: str
    table: str | None = None
    store: str | None = None
    k: int | None = None
    dtype: str = VectorDtype.FLOAT32.value
    metric: str = Metric.COSINE.value
    full: bool = False
    check: int | None = None
    batch_rows: int | None = None
    max_shrink: float = MAX_SHRINK
    seed: int = 0
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validate each option.

        Raises:
            ConfigError: an option is unknown or out of its bounds, or holds a secret.
        """
        require_no_secret(vars(self), what="an option of a push")
        require_folder(self.index, what="a push")
        for name, value, known in (
            ("--dtype", self.dtype, VectorDtype),
            ("--metric", self.metric, Metric),
        ):
            names = [each.value for each in known]
            if value not in names:
                raise ConfigError(f"{name} {value!r} is unknown; use {' or '.join(names)}")
        for name, number, least in (
            ("--check", self.check, 0),
            ("--batch-rows", self.batch_rows, 1),
            ("--k", self.k, 1),
        ):
            if number is not None and number < least:
                raise ConfigError(f"{name} takes {least} or more; {number} was given")
        if not 0 <= self.max_shrink <= 1:
            raise ConfigError(f"--max-shrink takes 0 to 1; {self.max_shrink:g} was given")

    def require_usable(self) -> None:
        """Validate address and options together; texts are not shown, as they may be secrets.

        Raises:
            ConfigError: a text is empty, has a NUL character or is not UTF-8; a file is given
                options of databases; or a database is given no table.
        """
        texts = {"--to": self.to, "--table": self.table or "x"}
        texts |= {f"--option {name}": name + value for name, value in self.options.items()}
        for what, text in texts.items():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"{what} is no text of UTF-8; check how it is made") from error
            if not text or "\0" in text:
                raise ConfigError(f"{what} is empty, or has a NUL character; check how it is made")
        if not is_file(self.to):
            if not self.table:
                require_address(self.to)
                raise ConfigError(
                    "a database needs the name of a table or collection; give --table NAME"
                )
            return
        given = {
            "--table": self.table is not None,
            "--option": bool(self.options),
            "--full": self.full,
            "--check": self.check is not None,
            "--metric": self.metric != Metric.COSINE.value,
            "seed": self.seed != 0,
        }
        require_file_name(self.to)
        if useless := [name for name, value in given.items() if value]:
            raise ConfigError(f"{self.to} is a file, which takes no {' and no '.join(useless)}")

    def rows_at_once(self, k: int) -> int:
        """Return how many rows of vectors of k numbers are sent at once."""
        return self.batch_rows or max(1, min(_MOST_ROWS, _BATCH_BYTES // (4 * k)))

    @property
    def checked(self) -> int:
        """Number of rows to compare."""
        return CHECKED if self.check is None else self.check

    @property
    def shaping(self) -> str:
        """Options that shape the table, with their defaults, to notice later when others are given.

        None of them can be a secret.
        """
        options = shaping_options(self.to, self.options)
        return " ".join(f"{name}={value}" for name, value in sorted(options.items()))
