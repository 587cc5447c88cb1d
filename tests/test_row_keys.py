"""Keys of rows, against dictionaries of what they stand for."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whiten_index.row_keys import KeyTable, joined, string_keys

quick = settings(max_examples=80, deadline=None, derandomize=True, database=None)
# Many that begin or end alike, with and without zeros at the end, of all lengths about a word's.
strings = st.text(max_size=20) | st.text("a\0", max_size=26)


def keys_of(values: list[str]) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in string_keys(pa.array(values, pa.string())).T]


@quick
@given(st.lists(strings, max_size=30))
def test_keys_are_equal_where_strings_are(values: list[str]) -> None:
    keys = keys_of(values)
    for half in (0, 1):
        halves = [key[half] for key in keys]
        assert len(set(halves)) == len(set(values))
        assert dict(zip(values, halves, strict=True)) == dict(
            zip(values[::-1], halves[::-1], strict=True)
        )


@quick
@given(st.lists(strings, min_size=1, max_size=30), st.data())
def test_a_key_does_not_depend_on_what_is_beside_it(values: list[str], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(values)))
    array = pa.array(values, data.draw(st.sampled_from([pa.string(), pa.large_string()])))
    alone = [keys_of([value])[0] for value in values[start:]]
    assert [tuple(map(int, key)) for key in string_keys(array.slice(start)).T] == alone


@quick
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_a_number_has_the_key_of_its_digits(values: list[int]) -> None:
    array = pa.array(values, pa.int64())
    assert np.array_equal(
        string_keys(array), string_keys(pa.array(list(map(str, values)), pa.string()))
    )


@quick
@given(st.lists(st.text("ab#", max_size=20), max_size=30))
def test_what_follows_the_last_mark_does_not_count(values: list[str]) -> None:
    keys = string_keys(pa.array(values, pa.string()), until=b"#")
    before = string_keys(pa.array([value.rpartition("#")[0] for value in values], pa.string()))
    assert np.array_equal(keys, before)


def test_one_string_of_another_size_does_no_harm() -> None:
    values = ["", "a" * 100_000, "b", "a" * 99_999]
    assert keys_of(values) == [keys_of([value])[0] for value in values]


def test_millions_of_names_have_halves_of_their_own() -> None:
    """A good half of 64 bits has no two alike among a million with a chance of 1 - 3e-8."""
    numbers = pa.array(range(1_000_000)).cast(pa.string())
    names = pc.binary_join_element_wise("wiki/page-", numbers, ".html", "")
    for half in string_keys(names):
        assert len(np.unique(half)) == len(names)
        # Each bit is set in half of them, give or take 6 standard deviations.
        for bit in range(64):
            set_in = int(np.count_nonzero(half & np.uint64(1 << bit)))
            assert abs(set_in - 500_000) <= 6 * 500


def test_digests_count_in_their_order() -> None:
    names = string_keys(pa.array(["x", "y"]))
    one, other = np.random.default_rng(0).integers(0, 256, (2, 2, 16), dtype=np.uint8)
    keys = [joined(names, *more) for more in ((one, other), (other, one), (one, one), (one,), ())]
    assert len({tuple(map(int, key)) for each in keys for key in each.T}) == 10


halves = st.integers(0, 3) | st.integers(0, 2**64 - 1)
blocks = st.lists(st.lists(st.tuples(halves, halves), max_size=12), max_size=4)


def as_keys(pairs: list[tuple[int, int]]) -> np.ndarray:
    return np.array(pairs, dtype=np.uint64).reshape(-1, 2).T.copy()


@quick
@given(blocks, st.lists(st.tuples(halves, halves), max_size=12))
def test_rows_are_found_by_their_key(
    held: list[list[tuple[int, int]]], asked: list[tuple[int, int]]
) -> None:
    rows = [key for block in held for key in block]
    wanted = asked + rows
    table = KeyTable([as_keys(block) for block in held])
    assert len(table) == len(rows)
    assert table.find(as_keys(wanted)).tolist() == [
        rows.index(key) if key in rows else -1 for key in wanted
    ]
    assert table.counts().tolist() == [
        rows.count(key) if rows.index(key) == i else 0 for i, key in enumerate(rows)
    ]


@pytest.mark.parametrize("keys", [[], [np.empty((2, 0), dtype=np.uint64)]])
def test_a_table_of_nothing_finds_nothing(keys: list[np.ndarray]) -> None:
    assert KeyTable(keys).find(as_keys([(0, 0)])).tolist() == [-1]
