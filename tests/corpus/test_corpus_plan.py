"""Planning shards: every row once, in order, within the bounds of rows and bytes."""

from hypothesis import given
from hypothesis import strategies as st

from whiten_index.corpus.sharding import RowGroup, plan_shards

GROUP = st.builds(
    lambda rows, width: RowGroup(rows, rows * width), st.integers(0, 60), st.integers(0, 300)
)
FOOTERS = st.lists(st.lists(GROUP, max_size=6), max_size=5)
PLAN = {"shard_rows": st.integers(1, 50), "shard_bytes": st.integers(1, 5000)}


@given(footers=FOOTERS, limit=st.none() | st.integers(1, 400), **PLAN)
def test_a_plan_holds_every_row_once_in_order_up_to_the_limit(
    footers, limit, shard_rows, shard_bytes
):
    plan = plan_shards(footers, shard_rows=shard_rows, shard_bytes=shard_bytes, limit=limit)
    planned = [(shard.file, span.row_group, row) for shard in plan for span in shard.spans
               for row in range(span.start, span.stop)]  # fmt: skip
    rows = [(file, group, row) for file, groups in enumerate(footers)
            for group, of in enumerate(groups) for row in range(of.rows)]  # fmt: skip
    assert planned == rows[:limit]


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


@given(footers=FOOTERS, other=st.lists(GROUP, max_size=6), **PLAN)
def test_a_change_in_one_file_moves_no_shard_of_another(footers, other, shard_rows, shard_bytes):
    size = {"shard_rows": shard_rows, "shard_bytes": shard_bytes}
    before = [shard.spans for shard in plan_shards(footers, **size)]
    after = plan_shards([other, *footers], **size)
    assert [shard.spans for shard in after if shard.file > 0] == before
