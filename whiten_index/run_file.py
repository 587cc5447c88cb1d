"""Run files: the ranking of every query, as TREC, Parquet or JSON lines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from whiten_index.errors import ConfigError
from whiten_index.manifest import replacing, writing

TREC, PARQUET, JSONL = (".trec", ".run", ".txt"), ".parquet", ".jsonl"
_TAG = "whiten-index"
_CHUNK = 256
_EMPTY = pa.schema(
    {"query_id": pa.string(), "doc_id": pa.string(), "rank": pa.int64(), "score": pa.float64()}
)


class Ranked(Protocol):
    """The hits of one query, best first."""

    @property
    def query_id(self) -> str | int:
        """The query's id."""

    @property
    def ids(self) -> list[str | int]:
        """The documents' ids, best first."""

    @property
    def scores(self) -> list[float]:
        """The documents' scores, falling."""


def check_run_path(path: Path) -> None:
    """Make sure the ending names a format, before any query is searched.

    Raises:
        ConfigError: it does not.
    """
    if path.suffix not in (*TREC, PARQUET, JSONL):
        raise ConfigError(
            f"the ending of {path.name} names no run format; use {', '.join(TREC)} (TREC), "
            f"{PARQUET} or {JSONL}"
        )


def write_run(path: Path, rankings: Iterable[Ranked]) -> int:
    """Write rankings in the format that the ending of ``path`` names, whole or not at all.

    Returns:
        How many queries were written.

    Raises:
        ConfigError: the ending names no format, or an id cannot stand in a TREC run.
        OutputError: the disk is full or cannot be written.
    """
    check_run_path(path)
    counter = itertools.count()
    counted = (ranking for ranking, _ in zip(rankings, counter, strict=False))
    with writing(path), replacing(path) as temporary:
        if path.suffix == PARQUET:
            _write_parquet(temporary, counted)
        else:
            with temporary.open("w", encoding="utf-8") as file:
                (_write_jsonl if path.suffix == JSONL else _write_trec)(file, counted)
    return next(counter)


def _write_trec(file: IO[str], rankings: Iterator[Ranked]) -> None:
    for ranking in rankings:
        query = _word(ranking.query_id)
        for rank, (document, score) in enumerate(_pairs(ranking), start=1):
            file.write(f"{query} Q0 {_word(document)} {rank} {score:.9g} {_TAG}\n")


def _write_jsonl(file: IO[str], rankings: Iterator[Ranked]) -> None:
    for ranking in rankings:
        hits = [{"id": document, "score": score} for document, score in _pairs(ranking)]
        line = {"query_id": ranking.query_id, "hits": hits}
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _write_parquet(path: Path, rankings: Iterator[Ranked]) -> None:
    writer: pq.ParquetWriter | None = None
    try:
        while chunk := list(itertools.islice(rankings, _CHUNK)):
            table = pa.table(
                {
                    "query_id": [r.query_id for r in chunk for _ in r.ids],
                    "doc_id": [document for r in chunk for document in r.ids],
                    "rank": [rank for r in chunk for rank in range(1, len(r.ids) + 1)],
                    "score": [score for r in chunk for score in r.scores],
                }
            )
            # Of queries without hits the types are not known, and nothing is to be written.
            if table.num_rows:
                writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
                writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        pq.write_table(_EMPTY.empty_table(), path)


def _pairs(ranking: Ranked) -> Iterator[tuple[str | int, float]]:
    return zip(ranking.ids, ranking.scores, strict=True)


def _word(value: str | int) -> str:
    word = str(value)
    if len(word.split()) != 1:
        raise ConfigError(
            f"the id {word!r} has blanks, which a TREC run cannot hold; write a .parquet or .jsonl "
            "run instead"
        )
    return word
