"""Files of word vectors, streamed word by word: text, word2vec's binary, Parquet, packed or not."""

from __future__ import annotations

import contextlib
import gzip
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from whiten_index.artifacts.files import reading
from whiten_index.artifacts.limits import LimitError, check_expanded, iterate_lines
from whiten_index.errors import CorpusError
from whiten_index.labels.table import PARQUET, check_readable, first_line, shown

_WORD_COLUMNS = ("word", "token")
_TEXT = (pa.string(), pa.large_string(), pa.string_view())
_BINARY = ".bin"
# First bytes of a fastText model, which holds parts of words and no plain table of vectors.
_FASTTEXT = (793712314).to_bytes(4, "little")
_CHUNK, _LONGEST_WORD, _WIDEST, _DIGITS = 1 << 20, 4096, 1 << 16, 18
# What the libraries raise on a file that is not what its ending says.
DAMAGE = (EOFError, zipfile.BadZipFile, zlib.error, OSError, pa.ArrowException, LimitError)
_TAKES = "GloVe or fastText text, word2vec text or .bin, either as .gz or .zip, or Parquet"


@dataclass(frozen=True)
class WordRow:
    """One word of a file.

    Attributes:
        number: of its line, entry or row.
        word: its bytes.
        raw: its numbers, as the format has them.
    """

    number: int
    word: bytes
    raw: Any


@dataclass(frozen=True)
class WordFile:
    """An open file of word vectors.

    Attributes:
        path: the file.
        dim: numbers a word, d.
        call: what errors call a row, such as ``line {}``.
        rows: the words, in the order of the file; to be read once.
        numbers: makes the (d,) float32 vector of a row's ``raw``; ValueError where it cannot.
    """

    path: Path
    dim: int
    call: str
    rows: Iterator[WordRow]
    numbers: Callable[[Any], NDArray[np.float32]]

    def vector(self, row: WordRow) -> NDArray[np.float32]:
        """Return the vector (d,) of a row.

        Raises:
            CorpusError: it holds something that is no finite float32.
        """
        try:
            with np.errstate(over="ignore"):
                vector = self.numbers(row.raw)
        except (TypeError, ValueError) as error:
            raise self._bad(row, first_line(error)) from error
        if not np.isfinite(vector).all():
            raise self._bad(row, "one is NaN, infinite or beyond float32")
        return vector

    def _bad(self, row: WordRow, why: str) -> CorpusError:
        return CorpusError(
            f"{self.path}, {self.call.format(row.number)}, the word {spelled(row.word)}: expected "
            f"{self.dim} finite numbers ({why}); mend the row, take it out, or fetch the file again"
        )


@contextlib.contextmanager
def open_word_file(path: str | Path) -> Iterator[WordFile]:
    """Open a file of word vectors: the format is told by the ending, a header by the first line.

    ``.parquet`` has a column word (or token, or one column of text) and one column of lists, or
    numeric columns in the order of the coordinates. ``.bin`` is word2vec's binary. All else is
    text, one word a line, with the header ``n d`` of word2vec and fastText or without it as
    GloVe's; its numbers are counted from the right, since some words of GloVe hold blanks. ``.gz``
    and a ``.zip`` of one file are unpacked as they are read.

    Raises:
        CorpusError: it is missing, damaged, cut short, or of another format.
    """
    path = Path(path)
    check_readable(path)
    with contextlib.ExitStack() as stack:
        try:
            with reading(path):
                if path.suffix == PARQUET:
                    file = pq.ParquetFile(path, page_checksum_verification=True)
                    yield _parquet(path, stack.enter_context(file))
                else:
                    stream, name, packed = _unpacked(path, stack)
                    yield (_binary if name.endswith(_BINARY) else _text)(path, stream, packed)
        except DAMAGE as error:
            raise CorpusError(
                f"{path} is damaged or cut short ({first_line(error)}); fetch it again"
            ) from error


