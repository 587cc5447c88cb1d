"""Types of Arrow in place of others, at whatever depth."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pyarrow as pa


def without_times(kind: pa.DataType) -> pa.DataType:
    """Return a type with numbers for dates and times, of which Python knows fewer than Arrow."""

    def number(leaf: pa.DataType) -> pa.DataType:
        if not pa.types.is_temporal(leaf):
            return leaf
        return pa.int32() if leaf.bit_width == 32 else pa.int64()

    if pa.types.is_dictionary(kind):
        return without_times(kind.value_type)
    return _replaced(kind, number)


def times_of(kind: pa.DataType) -> list[pa.DataType]:
    """Return the types of dates and times in a type, in their order."""
    found = list[pa.DataType]()

    def leaf(of: pa.DataType) -> pa.DataType:
        if pa.types.is_temporal(of):
            found.append(of)
        return of

    _replaced(kind.value_type if pa.types.is_dictionary(kind) else kind, leaf)
    return found


def repeated_field(kind: pa.DataType) -> str | None:
    """Return a name that two fields of a struct share, which no value of Python can tell apart."""
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

    return _replaced(kind, plain)


def _replaced(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    def field(of: pa.Field) -> pa.Field:
        return of.with_type(_replaced(of.type, leaf))

    if pa.types.is_struct(kind):
        return pa.struct([field(each) for each in kind])
    if pa.types.is_map(kind):
        return pa.map_(field(kind.key_field), field(kind.item_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(field(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(field(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(field(kind.value_field))
    return leaf(kind)
