"""Kept columns of types that Python, or Arrow's kernels, know little of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whiten_index import BuildConfig, build_index, open_index
from whiten_index.pipeline.update import update_index
from whiten_index.pipeline.update_config import UpdateConfig

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
    "a view of a list": (pa.array([[10**16]] * ROWS, pa.list_view(MS)), [10**16]),
    "views of lists": (
        pa.array([[None, [10**16]]] * ROWS, pa.large_list_view(pa.list_view(MS))),
        [None, [10**16]],
    ),
    "string views in a view of a list": (
        pa.array([["a"]] * ROWS, pa.list_view(pa.string_view())),
        ["a"],
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
    assert open_index(out).bundle.documents.get(ROWS - 1) == {"id": ROWS - 1, "k": expected}
    write(corpus, kept, seed=1)
    report = update_index(UpdateConfig(index=str(out)))
    assert report.to_json()["rows"]["changed"] == ROWS
    assert open_index(out).bundle.documents.get(7) == {"id": 7, "k": expected}
