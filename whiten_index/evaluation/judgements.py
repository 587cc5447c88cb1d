"""Judgements (qrels), their queries, and sets in BEIR form: read and checked."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from whiten_index.artifacts.atomic import replacing
from whiten_index.artifacts.files import is_file, writing
from whiten_index.artifacts.limits import load_json
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.errors import ConfigError, CorpusError, first_line
from whiten_index.evaluation.label_table import (
    CSV,
    JSONL,
    PARQUET,
    TEXT,
    TREC,
    TSV,
    LabelTable,
    read_lines,
    reading_parquet,
    to_text,
    to_utf8,
)
from whiten_index.evaluation.metrics import with_answers
from whiten_index.paths import shown

# The names a column may have, the preferred one first.
_QUERY, _DOCUMENT = ("query_id", "query-id"), ("doc_id", "corpus-id")
_GRADE, _SPLIT = ("relevance", "score"), "split"
_ID, _TEXT = ("id", "query_id", "_id"), ("text", "query")
TEXT_ENDINGS = (JSONL, CSV, TSV, TEXT)  # of queries, next to Parquet
_TREC_COLUMNS = ("query_id", "iteration", "doc_id", "relevance")
_WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")
# trec_eval keeps one counter a grade: 2**31 takes 16 GB and a minute, 2**40 ends the process.
_TOP_GRADE = 1_000_000
# Correlations multiply scores and add the products up, which must stay finite.
_TOP_SCORE = 1e100


def read_qrels(path: str | Path, *, split: str | None = None) -> dict[str, dict[str, int]]:
    """Read judgements as query id -> document id -> grade; integer ids become strings.

    The file is ``.parquet`` with query_id, doc_id, relevance or BEIR's query-id, corpus-id, score;
    ``.tsv`` with these as header, or TREC's four columns without one; ``.qrels``, ``.txt`` or
    ``.trec``: TREC's ``query iteration document grade``. With a ``split`` only the rows count whose
    column ``split`` says so.
    """
    known = {*_QUERY, *_DOCUMENT, *_GRADE, _SPLIT}
    table = LabelTable.read(Path(path), (PARQUET, TSV, *TREC), known, bare=_TREC_COLUMNS)
    query_name, document_name, grade_name = map(table.need, (_QUERY, _DOCUMENT, _GRADE))
    qrels: dict[str, dict[str, int]] = {}
    for row in _rows_of(table, split):
        query = table.parse(query_name, row, to_id)
        document = table.parse(document_name, row, to_id)
        grade = table.parse(grade_name, row, _to_grade)
        if qrels.setdefault(query, {}).setdefault(document, grade) != grade:
            raise CorpusError(
                f"{table.where(row)} gives query {query!r} and document {document!r} the grade "
                f"{grade}, an earlier one {qrels[query][document]}; keep one of the two"
            )
    if not any(grade > 0 for judged in qrels.values() for grade in judged.values()):
        within = "" if split is None else f" in split {split!r}"
        raise CorpusError(
            f"{path} has no grade above 0{within}, so no document counts as relevant; judge some "
            "with 1 or more"
        )
    return qrels


def read_queries(
    path: str | Path,
    *,
    text_columns: Sequence[str] = (),
    id_column: str | None = None,
    numbered: bool = False,
) -> dict[str, str]:
    """Read queries as query id -> text; integer ids become strings.

    The file is ``.parquet``, ``.jsonl`` (as BEIR's), ``.csv`` or ``.tsv`` with an id (id, query_id
    or _id) and a text (text or query), or the columns named. A ``.tsv`` of two columns needs no
    header. Queries that are ``numbered`` need no ids: these are then the numbers of lines, as in
    ``.txt``, with a query a line.
    """
    path, ids, texts = Path(path), (id_column,) if id_column else _ID, text_columns or _TEXT
    bare = ("text",) if path.suffix == TEXT else ("id", "text")
    table = LabelTable.read(path, (PARQUET, *TEXT_ENDINGS), {*ids, *texts}, bare=bare)
    numbered = numbered and id_column is None and not {*_ID} & table.columns.keys()
    id_name = "" if numbered else table.need(ids)
    text_names = [table.need((name,)) for name in text_columns] or [table.need(_TEXT)]
    queries: dict[str, str] = {}
    for row in range(len(table)):
        query = str(table.numbers[row]) if numbered else table.parse(id_name, row, to_id)
        if query in queries:
            raise CorpusError(
                f"{table.where(row)} has the id {query!r} of an earlier row; make the ids unique"
            )
        of = f" of query {query!r}"
        queries[query] = " ".join(table.parse(name, row, to_text, of=of) for name in text_names)
    return queries


def _rows_of(table: LabelTable, split: str | None) -> Sequence[int]:
    if split is None:
        return range(len(table))
    splits = table.columns.get(_SPLIT)
    if splits is None:
        raise ConfigError(f"{table.path} has no column split; do not ask for split {split!r}")
    rows = [row for row, value in enumerate(splits) if value == split]
    if not rows:
        known = ", ".join(dict.fromkeys(map(str, splits)))
        raise ConfigError(f"{table.path} has no split {split!r}; use one of {known}")
    return rows


def to_id(value: Any) -> str:
    """Return an id as a string, whole numbers too, for ``LabelTable.parse``.

    What evaluates a run reads ids as C strings of UTF-8, and ends the process over others.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError("text or a whole number")
    if "\0" in value:
        raise ValueError("a text without a NUL character")
    return to_utf8(value)


def _to_grade(value: Any) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if whole or (isinstance(value, str) and len(value) < 20 and _WHOLE.fullmatch(value)):
        grade = int(float(value))
        if abs(grade) <= _TOP_GRADE:
            return grade
    raise ValueError(f"a grade: a whole number such as 1, up to {_TOP_GRADE:,}")


