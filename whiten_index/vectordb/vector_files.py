"""Files of vectors: Parquet, Arrow and NumPy."""

import contextlib
import errno
import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from whiten_index.artifacts.atomic import locked, replacing, require_replaceable
from whiten_index.artifacts.files import (
    exists,
    fsync_path,
    is_file,
    is_link,
    reading,
    resolved,
    writing,
)
from whiten_index.artifacts.limits import load_json
from whiten_index.artifacts.manifest import sealed_json, unsealed
from whiten_index.errors import ArtifactError, ConfigError, first_line
from whiten_index.vectordb.database_writer import taken_over
from whiten_index.vectordb.push_config import ARROW, NPY, PARQUET
from whiten_index.vectordb.pushed_table import (
    METADATA,
    VECTOR,
    Layout,
    PushedTable,
    RowsError,
    vectors_array,
    vectors_of,
)

# Metadata of the documents of an .npy file: BLAKE2b of the bytes of its vectors, in hexadecimal,
# and those of earlier pushes. Two files are not put in place in one step, so that a push that was
# killed may leave new documents with old vectors.
_DIGEST, _EARLIER = "vectors_blake2b", "vectors_blake2b_before"
_MOST_EARLIER = 8
# Tries to be the only push that puts files in place, and the seconds between them.
_TRIES, _PAUSE = 100, 0.1

_BEGINNINGS = {PARQUET: b"PAR1", ARROW: b"ARROW1", NPY: b"\x93NUMPY"}
_HOLDS = "rows that a push wrote"
_DESCRIBED = ("version", "query_digest", "rows", "k", "dtype", "columns")


def require_file(address: str) -> Path:
    """Return the path of a file that is new or that a push wrote."""
    path = target_of(address)
    *_, described = written_files(path)
    for each in written_files(path):
        require_replaceable(each, lambda _: _is_ours(described), _HOLDS)
    if path != described:
        require_replaceable(path, lambda _: _digest(path) in _digests(described), _HOLDS)
    return path


def target_of(address: str) -> Path:
    """Return the path of a file; a link stays one, and its target is replaced."""
    path = Path(address)
    target = resolved(path) if is_link(path) else path
    if ending(target) != ending(path):
        raise ConfigError(
            f"{path} is a link to {target}, which does not end in {ending(path)}, the format of "
            "the rows; give both one ending"
        )
    return target


def written_version(path: Path) -> PushedTable | None:
    """Return the description of the rows of a file, or None."""
    described = written_files(path)[-1]
    if not exists(described):
        return None
    require_replaceable(described, _is_ours, _HOLDS)
    if path != described and not (exists(path) and _digest(path) in _digests(described)[:1]):
        return None
    try:
        facts = unsealed(load_json(_metadata(described)[METADATA.encode()]))
        found = PushedTable.read(json.dumps({"transform": "", "done": facts["rows"], **facts}))
        # Documents rewritten by others have lost the digest of their vectors.
        if found and path == described and _shape(path) != (found.rows, [*found.columns]):
            found = None
    except (KeyError, TypeError, ValueError):
        found = None
    if found is None:
        raise ConfigError(
            f"{described} does not say what it holds; a later release wrote it, or it was changed: "
            "name another file, or move it away"
        )
    return found


def _shape(path: Path) -> tuple[int, list[str]]:
    """Return how many rows a file has, and their columns."""
    kind = pads.ParquetFileFormat() if ending(path) == PARQUET else pads.IpcFileFormat()
    file = kind.make_fragment(str(path), pafs.LocalFileSystem())
    try:
        with reading(path):
            return file.count_rows(), file.physical_schema.names
    except (OSError, pa.ArrowException) as error:
        _refuse_damaged(path, error)
        raise


def _is_ours(described: Path) -> bool:
    return METADATA.encode() in _metadata(described)


def _metadata(path: Path) -> Mapping[bytes, bytes]:
    """Return the metadata of a file, empty if it is of no format that a push writes."""
    try:
        with reading(path):
            if ending(path) == PARQUET:
                return pq.read_metadata(path).metadata or {}
            with pa.memory_map(str(path)) as source:
                return pa.ipc.open_file(source).schema.metadata or {}
    except (OSError, pa.ArrowException) as error:
        _refuse_damaged(path, error)
        return {}


def _refuse_damaged(path: Path, error: Exception) -> None:
    """Refuse a file that cannot be read, although it begins as its format does."""
    if is_file(path):
        with reading(path), path.open("rb") as file:
            if file.read(8).startswith(_BEGINNINGS[ending(path)]):
                raise ArtifactError(
                    f"{path} is damaged, such as cut short; remove it, and the .npy file that it "
                    "describes, if any, then push again"
                ) from error


