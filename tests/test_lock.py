"""Locks that die with their holder."""

from __future__ import annotations

import os
import signal

import pytest

from tests.test_manifest import child, enter
from whiten_index.errors import BusyError
from whiten_index.lock import only_writer

HOLDER = """
import sys
from pathlib import Path
from whiten_index.lock import only_writer

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
