"""Keys of rows, against dictionaries of what they stand for."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from whiten_index.store.digest_index import KeyTable, string_keys

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
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30))
def test_a_number_has_the_key_of_its_digits(values: list[int]) -> None:
    array = pa.array(values, pa.int64())
    assert np.array_equal(
        string_keys(array), string_keys(pa.array(list(map(str, values)), pa.string()))
    )


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
