"""Folders of engines without a server: those of others, and those that cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from whiten_index.errors import ConfigError, DatabaseError
from whiten_index.vectordb.local_folders import remedy_of, require_own, require_there


def require(folder: Path, *marks: str) -> None:
    require_own(folder, engine="Ours", marks=marks, address=f"ours://{folder}")


@pytest.mark.parametrize("there", [[], [".DS_Store", "lost+found"], ["a.ours", "notes.txt"]])
def test_folders_that_are_taken(tmp_path: Path, there: list[str]) -> None:
    for name in there:
        (tmp_path / name).mkdir()
    require(tmp_path, "*.ours", "another")
    require(tmp_path / "absent" / "deeper", "*.ours")


@pytest.mark.parametrize("there", [["corpus.parquet"], ["ones"], ["notes.txt", "one.txt"]])
def test_folders_of_others(tmp_path: Path, there: list[str]) -> None:
    for name in there:
        (tmp_path / name).write_text("")
    why = rf"ours://.* such as '{sorted(there)[0]}'; name a folder"
    with pytest.raises(ConfigError, match=why):
        require(tmp_path, "one", "two")
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(there)


def test_folders_that_are_not_there(tmp_path: Path) -> None:
    """An engine that is only asked makes none, nor what it would put into an empty one."""
    why = "^ours://x is not there, or nothing was pushed to it yet; look at the path"
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "one").write_text("")
    for name, marks in (("absent", []), ("file", []), ("empty", ["one"]), ("half", ["one", "two"])):
        with pytest.raises(DatabaseError, match=why):
            require_there(tmp_path / name, marks=marks, address="ours://x")
    require_there(tmp_path / "empty", address="ours://x")
    require_there(tmp_path / "half", marks=["o*"], address="ours://x")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty", "file", "half"]


def test_what_is_no_folder_is_left_to_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    require(file, "one")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EROFS])
def test_what_this_user_may_not_write(number: int) -> None:
    words = os.strerror(number)
    for told in (f"[Errno {number}] {words}: '/x'", f"IO error: {words} (os error {number})"):
        assert "change the permissions of the folder" in str(remedy_of(told))
    assert remedy_of(f"code (os error {number})")
    assert remedy_of("attempt to write a readonly database")


def test_other_faults_of_a_disk() -> None:
    for number in (errno.ENOSPC, errno.EDQUOT):
        assert str(remedy_of(f"x: {os.strerror(number)} (os error {number})")).startswith("make")
    for told in ("no such table", "(os error 2)", "(os error 11)", "(os error 130)", ""):
        assert remedy_of(told) is None
