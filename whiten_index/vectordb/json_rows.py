"""Rows as JSON objects, for databases that keep only these with a vector, and back."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from whiten_index.corpus.arrow_types import replaced_leaves, times_as_numbers
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.database_writer import RowsError

# The years 1 to 9999, which ISO 8601 writes in four digits, in days since 1970.
_FIRST, _LAST = -719_162, 2_932_896
_DAY = 86_400
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def to_objects(rows: pa.RecordBatch, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return columns of rows as JSON objects.

    Dates, timestamps and decimals become text (ISO 8601, those with a zone in UTC), times of day
    and durations numbers of their unit, bytes base64, pairs of a map lists of two, and NaN null.

    Raises:
        RowsError: a date is outside the years 1 to 9999, or a number is infinite.
    """
    columns = []
    for name in names:
        kind, column = rows.schema.field(name).type, rows.column(name)
        try:
            for leaf in _leaves(column):
                _require_expressible(leaf)
            values = column.cast(_in_utc(kind)).cast(_plain(kind)).to_pylist()
        except (pa.ArrowException, ValueError) as error:
            raise RowsError(
                f"column {name!r} ({kind}) holds {str(error).splitlines()[0]}, which this database "
                "cannot keep; leave it out of --keep, or mend the corpus"
            ) from error
        if _has_bytes_or_floats(kind):
            values = [_changed(value, kind, _leaf_to_json, list) for value in values]
        columns.append(values)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def from_objects(objects: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return the table from which ``to_objects`` made objects.

    Raises:
        DatabaseError: a value has another type.
    """
    columns = []
    for field in schema:
        values = [each.get(field.name) for each in objects]
        try:
            if _has_bytes_or_floats(field.type):
                values = [_changed(each, field.type, _leaf_from_json, tuple) for each in values]
            columns.append(_cast(pa.array(values, _plain(field.type)), field.type))
        except (pa.ArrowException, ValueError, TypeError, LookupError, OverflowError) as error:
            told = (str(error).splitlines() or [type(error).__name__])[0]
            raise DatabaseError(
                f"column {field.name!r} of the database holds what no push wrote ({told}); push "
                "all rows with --full"
            ) from error
    return pa.table(columns, schema=schema)


def _cast(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """Cast an array; the fields of a null struct are null, where Arrow would parse empty texts."""
    if pa.types.is_struct(type_):
        members = zip(array.flatten(), type_, strict=True)
        arrays = [_cast(member, field.type) for member, field in members]
        return pa.StructArray.from_arrays(arrays, fields=list(type_), mask=array.is_null())
    is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_)
    if is_list and pa.types.is_nested(type_.value_type):
        values, mask = _cast(array.values, type_.value_type), array.is_null()
        return type(array).from_arrays(array.offsets, values, type=type_, mask=mask)
    return array.cast(type_)


def _leaves(column: pa.Array) -> Iterator[pa.Array]:
    """Yield the arrays of plain values in a column, at any depth."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        yield from _leaves(column.dictionary_decode())
    elif pa.types.is_struct(kind):
        for each in column.flatten():
            yield from _leaves(each)
    elif pa.types.is_map(kind):
        yield from _leaves(column.keys)
        yield from _leaves(column.items)
    elif pa.types.is_nested(kind):
        yield from _leaves(column.flatten())
    else:
        yield column


def _require_expressible(leaf: pa.Array) -> None:
    """Refuse what ISO 8601 or JSON has no form for."""
    kind = leaf.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        day = 1 if pa.types.is_date32(kind) else _DAY * _UNITS[getattr(kind, "unit", "ms")]
        found = pc.min_max(times_as_numbers(leaf)).as_py()
        first, after = _FIRST * day, (_LAST + 1) * day
        if found["min"] is not None and not first <= found["min"] <= found["max"] < after:
            raise ValueError("a date outside the years 1 to 9999")
    if pa.types.is_floating(kind) and pc.any(pc.is_inf(leaf.cast(pa.float64()))).as_py():
        raise ValueError("infinity")


def _in_utc(kind: pa.DataType) -> pa.DataType:
    """Return a type in UTC: offsets before 1900 have seconds, which ISO 8601 lacks."""

    def leaf(of: pa.DataType) -> pa.DataType:
        zoned = pa.types.is_timestamp(of) and of.tz
        return pa.timestamp(of.unit, "UTC") if zoned else of

    return replaced_leaves(kind, leaf)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type in JSON, except for bytes and floats."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)

    def leaf(of: pa.DataType) -> pa.DataType:
        if pa.types.is_timestamp(of) or pa.types.is_date(of) or pa.types.is_decimal(of):
            return pa.large_string()
        if pa.types.is_time(of) or pa.types.is_duration(of):
            return pa.int32() if of.bit_width == 32 else pa.int64()
        return of

    return replaced_leaves(kind, leaf)


def _changed(
    value: Any, kind: pa.DataType, leaf: Callable[[Any, pa.DataType], Any], pair: type
) -> Any:
    """Return a value with its leaves changed, at any depth; pairs of a map are of a type."""
    if value is None:
        return None
    if pa.types.is_dictionary(kind):
        return _changed(value, kind.value_type, leaf, pair)
    if pa.types.is_map(kind):
        kinds = (kind.key_type, kind.item_type)
        return [
            pair(_changed(one, of, leaf, pair) for one, of in zip(each, kinds, strict=True))
            for each in value
        ]
    if pa.types.is_struct(kind):
        return {each.name: _changed(value[each.name], each.type, leaf, pair) for each in kind}
    if pa.types.is_nested(kind):
        return [_changed(each, kind.value_type, leaf, pair) for each in value]
    return leaf(value, kind)


def _leaf_to_json(value: Any, kind: pa.DataType) -> Any:
    if _is_bytes(kind):
        return base64.b64encode(value).decode()
    return None if pa.types.is_floating(kind) and not math.isfinite(value) else value


def _leaf_from_json(value: Any, kind: pa.DataType) -> Any:
    if _is_bytes(kind):
        return base64.b64decode(value)
    # A database may write 1.0 as 1, and 1e300 as an integer of 301 digits.
    return float(value) if pa.types.is_floating(kind) else value


def _has_bytes_or_floats(kind: pa.DataType) -> bool:
    """Return whether values differ in JSON; maps are lists there."""
    return pa.types.is_nested(kind) or pa.types.is_floating(kind) or _is_bytes(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return any(test(kind) for test in tests)
