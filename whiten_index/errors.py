"""The errors a user can meet; each message says what was given, what was expected, what to do."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from whiten_index.address import hide_secrets


def first_line(message: object) -> str:
    """Return the first line of a library's message or error, or its kind if it has none."""
    # A secret may contain a line break.
    lines = hide_secrets(str(message)).strip().splitlines()
    return lines[0][:500] if lines else type(message).__name__


# Folder of copies -> URI in a bucket.
COPIES: dict[str, str] = {}


def named(text: object) -> str:
    """Return a text with buckets in place of the folders of their copies."""
    found = str(text)
    for folder, uri in COPIES.items():
        found = found.replace(folder, uri)
    return found


class WhitenIndexError(Exception):
    """Base of every error this package raises on purpose.

    Attributes:
        exit_code: the status with which the command line ends on this error.

    Examples:
        >>> try:
        ...     whiten_index.open_index("nowhere")
        ... except WhitenIndexError as error:
        ...     print(error.exit_code)
        5
    """

    exit_code = 1

    def __str__(self) -> str:
        # A library's message, which many errors quote, may name an address with its password.
        text = hide_secrets(super().__str__())
        # These are of this machine: its disk, and a version that is kept aside here.
        return text if isinstance(self, StorageError | GateError) else named(text)


class ConfigError(WhitenIndexError):
    """An option, or a combination of options, that cannot work."""

    exit_code = 2


def require_config(given: object, kind: type) -> None:
    """Refuse a path or a dictionary where a function takes a configuration."""
    if not isinstance(given, kind):
        name = kind.__name__
        raise ConfigError(f"this takes a {name}, not a {type(given).__name__}: {name}(…=…)")


def require_installed(*packages: str, by: str, extra: str) -> None:
    """Refuse work whose optional packages are not installed, and name the extra that has them."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ConfigError(
            f"{by} needs {' and '.join(missing)}; run: pip install 'whiten-index[{extra}]'"
        )


class CorpusError(WhitenIndexError):
    """A corpus, a query file or a row of either that cannot be used."""

    exit_code = 3


class NotFoundError(CorpusError):
    """A document, or an index of a server, that is not there."""


class EncoderError(WhitenIndexError):
    """A model that cannot be had, loaded or matched."""

    exit_code = 4


class ArtifactError(WhitenIndexError):
    """A store, moments file, whitening or index on disk that is missing, damaged or mismatched."""

    exit_code = 5


class FormatError(WhitenIndexError):
    """An artifact that a later release wrote: sound, but not to be read or replaced by this one."""

    exit_code = 5


class BusyError(WhitenIndexError):
    """An output folder that another process is writing."""

    exit_code = 6


class StorageError(WhitenIndexError):
    """A disk that is full, or a disk or bucket that cannot be written or read."""

    exit_code = 7


class WhiteningError(WhitenIndexError):
    """Moments from which the asked whitening cannot be computed (rank, rows, width)."""

    exit_code = 8


class GateError(WhitenIndexError):
    """A new version that was made, and that a gate kept from being published.

    Attributes:
        gates: the gates' findings as JSON values.
        candidate: folder in which the version is kept aside.
    """

    exit_code = 9

    def __init__(
        self, message: str, *, gates: Sequence[Mapping[str, Any]] = (), candidate: str = ""
    ) -> None:
        super().__init__(message)
        self.gates, self.candidate = tuple(gates), candidate


class DatabaseError(WhitenIndexError):
    """A database that cannot be reached, or that refuses what it was asked."""

    exit_code = 10


class ClusterError(WhitenIndexError):
    """A cluster that cannot be reached, or that has no worker left."""

    exit_code = 11


class PartialFailureError(WhitenIndexError):
    """Parts of the work that failed, while all the others were done.

    Attributes:
        items: parts, each with its name, its reason and its number of shards.
    """

    exit_code = 12

    def __init__(self, message: str, *, items: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.items = tuple(items)
