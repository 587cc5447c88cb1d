"""The rows of a corpus: columns, texts, ids and kept columns against plain Python; memory."""

import os
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.corpora import IN_TMP_PATH, open_corpus, read_all
from whiten_index.corpus.sharding import RowGroup, plan_shards
from whiten_index.errors import CorpusError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_columns": ("n",)}, "'n' .* int64; .*strings; columns that fit: s, t"),
        ({"text_columns": ("s", "v")}, "'v' .*list.*; columns that fit: s, t"),
        ({"text_columns": ("s",), "id_column": "x"}, "'x' .* double; .*fit: s, t, n"),
        ({"embedding_column": "s"}, "'s' .* string; .*columns that fit: v"),
        ({"embedding_column": "w"}, "'w' .*int64.*; .*columns that fit: v"),
    ],
)
def test_a_column_of_the_wrong_type_is_refused_with_those_that_fit(
    tmp_path, write_parquet, options, message
):
    columns = {"s": ["a"], "t": ["b"], "n": [1], "x": [0.5], "v": [[0.5, 1.0]], "w": [[1, 2]]}
    path = write_parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(CorpusError, match=message):
        open_corpus(path, **options)


def test_a_file_of_many_row_groups_is_opened_a_few_times(tmp_path, write_parquet, monkeypatch):
    # Each time its whole footer is read: with 100,000 row groups that would take hours.
    path = write_parquet(tmp_path / "a.parquet", {"a": ["x"] * 60}, row_group_size=1)
    opened, opens = [], os.open
    monkeypatch.setattr(os, "open", lambda *given: opened.append(given[0]) or opens(*given))
    assert read_all(open_corpus(path, text_columns=("a",), shard_rows=7))[1] == ["x"] * 60
    assert opened.count(str(path)) < 20


BLANKS = st.sampled_from([None, "", " ", "\t\n", "\u00a0", "\u3000 "])
PART = BLANKS | st.text("ab é中\n ", max_size=6)


def joined(*parts: str | None) -> str:
    return " ".join(part.strip() for part in parts if part is not None and part.strip())


@IN_TMP_PATH
@given(
    rows=st.lists(st.tuples(PART, PART), min_size=1, max_size=40),
    group=st.integers(1, 12),
    shard_rows=st.integers(1, 15),
    on_bad_row=st.sampled_from(["blank", "skip"]),
)
def test_texts_are_joined_and_blank_rows_counted(
    tmp_path, write_parquet, rows, group, shard_rows, on_bad_row
):
    first, second = (pa.array(column, pa.string()) for column in zip(*rows, strict=True))
    path = write_parquet(tmp_path / "a.parquet", {"a": first, "b": second}, row_group_size=group)
    corpus = open_corpus(
        path, text_columns=("a", "b"), shard_rows=shard_rows, on_bad_row=on_bad_row
    )
    ids, texts, skipped = read_all(corpus)
    wanted = {
        f"a.parquet#{i // group}:{i % group}": text
        for i, row in enumerate(rows)
        if (text := joined(*row))
    }
    assert dict(zip(ids, texts, strict=True)) == wanted
    assert ids == list(wanted)
    blank = len(rows) - len(wanted)
    assert skipped == ({"blank_text": blank} if blank else {})


WORDS = ["10", "20", "30"]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(WORDS), WORDS),
        (pa.array(WORDS, pa.large_string()), WORDS),
        (pa.array(WORDS).dictionary_encode(), WORDS),
        (pa.array([10, 20, 30], pa.int8()), [10, 20, 30]),
        (pa.array([10, -20, 2**62]), [10, -20, 2**62]),
        (pa.array([1, 2, 3], pa.uint64()), [1, 2, 3]),
    ],
)
def test_ids_of_every_type_come_through(tmp_path, write_parquet, column, expected):
    path = write_parquet(tmp_path / "a.parquet", {"text": WORDS, "k": column})
    corpus = open_corpus(path, id_column="k")
    corpus.check_ids()
    assert read_all(corpus)[0] == expected


@IN_TMP_PATH
@given(ids=st.lists(st.integers(0, 12) | st.none(), min_size=1, max_size=20))
def test_check_ids_agrees_with_counting(tmp_path, write_parquet, ids):
    path = write_parquet(
        tmp_path / "a.parquet",
        {"text": ["x"] * len(ids), "k": pa.array(ids, pa.int64())},
        row_group_size=6,
    )
    corpus = open_corpus(path, id_column="k", shard_rows=4, on_bad_row="skip")
    repeated = sum(n > 1 for value, n in Counter(ids).items() if value is not None)
    if repeated:
        with pytest.raises(CorpusError, match=f"^{repeated} ids of column k occur more than once"):
            corpus.check_ids()
    else:
        corpus.check_ids()


def test_null_ids_stop_or_are_skipped_and_counted(tmp_path, write_parquet):
    columns = {"text": ["x", "y", "", "z"], "k": ["a", None, None, "b"]}
    path = write_parquet(tmp_path / "a.parquet", columns)
    for choice in ("blank", "error"):
        with pytest.raises(CorpusError, match=r"row a\.parquet#0:1 of the corpus has no k; "):
            read_all(open_corpus(path, id_column="k", on_bad_row=choice))
    ids, texts, skipped = read_all(open_corpus(path, id_column="k", on_bad_row="skip"))
    assert (ids, texts, skipped) == (["a", "b"], ["x", "z"], {"null_id": 2})


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
