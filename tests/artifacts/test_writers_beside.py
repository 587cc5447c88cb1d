"""Writers of one target: one that was killed, and one that is beside another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from whiten_index.artifacts.atomic import replace_folder, replacing
from whiten_index.errors import StorageError


def test_a_writer_leaves_the_temporary_file_of_one_that_lives(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with replacing(target) as slow:
        slow.write_bytes(b"slow")
        with replacing(target) as fast:
            fast.write_bytes(b"fast")
        assert target.read_bytes() == b"fast"
    assert target.read_bytes() == b"slow"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_that_was_moved_aside_comes_back(tmp_path: Path) -> None:
    """A writer was killed between its two renames, where folders cannot be swapped in one step."""
    final = tmp_path / "folder"
    final.mkdir()
    (final / "f").write_text("old")
    left = tmp_path / f".tmp-{final.name}~00000000-000000000000"
    left.mkdir()
    final.rename(left / ".moved-aside")
    # What another host left counts after a day.
    os.utime(left / ".moved-aside" / "f", (0, 0))
    os.utime(left, (0, 0))

    def stopped(_: Path) -> None:
        raise StorageError("the disk is full")

    with pytest.raises(StorageError):
        replace_folder(final, stopped, files=lambda _: ["f"], what="a folder")
    assert (final / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
