"""Documents in Arrow files, and Arrow types with other leaves, at any depth."""

import struct
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from whiten_index.artifacts.files import reading
from whiten_index.artifacts.limits import check_expanded
from whiten_index.corpus.batches import ID
from whiten_index.errors import ArtifactError, first_line

# Of a value of a list in Python.
_VALUE_BYTES = 8
_OF_BYTES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_MOST_LEVELS = 50
_MAGIC_BYTES, _VERSION = 8, 4  # of Arrow files, and of metadata (V5, counted from V1 = 0)

Leaf = Callable[[pa.DataType], pa.DataType]


def times_as_numbers(array: pa.Array) -> pa.Array:
    """Return an array with numbers for dates and times, of which Python knows fewer than Arrow."""

    def number(leaf: pa.DataType) -> pa.DataType:
        if not pa.types.is_temporal(leaf):
            return leaf
        # An interval of Arrow is no one number.
        return {32: pa.int32(), 64: pa.int64()}.get(leaf.bit_width, leaf)

    # A cast would take most nested types wrongly or not at all.
    return array.view(replaced_leaves(array.type, number))


def times_of(kind: pa.DataType) -> list[pa.DataType]:
    """Return the types of dates and times in a type, in their order."""
    found = list[pa.DataType]()

    def leaf(of: pa.DataType) -> pa.DataType:
        if pa.types.is_temporal(of):
            found.append(of)
        return of

    replaced_leaves(kind, leaf)
    return found


def repeated_field(kind: pa.DataType) -> str | None:
    """Return a name that two fields of a struct share, which Python values cannot represent."""
    if not pa.types.is_nested(kind):
        return None
    fields = [kind.field(number) for number in range(kind.num_fields)]
    names = [field.name for field in fields] if pa.types.is_struct(kind) else []
    twice = (name for name in names if names.count(name) > 1)
    inside = (name for field in fields if (name := repeated_field(field.type)) is not None)
    return next(chain(twice, inside), None)


def without_views(kind: pa.DataType) -> pa.DataType:
    """Return a type with strings and bytes for views of them, which few of Arrow's kernels take."""

    def plain(leaf: pa.DataType) -> pa.DataType:
        if pa.types.is_string_view(leaf):
            return pa.large_string()
        return pa.large_binary() if pa.types.is_binary_view(leaf) else leaf

    return replaced_leaves(kind, plain)


