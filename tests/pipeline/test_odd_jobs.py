"""Nights on which something small is wrong, and nothing else may come to harm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from whiten_index.artifacts.job_file import read_toml
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.pipeline.canary_file import CanaryFile

DIM = 8


def test_a_mark_of_windows_editors_at_the_front_of_a_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b'\xef\xbb\xbfindex = "x"\r\n')
    assert read_toml(path) == {"index": "x"}
    path.write_bytes('index = "é"'.encode("latin-1"))
    with pytest.raises(ConfigError, match="save it as UTF-8"):
        read_toml(path)


def test_a_pipe_for_canaries_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "canaries.parquet")
    with pytest.raises(CorpusError, match="is a pipe or a device"):
        CanaryFile.read(tmp_path / "canaries.parquet", dim=DIM)