def text_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of the lines of a text file that are not blank, unpacked.

    Only a newline ends a line: words may hold what Unicode also calls one.
    """
    with reading(path), contextlib.ExitStack() as stack:
        stream, _, packed = _unpacked(path, stack)
        yield from _lines(stream, packed)


def _lines(stream: IO[bytes], packed: int | None) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(iterate_lines(stream, packed=packed), start=1):
        if line.strip():
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _unpacked(path: Path, stack: contextlib.ExitStack) -> tuple[IO[bytes], str, int | None]:
    """Return the bytes inside a file, the name that tells their format, the size of a packed one.

    Raises:
        CorpusError: an archive holds none or several, or one that cannot be unpacked.
    """
    size = path.stat().st_size
    if path.suffix == ".gz":
        return stack.enter_context(cast(IO[bytes], gzip.open(path, "rb"))), path.stem, size
    if path.suffix != ".zip":
        return stack.enter_context(path.open("rb")), path.name, None
    archive = stack.enter_context(zipfile.ZipFile(path))
    names = [n for n in archive.namelist() if not n.endswith("/") and not n.startswith("__MACOSX/")]
    if len(names) != 1:
        raise CorpusError(
            f"{path} holds {len(names)} files ({', '.join(names[:6])}), expected one; unpack it "
            "and name the one to use"
        )
    if names[0].endswith((PARQUET, ".gz", ".zip")):
        raise CorpusError(f"{path} holds {names[0]}, which is packed itself; unpack the archive")
    try:
        return stack.enter_context(archive.open(names[0])), PurePosixPath(names[0]).name, size
    except RuntimeError as error:
        raise CorpusError(f"{path} cannot be unpacked here ({error}); unpack it first") from error


def _text(path: Path, stream: IO[bytes], packed: int | None) -> WordFile:
    lines = _lines(stream, packed)
    number, first = next(lines, (0, b""))
    if not number:
        raise CorpusError(f"{path} is empty; name a file of word vectors: {_TAKES}")
    fields = first.split()
    header = len(fields) == 2 and all(map(_is_count, fields))
    declared, dim = (int(fields[0]), int(fields[1])) if header else (None, len(fields) - 1)
    if not 0 < dim <= _WIDEST or b"\0" in first:
        raise CorpusError(
            f"{path}, line {number}, is neither a word with its numbers nor the header `words "
            f"dims` but {shown(first[:80])}; name {_TAKES}"
        )

    def rows() -> Iterator[WordRow]:
        read = 0
        if not header:
            yield _fields(path, number, first, dim)
        for place, line in lines:
            read += 1
            yield _fields(path, place, line, dim)
        if declared is not None and read != declared:
            raise _miscounted(path, read, declared)

    return WordFile(path, dim, "line {}", rows(), _parsed)


def _is_count(field: bytes) -> bool:
    """Return whether a field of a header is a number that a file can hold."""
    return field.isdigit() and len(field) <= _DIGITS


def _fields(path: Path, number: int, line: bytes, dim: int) -> WordRow:
    fields = line.rsplit(None, dim)
    if len(fields) != dim + 1 or _two_lines(fields[0].split(), dim):
        raise CorpusError(
            f"{path}, line {number}, has {len(line.split())} fields, expected a word and {dim} "
            f"numbers: {shown(line[:80])}; mend the line, take it out, or fetch the file again"
        )
    return WordRow(number, fields[0].lstrip(), fields[1:])


def _two_lines(parts: list[bytes], dim: int) -> bool:
    """Whether a word with blanks is a whole line, run together with the word of the next."""
    if len(parts) <= dim:
        return False
    try:
        # The last of the d numbers may have grown together with the next word.
        _parsed(parts[1:dim])
    except ValueError:
        return False
    return True


def _parsed(fields: list[bytes]) -> NDArray[np.float32]:
    return np.array([float(field) for field in fields]).astype(np.float32)


def _miscounted(path: Path, read: int, declared: int) -> CorpusError:
    return CorpusError(
        f"{path} holds {read:,} words and its header says {declared:,}; fetch it again, or write "
        "the right number into the header"
    )


def _binary(path: Path, stream: IO[bytes], packed: int | None) -> WordFile:
    head = stream.readline(_LONGEST_WORD)
    if head.startswith(_FASTTEXT):
        raise CorpusError(f"{path} is a fastText model, not a table of vectors; name its .vec file")
    fields = head.split()
    if len(fields) != 2 or not all(map(_is_count, fields)) or int(fields[1]) < 1:
        raise CorpusError(
            f"{path} does not begin with the header `words dims` of word2vec's binary format but "
            f"with {shown(head[:40])}; name {_TAKES}"
        )
    declared, dim = int(fields[0]), int(fields[1])
    if dim > _WIDEST:
        raise CorpusError(f"{path} has vectors of {dim:,} dims, and {_WIDEST:,} are the limit")
    return WordFile(path, dim, "word {}", _entries(path, stream, declared, dim, packed), _floats)


def _entries(
    path: Path, stream: IO[bytes], declared: int, dim: int, packed: int | None
) -> Iterator[WordRow]:
    """Yield the entries of word2vec's binary: word, a blank, d float32; some end with a newline."""
    width, held, start, total = 4 * dim, b"", 0, 0
    for number in range(1, declared + 1):
        while (blank := held.find(b" ", start)) < 0 or len(held) < blank + 1 + width:
            if blank < 0 and len(held) - start > _LONGEST_WORD:
                raise CorpusError(f"{path}, word {number}, has no end; fetch the file again")
            if not (more := stream.read(_CHUNK + width)):
                raise _miscounted(path, number - 1, declared)
            check_expanded(total := total + len(more), packed)
            held, start = held[start:] + more, 0
        yield WordRow(number, held[start:blank].lstrip(b"\n"), held[blank + 1 : blank + 1 + width])
        start = blank + 1 + width
    if (held[start:] + stream.read(_LONGEST_WORD)).strip(b"\n"):
        raise CorpusError(
            f"{path} goes on after the {declared:,} words of {dim} dims of its header; fetch it "
            "again"
        )


