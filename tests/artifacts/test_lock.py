"""Locks that die with their holder, and writers of one target, one killed or beside another."""

import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.artifacts.test_manifest import child, enter
from whiten_index.artifacts.atomic import replace_folder, replacing, temporary_folder
from whiten_index.artifacts.files import walk_files
from whiten_index.artifacts.lock import only_writer
from whiten_index.errors import ArtifactError, BusyError, StorageError

HOLDER = """
import sys
from pathlib import Path
from whiten_index.artifacts.lock import only_writer

with only_writer(Path(sys.argv[1]), what="store"):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_told_who_holds_the_folder(tmp_path):
    with child(HOLDER, tmp_path) as holder:
        with pytest.raises(
            BusyError,
            match=rf"store .*{tmp_path.name} is being written by process {holder.pid} on .*; wait",
        ):
            enter(tmp_path)
        holder.communicate("")  # ends in peace
        assert holder.returncode == 0
        enter(tmp_path)


def test_a_killed_holder_frees_the_folder(tmp_path):
    with child(HOLDER, tmp_path) as holder:
        with pytest.raises(BusyError):
            enter(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with only_writer(tmp_path, what="store"), pytest.raises(BusyError) as caught:
            enter(tmp_path)
        assert f"process {os.getpid()} " in str(caught.value), "names the dead one"


def test_two_holders_of_one_process_are_two_writers_and_the_first_keeps_the_lock(tmp_path):
    with only_writer(tmp_path, what="store"):
        for _ in range(3):
            with pytest.raises(BusyError, match=f"process {os.getpid()} on"):
                enter(tmp_path)
    enter(tmp_path)


def test_an_error_in_the_block_frees_the_folder_and_passes(tmp_path):
    with pytest.raises(RuntimeError, match="mine"), only_writer(tmp_path, what="store"):
        raise RuntimeError("mine")
    enter(tmp_path)


def test_a_new_folder_is_made_and_others_are_not_held(tmp_path):
    with only_writer(tmp_path / "deep" / "a", what="store"):
        assert (tmp_path / "deep" / "a").is_dir()
        enter(tmp_path / "deep" / "b")


# Hosts that do not share locks: the system's lock is free, and the file names another host.


def named(folder, **owner):
    """Leave the lock of a process that ended without unlocking."""
    path = folder / ".lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "since": "then", **owner}))
    return path


def test_the_lock_of_another_host_is_refused_until_it_is_removed(tmp_path):
    path = named(tmp_path)
    with pytest.raises(BusyError, match=r"locked by process 7 on elsewhere since then") as caught:
        enter(tmp_path)
    command = str(caught.value).partition("same command again: ")[2]
    subprocess.run(shlex.split(command), check=True)
    assert not path.exists()
    enter(tmp_path)


@pytest.mark.parametrize("text", ["", "\x00" * 40, "half of a lo", "[3]", "[" * 3000])
def test_a_lock_that_names_nobody_is_taken(tmp_path, text):
    (tmp_path / ".lock").write_text(text)
    enter(tmp_path)


def test_a_dead_owner_of_this_host_is_followed_at_once(tmp_path):
    named(tmp_path, host=socket.gethostname(), since="then" * 100)
    with only_writer(tmp_path, what="store"), pytest.raises(BusyError) as caught:
        enter(tmp_path)
    assert f"process {os.getpid()} " in str(caught.value)
    assert (tmp_path / ".lock").read_text() == ""


@pytest.mark.parametrize("kind", ["link", "hard link", "link to nothing", "pipe", "folder"])
def test_a_lock_that_is_no_plain_file_is_refused_and_its_target_kept(tmp_path, kind):
    victim, lock = tmp_path / "victim", tmp_path / "out" / ".lock"
    lock.parent.mkdir()
    if kind in ("link", "hard link"):
        victim.write_text("precious")
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    elif kind == "hard link":
        lock.hardlink_to(victim)
    else:
        lock.symlink_to(victim)
    with (
        pytest.raises(ArtifactError, match="is not a plain file, as a lock is; remove it"),
        only_writer(lock.parent, what="index"),
    ):
        pass
    assert not victim.exists() or victim.read_text() == "precious"


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
