"""Nights on which something small is wrong, and nothing else may come to harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from whiten_index.artifacts.job_file import read_toml
from whiten_index.errors import ConfigError

DIM = 8


def test_a_mark_of_windows_editors_at_the_front_of_a_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b'\xef\xbb\xbfindex = "x"\r\n')
    assert read_toml(path) == {"index": "x"}
    path.write_bytes('index = "é"'.encode("latin-1"))
    with pytest.raises(ConfigError, match="is not TOML in UTF-8"):
        read_toml(path)
