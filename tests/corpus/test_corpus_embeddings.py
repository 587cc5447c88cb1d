"""Embedding columns: every type exactly, bad rows skipped, counted or named."""

import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.corpora import IN_TMP_PATH, open_corpus
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.errors import CorpusError


def read_vectors(corpus: ParquetCorpus) -> tuple[list, np.ndarray, Counter]:
    """Return ids, embeddings and skipped counts of a whole corpus of embeddings."""
    batches = list(corpus.batches())
    skipped = Counter()
    for batch in batches:
        assert batch.read == len(batch) + sum(batch.skipped.values())
        assert batch.documents.num_rows == len(batch)
        skipped.update(batch.skipped)
    ids = [value for batch in batches for value in batch.documents.column("id").to_pylist()]
    return ids, np.concatenate([batch.embeddings for batch in batches]), skipped


FLOATS = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}
LISTS = {
    "list": pa.list_,
    "large_list": pa.large_list,
    "fixed_size_list": lambda kind: pa.list_(kind, 3),
}


def embedding_column(rows: list, kind: pa.DataType) -> pa.Array:
    """Build a list column; float16 items go by numpy, which pyarrow insists on."""
    scalar = np.dtype(kind.value_type.to_pandas_dtype()).type
    items = [
        None if row is None else [None if x is None else scalar(x) for x in row] for row in rows
    ]
    return pa.array(items, kind)


@pytest.mark.parametrize("floats", FLOATS)
@pytest.mark.parametrize("lists", LISTS)
def test_embeddings_of_every_type_come_through_exactly(tmp_path, write_parquet, lists, floats):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(50, 3)).astype(floats)
    kind = LISTS[lists](FLOATS[floats])
    path = write_parquet(
        tmp_path / "a.parquet", {"v": embedding_column(list(matrix), kind)}, row_group_size=20
    )
    corpus = open_corpus(path, embedding_column="v", shard_rows=15)
    _, found, skipped = read_vectors(corpus)
    assert corpus.dim == 3
    assert found.dtype == matrix.dtype
    np.testing.assert_array_equal(found, matrix)
    assert not skipped


@pytest.mark.parametrize(
    ("bad", "choice", "message"),
    [
        ([1.0, math.nan], "blank", "has a NaN or an infinity in v"),
        ([1.0, None], "blank", "has a NaN or an infinity in v"),
        ([1.0], "blank", "has a v whose width is not 2"),
        (None, "error", "has no v"),
        ([], "error", "has no v"),
    ],
)
def test_a_bad_embedding_is_an_error_that_names_the_row(
    tmp_path, write_parquet, bad, choice, message
):
    path = write_parquet(
        tmp_path / "a.parquet", {"v": [[1.0, 2.0]] * 4 + [bad, None]}, row_group_size=3
    )
    with pytest.raises(CorpusError, match=rf"row a\.parquet#1:1 of the corpus {message}.*; mend"):
        read_vectors(open_corpus(path, embedding_column="v", on_bad_row=choice))


VECTOR = st.none() | st.lists(
    st.sampled_from([0.0, 1.5, -2.0, math.nan, math.inf, None]), max_size=3
)


@IN_TMP_PATH
@given(rows=st.lists(VECTOR, max_size=25), group=st.integers(1, 9), shard_rows=st.integers(1, 9))
@example(rows=[[], None, [math.nan] * 2], group=1, shard_rows=1)
def test_counts_of_embeddings_add_up(tmp_path, write_parquet, rows, group, shard_rows):
    rows = [[0.0, 1.0], *rows]
    column = embedding_column(rows, pa.list_(pa.float32()))
    path = write_parquet(tmp_path / "a.parquet", {"v": column}, row_group_size=group)
    ids, found, skipped = read_vectors(
        open_corpus(path, embedding_column="v", shard_rows=shard_rows, on_bad_row="skip")
    )

    def reason(row):
        if not row:
            return "null_embedding"
        if len(row) != 2:
            return "wrong_width"
        fine = all(value is not None and math.isfinite(value) for value in row)
        return "kept" if fine else "not_finite"

    reasons = list(map(reason, rows))
    kept = [i for i, why in enumerate(reasons) if why == "kept"]
    assert ids == [f"a.parquet#{i // group}:{i % group}" for i in kept]
    np.testing.assert_array_equal(found, [rows[i] for i in kept])
    assert skipped == Counter(why for why in reasons if why != "kept")
