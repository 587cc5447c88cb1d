"""Nights on which something small is wrong, and nothing else may come to harm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whiten_index import BuildConfig, build_index
from whiten_index.artifacts.job_file import read_toml
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.pipeline.canary_file import CanaryFile

ROWS, DIM = 200, 8


def corpus(folder: Path, *, seed: int = 0, **columns: Any) -> Path:
    rows = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
    rows[seed] += seed
    embeddings = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), DIM)
    folder.mkdir(exist_ok=True)
    table = pa.table({"id": range(ROWS), "e": embeddings, **columns})
    pq.write_table(table, folder / "f.parquet")
    return folder


def built(folder: Path, out: Path, **options: Any) -> Path:
    named = {"embedding_column": "e", "id_column": "id", "k": 4, **options}
    build_index(BuildConfig(corpus=(str(folder),), out=str(out), **named))
    return out


def test_a_mark_of_windows_editors_at_the_front_of_a_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b'\xef\xbb\xbfindex = "x"\r\n')
    assert read_toml(path) == {"index": "x"}
    path.write_bytes('index = "é"'.encode("latin-1"))
    with pytest.raises(ConfigError, match="save it as UTF-8"):
        read_toml(path)


def test_a_pipe_for_canaries_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "canaries.parquet")
    with pytest.raises(CorpusError, match="is no file"):
        CanaryFile.read(tmp_path / "canaries.parquet", dim=DIM)
