"""Findings of gates, and the file of canary queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from whiten_index.artifacts.files import exists, is_file, reading
from whiten_index.corpus.batches import TextBatch
from whiten_index.corpus.corpus_config import CorpusConfig
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.corpus.row_checks import OnBadRow
from whiten_index.errors import CorpusError, GateError
from whiten_index.paths import cut


@dataclass(frozen=True)
class Base:
    """The version before, and what became of its rows; rows are passages where it has these.

    Attributes:
        rows: of its index.
        new: rows that came since, None where it is not known.
        deleted: rows that went, None where it is not known.
    """

    rows: int
    new: int | None = None
    deleted: int | None = None

    @property
    def expected(self) -> int | None:
        """Rows that there should be now, None where it is not known."""
        if self.new is None or self.deleted is None:
            return None
        return self.rows - self.deleted + self.new


@dataclass(frozen=True)
class Gate:
    """What one gate found.

    Attributes:
        name: counts, codes, canaries or size.
        passed: whether the version may be published for all this gate knows.
        found: figures, as JSON values.
        bound: what was asked of them.
        why: what failed, in sentences; empty where nothing did.
    """

    name: str
    passed: bool
    found: dict[str, Any]
    bound: dict[str, Any]
    why: str = ""

    @classmethod
    def of(
        cls, name: str, found: dict[str, Any], bound: dict[str, Any], faults: Sequence[str]
    ) -> Gate:
        """Return a gate that is passed where there are no faults."""
        return cls(name, not faults, found, bound, "; ".join(faults))

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return dict(vars(self))


def require_passed(gates: Sequence[Gate], *, candidate: Path | str) -> None:
    """Refuse a version that did not pass.

    Args:
        gates: what they found.
        candidate: folder in which the version is kept aside.

    Raises:
        GateError: one of them was not passed.
    """
    failed = [gate for gate in gates if not gate.passed]
    if failed:
        raise GateError(
            "the new version is not published: "
            + "; ".join(f"gate {gate.name}: {gate.why}" for gate in failed)
            + f". It is kept in {candidate}; mend the cause, or move the bound, and run it again",
            gates=[gate.to_json() for gate in gates],
            candidate=str(candidate),
        )


TEXT, EMBEDDING, EXPECTED = "text", "embedding", "expected"
MOST_QUERIES = 10_000


@dataclass(frozen=True, eq=False)
class CanaryFile:
    """Queries, and the documents that must be among the ten nearest of each.

    Attributes:
        path: the file.
        texts: of the queries, None where they are embeddings.
        embeddings: (q, d) raw, None where they are texts.
        expected: the ids that each must find, none where it names none.
    """

    path: str
    texts: tuple[str, ...] | None
    embeddings: NDArray[np.float32] | None
    expected: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.expected)

    @property
    def needs_encoder(self) -> bool:
        """Whether the queries are texts."""
        return self.texts is not None

    def query_name(self, place: int) -> str:
        """Return how messages call a query, whose place counts from 0: by its row, from 1."""
        said = "" if self.texts is None else f" ({cut(' '.join(self.texts[place].split()))!r})"
        return f"row {place + 1} of the canary file{said}"

    @classmethod
    def read(cls, path: Path | str, *, dim: int) -> CanaryFile:
        """Read the column ``text`` or ``embedding``, and ``expected`` where there is one.

        ``expected`` holds an id, or a list of ids, strings or integers as in the index; null asks
        for none.

        Args:
            path: a Parquet file.
            dim: width of the embeddings that the index takes.

        Raises:
            CorpusError: the file or a row of it cannot be used.
        """
        name = str(path)
        schema = _schema(Path(path))
        asked = [column for column in (TEXT, EMBEDDING) if column in schema.names]
        if len(asked) != 1:
            has = "both" if asked else "neither"
            raise CorpusError(
                f"canary queries come in one column, {TEXT} or {EMBEDDING}, and {name} has "
                f"{has}; its columns are {', '.join(schema.names)}: rename or drop one"
            )
        odd = [column for column in schema.names if column not in (TEXT, EMBEDDING, EXPECTED)]
        if odd:
            # A column of ids under another name would be thought to be looked at.
            raise CorpusError(
                f"{name} has {', '.join(odd)}, which no gate reads; ids that a query must find "
                f"come in column {EXPECTED}: rename or drop it"
            )
        config = CorpusConfig(
            sources=(name,),
            text_columns=(TEXT,) if asked == [TEXT] else (),
            embedding_column=EMBEDDING if asked == [EMBEDDING] else None,
            keep=(EXPECTED,) if EXPECTED in schema.names else (),
            # To count them, and to refuse the file in words that name no option of a corpus.
            on_bad_row=OnBadRow.SKIP,
        )
        corpus = ParquetCorpus.open(config)
        if corpus.dim not in (None, dim):
            raise CorpusError(
                f"the embeddings of {name} have {corpus.dim} dims, and those of the index {dim}; "
                "take both from one encoder"
            )
        if corpus.rows > MOST_QUERIES:
            raise CorpusError(
                f"{name} holds {corpus.rows} queries, each of which is compared with every row of "
                f"the index; keep {MOST_QUERIES} at most"
            )
        return _read(name, corpus)


def _read(name: str, corpus: ParquetCorpus) -> CanaryFile:
    texts: list[str] = []
    embeddings: list[NDArray[np.floating]] = []
    expected: list[tuple[str, ...]] = []
    for batch in corpus.batches():
        if batch.skipped:
            bad = ", ".join(f"{n} {why.replace('_', ' ')}" for why, n in batch.skipped.items())
            raise CorpusError(
                f"{name} has rows that cannot be used as queries ({bad}); mend or drop them"
            )
        if isinstance(batch, TextBatch):
            texts += batch.texts
        else:
            embeddings.append(batch.embeddings)
        if corpus.config.keep:
            values = batch.documents[EXPECTED].to_pylist()
            expected += [_ids(name, value) for value in values]
        else:
            expected += [()] * batch.documents.num_rows
    if corpus.config.keep and not any(expected):
        raise CorpusError(f"column {EXPECTED} of {name} names no document; fill it, or drop it")
    if corpus.config.text_columns:
        return CanaryFile(name, tuple(texts), None, tuple(expected))
    with np.errstate(over="ignore"):
        queries = np.concatenate(embeddings).astype(np.float32)
    if not np.isfinite(queries).all():
        raise CorpusError(f"the embeddings of {name} are beyond float32; scale them down")
    return CanaryFile(name, None, queries, tuple(expected))


def _ids(name: str, value: Any) -> tuple[str, ...]:
    """Return the ids a row names, numbers as texts."""
    if value is None:
        return ()
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, str | int):
            raise CorpusError(
                f"column {EXPECTED} of {name} holds {each!r}, and ids are strings or integers; "
                "mend the row"
            )
    return tuple(dict.fromkeys(str(each) for each in values))


def _schema(path: Path) -> pa.Schema:
    try:
        # Opening a pipe would wait for someone to write to it.
        with reading(path):
            found = None if exists(path) and not is_file(path) else pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        reason = cut(str(error).splitlines()[0], most=200)
        raise CorpusError(
            f"{cut(str(path), most=200)} cannot be read as Parquet ({reason}); canary queries come "
            f"in a Parquet file with a column {TEXT} or {EMBEDDING}"
        ) from error
    if found is None:
        raise CorpusError(
            f"{cut(str(path), most=200)} is no file; canary queries come in a Parquet file with a "
            f"column {TEXT} or {EMBEDDING}"
        )
    return found
