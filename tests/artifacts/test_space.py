"""Room on the disk: sums by file system, against what the system says is free."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whiten_index.artifacts.atomic import require_space
from whiten_index.errors import StorageError


def says_free(monkeypatch: pytest.MonkeyPatch, **free: int) -> None:
    """Let a file system of 4 KiB blocks have so many free, by the name of a folder on it."""

    def statvfs(path: Any) -> SimpleNamespace:
        parts = Path(path).parts
        blocks = next((n for name, n in free.items() if name in parts), 10**6)
        return SimpleNamespace(
            f_bavail=blocks, f_bfree=blocks + 10**9, f_frsize=4096, f_bsize=1 << 20, f_blocks=10**10
        )

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_one_disk_is_asked_for_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says_free(monkeypatch, **{tmp_path.name: 25})
    wanted = {tmp_path / "index": 60_000, tmp_path / "store" / "deep": 42_401}
    with pytest.raises(StorageError) as caught:
        require_space(wanted, "the update")
    said = str(caught.value)
    assert "the update needs about 102,401 bytes" in said
    assert "102,400 free; free 1 bytes more" in said
    assert str(tmp_path / "index") in said
    assert str(tmp_path / "store" / "deep") in said
    assert caught.value.exit_code == 7
    assert not list(tmp_path.iterdir())


def test_a_real_disk_is_refused_what_it_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="needs about 1,152,921,504,606,846,976 bytes"):
        require_space({tmp_path / "index": 1 << 60}, "the update")
