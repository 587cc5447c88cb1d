"""Which type of PostgreSQL a column of Arrow becomes, its values in binary, and back."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from psycopg.adapt import PyFormat

from whiten_index.vectordb.json_rows import from_objects, to_objects
from whiten_index.vectordb.option_values import first_line
from whiten_index.vectordb.postgres.blocks import Encoded, Fixed, large_binary, lists
from whiten_index.vectordb.row_checks import RowsError

# PostgreSQL counts from 2000-01-01, Arrow from 1970-01-01.
_EPOCH_DAYS = (datetime.date(2000, 1, 1) - datetime.date(1970, 1, 1)).days
_DAY_US = 86_400_000_000
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")

_Decode = Callable[[Sequence[Any], pa.DataType], pa.Array]


@dataclass(frozen=True)
class Kind:
    """How values of one type are kept.

    Attributes:
        sql: the type in PostgreSQL.
        oid: of the type, 0 where no list of it can be kept.
        encode: turns an array into the bytes of COPY; what is null may be anything.
        decode: turns what the client gives, null as None, into an array of a type.
    """

    sql: str
    oid: int
    encode: Callable[[pa.Array], Encoded]
    decode: _Decode


def kind_of(name: str, type_: pa.DataType) -> Kind:
    """Return how a column is kept.

    Lists of plain values become arrays, what is nested otherwise jsonb.

    Raises:
        RowsError: nothing in PostgreSQL stands for the type.
    """
    leaf = _leaf(type_)
    if leaf is not None:
        return leaf
    if _is_list(type_):
        item = _leaf(type_.value_type)
        if item is not None:
            return _list(item)
    if pa.types.is_nested(type_):
        return Kind("jsonb", 0, lambda array: _json(name, array), _from_json)
    raise RowsError(
        f"column {name!r} has the type {type_}, which PostgreSQL has nothing for; leave it out of "
        "--keep, or change it in the corpus"
    )


def encoded(name: str, kind: Kind, array: pa.Array) -> Encoded:
    """Return the values of a column in binary.

    Raises:
        RowsError: a value cannot be kept as it is; the column is named.
    """
    try:
        return kind.encode(array)
    except _CannotKeepError as error:
        why, remedy = str(error), "mend the corpus"
    except pa.ArrowInvalid as error:
        why, remedy = first_line(error), "round it to microseconds in the corpus"
    except (pa.ArrowException, OverflowError) as error:
        why, remedy = first_line(error), "mend the corpus"
    raise RowsError(
        f"column {name!r} ({array.type}) holds what PostgreSQL cannot keep as it is: {why}; "
        f"{remedy}, or leave it out of --keep"
    )


class _CannotKeepError(Exception):
    pass


def _leaf(type_: pa.DataType) -> Kind | None:
    """Return how a type without parts is kept, None where it has parts."""
    is_ = pa.types
    if is_.is_null(type_):
        return Kind("text", 0, lambda array: array.cast(pa.large_binary()), _plain)
    if is_.is_boolean(type_):
        return Kind("boolean", 16, lambda a: _fixed("u1", _numbers(a.cast(pa.uint8()))), _plain)
    if is_.is_integer(type_) and type_ != pa.uint64():
        width = type_.bit_width * (2 if is_.is_unsigned_integer(type_) else 1)
        sql, oid, code = _INTEGERS[max(width, 16)]
        return Kind(sql, oid, lambda array: _fixed(code, _numbers(array)), _plain)
    if type_ == pa.uint64():
        return Kind("numeric(20,0)", 1700, _numeric, _whole)
    if is_.is_floating(type_):
        sql, oid, code = _FLOATS[type_.bit_width]
        return Kind(sql, oid, lambda array: _fixed(code, _numbers(array)), _floats)
    if is_.is_decimal(type_):
        sql = f"numeric({type_.precision},{type_.scale})"
        return Kind(sql, 1700, _numeric, _plain)
    if is_.is_string(type_) or is_.is_large_string(type_) or is_.is_string_view(type_):
        return Kind("text", 25, _text, _plain)
    if _is_bytes(type_):
        return Kind("bytea", 17, lambda array: array.cast(pa.large_binary()), _plain)
    return _times(type_)


_INTEGERS = {16: ("smallint", 21, ">i2"), 32: ("integer", 23, ">i4"), 64: ("bigint", 20, ">i8")}
_FLOATS = {16: ("real", 700, ">f4"), 32: ("real", 700, ">f4"), 64: ("double precision", 701, ">f8")}


def _times(type_: pa.DataType) -> Kind | None:
    """Return how dates, times and durations are kept: all but dates in whole microseconds."""
    is_ = pa.types
    if is_.is_date(type_):
        return Kind("date", 1082, _date, _from_ticks(pa.date32(), _EPOCH_DAYS))
    if is_.is_time(type_):
        return Kind("time", 1083, _ticks(pa.time64("us"), 0), _from_ticks(pa.time64("us"), 0))
    if is_.is_timestamp(type_):
        sql, oid = ("timestamp", 1114) if type_.tz is None else ("timestamptz", 1184)
        micro, start = pa.timestamp("us", type_.tz), _EPOCH_DAYS * _DAY_US
        return Kind(sql, oid, _ticks(micro, start), _from_ticks(micro, start))
    if is_.is_duration(type_):
        micro = pa.duration("us")
        return Kind("interval", 1186, _ticks(micro, 0, days=True), _from_ticks(micro, 0))
    return None


def _is_list(type_: pa.DataType) -> bool:
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(type_) for test in tests)


def _is_bytes(type_: pa.DataType) -> bool:
    is_ = pa.types
    tests = (is_.is_binary, is_.is_large_binary, is_.is_fixed_size_binary, is_.is_binary_view)
    return any(test(type_) for test in tests)


def _numbers(array: pa.Array) -> NDArray[Any]:
    """Return numbers, zero for null."""
    filled = array
    if array.null_count:
        zeros = pa.scalar(0, pa.int64()).cast(array.type)
        filled = pc.if_else(array.is_valid(), array, zeros)
    found: NDArray[Any] = filled.to_numpy(zero_copy_only=False)
    return found


def _fixed(code: str, values: NDArray[Any]) -> Fixed:
    return Fixed(((code, values),))


def _text(array: pa.Array) -> pa.Array:
    found = array.cast(pa.large_binary())
    _, offsets, data = found.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int64)[found.offset : found.offset + len(found) + 1]
    if not len(found) or data is None or bounds[-1] == bounds[0]:
        return found
    # One quick look at all bytes; where there is a NUL, another at each text.
    if np.frombuffer(data, dtype=np.uint8)[bounds[0] : bounds[-1]].min() == 0:
        count = pc.sum(pc.match_substring(found, b"\0")).as_py()
        if count:
            raise _CannotKeepError(f"a NUL character in {count:,} of {len(found):,} texts")
    return found


def _ticks(micro: pa.DataType, start: int, *, days: bool = False) -> Callable[[pa.Array], Fixed]:
    """Return what turns an array into microseconds since PostgreSQL's start.

    Args:
        micro: the type in microseconds; a cast to it fails where nanoseconds would be lost.
        start: of PostgreSQL's count, in microseconds.
        days: whether days and months follow, as in an interval.
    """
    zero = np.int64(0)

    def encode(array: pa.Array) -> Fixed:
        values = _numbers(array.cast(micro).cast(pa.int64()))
        if start and len(values) and values.min() <= np.iinfo(np.int64).min + start:
            raise _CannotKeepError("a time before 4713 BC")
        fields: tuple[tuple[str, Any], ...] = ((">i8", values - start),)
        return Fixed((*fields, (">i8", zero)) if days else fields)

    return encode


def _date(array: pa.Array) -> Fixed:
    days = _numbers(array.cast(pa.date32()).cast(pa.int32())).astype(np.int64) - _EPOCH_DAYS
    if len(days) and days.min() <= np.iinfo(np.int32).min:
        raise _CannotKeepError("a date before 4713 BC")
    return _fixed(">i4", days)


def _numeric(array: pa.Array) -> pa.Array:
    dump = psycopg.adapters.get_dumper(Decimal, PyFormat.BINARY)(Decimal).dump
    values = [None if each is None else bytes(dump(Decimal(each))) for each in array.to_pylist()]
    return pa.array(values, pa.large_binary())


def _json(name: str, array: pa.Array) -> pa.Array:
    rows = pa.record_batch([array], names=[name])
    texts = [
        None if each[name] is None else json.dumps(each[name], ensure_ascii=False)
        for each in to_objects(rows, [name])
    ]
    if any(each is not None and "\\u0000" in each and _NUL.search(each) for each in texts):
        raise _CannotKeepError("a NUL character in a text")
    # The release of the format stands before the text.
    return pa.array(
        [None if each is None else b"\1" + each.encode() for each in texts], pa.large_binary()
    )


def _from_json(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    schema = pa.schema([pa.field("value", type_)])
    return _one(from_objects([{"value": each} for each in values], schema)["value"])


def _plain(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    return pa.array(values, type_)


def _whole(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    return pa.array([None if each is None else int(each) for each in values], type_)


def _floats(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    there = np.array([np.nan if each is None else each for each in values], dtype=np.float64)
    nulls = np.array([each is None for each in values], dtype=np.bool_)
    return pa.array(there.astype(type_.to_pandas_dtype()), type_, mask=nulls)


def _from_ticks(micro: pa.DataType, start: int) -> _Decode:
    number = pa.int32() if pa.types.is_date(micro) else pa.int64()

    def decode(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
        since = [None if each is None else each + start for each in values]
        return pa.array(since, number).cast(micro).cast(type_)

    return decode


def _list(item: Kind) -> Kind:
    """Return how a list is kept: as an array of its items."""

    def encode(array: pa.Array) -> pa.Array:
        offsets = _offsets(array)
        values = array.values[offsets[0] : offsets[-1]]
        return lists(
            large_binary(item.encode(values), values, with_length=True),
            offsets - offsets[0],
            array,
            oid=item.oid,
            has_null=bool(values.null_count),
        )

    def decode(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
        sizes = [0 if each is None else len(each) for each in values]
        items = item.decode([one for each in values for one in each or ()], type_.value_type)
        if pa.types.is_fixed_size_list(type_):
            # A null takes as many places as any other.
            filled = [[None] * type_.list_size if each is None else each for each in values]
            items = item.decode([one for each in filled for one in each], type_.value_type)
            nulls = pa.array([each is None for each in values], pa.bool_())
            return pa.FixedSizeListArray.from_arrays(items, type=type_, mask=nulls)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        large = pa.types.is_large_list(type_)
        make, width = (pa.LargeListArray, pa.int64()) if large else (pa.ListArray, pa.int32())
        nulls = pa.array([each is None for each in values], pa.bool_())
        return make.from_arrays(pa.array(ends, width), items, type=type_, mask=nulls)

    base = item.sql
    return Kind(f"{base}[]", 0, encode, decode)


def _offsets(array: pa.Array) -> NDArray[np.int64]:
    """Return where each list starts in its child, and the end of the last."""
    if pa.types.is_fixed_size_list(array.type):
        counted: NDArray[np.int64] = np.arange(len(array) + 1) + int(array.offset)
        return counted * int(array.type.list_size)
    found: NDArray[np.int64] = array.offsets.to_numpy().astype(np.int64)
    return found


def _one(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
