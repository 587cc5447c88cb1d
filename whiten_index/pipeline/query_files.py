"""Files of canary queries, which a new version must answer before it is published."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import CorpusError
from whiten_index.evaluation.label_table import PARQUET, LabelTable, to_text
from whiten_index.paths import cut

_TEXT, _EMBEDDING, _EXPECTED = "text", "embedding", "expected"
# Each query is compared with every row of the index.
_MOST_QUERIES = 10_000
# A search squares numbers in float32, and sums them up.
_LARGEST = 1e15


@dataclass(frozen=True, eq=False)
class CanaryFile:
    """Canary queries, as texts or raw embeddings (q, d), and the ids that each must find."""

    texts: tuple[str, ...] | None
    embeddings: NDArray[np.float32] | None
    expected: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.expected)

    @classmethod
    def read(cls, path: Path | str, *, dim: int) -> "CanaryFile":
        """Read the column ``text`` or ``embedding`` (of width ``dim``), and ``expected`` if any.

        ``expected`` holds an id, or a list of ids, strings or integers as in the index.
        """
        table = LabelTable.read(Path(path), (PARQUET,), (_TEXT, _EMBEDDING, _EXPECTED))
        asked = [column for column in (_TEXT, _EMBEDDING) if column in table.columns]
        if len(asked) != 1:
            has = "both columns" if asked else "neither column"
            raise table.lacks(f"{has} {_TEXT} and {_EMBEDDING}, of which queries need one")
        if odd := [column for column in table.names if column not in table.columns]:
            # A column of ids under another name would be thought to be looked at.
            raise CorpusError(
                f"{path} has {', '.join(odd)}, which no gate reads; ids that a query must find "
                f"come in column {_EXPECTED}: rename or drop it"
            )
        if len(table) > _MOST_QUERIES:
            raise CorpusError(f"{path} holds {len(table)} queries; keep {_MOST_QUERIES} at most")
        rows = range(len(table))
        expected: tuple[tuple[str, ...], ...] = ((),) * len(table)
        if _EXPECTED in table.columns:
            expected = tuple(table.parse(_EXPECTED, row, _ids) for row in rows)
            if not any(expected):
                raise CorpusError(
                    f"column {_EXPECTED} of {path} names no document; fill or drop it"
                )
        if asked == [_TEXT]:
            return cls(tuple(table.parse(_TEXT, row, to_text) for row in rows), None, expected)
        parse = partial(_raw_embedding, dim=dim)
        embeddings = np.array([table.parse(_EMBEDDING, row, parse) for row in rows], np.float32)
        return cls(None, embeddings, expected)

    def query_name(self, place: int) -> str:
        """Return the name of a query in messages."""
        said = "" if self.texts is None else f" ({cut(' '.join(self.texts[place].split()))!r})"
        return f"row {place + 1} of the canary file{said}"


def _raw_embedding(value: Any, *, dim: int) -> NDArray[np.float64]:
    """Return a raw embedding (dim,) of a query; raise ``ValueError`` for anything else."""
    numbers = isinstance(value, list) and all(isinstance(each, float | int) for each in value)
    if not numbers or len(value) != dim:
        raise ValueError(f"{dim} numbers, as the embeddings of the index have")
    row = np.array(value, dtype=np.float64)
    with np.errstate(over="ignore"):
        if not np.linalg.norm(row) < _LARGEST:
            raise ValueError("numbers that float32 can be searched with")
    return row


def _ids(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(each, bool) or not isinstance(each, str | int) for each in values):
        raise ValueError("ids that are strings or integers")
    return tuple(dict.fromkeys(map(str, values)))
