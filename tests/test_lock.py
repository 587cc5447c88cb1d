"""Locks that die with their holder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import threading
import time

import pytest

from tests.test_manifest import child, enter
from whiten_index.artifacts import lock
from whiten_index.artifacts.lock import only_writer
from whiten_index.errors import BusyError

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


# Hosts whose locks do not reach each other: the system's lock is free, the owner's file is not.


OWNER = ".lock-owner"


@pytest.fixture
def quick_signs(monkeypatch):
    """Signs of life every 50 ms, on a file system whose times are as fine."""
    monkeypatch.setattr(lock, "RENEWED_EVERY", 0.05)


def owned_by(folder, *, age=0.0, **changes):
    """Leave the file of an owner who renewed it so many seconds ago."""
    with only_writer(folder, what="store"):
        owner = json.loads((folder / OWNER).read_text())
    owner |= {"host": "elsewhere", "boot": "b", "machine": "m", "pid": 7, "token": "t", **changes}
    (folder / OWNER).write_text(json.dumps(owner))
    then = time.time() - age
    os.utime(folder / OWNER, (then, then))


def renewing(path, stop):
    while not stop.wait(0.02):
        os.utime(path)


@pytest.mark.parametrize("age", [0, 30, 599])
def test_another_hosts_owner_holds_the_folder_while_it_shows_signs_of_life(tmp_path, age):
    owned_by(tmp_path, age=age)
    before = (tmp_path / OWNER).read_text()
    message = (
        r"being written by process 7 on elsewhere since 20.* \(last sign of life 20.*\); wait for "
        r"it .* if that host is gone, run again 10 minutes after its last sign of life"
    )
    with pytest.raises(BusyError, match=message):
        enter(tmp_path)
    assert (tmp_path / OWNER).read_text() == before
    assert {path.name for path in tmp_path.iterdir()} == {OWNER, ".lock"}


# From the future: a clock that was put back since.
@pytest.mark.parametrize("age", [700, 1e6, -1e5])
def test_another_hosts_owner_without_signs_of_life_is_taken_over(tmp_path, quick_signs, age):
    owned_by(tmp_path, age=age)
    with only_writer(tmp_path, what="store") as held:
        assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
        held.require()
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


@pytest.mark.parametrize("age", [1e6, -1e5])
def test_an_owner_who_is_only_behind_or_ahead_by_the_clock_is_seen_to_live(
    tmp_path, monkeypatch, age
):
    monkeypatch.setattr(lock, "RENEWED_EVERY", 0.2)
    owned_by(tmp_path, age=age)
    stop = threading.Event()
    thread = threading.Thread(target=renewing, args=(tmp_path / OWNER, stop))
    monkeypatch.setattr(lock.Held, "_is_fresh", lambda self, seen: thread.start())
    try:
        with pytest.raises(BusyError, match="process 7 on elsewhere"):
            enter(tmp_path)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("data", ["", "\x00" * 40, "process 7 on elsewhere since then", "[3]"])
def test_an_owner_who_cannot_be_made_out_is_waited_for_like_another_hosts(
    tmp_path, quick_signs, data
):
    (tmp_path / OWNER).write_text(data)
    with pytest.raises(BusyError, match=r"is being written by .*; wait"):
        enter(tmp_path)
    os.utime(tmp_path / OWNER, (1, 1))
    enter(tmp_path)


@pytest.mark.parametrize("changes", [{"boot": "another"}, {"machine": "another"}, {}])
def test_a_dead_owner_of_this_host_is_followed_at_once(tmp_path, monkeypatch, changes):
    monkeypatch.setattr(lock.time, "sleep", None)
    monkeypatch.setattr(lock, "host_facts", lambda: {"host": "h", "machine": "m", "boot": "b"})
    owned_by(tmp_path, **{"host": "h", "machine": "m", "boot": "b", **changes})
    enter(tmp_path)
    owned_by(tmp_path, host="h", machine="another", boot="another")
    with pytest.raises(BusyError, match="process 7 on h since"):
        enter(tmp_path)


def test_the_owner_renews_its_file_and_makes_it_anew_where_it_was_removed(tmp_path, quick_signs):
    with only_writer(tmp_path, what="store") as held:
        text = (tmp_path / OWNER).read_text()
        os.utime(tmp_path / OWNER, (1, 1))
        wait_until(lambda: (tmp_path / OWNER).stat().st_mtime > 1)
        (tmp_path / OWNER).unlink()
        wait_until(lambda: (tmp_path / OWNER).exists())
        assert (tmp_path / OWNER).read_text() == text
        (tmp_path / OWNER).unlink()
        held.require()
        assert (tmp_path / OWNER).read_text() == text
    assert not (tmp_path / OWNER).exists()


def wait_until(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError


TAKEN = r"store .* was taken over by process 7 on elsewhere .*10 minutes; look at what is"


def work_and_be_taken_over(folder):
    with only_writer(folder, what="store") as held:
        held.require()
        # As after hours of standing still.
        (folder / OWNER).write_text(json.dumps({"pid": 7, "host": "elsewhere", "token": "t"}))
        with pytest.raises(BusyError, match=TAKEN):
            held.require()


def fail_and_be_taken_over(folder):
    with only_writer(folder, what="store"):
        (folder / OWNER).write_text("{}")
        raise RuntimeError("mine")


def test_an_owner_who_was_taken_over_is_told_before_it_publishes_and_at_the_end(tmp_path):
    with pytest.raises(BusyError, match=TAKEN):
        work_and_be_taken_over(tmp_path)
    assert json.loads((tmp_path / OWNER).read_text())["pid"] == 7, "not ours to remove"


def test_an_error_in_the_block_is_not_hidden_by_the_takeover(tmp_path):
    with pytest.raises(RuntimeError, match="mine"):
        fail_and_be_taken_over(tmp_path)


def test_of_many_hosts_without_a_common_lock_one_owns_the_folder(tmp_path, quick_signs):
    """Each claims the folder with a host's name of its own and no lock of the system at all."""
    owned_by(tmp_path, age=1e6)
    start, owners, refused = threading.Barrier(8), [], []

    def claim(number):
        held = lock.Held(tmp_path, "store")
        held._me |= {"host": f"host-{number}"}
        held._aside = lambda name: tmp_path / f".tmp-{number}~{name}"
        start.wait(timeout=30)
        try:
            held.claim()
            held.require()
            owners.append(held)
        except BusyError:
            refused.append(number)

    threads = [threading.Thread(target=claim, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(owners) + len(refused) == 8
    sure = []
    for held in owners:
        with contextlib.suppress(BusyError):
            held.require()
            sure.append(held)
    assert len(sure) == 1


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_hard_links_will_do(tmp_path, monkeypatch, code):
    def no_links(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lock.os, "link", no_links)
    with only_writer(tmp_path, what="store") as held:
        held.require()
        with pytest.raises(BusyError, match=f"process {os.getpid()} on"):
            enter(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}
