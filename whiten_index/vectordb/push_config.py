"""What to push, and where to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whiten_index.errors import ConfigError
from whiten_index.paths import require_folder, require_no_secret
from whiten_index.vectordb.database_writer import Metric, VectorDtype
from whiten_index.vectordb.registry import require_address, shaping_options
from whiten_index.vectordb.vector_files import is_file, require_file_name

# Vectors sent at once: a commit costs about as much as some thousand rows, whatever it holds.
_BATCH_BYTES, _MOST_ROWS = 1 << 26, 1 << 16
CHECKED = 100
# As of an update: fewer rows look like the wrong index, or a corpus read by half.
MAX_SHRINK = 0.2


@dataclass(frozen=True, kw_only=True)
class PushConfig:
    """What to push, and where to.

    Attributes:
        index: folder of the index, of which the published version is pushed.
        to: URL of the database, or a file that ends in .parquet, .arrow or .npy.
        table: what the users of the database query; None for a file, which has its own name.
        store: folder of the raw embeddings, by default where the build had them.
        k: leading coordinates of the vectors to push, scaled to unit length; all by default.
        dtype: in which the database keeps the vectors.
        metric: by which it ranks them.
        full: whether to push all rows where the changed ones would do.
        check: rows that are looked at before the name stands for what was pushed, 100 by default;
            of 0 their count alone is.
        batch_rows: sent at once; as many as have 64 MB of vectors by default, 65,536 at most.
        max_shrink: share of the rows that a table has which may be gone after the push.
        seed: of the rows to check.
        options: of the database's index and load.
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
        """Refuse values that cannot be used.

        Raises:
            ConfigError: one of them is out of its bounds or not known.
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
        if self.check is not None and self.check < 0:
            raise ConfigError(f"--check takes how many rows, 0 for none; {self.check} was given")
        if self.batch_rows is not None and self.batch_rows < 1:
            raise ConfigError(f"--batch-rows takes 1 or more; {self.batch_rows} was given")
        if self.k is not None and self.k < 1:
            raise ConfigError(f"--k takes 1 or more; {self.k} was given")
        if not 0 <= self.max_shrink <= 1:
            raise ConfigError(f"--max-shrink takes 0 to 1; {self.max_shrink:g} was given")

    def require_usable(self) -> None:
        """Refuse an address and options that do not go together.

        Raises:
            ConfigError: a file is given options of databases, or a database no table.
        """
        self._require_texts()
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

    def _require_texts(self) -> None:
        """Refuse what no address and no name can hold; it is not shown, as it may be a secret.

        Raises:
            ConfigError: an empty address, a NUL character, or bytes that are not UTF-8.
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

    @property
    def checked(self) -> int:
        """How many rows are looked at."""
        return CHECKED if self.check is None else self.check

    @property
    def shaping(self) -> str:
        """Those of the options that shape the table, by name, with their defaults.

        They stand beside the rows, to tell when others are given; secrets are none of them.
        """
        options = shaping_options(self.to, self.options)
        return " ".join(f"{name}={value}" for name, value in sorted(options.items()))
