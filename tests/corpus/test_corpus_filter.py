"""Row filters: they keep what Python would keep, and are never code."""

import ast
import datetime
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.corpora import IN_TMP_PATH, open_corpus, read_all
from whiten_index.corpus.row_filter import RowFilter
from whiten_index.errors import ConfigError, CorpusError

FILTERED = {
    "lang": ["en", "de", "fr", "en", "it", "de"],
    "year": [2018, 2019, 2020, 2021, 2022, 2020],
    "score": [0.5, -1.0, 2.5, 0.0, 1.5, 3.0],
    "ok": [True, False, True, True, False, False],
}


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize(
    "condition",
    [
        "lang == 'en'", "lang != 'en'", "'en' == lang", "year > 2019", "2020 <= year",
        "2018 < year <= 2021", "2018 < year != 2020 < 2021", "score >= -1.0", "score < -0.5",
        "lang in ['en', 'de']", "lang in ('en', 'de')", "lang in {'en', 'de'}",
        "lang not in ['en']", "year in [2020, 1]", "lang in []", "lang not in []",
        "ok", "not ok", "ok and year > 2019", "ok or year > 2021 or lang == 'de'",
        "not (ok and lang == 'en')", "not ok and not lang == 'it'",
        "lang == 'en' or lang == 'de' and year >= 2020",
        "(lang == 'en' or lang == 'de') and year >= 2020",
        "lang is None", "lang is not None", "score < year", "lang > 'en'",
        "  lang == 'en'  ",
    ],
)  # fmt: skip
def test_a_row_filter_keeps_what_python_would_keep(tmp_path, write_parquet, condition, encoded):
    table = pa.table({**FILTERED, "text": [str(i) for i in range(6)]})
    if encoded:
        table = table.set_column(0, "lang", table.column("lang").dictionary_encode())
    path = write_parquet(tmp_path / "a.parquet", table, row_group_size=4)
    rows = zip(*FILTERED.values(), strict=True)
    wanted = [
        str(i)
        for i, row in enumerate(rows)
        if eval(condition.strip(), {}, dict(zip(FILTERED, row, strict=True)))
    ]
    _, texts, skipped = read_all(open_corpus(path, row_filter=condition))
    assert texts == wanted
    assert skipped["filtered"] == 6 - len(wanted)


@pytest.mark.parametrize("bits", [pa.float32(), pa.float64(), pa.decimal128(9, 2)])
@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("f == 0.1", [0]), ("0.1 == f", [0]), ("f <= 0.1", [0]), ("f < 0.1", []),
        ("f > 0.1", [1, 2]), ("f != 0.1", [1, 2]),
        ("f in [0.1, 7.5]", [0, 2]), ("f not in (0.1,)", [1, 2]),
        ("f < 1e300", [0, 1, 2]), ("f == 1e300", []), ("f in [0.105, 0.3]", [1]),
        ("f in [1e39, 0.3]", [1]), ("f not in [1e39]", [0, 1, 2]), ("f > 16777217", []),
        ("f in [16777217, 7.5]", [2]),
    ],
)  # fmt: skip
def test_numbers_are_rounded_as_the_column_is(bits, condition, wanted):
    batch = pa.record_batch({"f": pa.array([0.1, 0.3, 7.5]).cast(bits)})
    if pa.types.is_decimal(bits):
        condition = condition.replace("1e300", "9e70")  # a decimal has 76 digits
    assert np.flatnonzero(RowFilter.parse(condition).mask(batch)).tolist() == wanted


DAY, MOMENT = "2024-01-31T00:00:00", 1_706_659_200 * 10**9


@pytest.mark.parametrize("kind", [pa.timestamp("ns"), pa.timestamp("ns", "Asia/Tokyo")])
@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        (f"t == '{DAY}.123456789'", [1]), (f"t > '{DAY}.123456789'", [2]),
        (f"t <= '{DAY}.123456789'", [0, 1]), (f"t < '{DAY}.1234567'", [0]),
        (f"t in ['{DAY}.123456789', '{DAY}.123457']", [1, 2]), (f"t > '{DAY}'", [0, 1, 2]),
    ],
)  # fmt: skip
def test_times_are_compared_to_the_nanosecond(kind, condition, wanted):
    rows = [MOMENT + part for part in (123_456_500, 123_456_789, 123_457_000)]
    batch = pa.record_batch({"t": pa.array(rows, kind)})
    assert np.flatnonzero(RowFilter.parse(condition).mask(batch)).tolist() == wanted
    batch = pa.record_batch({"t": pa.array([row - MOMENT for row in rows], pa.time64("ns"))})
    condition = condition.replace("2024-01-31T", "")
    assert np.flatnonzero(RowFilter.parse(condition).mask(batch)).tolist() == wanted
    with pytest.raises(CorpusError, match="has more than nine decimals"):
        RowFilter.parse("t > '00:00:00.1234567891'").mask(batch)


