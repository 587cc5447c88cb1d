"""CSV, JSON, Arrow and text files as one Parquet file."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from whiten_index.errors import CorpusError, first_line

_SIGN = re.compile(r"\S")


def to_parquet(files: str, target: str) -> None:
    """Write the files that match a pattern as one Parquet file, with the columns of all of them.

    JSON is an array, or an object a line. A column with values of several types becomes text, and a
    note on standard error names it. A ``.txt`` has a text a line, which are the column ``text``.

    Args:
        files: path or glob pattern; the ending of each file says how to read it.
        target: the Parquet file.

    Raises:
        SystemExit: no file matches, or one cannot be read; the message names it.

    Examples:
        >>> _ = Path("pets.json").write_text('[{"text": "a cat"}, {"text": "a dog"}]')
        >>> to_parquet("pets.json", "pets.parquet")
        pets.parquet: 2 rows with text
    """
    import pyarrow.parquet as pq

    from whiten_index.corpus.sources import find_files

    parts, path = [], files
    try:
        for path in (file.path for file in find_files([files])):
            parts.append(READERS[Path(path).suffix](path))
    except (OSError, ValueError, CorpusError, pa.ArrowException) as error:
        raise SystemExit(f"Error: {path} cannot be read: {first_line(error)}") from None
    table = _joined(parts)
    pq.write_table(table, target)
    print(f"{target}: {len(table):,} rows with {', '.join(table.column_names)}")


def _joined(parts: list[pa.Table]) -> pa.Table:
    try:
        return pa.concat_tables(parts, promote_options="permissive")
    except pa.ArrowException:
        return _table([row for part in parts for row in part.to_pylist()])


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    columns = dict[str, Any]()
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, OverflowError):
            note = f"note: {name} has values of several types, and is written as text"
            print(note, file=sys.stderr)
            columns[name] = pa.array(map(_text, values), pa.string())
    return pa.table(columns)


def _text(value: Any) -> str | None:
    plain = value is None or isinstance(value, str)
    return value if plain else json.dumps(value, ensure_ascii=False, default=str)


def _read_json(path: str) -> pa.Table:
    text, decoder, rows, end = Path(path).read_text("utf-8-sig"), json.JSONDecoder(), [], 0
    while start := _SIGN.search(text, end):
        value, end = decoder.raw_decode(text, start.start())
        rows += value if isinstance(value, list) else [value]
    return _table([row if isinstance(row, dict) else {"text": row} for row in rows])


def _read_csv(path: str, **options: Any) -> pa.Table:
    from pyarrow import csv

    return csv.read_csv(path, parse_options=csv.ParseOptions(**options))


def _read_arrow(path: str) -> pa.Table:
    with pa.OSFile(path) as file:
        stream = file.read(6) != b"ARROW1"
        file.seek(0)
        return (pa.ipc.open_stream if stream else pa.ipc.open_file)(file).read_all()


READERS: dict[str, Callable[[str], pa.Table]] = {
    ".arrow": _read_arrow,
    ".csv": lambda path: _read_csv(path, newlines_in_values=True),
    ".feather": _read_arrow,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".tsv": lambda path: _read_csv(path, delimiter="\t", quote_char=False),
    ".txt": lambda path: pa.table({"text": Path(path).read_text(encoding="utf-8").splitlines()}),
}
