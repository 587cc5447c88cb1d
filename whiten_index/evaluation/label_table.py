"""A file of labels as columns, whatever its format, with what errors call a row of it."""

import contextlib
import csv
import json
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from whiten_index.artifacts.files import NotAFileError, is_folder, list_folder, open_file, reading
from whiten_index.artifacts.limits import LimitError, check_expanded, iterate_lines, load_json
from whiten_index.corpus.arrow_types import unpacked_bytes
from whiten_index.corpus.parquet_reader import check_footer, chunks_of
from whiten_index.errors import ConfigError, CorpusError, first_line
from whiten_index.paths import cut, shown

PARQUET, JSONL, TSV, CSV, TEXT = ".parquet", ".jsonl", ".tsv", ".csv", ".txt"
TREC = (".qrels", TEXT, ".trec")
# What a list and its value take, at least: a short text has some 50 bytes.
_VALUE_BYTES = 64
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class LabelTable:
    """The columns of a file that have a known name; missing values are None.

    ``names`` are those of all columns, ``numbers`` those of the rows in the file.
    """

    path: Path
    columns: dict[str, list[Any]]
    names: Sequence[str]
    numbers: Sequence[int]

    def __post_init__(self) -> None:
        """Refuse a table without rows, or with two columns of a name."""
        path, names = self.path, self.names
        if not len(self):
            raise CorpusError(f"{path} is empty: it holds no rows; name a file that does")
        if len(set(names)) < len(names):
            raise CorpusError(f"{path} names a column twice: {', '.join(names)}; rename one")

    @classmethod
    def read(
        cls,
        path: Path,
        endings: Collection[str],
        known: Collection[str],
        *,
        bare: Sequence[str] = (),
    ) -> "LabelTable":
        """Read the columns that have a ``known`` name.

        ``bare`` are the columns of a file between blanks without a header, as TREC has them; a
        single one is the whole line.
        """
        if path.suffix not in endings:
            raise ConfigError(
                f"the ending of {path.name or path} names no format that is read here; use "
                f"{', '.join(endings)}" + (_of_array(path) if path.suffix == ".json" else "")
            )
        try:
            with reading(path):
                open_file(path).close()
        except (FileNotFoundError, IsADirectoryError, NotAFileError) as error:
            known_as = {FileNotFoundError: "does not exist", IsADirectoryError: "is a folder"}
            why = known_as.get(type(error), str(error))
            raise CorpusError(f"{path} {why}; name a {path.suffix} file") from error
        if path.suffix == PARQUET:
            return _read_parquet(path, known)
        if path.suffix == JSONL:
            return _read_jsonl(path, known)
        return _read_fields(path, known, bare)

    def __len__(self) -> int:
        return len(self.numbers)

    def where(self, row: int) -> str:
        """Return what errors call a row, and its file."""
        number = self.numbers[row]
        place = f"row {number} (from 0)" if self.path.suffix == PARQUET else f"line {number}"
        return f"{self.path}, {place},"

    def need(self, choices: Sequence[str]) -> str:
        """Return the first of these names that a column has."""
        for name in choices:
            if name in self.columns:
                return name
        raise self.lacks(f"no column {' or '.join(choices)}")

    def lacks(self, what: str) -> CorpusError:
        """Return the error of a missing column: it lists the columns there are."""
        return CorpusError(
            f"{self.path} has {what}; its columns are {cut(', '.join(self.names), most=500)}: "
            "rename or add one"
        )

    def parse(
        self, name: str, row: int, parser: Callable[[Any], _Value], *, of: str = ""
    ) -> _Value:
        """Return a value as ``parser`` makes it; ``of`` is what an error says after its column."""
        value = self.columns[name][row]
        try:
            return parser(value)
        except ValueError as error:
            raise CorpusError(
                f"{self.where(row)} has {shown(value)} as {name}{of}, expected {error}; mend "
                "the row or take it out"
            ) from error


