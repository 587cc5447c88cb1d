"""File of canary queries, and of the documents that each must find."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import CorpusError
from whiten_index.evaluation.label_table import PARQUET, LabelTable
from whiten_index.paths import cut

TEXT, EMBEDDING, EXPECTED = "text", "embedding", "expected"
# Each query is compared with every row of the index.
_MOST_QUERIES = 10_000
# float32 squares numbers up to 1.8e19, and sums them up.
_LARGEST = 1e18


@dataclass(frozen=True, eq=False)
class CanaryFile:
    """Canary queries, as texts or raw embeddings (q, d), and the ids that each must find."""

    path: str
    texts: tuple[str, ...] | None
    embeddings: NDArray[np.float32] | None
    expected: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.expected)

    def query_name(self, place: int) -> str:
        """Return the name of a query in messages."""
        said = "" if self.texts is None else f" ({cut(' '.join(self.texts[place].split()))!r})"
        return f"row {place + 1} of the canary file{said}"

    @classmethod
    def read(cls, path: Path | str, *, dim: int) -> CanaryFile:
        """Read the column ``text`` or ``embedding`` (of width ``dim``), and ``expected`` if any.

        ``expected`` holds an id, or a list of ids, strings or integers as in the index.
        """
        table = LabelTable.read(Path(path), (PARQUET,), (TEXT, EMBEDDING, EXPECTED))
        asked = [column for column in (TEXT, EMBEDDING) if column in table.columns]
        if len(asked) != 1:
            has = "both columns" if asked else "neither column"
            raise table.lacks(f"{has} {TEXT} and {EMBEDDING}, of which queries need one")
        if odd := [column for column in table.names if column not in table.columns]:
            # A column of ids under another name would be thought to be looked at.
            raise CorpusError(
                f"{path} has {', '.join(odd)}, which no gate reads; ids that a query must find "
                f"come in column {EXPECTED}: rename or drop it"
            )
        if len(table) > _MOST_QUERIES:
            raise CorpusError(f"{path} holds {len(table)} queries; keep {_MOST_QUERIES} at most")
        rows = range(len(table))
        expected: tuple[tuple[str, ...], ...] = ((),) * len(table)
        if EXPECTED in table.columns:
            expected = tuple(table.parse(EXPECTED, row, _ids) for row in rows)
            if not any(expected):
                raise CorpusError(f"column {EXPECTED} of {path} names no document; fill or drop it")
        if asked == [TEXT]:
            texts = tuple(table.parse(TEXT, row, _text) for row in rows)
            return cls(str(path), texts, None, expected)
        parse = partial(_embedding, dim=dim)
        embeddings = np.array([table.parse(EMBEDDING, row, parse) for row in rows], np.float32)
        return cls(str(path), None, embeddings, expected)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")
    return value


def _embedding(value: Any, *, dim: int) -> NDArray[np.float64]:
    numbers = isinstance(value, list) and all(isinstance(each, float | int) for each in value)
    if not numbers or len(value) != dim:
        raise ValueError(f"{dim} numbers, as the embeddings of the index have")
    row = np.array(value, dtype=np.float64)
    with np.errstate(over="ignore"):
        if not np.linalg.norm(row) < _LARGEST:
            raise ValueError("numbers that float32 can be searched with")
    return row


def _ids(value: Any) -> tuple[str, ...]:
    """Return the ids that a row names, numbers as texts."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(each, bool) or not isinstance(each, str | int) for each in values):
        raise ValueError("ids that are strings or integers")
    return tuple(dict.fromkeys(map(str, values)))