def to_score(value: Any) -> float:
    """Return a number up to 1e100, NaN for nothing, for ``LabelTable.parse``."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    expected = "a finite number up to 1e100 or nothing"
    try:
        score = to_number(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(expected) from error
    if abs(score) > _TOP_SCORE:
        raise ValueError(expected)
    return score


def to_number(value: Any) -> float:
    """Return a value as a float; of text, only what other tools read as a number too."""
    # Python's float also takes underscores and the digits of other scripts, and bytes of both.
    if isinstance(value, str | bytes):
        text = value.decode() if isinstance(value, bytes) else value
        if "_" in text or not text.strip().isascii():
            raise ValueError("no number in ASCII digits")
    return float(value)


@dataclass(frozen=True, eq=False)
class JudgedQueries:
    """Queries with their texts and what answers them."""

    source: str
    texts: Mapping[str, str]
    qrels: Mapping[str, Mapping[str, int]]
    left_out: int

    @property
    def digest(self) -> str:
        """Identity of the texts and of what answers them."""
        qrels = {query: dict(grades) for query, grades in self.qrels.items()}
        return fingerprint({"texts": dict(self.texts), "qrels": qrels})

    def missing(self, names: Iterable[str]) -> int:
        """Return how many relevant documents a corpus lacks; refuse a corpus without any."""
        known, every = dict.fromkeys(names), self.qrels.values()
        relevant = {name: None for grades in every for name, grade in grades.items() if grade > 0}
        lacking = relevant.keys() - known.keys()
        if len(lacking) == len(relevant):
            found = f"ids such as {some(known)}" if known else "none"
            raise CorpusError(
                f"{self.source} names no document of the corpus: it judges {some(relevant)}, and "
                f"the corpus has {found}; check --id-column and --filter"
            )
        return len(lacking)


def read_judged(
    queries: str | Path, qrels: str | Path, *, split: str | None = None
) -> JudgedQueries:
    """Read queries and judgements; queries without a relevant document or a text are left out."""
    every = read_queries(queries)
    relevant = with_answers(read_qrels(qrels, split=split))
    texts = {query: every[query] for query in relevant if query in every}
    if not texts:
        raise CorpusError(
            f"no query of {qrels} is in {queries}: the judgements name {some(relevant)}, the "
            f"queries are {some(every)}; give files that belong together"
        )
    return JudgedQueries(
        source=str(qrels),
        texts=texts,
        qrels={query: relevant[query] for query in texts},
        left_out=len(relevant) - len(texts),
    )


def some(names: Iterable[str]) -> str:
    """Return two of some names as errors show them."""
    return " and ".join(map(repr, itertools.islice(names, 2)))


_SCHEMA = pa.schema([("id", pa.string()), ("title", pa.string()), ("text", pa.string())])
_ROWS = 8_192


def corpus_file(folder: Path) -> Path:
    """Return the corpus of a set."""
    return _first(folder, "corpus.parquet", "corpus.jsonl")


def queries_file(folder: Path) -> Path:
    """Return the queries of a set."""
    return _first(folder, "queries.parquet", "queries.jsonl")


def qrels_file(folder: Path, split: str | None) -> tuple[Path, str | None]:
    """Return the judgements of a set, of ``test`` by default, and which rows: None for all."""
    name = split or "test"
    qrels = _first(folder, "qrels.parquet", f"qrels/{name}.parquet", f"qrels/{name}.tsv")
    if qrels.suffix == ".parquet" and "split" in _columns(qrels):
        return qrels, name
    # A file of one split has its name; no other file has splits to choose from.
    return qrels, split if qrels.name == "qrels.parquet" else None


def _first(folder: Path, *names: str) -> Path:
    for name in names:
        if is_file(folder / name):
            return folder / name
    raise ConfigError(f"{folder} is no retrieval set: it has no {' and no '.join(names)}")


def id_column(corpus: Path) -> str:
    """Return which column of a Parquet file names its documents: ``id``, or BEIR's ``_id``."""
    names = _columns(corpus)
    return "_id" if "_id" in names and "id" not in names else "id"


def text_columns(corpus: Path) -> list[str]:
    """Return which of BEIR's columns of text a Parquet file has."""
    names = _columns(corpus)
    return [name for name in ("title", "text") if name in names]


def _columns(path: Path) -> list[str]:
    with reading_parquet(path):
        return list(pq.read_schema(path).names)


def parquet_corpus(corpus: Path, work: Path) -> Path:
    """Return a corpus as Parquet: itself, or made in ``work`` of BEIR's JSON lines."""
    if corpus.suffix != ".jsonl":
        return corpus
    target = work / "corpus.parquet"
    with writing(target):
        work.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary, pq.ParquetWriter(temporary, _SCHEMA) as writer:
            lines = ((f"{corpus}, line {number},", line) for number, line in read_lines(corpus))
            documents = itertools.starmap(_document, lines)
            while batch := list(itertools.islice(documents, _ROWS)):
                writer.write_table(pa.Table.from_pylist(batch, _SCHEMA))
    return target


def _document(where: str, line: str) -> dict[str, str]:
    try:
        found = load_json(line)
        title = found.get("title")
        return {
            "id": _parsed("_id", found["_id"], to_id),
            "title": "" if title is None else _parsed("title", title, to_utf8),
            "text": _parsed("text", found["text"], to_utf8),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorpusError(
            f"{where} is not a document of BEIR, an object with _id, title and text "
            f"({type(error).__name__}: {first_line(error)}); mend it or take it out"
        ) from error


def _parsed(name: str, value: Any, parser: Callable[[Any], str]) -> str:
    try:
        return parser(value)
    except ValueError as error:
        raise ValueError(f"its {name} is {shown(value)}, expected {error}") from error
