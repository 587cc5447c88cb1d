"""Kept columns of types that Python, or Arrow's kernels, know little of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whiten_index import BuildConfig, build_index, open_index
from whiten_index.arrow_types import without_times, without_views
from whiten_index.errors import CorpusError
from whiten_index.update import UpdateConfig, update_index

ROWS, DIM = 40, 8
MS = pa.timestamp("ms")
LATE = 253_402_300_799_000
ODD = {
    "string view": (pa.array(["a"] * ROWS, pa.string_view()), "a"),
    "views in a list": (pa.array([["a"]] * ROWS, pa.list_(pa.string_view())), ["a"]),
    "bytes view": (pa.array([b"a"] * ROWS, pa.binary_view()), b"a"),
    "a far year": (pa.array([10**16] * ROWS, MS), 10**16),
    "never": (pa.array([LATE] * ROWS, MS).cast(pa.timestamp("ms", "Asia/Tokyo")), LATE),
    "no zone": (pa.array([5] * ROWS, MS).cast(pa.timestamp("ms", "Mars/Olympus")), 5),
    "within": (
        pa.array([{"t": [10**16]}] * ROWS, pa.struct([("t", pa.list_(MS))])),
        {"t": [10**16]},
    ),
}


def write(folder: Path, kept: pa.Array, seed: int) -> None:
    rows = np.random.default_rng(seed).standard_normal((ROWS, DIM)).astype(np.float32)
    embeddings = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), DIM)
    folder.mkdir(exist_ok=True)
    table = pa.table({"id": range(ROWS), "e": embeddings, "k": kept})
    pq.write_table(table, folder / "f.parquet")


@pytest.mark.parametrize("name", ODD)
def test_it_is_kept_found_and_updated(name: str, tmp_path: Path) -> None:
    kept, expected = ODD[name]
    corpus, out = tmp_path / "c", tmp_path / "index"
    write(corpus, kept, seed=0)
    options: dict[str, Any] = {"embedding_column": "e", "id_column": "id", "keep": ("k",), "k": 4}
    build_index(BuildConfig(corpus=(str(corpus),), out=str(out), **options))
    assert open_index(out).bundle.documents.get(7) == {"id": 7, "k": expected}
    write(corpus, kept, seed=1)
    report = update_index(UpdateConfig(index=str(out)))
    assert report.to_json()["rows"]["changed"] == ROWS
    assert open_index(out).bundle.documents.get(7) == {"id": 7, "k": expected}


def test_types_are_replaced_at_any_depth() -> None:
    kind = pa.struct([("a", pa.list_(pa.string_view())), ("b", pa.map_(pa.string(), MS))])
    assert without_views(kind).field("a").type == pa.list_(pa.large_string())
    assert without_times(kind).field("b").type == pa.map_(pa.string(), pa.int64())
    assert without_times(pa.dictionary(pa.int8(), MS)) == pa.int64()
    assert without_times(pa.date32()) == pa.int32()
    for plain in (pa.int32(), pa.list_(pa.float16(), 3), pa.large_list(pa.string())):
        assert without_views(plain) == without_times(plain) == plain


@pytest.mark.parametrize("name", ["a", ""])
def test_a_record_with_two_fields_of_one_name_is_refused(name: str, tmp_path: Path) -> None:
    """pyarrow makes no value of it, so that a search could not show it."""
    fields = pa.StructArray.from_arrays([pa.array(range(ROWS))] * 2, names=[name, name])
    offsets = pa.array(range(ROWS + 1), pa.int32())
    for kept in (fields, pa.ListArray.from_arrays(offsets, fields)):
        write(tmp_path / "c", kept, seed=0)
        config = BuildConfig(
            corpus=(str(tmp_path / "c"),), out=str(tmp_path / "index"), embedding_column="e",
            id_column="id", keep=("k",), k=4,
        )  # fmt: skip
        with pytest.raises(CorpusError, match=f"'k' of .* two fields '{name}'"):
            build_index(config)
        assert not (tmp_path / "index" / "CURRENT").exists()