UNITS = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}
TIMES = {
    "1969-12-31T23:59:59.9999999": -100, "1970-01-01": 0, "1970-01-01T00:00:00.000000001": 1,
    "1970-01-01T00:00:00.001": 10**6, "1970-01-02T00:00:00.5": 86_400_500 * 10**6,
    "9999-12-31": 253_402_214_400 * 10**9, "0001-01-01T00:00:00.1234567": -(10**20),
}  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("form", ["t == {}", "t < {}", "t >= {}", "t in [{}]", "t not in [{}, 0]"])
def test_times_of_any_unit_are_compared_exactly(unit, encoded, form):
    """No time is too fine for a column, nor too early or late for its unit."""
    last = 253_402_214_400 * 10**9 if unit != "ns" else 2**63 - 1
    rows = [-(10**9), 0, 10**9, 86_400 * 10**9, last]
    times = pa.array([*(row // UNITS[unit] for row in rows), None], pa.timestamp(unit))
    table = pa.table({"t": times.dictionary_encode() if encoded else times})
    for text, number in TIMES.items():
        wanted = [eval(form.format(number), {}, {"t": row}) for row in rows]
        condition = form.format(repr(text)).replace(", 0]", ", '1970-01-01', None]")
        assert RowFilter.parse(condition).mask(table).tolist() == [*wanted, False], condition


@pytest.mark.parametrize("condition", [
    "t >= '2024-01-01T00:00:00+02:00'", "t in ['2024-01-01', '2024-01-01T00Z']",
    "t == 1704067200", "t in [1704067200]", "t > '2024-01-01" + "1.1111111" * 12_000 + "'",
    "clock == '10:00Z'", "t == '2024-01-01T00:00:00.1234567891'",
])  # fmt: skip
def test_what_cannot_be_compared_with_a_time_is_refused(condition):
    """A time with a zone is another one in each place whose clock the column may be of."""
    days = pa.array([0, 1], pa.timestamp("us"))
    table = pa.table({"t": days, "clock": days.cast(pa.time64("us"))})
    with pytest.raises(CorpusError, match=r"has a zone|is no date or time|nine decimals"):
        RowFilter.parse(condition).mask(table)


NUMBERS = {
    pa.uint64(): [0, 7, 2**64 - 1], pa.int64(): [-5, 0, 2**53 + 1], pa.int8(): [-2, 0, 127],
    pa.dictionary(pa.int32(), pa.int64()): [5, 6, 5], pa.float64(): [0.0, -0.0, 1.5],
}  # fmt: skip


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
@pytest.mark.parametrize("form", ["x == {}", "x < {}", "x >= {}", "x in [{}]", "x not in [{}, 1]"])
@pytest.mark.parametrize("negated", [False, True])
def test_every_number_is_compared_exactly_and_null_never(kind, form, negated):
    rows = pa.table({"x": pa.array([*NUMBERS[kind], None], kind)})
    for number in (
        0, 0.0, -0.0, 5, 5.5, 7, -1, -2.0, 1000, 2**53, 2.0**53, 2**64 - 1, 10**40, 1e300,
    ):  # fmt: skip
        condition = form.format(number)
        condition = f"not ({condition})" if negated else condition
        wanted = [eval(condition, {}, {"x": x}) for x in NUMBERS[kind]]
        assert RowFilter.parse(condition).mask(rows).tolist() == [*wanted, False], condition


COMPARISON = st.builds(
    "{} {} {}".format, st.sampled_from("ab"), st.sampled_from(["==", "!=", "<", ">="]),
    st.integers(-1, 3),
)  # fmt: skip
CONDITION = st.recursive(
    COMPARISON
    | st.builds("{} <= {} < {}".format, st.integers(-1, 3), st.sampled_from("ab"), st.just("b"))
    | st.builds("{} in {}".format, st.sampled_from("ab"), st.lists(st.integers(-1, 3))),
    lambda inner: (
        st.builds("({}) and ({})".format, inner, inner)
        | st.builds("({}) or ({}) and {}".format, inner, inner, COMPARISON)
        | st.builds("not ({})".format, inner)
    ),
    max_leaves=6,
)


@IN_TMP_PATH
@given(condition=CONDITION)
def test_nested_conditions_keep_what_python_would_keep(tmp_path, write_parquet, condition):
    rows = [(a, b) for a in range(-1, 4) for b in range(-1, 4)]
    path = tmp_path / "a.parquet"
    if not path.exists():
        a, b = zip(*rows, strict=True)
        write_parquet(path, {"text": [str(row) for row in rows], "a": a, "b": b})
    wanted = [str((a, b)) for a, b in rows if eval(condition, {}, {"a": a, "b": b})]
    assert read_all(open_corpus(path, row_filter=condition))[1] == wanted


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os')", "__import__('os').system('true')", "lang == __import__('os')",
        "lang in __import__('os')", "open('/etc/passwd')", "(lambda: True)()", "lang.upper() == 1",
        "[x for x in (1, 2)]", "lang[0] == 'e'", "f'{lang}' == 'en'", "lang == 'en' & ok",
        "lang := 'en'", "lang == 'en';", "import os", "lang ==", "'en'", "1", "True",
        "year + 1 == 2", "lang is 'en'", "lang in 'english'", "lang in 5", "lang in ok",
        "ok if ok else ok", "lang == 'en' and", "lang == ['en']x", "\0", "(" * 300, "*",
        "\"lang\" <> 'en'", "'lang' in ['en']", "1 == 1",
    ],
)  # fmt: skip
def test_a_row_filter_is_never_code(code):
    with pytest.raises(ConfigError, match=r"row filter .* is not understood"):
        RowFilter.parse(code)


def dated() -> pa.Table:
    days = [datetime.date(2024, 1, day) for day in (1, 15, 31)]
    times = [datetime.datetime(2024, 1, day, 12) for day in (1, 15, 31)]
    return pa.table({"day": days, "at": times, "my column": [1, 2, 3], "class": ["a", "b", None]})


@pytest.mark.parametrize(
    ("condition", "kept", "columns"),
    [
        ("day >= '2024-01-15'", [1, 2], ("day",)),
        ("day in ['2024-01-01', '2024-01-31']", [0, 2], ("day",)),
        ("'2024-01-10' < day < '2024-01-20'", [1], ("day",)),
        ("at == '2024-01-31T12:00:00'", [2], ("at",)),
        ("column('my column') > 1 and day < '2024-01-20'", [1], ("day", "my column")),
        ("column('class') is None", [2], ("class",)),
        ("column('class') in ['a']", [0], ("class",)),
    ],
)
def test_dates_and_columns_of_any_name(condition: str, kept: list, columns: tuple) -> None:
    parsed = RowFilter.parse(condition)
    assert parsed.columns == columns
    assert dated().filter(parsed.mask(dated()))["my column"].to_pylist() == [
        1 + row for row in kept
    ]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_without_a_zone_are_utc_where_the_column_has_any_zone(unit: str) -> None:
    days = pa.array([0, 86_400], pa.timestamp("s")).cast(pa.timestamp(unit))
    table = pa.table({"at": days.cast(pa.timestamp(unit, tz="Europe/Berlin"))})
    for condition in ("at >= '1970-01-02'", "at in ['1970-01-02']", "at != '1970-01-01T01+01:00'"):
        assert RowFilter.parse(condition).mask(table).tolist() == [False, True]


def test_a_long_list_is_translated_once_for_all_batches(tmp_path, write_parquet):
    table = pa.table({"year": list(range(400)), "text": ["x"] * 400})
    path = write_parquet(tmp_path / "a.parquet", table, row_group_size=10)
    wanted = list(range(0, 2000, 2))
    corpus = open_corpus(path, row_filter=f"year in {wanted}", shard_rows=10)
    with mock.patch("ast.literal_eval", wraps=ast.literal_eval) as read:
        _, texts, skipped = read_all(corpus)
    assert (len(texts), skipped["filtered"]) == (200, 200)
    assert read.call_count <= len(wanted)
