"""Rows as objects of JSON, and back."""

import datetime
import json
import math

import numpy as np
import pyarrow as pa
import pytest

from whiten_index.errors import DatabaseError
from whiten_index.vectordb.json_rows import from_objects, to_objects
from whiten_index.vectordb.pushed_table import RowsError

# Name -> type, the first and the last value that is kept, in its unit.
EDGES = {
    "date32": (pa.date32(), -719_162, 2_932_896),
    "date64": (pa.date64(), -719_162 * 86_400_000, 2_932_896 * 86_400_000),
    "seconds": (pa.timestamp("s"), -62_135_596_800, 253_402_300_799),
    "micros": (pa.timestamp("us"), -62_135_596_800 * 10**6, 253_402_300_800 * 10**6 - 1),
    "zone": (
        pa.timestamp("ms", "Asia/Kathmandu"),
        -62_135_596_800 * 1000,
        253_402_300_800 * 1000 - 1,
    ),
}


def batch(values: pa.Array) -> pa.RecordBatch:
    return pa.record_batch([values], names=["x"])


def of(numbers: list[int | None], kind: pa.DataType) -> pa.Array:
    plain = pa.int32() if pa.types.is_date32(kind) else pa.int64()
    return pa.array(numbers, plain).cast(kind)


@pytest.mark.parametrize(("kind", "first", "last"), EDGES.values(), ids=EDGES)
def test_the_first_and_the_last_date_come_back(kind: pa.DataType, first: int, last: int) -> None:
    rows = batch(of([first, None, last], kind))
    there = from_objects(json.loads(json.dumps(to_objects(rows, ["x"]))), rows.schema)
    assert there["x"].combine_chunks().equals(rows["x"])


@pytest.mark.parametrize(("kind", "first", "last"), EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("inside", ["", "list", "struct", "map", "dictionary"])
def test_dates_that_cannot_be_written(
    kind: pa.DataType, first: int, last: int, inside: str
) -> None:
    step = 86_400_000 if pa.types.is_date64(kind) else 1
    for number in (first - step, last + step):
        values = of([0, number], kind)
        if inside == "list":
            values = pa.ListArray.from_arrays([0, 2], values)
        elif inside == "struct":
            values = pa.StructArray.from_arrays([values], ["a"])
        elif inside == "map":
            values = pa.MapArray.from_arrays([0, 2], pa.array(["a", "b"]), values)
        elif inside == "dictionary":
            values = values.dictionary_encode()
        with pytest.raises(DatabaseError, match=r"column 'x' .*outside the years 1 to 9999"):
            to_objects(batch(values), ["x"])


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("inside", ["", "list", "struct"])
def test_infinity_is_refused(kind: pa.DataType, inside: str) -> None:
    """JSON has no word for it; of what is no number null is made."""
    for number in (math.inf, -math.inf, math.nan):
        values = pa.array(np.array([0, number], kind.to_pandas_dtype()), kind)
        if inside == "list":
            values = pa.ListArray.from_arrays([0, 2, 2], values)
        elif inside == "struct":
            values = pa.StructArray.from_arrays([values], ["a"])
        if math.isnan(number):
            assert len(to_objects(batch(values), ["x"])) == 2
            continue
        with pytest.raises(RowsError, match=r"column 'x' .*holds infinity, .*mend the corpus"):
            to_objects(batch(values), ["x"])


def test_zones_are_written_in_utc() -> None:
    """The offset of Kathmandu was 5:41:16 until 1920."""
    values = pa.array([-2_000_000_000, 0], pa.timestamp("s", "Asia/Kathmandu"))
    told = to_objects(batch(values), ["x"])
    assert told == [{"x": "1906-08-16 20:26:40Z"}, {"x": "1970-01-01 00:00:00Z"}]
    assert from_objects(told, batch(values).schema)["x"].combine_chunks().equals(values)


def test_columns_of_nulls_and_without_rows() -> None:
    for values in ([], [None]):
        rows = batch(pa.array(values, pa.timestamp("us")))
        assert to_objects(rows, ["x"]) == [{"x": None} for _ in values]


def test_what_no_push_wrote() -> None:
    schema = pa.schema([pa.field("x", pa.date32())])
    for value in ("yesterday", 7.5, {}):
        with pytest.raises(DatabaseError, match=r"column 'x' .*no push wrote.*--full"):
            from_objects([{"x": value}], schema)


def test_a_null_struct_that_holds_a_date_comes_back_null() -> None:
    """It has no text, which could be read as a date."""
    inside = pa.struct([("day", pa.date32()), ("at", pa.timestamp("us", "UTC"))])
    for kind, values in (
        (inside, [{"day": datetime.date(2024, 2, 29), "at": None}, None]),
        (pa.struct([("inner", inside)]), [None, {"inner": None}]),
        (pa.list_(inside), [[None, {"day": None, "at": None}], None, []]),
    ):
        rows = batch(pa.array(values, kind))
        there = from_objects(json.loads(json.dumps(to_objects(rows, ["x"]))), rows.schema)
        assert there["x"].to_pylist() == values