def to_text(value: Any) -> str:
    """Return a text that is not blank, for ``LabelTable.parse``."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text that is not blank")
    return to_utf8(value)


def to_utf8(value: Any) -> str:
    """Return a text, which may be blank, for ``LabelTable.parse``."""
    try:
        str.encode(value)
    except TypeError as error:
        raise ValueError("a text") from error
    except UnicodeEncodeError as error:
        raise ValueError("a text that UTF-8 can hold, without half surrogates") from error
    return str(value)


def label_files(paths: Iterable[str | Path], endings: Collection[str]) -> Iterator[list[Path]]:
    """Yield the file of each path alone, or the files of a folder that have one of the endings."""
    for path in map(Path, paths):
        files = [path]
        if is_folder(path):
            files = [each for each in list_folder(path) if each.suffix in endings]
        if not files:
            raise CorpusError(f"{path} holds no {', '.join(endings)} file; name a file")
        yield files


@contextlib.contextmanager
def reading_parquet(path: Path) -> Iterator[None]:
    """Refuse a Parquet file that cannot be read."""
    try:
        with reading(path):
            yield
    except (OSError, ArithmeticError, ValueError, pa.ArrowException) as error:
        raise CorpusError(
            f"{path} is not a readable Parquet file ({first_line(error)}); restore it or name "
            "another"
        ) from error


def _read_parquet(path: Path, known: Collection[str]) -> LabelTable:
    with reading_parquet(path), _reading_whole(path) as source:
        schema, packed = pq.read_schema(source), os.fstat(source.fileno()).st_size
        wanted = [name for name in schema.names if name in known]
        check_footer(metadata := pq.read_metadata(source))
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        check_expanded(sum(group.total_byte_size for group in groups), packed)
        read = [chunk for group in groups for _, chunk in chunks_of(group, wanted)]
        check_expanded(sum(chunk.num_values for chunk in read) * _VALUE_BYTES, packed)
        # A file may hold a text once and name it in a billion rows: it stays one until it is sized.
        texts = {each.path_in_schema for each in read if each.physical_type == "BYTE_ARRAY"}
        options = {"page_checksum_verification": True, "read_dictionary": [*texts]}
        with pq.ParquetFile(source, **options) as file:
            table = file.read(wanted)
        # Damage that decodes all the same shows as text that is not UTF-8.
        table.validate(full=True)
        check_expanded(sum(map(unpacked_bytes, table.to_batches())), packed)
        columns = dict(zip(table.column_names, (c.to_pylist() for c in table.columns), strict=True))
    return LabelTable(path, columns, schema.names, range(table.num_rows))


def _read_jsonl(path: Path, known: Collection[str]) -> LabelTable:
    records, numbers = [], []
    names: dict[str, None] = {}
    for number, line in read_lines(path):
        try:
            record = load_json(line)
            names.update(dict.fromkeys(record.keys()))
        except (ValueError, AttributeError) as error:
            raise CorpusError(
                f"{path}, line {number}, is no JSON object ({first_line(error)}): {shown(line)}; "
                "write one whole object a line, with a key for every column"
                + (_of_array(path) if line.startswith("[") else "")
            ) from error
        records.append({name: record[name] for name in known if name in record})
        numbers.append(number)
    found = [name for name in names if name in known]
    columns = {name: [record.get(name) for record in records] for name in found}
    return LabelTable(path, columns, list(names), numbers)


def _of_array(path: Path) -> str:
    """Return how a JSON array becomes lines."""
    old, new = json.dumps(str(path)), shlex.quote(f"{path.stem}-lines.jsonl")
    code = f"import json; [print(json.dumps(each)) for each in json.load(open({old}))]"
    return f". This makes lines of an array: python -c {shlex.quote(code)} > {new}"


def _read_fields(path: Path, known: Collection[str], bare: Sequence[str]) -> LabelTable:
    """Read fields between tabs or commas under a header, or those of TREC between blanks."""
    # Only fields between commas may stand in quotes, and then have commas and line breaks.
    separator = {CSV: ",", TSV: "\t"}.get(path.suffix)
    if path.suffix == CSV:
        lines = list(_read_csv(path))
    else:
        whole = len(bare) == 1
        lines = [(n, [t] if whole else t.split(separator)) for n, t in read_lines(path)]
    header = lines[0][1] if lines else []
    trec = separator is None or (len(header) == len(bare) and not {*header} & {*known})
    names: Sequence[str] = bare if trec else header
    records, numbers = [], []
    for number, fields in lines if trec else lines[1:]:
        if len(fields) != len(names):
            between = {CSV: "commas", TSV: "tabs"}.get(path.suffix, "blanks")
            raise CorpusError(
                f"{path}, line {number}, has {len(fields)} fields, expected {len(names)} between "
                f"{between} ({', '.join(names)}): {shown((separator or ' ').join(fields))}; mend "
                "the line or take it out"
            )
        records.append(fields)
        numbers.append(number)
    places = {name: place for place, name in enumerate(names) if name in known}
    columns = {name: [fields[place] for fields in records] for name, place in places.items()}
    return LabelTable(path, columns, names, numbers)


def _read_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    rows = csv.reader((f"{line}\n" for _, line in read_lines(path, blank=True)), strict=True)
    try:
        yield from ((rows.line_num, fields) for fields in rows if fields)
    except csv.Error as error:
        raise CorpusError(
            f"{path}, line {rows.line_num}, is no CSV ({error}); mend it or take it out"
        ) from error


def read_lines(path: Path, *, blank: bool = False) -> Iterator[tuple[int, str]]:
    """Yield number and text of every line, ``blank`` ones only if wanted."""
    try:
        with reading(path), _reading_whole(path) as file:
            for number, line in enumerate(iterate_lines(file), start=1):
                # Only a newline ends a line: texts may hold what Unicode also calls one.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if blank or text.strip(" "):
                    yield number, text
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}, line {number}, is not UTF-8; convert the file to it") from error
    except LimitError as error:
        raise CorpusError(f"{path} cannot be read: {error}; split it into lines") from error


@contextlib.contextmanager
def _reading_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file; refuse what was read of it if something wrote to it meanwhile."""

    def state(file: BinaryIO) -> tuple[int, int, int]:
        found = os.fstat(file.fileno())
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns

    with open_file(path) as file:
        before = state(file)
        yield file
        if state(file) != before:
            raise CorpusError(
                f"{path} changed while it was read; run the same command again when nothing "
                "writes to it"
            )
