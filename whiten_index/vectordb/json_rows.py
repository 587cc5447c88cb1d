"""Rows as JSON objects, for databases that keep only these with a vector, and back."""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.corpus.arrow_types import times_as_numbers
from whiten_index.errors import DatabaseError
from whiten_index.vectordb.pushed_table import VECTOR, Layout, RowsError, vectors_array

# The years 1 to 9999, which ISO 8601 writes in four digits.
_FIRST, _LAST = np.datetime64("0001-01-01", "D"), np.datetime64("9999-12-31", "D")
_DAY_MS = 86_400_000


def to_objects(rows: pa.RecordBatch, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return columns of rows as JSON objects; see ``json_values``."""
    columns = [json_values(rows, name) for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def json_values(rows: pa.RecordBatch, name: str) -> list[Any]:
    """Return the values of a column as JSON.

    Dates, timestamps and decimals become text (ISO 8601, those with a zone in UTC), times of day
    and durations numbers of their unit, bytes base64, pairs of a map lists of two, and NaN null.
    A date outside the years 1 to 9999, and infinity, are refused.
    """
    column = rows.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    try:
        values: list[Any] = times_as_numbers(column).to_pylist()
        if _is_plain(kind):
            return values
        return [_mapped(each, kind, _to_json, list) for each in values]
    except (pa.ArrowNotImplementedError, TypeError, ValueError) as error:
        raise RowsError(
            f"column {name!r} ({kind}) holds {str(error).splitlines()[0]}, which this database "
            "cannot keep; leave it out of --keep, or mend the corpus"
        ) from error


def from_objects(objects: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return the table from which ``to_objects`` made objects."""
    columns = []
    for field in schema:
        kind, values = field.type, [each.get(field.name) for each in objects]
        try:
            if not _is_plain(kind):
                values = [_mapped(each, kind, _from_json, tuple) for each in values]
            numbers = times_as_numbers(pa.nulls(0, kind)).type
            columns.append(pa.array(values, numbers).view(kind))
        except (pa.ArrowNotImplementedError, ArithmeticError, AttributeError, LookupError,
                TypeError, ValueError) as error:  # fmt: skip
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise DatabaseError(
                f"column {field.name!r} of the database holds what no push wrote ({why}); push "
                "all rows with --full"
            ) from error
    return pa.table(columns, schema=schema)


def table_of(
    objects: Sequence[Mapping[str, Any]], vectors: NDArray[np.float32], layout: Layout
) -> pa.Table:
    """Return rows of a layout of their other columns as objects and their vectors (n, k)."""
    at = layout.schema.get_field_index(VECTOR)
    rows = from_objects(objects, layout.schema.remove(at))
    return rows.add_column(at, layout.schema.field(at), vectors_array(vectors, layout.k))


def _mapped(
    value: Any, kind: pa.DataType, leaf: Callable[[Any, pa.DataType], Any], pair: type
) -> Any:
    """Return a value with its leaves mapped, at any depth; pairs of a map are of a type."""
    if value is None:
        return None
    if pa.types.is_dictionary(kind):
        return _mapped(value, kind.value_type, leaf, pair)
    if pa.types.is_map(kind):
        kinds = (kind.key_type, kind.item_type)
        return [
            pair(_mapped(one, of, leaf, pair) for one, of in zip(each, kinds, strict=True))
            for each in value
        ]
    if pa.types.is_struct(kind):
        return {each.name: _mapped(value[each.name], each.type, leaf, pair) for each in kind}
    if pa.types.is_nested(kind):
        return [_mapped(each, kind.value_type, leaf, pair) for each in value]
    return leaf(value, kind)


def _to_json(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        zoned = None
        if pa.types.is_timestamp(kind):
            moment, zoned = np.datetime64(value, kind.unit), kind.tz
        else:
            moment = np.datetime64(value // _DAY_MS if pa.types.is_date64(kind) else value, "D")
        if not _FIRST <= moment.astype("datetime64[D]") <= _LAST:
            raise ValueError("a date outside the years 1 to 9999")
        return str(moment).replace("T", " ") + ("Z" if zoned else "")
    if pa.types.is_floating(kind):
        if math.isinf(value):
            raise ValueError("infinity")
        return None if math.isnan(value) else float(value)
    if pa.types.is_decimal(kind):
        return str(value)
    return base64.b64encode(value).decode() if is_bytes(kind) else value


def _from_json(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        unit: Any = kind.unit if pa.types.is_timestamp(kind) else "D"
        number = int(np.datetime64(value.removesuffix("Z"), unit).astype(np.int64))
        return number * _DAY_MS if pa.types.is_date64(kind) else number
    if pa.types.is_floating(kind):
        # A database may write 1.0 as 1, and 1e300 as an integer of 301 digits.
        return float(value)
    if pa.types.is_decimal(kind):
        return Decimal(value)
    return base64.b64decode(value) if is_bytes(kind) else value


def _is_plain(kind: pa.DataType) -> bool:
    """Return whether values are the same in JSON, times of day and durations as numbers."""
    same = (
        pa.types.is_boolean, pa.types.is_integer, pa.types.is_string, pa.types.is_large_string,
        pa.types.is_null, pa.types.is_time, pa.types.is_duration,
    )  # fmt: skip
    return any(test(kind) for test in same)


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether values are bytes."""
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return any(test(kind) for test in tests)