def _digests(described: Path) -> list[str]:
    """Return the digests of the vectors that pushes wrote with documents, the latest first."""
    found = _metadata(described)
    return b" ".join(found.get(name.encode(), b"") for name in (_DIGEST, _EARLIER)).decode().split()


def _digest(vectors: Path) -> str:
    """Return the digest of the vectors in a file, empty if a push wrote no such file."""
    try:
        with reading(vectors), vectors.open("rb") as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            end = file.tell() + math.prod(shape) * dtype.itemsize
            found = hashlib.file_digest(file, "blake2b").hexdigest()
            if file.tell() != end:
                raise ValueError(f"it has {file.tell()} bytes instead of {end}")  # noqa: TRY301
            return found
    except ValueError as error:
        _refuse_damaged(vectors, error)
        return ""


def ending(path: Path) -> str:
    """Return the ending of a file, which names its format, in lower case."""
    return path.suffix.lower()


def written_files(path: Path) -> tuple[Path, ...]:
    """Return the files of the rows: next to an .npy file there is one of its documents."""
    return (path, path.with_suffix(".documents.parquet")) if ending(path) == NPY else (path,)


def write_rows(
    path: Path,
    layout: Layout,
    pushed: PushedTable,
    batches: Iterable[pa.RecordBatch],
    *,
    before: PushedTable | None,
) -> None:
    """Write rows of a layout to a file, which is replaced as a whole at the end.

    It is refused then if it is not what was there ``before``.
    """
    facts = {name: getattr(pushed, name) for name in _DESCRIBED}
    marked = {METADATA: sealed_json(facts).decode()}
    with contextlib.ExitStack() as turn, contextlib.ExitStack() as open_files:
        open_files.enter_context(writing(path, kept=""))
        places = [open_files.enter_context(replacing(each)) for each in written_files(path)]
        if ending(path) == NPY:
            earlier = _digests(written_files(path)[-1])
            _write_npy(places[0], places[1], layout, pushed.rows, marked, earlier, batches)
        else:
            _write_table(places[0], layout, marked, batches, path)
        for place in places:
            fsync_path(place)
        # Two pushes that put files in place at once would leave documents with others' vectors.
        for _ in range(_TRIES):
            try:
                turn.enter_context(locked(resolved(path).parent))
                break
            except BlockingIOError:
                # Another push has it for moments; if another program keeps it, we go on.
                time.sleep(_PAUSE)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM):
                    raise
                break  # a file system without locks
        if written_version(require_file(str(path))) != before:
            raise taken_over(str(path))


def _write_table(
    place: Path, layout: Layout, marked: Mapping[str, str], batches: Iterable[pa.RecordBatch],
    path: Path,
) -> None:  # fmt: skip
    at = layout.schema.get_field_index(VECTOR)
    kind = pa.float16() if layout.dtype == "float16" else pa.float32()
    field = pa.field(VECTOR, pa.list_(kind, layout.k))
    schema = layout.schema.set(at, field).with_metadata(marked)
    make = pq.ParquetWriter if ending(path) == PARQUET else pa.ipc.new_file
    # Arrow takes some paths for the addresses of file systems.
    with place.open("wb") as file, make(file, schema) as writer:
        for batch in batches:
            vectors = vectors_of(batch).astype(layout.dtype, copy=False)
            changed = batch.set_column(at, field, vectors_array(vectors, layout.k))
            with _refusals(path):
                writer.write_batch(changed.replace_schema_metadata(marked))


@contextlib.contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise RowsError(
            f"{path} cannot hold a kept value ({first_line(error)}); mend the corpus, or leave "
            "the column out of --keep"
        ) from error


def _write_npy(
    vectors: Path, documents: Path, layout: Layout, rows: int, marked: Mapping[str, str],
    earlier: list[str], batches: Iterable[pa.RecordBatch],
) -> None:  # fmt: skip
    names = [name for name in layout.schema.names if name != VECTOR]
    schema = pa.schema([layout.schema.field(name) for name in names])
    dtype = np.dtype(layout.dtype).newbyteorder("<")
    header: Any = {"descr": dtype.str, "fortran_order": False, "shape": (rows, layout.k)}
    with (
        vectors.open("wb") as file,
        documents.open("wb") as beside,
        pq.ParquetWriter(beside, schema.with_metadata(marked)) as writer,
    ):
        np.lib.format.write_array_header_1_0(file, header)
        digest = hashlib.blake2b()
        for batch in batches:
            numbers = np.ascontiguousarray(vectors_of(batch), dtype=dtype)
            digest.update(numbers.data)
            file.write(numbers.data)
            with _refusals(documents):
                writer.write_batch(batch.select(names).replace_schema_metadata(marked))
        others = [each for each in earlier if each != digest.hexdigest()][:_MOST_EARLIER]
        writer.add_key_value_metadata({_DIGEST: digest.hexdigest(), _EARLIER: " ".join(others)})
