"""Planning shards: every row once, in order, within the bounds of rows and bytes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpus_helpers import open_corpus
from whiten_index.corpus import RowGroup, Shard, Span, plan_shards, plan_windows
from whiten_index.errors import ConfigError

GROUP = st.builds(
    lambda rows, width: RowGroup(rows, rows * width), st.integers(0, 60), st.integers(0, 300)
)
FOOTERS = st.lists(st.lists(GROUP, max_size=6), max_size=5)
PLAN = {"shard_rows": st.integers(1, 50), "shard_bytes": st.integers(1, 5000)}


def rows_of(shards) -> list[tuple[int, int, int]]:
    return [
        (shard.file, span.row_group, row)
        for shard in shards
        for span in shard.spans
        for row in range(span.start, span.stop)
    ]


def every_row(footers) -> list[tuple[int, int, int]]:
    return [
        (file, group, row)
        for file, groups in enumerate(footers)
        for group, of in enumerate(groups)
        for row in range(of.rows)
    ]


@given(footers=FOOTERS, limit=st.none() | st.integers(1, 400), **PLAN)
def test_a_plan_holds_every_row_once_in_order_up_to_the_limit(
    footers, limit, shard_rows, shard_bytes
):
    plan = plan_shards(footers, shard_rows=shard_rows, shard_bytes=shard_bytes, limit=limit)
    assert rows_of(plan) == every_row(footers)[:limit]
    again = plan_shards(footers, shard_rows=shard_rows, shard_bytes=shard_bytes, limit=limit)
    assert plan == again


@given(footers=FOOTERS, **PLAN)
def test_shards_respect_rows_and_bytes(footers, shard_rows, shard_bytes):
    for shard in plan_shards(footers, shard_rows=shard_rows, shard_bytes=shard_bytes):
        assert 1 <= shard.rows <= shard_rows
        groups = footers[shard.file]
        size = sum(
            (span.stop - span.start) * groups[span.row_group].bytes / groups[span.row_group].rows
            for span in shard.spans
        )
        assert shard.rows == 1 or size <= shard_bytes * (1 + 1e-6)


@given(
    rows=st.lists(st.lists(st.integers(0, 10**6), max_size=5), max_size=4),
    shard_rows=st.integers(10_000, 10**7),
)
def test_narrow_rows_fill_their_shards(rows, shard_rows):
    """Small row groups are joined: a file takes no more shards than its rows need."""
    footers = [[RowGroup(count, count) for count in groups] for groups in rows]
    plan = plan_shards(footers, shard_rows=shard_rows, shard_bytes=1 << 50)
    needed = [math.ceil(sum(groups) / shard_rows) for groups in rows]
    assert [sum(shard.file == file for shard in plan) for file in range(len(rows))] == needed


@given(footers=FOOTERS, limit=st.integers(1, 400), **PLAN)
def test_a_limit_keeps_all_shards_but_the_last(footers, limit, shard_rows, shard_bytes):
    whole = plan_shards(footers, shard_rows=shard_rows, shard_bytes=shard_bytes)
    some = plan_shards(footers, shard_rows=shard_rows, shard_bytes=shard_bytes, limit=limit)
    assert some[:-1] == whole[: len(some[:-1])]


@given(footers=FOOTERS, other=st.lists(GROUP, max_size=6), **PLAN)
def test_a_change_in_one_file_moves_no_shard_of_another(footers, other, shard_rows, shard_bytes):
    size = {"shard_rows": shard_rows, "shard_bytes": shard_bytes}
    before = [shard.spans for shard in plan_shards(footers, **size)]
    after = plan_shards([other, *footers], **size)
    assert [shard.spans for shard in after if shard.file > 0] == before


def test_wide_rows_make_smaller_shards():
    narrow = plan_shards([[RowGroup(1000, 1000)]], shard_rows=500, shard_bytes=10_000)
    wide = plan_shards([[RowGroup(1000, 1_000_000)]], shard_rows=500, shard_bytes=10_000)
    assert [shard.rows for shard in narrow] == [500, 500]
    assert [shard.rows for shard in wide] == [10] * 100


@pytest.mark.parametrize("name", ["text", "meta.text"])
def test_wide_rows_of_a_file_make_smaller_shards(tmp_path, write_parquet, name):
    letter = "x" * (1 << 20)
    texts = [f"{i}{letter}" for i in range(72)]
    path = write_parquet(
        tmp_path / "a.parquet", {name: texts}, use_dictionary=False, write_statistics=False
    )
    corpus = open_corpus(path, text_columns=(name,))
    assert corpus.rows == 72
    assert len(corpus.shards) > 1


@pytest.mark.parametrize("shard_rows", [0, -1])
def test_a_shard_needs_a_row(shard_rows):
    with pytest.raises(ConfigError, match=f"at least 1 row; --shard-rows {shard_rows}"):
        plan_shards([], shard_rows=shard_rows)


def test_a_limit_is_positive():
    with pytest.raises(ConfigError, match="--limit takes a positive number of rows; 0"):
        plan_shards([], limit=0)


# --------------------------------------------------------------------------- windows


def shards_of(*sizes: tuple[int, int]) -> list[Shard]:
    return [Shard(i, (Span(0, 0, rows),), size) for i, (rows, size) in enumerate(sizes)]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 900)), max_size=30),
    rows=st.integers(1, 100),
    size=st.integers(1, 1000),
)
def test_windows_join_neighbours_within_both_bounds(sizes, rows, size):
    shards = shards_of(*sizes)
    windows = plan_windows(shards, rows=rows, size=size)
    assert [shard for window in windows for shard in window] == shards
    for window in windows:
        total = sum(shard.rows for shard in window), sum(shard.bytes for shard in window)
        assert len(window) == 1 or (total[0] <= rows and total[1] <= size)
    for window, following in pairwise(windows):
        longer = [*window, following[0]]
        assert sum(s.rows for s in longer) > rows or sum(s.bytes for s in longer) > size


def test_a_shard_knows_its_bytes():
    shards = plan_shards([[RowGroup(10, 1000), RowGroup(30, 600)]], shard_rows=20)
    assert [(shard.rows, shard.bytes) for shard in shards] == [(20, 1200), (20, 400)]
