"""Peak memory of encoding and fitting does not grow with the corpus, even in one row group.

Each figure is the peak resident size of a process of its own. What the larger corpus would add,
were it kept, is above the bound.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.memory import peak_rss_mb
from tests.helpers.bad_input import run_python
from whiten_index import BuildConfig, Whitening, encode_corpus

pytestmark = pytest.mark.slow

SMALL, LARGE = 20_000, 80_000
KEPT_CHARACTERS = 3000  # 60,000 rows more are 180 MB more, in a file of a few MB
DIM = 384  # 60,000 rows more are 92 MB more


def child(config_json: str) -> None:
    """Encode and fit, and print the peak resident size."""
    report = encode_corpus(BuildConfig(**json.loads(config_json)))
    Whitening.fit(report.store.total_moments(report.record.distinct_parts))
    print(json.dumps({"rows": report.record.rows, "peak_mb": peak_rss_mb()}))


def peak_mb(config: dict[str, Any]) -> tuple[int, float]:
    """Return the rows encoded and the peak of a fresh process."""
    alone = json.dumps({**config, "threads": 1, "device": "cpu"})
    # How many arenas malloc makes depends on the luck of the threads, not on the rows.
    found = json.loads(run_python(__file__, alone, MALLOC_ARENA_MAX="2").splitlines()[-1])
    return found["rows"], found["peak_mb"]


def texts(rows: int, words: tuple[str, ...]) -> pa.Table:
    drawn = np.random.default_rng(0).choice(words, size=(rows, 6))
    lines = [" ".join(row) for row in drawn]
    kept = [line.ljust(KEPT_CHARACTERS, "x") for line in lines]
    return pa.table({"id": np.arange(rows), "text": lines, "kept": kept})


def embeddings(rows: int) -> pa.Table:
    flat = np.random.default_rng(0).standard_normal(rows * DIM, dtype=np.float32)
    column = pa.FixedSizeListArray.from_arrays(flat, DIM)
    return pa.table({"id": np.arange(rows), "embedding": column})


@pytest.mark.parametrize("kind", ["texts", "embeddings"])
def test_peak_memory_does_not_depend_on_the_rows(
    tmp_path: Path, tiny_model: Path, tiny_words: tuple[str, ...], kind: str, record_property: Any
) -> None:
    peaks = {}
    for rows in (SMALL, LARGE):
        path = tmp_path / f"{rows}.parquet"
        table = texts(rows, tiny_words) if kind == "texts" else embeddings(rows)
        pq.write_table(table, path, row_group_size=rows, compression="zstd", use_dictionary=False)
        del table
        assert pq.ParquetFile(path).num_row_groups == 1
        config: dict[str, Any] = {
            "corpus": [str(path)],
            "store": str(tmp_path / f"store-{rows}"),
            "id_column": "id",
            "shard_rows": 1024,
        }
        if kind == "texts":
            config |= {"text_columns": ["text"], "keep": ["kept"], "model": str(tiny_model)}
        else:
            config |= {"embedding_column": "embedding"}
        encoded, peaks[rows] = peak_mb(config)
        assert encoded == rows
    record_property("peak_mb", peaks)
    print(f"{kind}: {peaks}")
    assert peaks[LARGE] == pytest.approx(peaks[SMALL], rel=0.15), peaks


if __name__ == "__main__":
    child(sys.argv[1])
