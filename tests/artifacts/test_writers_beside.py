"""Writers of one target: one that was killed, and one that is beside another."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from whiten_index.artifacts.atomic import replace_folder, replacing, temporary_folder
from whiten_index.artifacts.files import walk_files
from whiten_index.artifacts.lock import only_writer
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
    stopped = Mock(side_effect=StorageError("the disk is full"))
    with pytest.raises(StorageError):
        replace_folder(final, stopped, files=lambda _: ["f"], what="a folder")
    assert (final / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_long_name_is_not_taken_for_another_that_begins_alike(tmp_path: Path) -> None:
    first, second = (tmp_path / ("p" * 200 + end) for end in "ab")
    with temporary_folder(first) as left:
        name = left.name
    (tmp_path / name / ".moved-aside").mkdir(parents=True)
    with temporary_folder(second):
        pass
    assert (tmp_path / name).exists()
    with temporary_folder(first):
        pass
    assert not (tmp_path / name).exists()
    assert first.exists()


@pytest.fixture
def deep() -> Iterator[Path]:
    """A folder within a folder, more often than Python has levels: pytest could not remove it."""
    made = Path(tempfile.mkdtemp()) / "deep"
    made.mkdir()
    inside = os.open(made, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=inside)
        inside, above = os.open("d", os.O_RDONLY, dir_fd=inside), inside
        os.close(above)
    (descriptor := os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=inside))
    os.close(descriptor)
    os.close(inside)
    yield made
    subprocess.run(["rm", "-rf", made.parent], check=True)


def test_a_leftover_that_cannot_be_removed_stays(deep: Path) -> None:
    assert len(list(walk_files(deep))) == 1
    target = deep.parent / "file"
    with temporary_folder(target) as left:
        name = left.name
    deep.rename(deep.parent / name)
    with replacing(target) as new:
        new.write_text("new")
    assert target.read_text() == "new"


def test_a_lock_that_a_file_server_fails_to_close_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, other = os.close, tmp_path / "other"
    other.mkdir()

    def fail(descriptor: int) -> None:
        close(descriptor)
        raise OSError(5, "Input/output error")

    with only_writer(tmp_path, what="store"), monkeypatch.context() as patch:
        patch.setattr(os, "close", fail)
        with pytest.raises(StorageError, match="says more"), only_writer(other, what="store"):
            raise StorageError("says more")
    with only_writer(other, what="store"):
        pass
