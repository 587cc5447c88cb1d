"""File of canary queries, and of the documents that each must find."""

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
from whiten_index.errors import CorpusError
from whiten_index.paths import cut

TEXT, EMBEDDING, EXPECTED = "text", "embedding", "expected"
_MOST_QUERIES = 10_000
# float32 squares numbers up to 1.8e19, and sums them up.
_LARGEST = 1e18


@dataclass(frozen=True, eq=False)
class CanaryFile:
    """Queries, and the documents that must be among the ten nearest of each.

    Attributes:
        path: the file.
        texts: of the queries, None if they are embeddings.
        embeddings: (q, d) raw, None if they are texts.
        expected: ids that each query must find, perhaps none.
    """

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

        Raises:
            CorpusError: the file or a row of it cannot be used.
        """
        name, columns = str(path), _columns(Path(path))
        asked = [column for column in (TEXT, EMBEDDING) if column in columns]
        if len(asked) != 1:
            has = "both" if asked else "neither"
            raise CorpusError(
                f"canary queries come in one column, {TEXT} or {EMBEDDING}, and {name} has "
                f"{has}; its columns are {', '.join(columns)}: rename or drop one"
            )
        odd = [column for column in columns if column not in (TEXT, EMBEDDING, EXPECTED)]
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
            keep=(EXPECTED,) if EXPECTED in columns else (),
            # To count them, and to refuse the file in words that name no option of a corpus.
            on_bad_row="skip",
        )
        corpus = ParquetCorpus.open(config)
        if corpus.dim not in (None, dim):
            raise CorpusError(
                f"the embeddings of {name} have {corpus.dim} dims, and those of the index {dim}; "
                "take both from one encoder"
            )
        if corpus.rows > _MOST_QUERIES:
            raise CorpusError(
                f"{name} holds {corpus.rows} queries, each of which is compared with every row of "
                f"the index; keep {_MOST_QUERIES} at most"
            )
        return _read(name, corpus)


def _columns(path: Path) -> list[str]:
    wanted = f"canary queries come in a Parquet file with a column {TEXT} or {EMBEDDING}"
    shown = cut(str(path), most=200)
    try:
        with reading(path):
            # Opening a pipe would wait for someone to write to it.
            if exists(path) and not is_file(path):
                raise CorpusError(f"{shown} is no file; {wanted}")
            return list(pq.read_schema(path).names)
    except (OSError, pa.ArrowException) as error:
        reason = cut(str(error).splitlines()[0], most=200)
        raise CorpusError(f"{shown} cannot be read as Parquet ({reason}); {wanted}") from error


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
            expected += [_ids(name, value) for value in batch.documents[EXPECTED].to_pylist()]
        else:
            expected += [()] * batch.documents.num_rows
    if corpus.config.keep and not any(expected):
        raise CorpusError(f"column {EXPECTED} of {name} names no document; fill it, or drop it")
    if corpus.config.text_columns:
        return CanaryFile(name, tuple(texts), None, tuple(expected))
    with np.errstate(over="ignore"):
        queries = np.concatenate(embeddings).astype(np.float32)
        sizes = np.linalg.norm(queries, axis=1)
    if not (sizes < _LARGEST).all():
        raise CorpusError(
            f"row {int(np.argmin(sizes < _LARGEST)) + 1} of {name} has numbers too large to be "
            "searched with in float32; scale it as the corpus's embeddings are"
        )
    return CanaryFile(name, None, queries, tuple(expected))


def _ids(name: str, value: Any) -> tuple[str, ...]:
    """Return the ids that a row names, numbers as texts."""
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
