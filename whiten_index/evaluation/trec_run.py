"""Run files: the ranking of every query, as TREC, Parquet or JSON lines; written and read."""

from __future__ import annotations

import errno
import itertools
import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from whiten_index.artifacts.atomic import replacing
from whiten_index.artifacts.files import exists, is_folder, is_link, writing
from whiten_index.artifacts.limits import load_json
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.judgements import to_id, to_number
from whiten_index.evaluation.label_table import (
    LabelTable,
    check_readable,
    first_line,
    read_lines,
    shown,
)
from whiten_index.evaluation.metrics import Run

TREC, PARQUET, JSONL = (".trec", ".run", ".txt"), ".parquet", ".jsonl"
RUN_ENDINGS = (*TREC, PARQUET, JSONL)
_TAG = "whiten-index"
_CHUNK = 256
_TREC_FIELDS = ("query_id", "Q0", "doc_id", "rank", "score", "tag")
_READ = ("query_id", "doc_id", "score")
# The place in the file, the query, and documents with their scores.
_Hits = tuple[str, Any, list[tuple[Any, Any]]]
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
    """Make sure the ending names a format, before any query is searched."""
    if path.suffix not in RUN_ENDINGS:
        raise ConfigError(
            f"the ending of {path.name or path} names no run format; use {', '.join(TREC)} "
            f"(TREC), {PARQUET} or {JSONL}"
        )


def check_place(path: Path) -> None:
    """Make sure that a run can be written to ``path``, before any query is searched.

    Nothing is left there; folders that are missing are for the writer to make.
    """
    with writing(path, kept=""):
        if is_folder(path):
            raise IsADirectoryError(errno.EISDIR, "is a folder")
        folder = path.parent
        while not (exists(folder) or is_link(folder)):
            folder = folder.parent
        # Permissions alone do not say it: some file systems take no files from anybody.
        tempfile.TemporaryFile(dir=folder).close()


def write_run(path: Path, rankings: Iterable[Ranked]) -> int:
    """Write rankings in the format that the ending of ``path`` names, whole or not at all.

    Returns:
        How many queries were written.
    """
    check_run_path(path)
    counter = itertools.count()
    counted = (ranking for ranking, _ in zip(rankings, counter, strict=False))
    with writing(path, kept=""), replacing(path) as temporary:
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


def read_run(path: str | Path) -> Run:
    """Read a run as query id -> document id -> score; integer ids become strings.

    The order is that of the scores, whatever the ranks say, as trec_eval has it.

    Args:
        path: TREC's six columns (``.trec``, ``.run``, ``.txt``), or ``.parquet`` with query_id,
            doc_id and score, or ``.jsonl`` with query_id and hits, as ``write_run`` writes them.

    Raises:
        ConfigError: the ending names no format.
        CorpusError: the file is missing, empty or damaged, a line lacks something, a score is no
            finite number, or a query has a document twice: which of the two scores counts would
            change the figures.
    """
    path = Path(path)
    check_run_path(path)
    run: dict[str, dict[str, float]] = {}
    for where, query_id, hits in _jsonl_hits(path) if path.suffix == JSONL else _table_hits(path):
        query = _to_id(query_id, f"{where} query id")
        found = run.setdefault(query, {})
        for document_id, score in hits:
            document = _to_id(document_id, f"{where} document id")
            if document in found:
                raise CorpusError(
                    f"{where} has document {document!r} of query {query!r} again; keep one, such "
                    "as the best passage of a document"
                )
            found[document] = _to_score(score, where)
    if not run:
        raise CorpusError(f"{path} is empty: it ranks nothing; name a run that does")
    return run


def _table_hits(path: Path) -> Iterator[_Hits]:
    table = LabelTable.read(path, RUN_ENDINGS, set(_READ), bare=_TREC_FIELDS)
    queries, documents, scores = (table.columns[table.need((name,))] for name in _READ)
    for row, query in enumerate(queries):
        yield table.where(row), query, [(documents[row], scores[row])]


def _jsonl_hits(path: Path) -> Iterator[_Hits]:
    check_readable(path)
    first_lines: dict[str, int] = {}
    for number, line in read_lines(path):
        where = f"{path}, line {number},"
        try:
            ranking = load_json(line)
            query = ranking["query_id"]
            hits = [(hit["id"], hit["score"]) for hit in ranking["hits"]]
        except (ValueError, KeyError, TypeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
            raise CorpusError(
                f'{where} is no ranking such as {{"query_id": "q1", "hits": [{{"id": "d1", '
                f'"score": 0.5}}]}} ({why}): {shown(line)}; mend it or take it out'
            ) from error
        if (earlier := first_lines.setdefault(str(query), number)) != number:
            raise CorpusError(f"{where} ranks query {query!r} of line {earlier} again; keep one")
        yield where, query, hits


def _to_id(value: Any, where: str) -> str:
    try:
        return to_id(value)
    except ValueError as error:
        raise CorpusError(
            f"{where} is {shown(value)}, expected {error}; mend it or take it out"
        ) from error


def _to_score(value: Any, where: str) -> float:
    try:
        score = math.nan if isinstance(value, bool) else to_number(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if not math.isfinite(score):
        raise CorpusError(
            f"{where} has {shown(value)} as score, expected a finite number; mend it or take it out"
        )
    return score
