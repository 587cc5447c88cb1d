"""Locks that die with their holder."""

import json
import os
import shlex
import signal
import socket
import subprocess

import pytest

from tests.artifacts.test_manifest import child, enter
from whiten_index.artifacts.lock import only_writer
from whiten_index.errors import ArtifactError, BusyError

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
