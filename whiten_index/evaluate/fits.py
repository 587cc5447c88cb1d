"""What transforms are fitted on beside the task itself: sentences of a Parquet corpus."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from whiten_index.artifacts.files import reading
from whiten_index.corpus import find_files
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluate.config import OF_TASKS, EvalConfig

# Columns of sentences that a corpus to fit on may have; each is a sentence of its own.
_KNOWN_COLUMNS = (("premise", "hypothesis"), ("sentence1", "sentence2"), ("sentence",), ("text",))


def fit_source(config: EvalConfig) -> str | None:
    """Return the corpus that transforms are fitted on, None for the task itself."""
    return None if not config.transforms or config.fit in OF_TASKS else config.fit


def check_fit(config: EvalConfig) -> None:
    """Refuse, before anything is encoded, a corpus that cannot be fitted on.

    Raises:
        ConfigError: it is not named, or has no such column.
        CorpusError: it cannot be read.
    """
    source = fit_source(config)
    if source is not None:
        sentence_columns(source, config.fit_columns)


def sentence_columns(source: str, asked: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return the columns of sentences of a Parquet corpus: those asked for, or those known.

    Raises:
        ConfigError: it has no column that is asked for.
        CorpusError: it has none of those known, or cannot be read.
    """
    try:
        file = find_files([source])[0]
        with reading(file.path):
            names = pq.read_schema(file.path, filesystem=file.filesystem).names
    except (CorpusError, OSError, pa.ArrowException) as error:
        raise CorpusError(
            f"{source} cannot be fitted on ({str(error).splitlines()[0][:160]}); --fit takes "
            f"{', '.join(OF_TASKS)}, or a Parquet corpus of sentences"
        ) from error
    if asked is not None:
        if lacking := [name for name in asked if name not in names]:
            raise ConfigError(
                f"{source} has no column {', '.join(lacking)}; --fit-column takes some of "
                f"{', '.join(names)}"
            )
        return asked
    for columns in _KNOWN_COLUMNS:
        if set(columns) <= set(names):
            return columns
    known = ", ".join(" and ".join(columns) for columns in _KNOWN_COLUMNS)
    raise CorpusError(
        f"{source} has the columns {', '.join(names)} and none of {known}; name the columns of "
        "sentences with --fit-column"
    )
