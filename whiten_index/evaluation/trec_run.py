"""Run files: the ranking of every query, as TREC, Parquet or JSON lines; written and read."""

import contextlib
import errno
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from whiten_index.artifacts.atomic import replacing, require_plain_target
from whiten_index.artifacts.files import exists, is_folder, is_link, writing
from whiten_index.artifacts.limits import json_value
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.judgements import to_id, to_number
from whiten_index.evaluation.label_table import JSONL, PARQUET, LabelTable
from whiten_index.evaluation.metrics import Run

TREC = (".trec", ".run", ".txt")
RUN_ENDINGS = (*TREC, PARQUET, JSONL)
_TAG = "whiten-index"
_CHUNK = 256
_TREC_FIELDS = ("query_id", "Q0", "doc_id", "rank", "score", "tag")
_READ, _HITS = ("query_id", "doc_id", "score"), "hits"
_EMPTY = pa.schema(
    {"query_id": pa.string(), "doc_id": pa.string(), "rank": pa.int64(), "score": pa.float64()}
)


@dataclass(frozen=True, slots=True)
class Ranking:
    """The hits of one query."""

    query_id: str | int
    ids: list[str | int]  # of documents, best first
    scores: list[float]  # their cosines, falling
    # Reads the same hits with kept columns, whose types are in their ``schema``.
    read_hits: Callable[[], Any] | None = None


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
        require_plain_target(path)
        folder = path.parent
        while not (exists(folder) or is_link(folder)):
            folder = folder.parent
        # Permissions alone do not say it: some file systems take no files from anybody.
        tempfile.TemporaryFile(dir=folder).close()


def kept_names(
    kept: Iterable[str], own: Collection[str], *, remedy: str = "rename one of them"
) -> dict[str, str]:
    """Return the name of each kept column next to our ``own``: ``score`` is ``kept_score`` there.

    Raises:
        ConfigError: that is the name of another kept column.
    """
    names = {name: f"kept_{name}" if name in own else name for name in kept}
    for name, other in names.items():
        if other != name and other in names:
            raise ConfigError(f"columns {name} and {other} are both kept; {remedy}")
    return names


def write_run(path: Path, rankings: Iterable[Ranking]) -> int:
    """Write rankings in the format that the ending of ``path`` names, whole or not at all.

    Return the number of queries written.
    """
    check_run_path(path)
    counter = itertools.count()
    counted = (ranking for ranking, _ in zip(rankings, counter, strict=False))
    with writing(path, kept=""), replacing(path) as temporary:
        if path.suffix == PARQUET:
            _write_parquet(temporary, counted)
        else:
            _write_text(temporary, counted, as_json=path.suffix == JSONL)
    return next(counter)


def _write_text(path: Path, rankings: Iterator[Ranking], *, as_json: bool) -> None:
    with path.open("w", encoding="utf-8") as file:
        for ranking in rankings:
            pairs = zip(ranking.ids, ranking.scores, strict=True)
            if as_json:
                hits = [{"id": document, "score": score} for document, score in pairs]
                for hit, kept in zip(hits, _read_hits(ranking), strict=False):
                    hit |= {"columns": kept.columns} if kept.columns else {}
                line = {"query_id": ranking.query_id, "hits": hits}
                text = json.dumps(json_value(line), ensure_ascii=False, default=str)
                file.write(text + "\n")
                continue
            query = _word(ranking.query_id)
            for rank, (document, score) in enumerate(pairs, start=1):
                file.write(f"{query} Q0 {_word(document)} {rank} {score:.9g} {_TAG}\n")


def _write_parquet(path: Path, rankings: Iterator[Ranking]) -> None:
    writer: pq.ParquetWriter | None = None
    try:
        while chunk := list(itertools.islice(rankings, _CHUNK)):
            found = {
                "query_id": [r.query_id for r in chunk for _ in r.ids],
                "doc_id": [document for r in chunk for document in r.ids],
                "rank": [rank for r in chunk for rank in range(1, len(r.ids) + 1)],
                "score": [score for r in chunk for score in r.scores],
            }
            read = [_read_hits(r) for r in chunk]
            kinds = {each.name: each.type for each in getattr(read[0], "schema", ())}
            kinds.pop("id", None)
            remedy = "write a .jsonl run, or rename one of them"
            for kept, name in kept_names(kinds, _EMPTY.names, remedy=remedy).items():
                values = [hit.columns[kept] for hits in read for hit in hits]
                found[name] = pa.array(values, kinds[kept])
            table = pa.table(found)
            # Of queries without hits the types are not known, and nothing is to be written.
            if table.num_rows:
                writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
                writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        pq.write_table(_EMPTY.empty_table(), path)


def _read_hits(ranking: Ranking) -> Any:
    return () if ranking.read_hits is None else ranking.read_hits()


def _word(value: str | int) -> str:
    word = str(value)
    if word.split() != [word] or "\0" in word:
        raise ConfigError(
            f"the id {word!r} has blanks or a NUL character, which a TREC run cannot hold; write a "
            ".parquet or .jsonl run instead"
        )
    return word


def read_run(path: str | Path) -> Run:
    """Read a run as query id -> document id -> score; integer ids become strings.

    The order is that of the scores, whatever the ranks say, as trec_eval has it. The file has
    TREC's six columns (``.trec``, ``.run``, ``.txt``), or is ``.parquet`` with query_id, doc_id and
    score, or ``.jsonl`` with query_id and hits, as ``write_run`` writes them. A query may not have
    a document twice, since which of the two scores counts would change the figures.
    """
    path = Path(path)
    table = LabelTable.read(path, RUN_ENDINGS, {*_READ, _HITS}, bare=_TREC_FIELDS)
    ranks_whole = path.suffix == JSONL
    for name in (_READ[0], _HITS) if ranks_whole else _READ:
        table.need((name,))
    run: dict[str, dict[str, float]] = {}
    for row in range(len(table)):
        query = table.parse(_READ[0], row, to_id)
        if ranks_whole:
            if query in run:
                raise CorpusError(f"{table.where(row)} ranks query {query!r} again; keep one")
            hits = table.parse(_HITS, row, _to_hits)
        else:
            document, score = _READ[1:]
            hits = [(table.parse(document, row, to_id), table.parse(score, row, _to_score))]
        found = run.setdefault(query, {})
        for name, value in hits:
            if name in found:
                raise CorpusError(
                    f"{table.where(row)} has document {name!r} of query {query!r} again; keep "
                    "one, such as the best passage of a document"
                )
            found[name] = value
    return run


def _to_hits(value: Any) -> list[tuple[str, float]]:
    try:
        return [(to_id(hit["id"]), _to_score(hit["score"])) for hit in value]
    except (ValueError, KeyError, TypeError) as error:
        said = f"it has no {error}" if isinstance(error, KeyError) else f"expected {error}"
        raise ValueError(f'hits such as [{{"id": "d1", "score": 0.5}}] ({said})') from error


def _to_score(value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and math.isfinite(score := to_number(value)):
            return score
    raise ValueError("a finite number")