def replaced_leaves(kind: pa.DataType, leaf: Leaf) -> pa.DataType:
    """Return a type with ``leaf`` applied to its leaves, those of dictionaries among them."""

    def field(of: pa.Field) -> pa.Field:
        return of.with_type(replaced_leaves(of.type, leaf))

    if pa.types.is_struct(kind):
        return pa.struct([field(each) for each in kind])
    if pa.types.is_map(kind):
        return pa.map_(field(kind.key_field), field(kind.item_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(field(kind.value_field), kind.list_size)
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, leaf(kind.value_type), kind.ordered)
    if pa.types.is_large_list(kind):
        return pa.large_list(field(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(field(kind.value_field))
    return leaf(kind)


def _is_compressed(message: pa.ipc.Message) -> bool:
    """Return whether a message has compressed columns, which unpack to any size, or may have."""
    if message.type not in ("record batch", "dictionary"):
        return False
    data = message.metadata.to_pybytes()

    def number(kind: str, place: int) -> int:
        found: int = struct.unpack_from(kind, data, place)[0]
        return found

    def inside(table: int, field: int) -> int | None:
        """Return the place of a field of a FlatBuffers table, None if it is not there."""
        names = table - number("<i", table)
        there = 4 + 2 * field < number("<H", names)
        place = number("<H", names + 4 + 2 * field) if there else 0
        return table + place if place else None

    def follow(place: int | None) -> int:
        return 0 if place is None else place + number("<I", place)

    # Older versions name the compression in free metadata.
    version = inside(number("<I", 0), 0)
    if version is None or number("<h", version) != _VERSION:
        return True
    # Message.header, then DictionaryBatch.data, then RecordBatch.compression.
    batch = follow(inside(number("<I", 0), 2))
    batch = follow(inside(batch, 1)) if message.type == "dictionary" else batch
    return inside(batch, 3) is not None


def is_strange(kind: pa.DataType, levels: int = _MOST_LEVELS) -> bool:
    """Return whether a type is one of those that no index has, at any depth.

    Of these a few bytes can stand for any number of values, or Arrow writes none so deep.
    """
    if isinstance(kind, pa.BaseExtensionType):
        # How long the texts of its dictionary are would be known only after they are in memory.
        return is_strange(kind.storage_type, levels) or _has_texts(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return bool(pa.types.is_nested(kind.value_type))
    views = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    runs = pa.types.is_run_end_encoded(kind)
    if views or runs or pa.types.is_union(kind) or kind == pa.struct([]) or not levels:
        return True
    inside = [kind.field(number).type for number in range(kind.num_fields)]
    return any(pa.types.is_dictionary(each) or is_strange(each, levels - 1) for each in inside)


def _has_texts(kind: pa.DataType) -> bool:
    inside = (kind.field(number).type for number in range(kind.num_fields))
    return without_views(kind) in _OF_BYTES or any(map(_has_texts, inside))


def unpacked_bytes(batch: pa.RecordBatch) -> int:
    """Return the size of a batch whose values are written out, as Python has those of lists.

    A dictionary may name one text in every row, and a null in a list takes no bytes.
    """
    # Batches share their dictionaries.
    plain = (c.indices if pa.types.is_dictionary(c.type) else c for c in batch.columns)
    return int(sum(each.nbytes for each in plain) + sum(map(_shared_bytes, batch.columns)))


def _shared_bytes(array: pa.Array) -> float:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _shared_bytes(array.storage)
    if pa.types.is_struct(kind):
        return sum(map(_shared_bytes, array.flatten()))
    if pa.types.is_nested(kind):
        if pa.types.is_map(kind):
            array = array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
        values = array.flatten()  # of a slice, its own
        return _VALUE_BYTES * len(values) + _shared_bytes(values)
    if not pa.types.is_dictionary(kind):
        return 0
    plain = without_views(kind.value_type)
    if plain not in _OF_BYTES and not pa.types.is_fixed_size_binary(plain):
        return 0
    lengths = pc.binary_length(array.dictionary.cast(plain)).cast(pa.float64())
    return float(pc.sum(lengths.take(array.indices)).as_py() or 0)


def read_documents(path: Path, data: Any = None, *, full: bool = True) -> pa.Table:
    """Return ids and kept columns from a file, mapped, or ``data``; ``full`` checks each value.

    Raises:
        ArtifactError: they cannot be read, or are no such columns.
    """
    try:
        with reading(path):
            if data is None:
                # A file is a stream between a magic number and a table of places.
                data = pa.memory_map(str(path)).read_buffer()[_MAGIC_BYTES:]
            if any(map(_is_compressed, pa.ipc.MessageReader.open_stream(data))):
                raise pa.ArrowInvalid("its columns are compressed, which no index has")
            table = pa.ipc.open_stream(data).read_all()
            if any(map(is_strange, table.schema.types)):
                raise pa.ArrowInvalid("it has columns of types that no index has")
            table.validate(full=full)
            if full:
                check_expanded(sum(map(unpacked_bytes, table.to_batches())), len(data))
            names, kinds = table.column_names, (pa.int64(), pa.string(), pa.large_string())
    except (OSError, ValueError, struct.error, pa.ArrowException) as error:
        # Names that are not in UTF-8 are a ValueError.
        raise ArtifactError(
            f"{path} cannot be read ({first_line(error)}); restore it or build again"
        ) from error
    if len({*names}) < len(names) or ID not in names or table[ID].type not in kinds:
        raise ArtifactError(
            f"{path} is damaged: its columns are {table.schema.to_string()[:200]!r}; restore "
            "it or build again"
        )
    return table
