"""Retrieval sets in BEIR form: their files found, a corpus of JSON lines turned into Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from whiten_index.artifacts.atomic import replacing
from whiten_index.artifacts.files import is_file, writing
from whiten_index.artifacts.limits import load_json
from whiten_index.corpus.sources import SourceFile
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.judgements import to_id, to_utf8
from whiten_index.evaluation.label_table import first_line, read_lines, reading_parquet, shown

_SCHEMA = pa.schema([("id", pa.string()), ("title", pa.string()), ("text", pa.string())])
_ROWS = 8_192


def corpus_file(folder: Path) -> Path:
    """Return the corpus of a set."""
    return _first(folder, "corpus.parquet", "corpus.jsonl")


def queries_file(folder: Path) -> Path:
    """Return the queries of a set."""
    return _first(folder, "queries.parquet", "queries.jsonl")


def qrels_file(folder: Path, split: str) -> tuple[Path, str | None]:
    """Return the judgements of a set, and which of their rows: None for all of them."""
    qrels = _first(folder, "qrels.parquet", f"qrels/{split}.parquet", f"qrels/{split}.tsv")
    # A file of one split says so by its name.
    of_several = qrels.suffix == ".parquet" and "split" in _columns(qrels)
    return qrels, split if of_several else None


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
    source = SourceFile(corpus.name, str(corpus), pafs.LocalFileSystem()).identified()
    with writing(target):
        work.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary, pq.ParquetWriter(temporary, _SCHEMA) as writer:
            for batch in _batches(corpus):
                writer.write_table(pa.Table.from_pylist(batch, _SCHEMA))
            source.require_unchanged()
    return target


def _batches(source: Path) -> Iterator[list[dict[str, str]]]:
    batch: list[dict[str, str]] = []
    for number, line in read_lines(source):
        batch.append(_document(line, f"{source}, line {number},"))
        if len(batch) == _ROWS:
            yield batch
            batch = []
    yield batch


def _document(line: str, where: str) -> dict[str, str]:
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