def _floats(raw: bytes) -> NDArray[np.float32]:
    return np.frombuffer(raw, "<f4").astype(np.float32)


def _parquet(path: Path, file: pq.ParquetFile) -> WordFile:
    schema = file.schema_arrow
    texts = [field.name for field in schema if field.type in _TEXT]
    word = next((n for n in _WORD_COLUMNS if n in texts), texts[0] if len(texts) == 1 else None)
    lists = [f.name for f in schema if _is_list(f.type)]
    plain = [f.name for f in schema if pa.types.is_floating(f.type) or pa.types.is_integer(f.type)]
    columns = lists or plain
    if word is None or len(lists) > 1 or not columns:
        raise CorpusError(
            f"{path} has the columns {', '.join(schema.names)}; expected one of text named word "
            "and either one of lists of numbers or one of numbers a coordinate"
        )
    if not file.metadata.num_rows:
        raise CorpusError(f"{path} is empty; name a file of word vectors: {_TAKES}")
    dim = _list_width(path, file, lists[0]) if lists else len(plain)

    def numbers(raw: Any) -> NDArray[np.float32]:
        values = raw if isinstance(raw, list) else [raw]
        if len(values) != dim:
            raise ValueError(f"there are {len(values)}")
        return np.array([float(value) for value in values]).astype(np.float32)

    return WordFile(path, dim, "row {} (from 0)", _records(path, file, word, lists, plain), numbers)


def _is_list(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_list(kind) for is_list in lists)


def _list_width(path: Path, file: pq.ParquetFile, column: str) -> int:
    first = next(file.iter_batches(1, columns=[column])).column(0)[0].as_py()
    if not first:
        raise CorpusError(f"{path}, row 0 (from 0), has no numbers in {column}; take the row out")
    return len(first)


def _records(
    path: Path, file: pq.ParquetFile, word: str, lists: list[str], plain: list[str]
) -> Iterator[WordRow]:
    number = 0
    for batch in file.iter_batches(4096, columns=[word, *(lists or plain)]):
        words = batch.column(batch.schema.get_field_index(word)).to_pylist()
        names = lists or plain
        columns = [batch.column(batch.schema.get_field_index(name)) for name in names]
        for i, value in enumerate(words):
            if value is None:
                raise CorpusError(f"{path}, row {number} (from 0), has no word; take the row out")
            raw = [column[i].as_py() for column in columns]
            yield WordRow(number, value.encode(), raw[0] if lists else raw)
            number += 1


def spelled(word: bytes) -> str:
    """Return a word of a file as errors show it."""
    return shown(word.decode("utf-8", "replace"))
