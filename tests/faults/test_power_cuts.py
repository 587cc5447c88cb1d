"""A night that loses its power at any file operation does no harm.

After each, what is published opens, verifies and answers, being the version before or the new one,
whole; and the next run ends as if nothing had happened, with nothing left over. ``power_cuts.py``
does it; here it is started, and what it found is looked at.
"""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import power_cuts
from tests.faults.disk_model import Disk
from tests.faults.file_operations import Operation, Tap
from tests.faults.place import COLUMNS, Place, Tree, in_fork, read_tree
from tests.faults.run import PROCESSES, assert_no_problems, tried
from whiten_index.artifacts.atomic import make_folder, remove_folder, replace_file
from whiten_index.artifacts.manifest import new_artifact


def sweep(folder: Path, *, every: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what was found of the flows, and at each of the points; all of it harmless."""
    found = tried(folder, power_cuts, every)
    flows = [each for each in found if "escaped" in each]
    points = [each for each in found if "problems" in each]
    # What the operations seen make of the disk is what is on it: none escaped.
    assert [flow["escaped"] for flow in flows] == [[]] * len(power_cuts.FLOWS) * PROCESSES
    assert_no_problems(points)
    published = {(each["flow"], each["published"]) for each in points}
    assert {*((flow, "old") for flow in power_cuts.FLOWS), ("night", "new")} <= published
    return flows, points


@pytest.mark.slow
def test_every_fifth_operation(tmp_path: Path) -> None:
    flows, points = sweep(tmp_path, every=5)
    assert len(points) >= sum(flow["operations"] for flow in flows) / PROCESSES / 5


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_operation(tmp_path: Path) -> None:
    _, points = sweep(tmp_path, every=1)
    by_flow = Counter((each["flow"], each["published"]) for each in points)
    assert all(by_flow[flow, which] for flow in power_cuts.FLOWS for which in ("old", "new"))


# What it rests on: the operations seen, and the disk made of them.


def recorded(folder: Path, work: Callable[[], Any]) -> tuple[Disk, list[Operation]]:
    """Return the disk as it was before, and the operations of work that a fork does."""
    disk, place = Disk(folder), Place(folder.parent)

    def watched() -> list[Operation]:
        done: list[Operation] = []
        Tap(folder, after=done.append).install()
        work()
        return done

    status, done = in_fork(place, watched)
    assert status == 0, place.said()
    return disk, done


def left_behind(disk: Disk, operations: list[Operation]) -> list[list[Tree]]:
    """Return for each number of operations done what a power cut may leave, of many draws."""
    found = []
    for number in range(len(operations) + 1):
        found.append([tree for seed in range(20) for _, tree in disk.after_power_cuts(seed)])
        if number < len(operations):
            disk.apply(operations[number])
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "file").write_bytes(b"before")
    return tmp_path / "disk"


def test_a_file_replaced_is_the_old_one_or_the_new_one(folder: Path) -> None:
    disk, done = recorded(folder, lambda: replace_file(folder / "file", b"after"))
    # Locks and modes are no content, which the disk of this test holds.
    done = [each for each in done if each.name not in ("flock", "chmod", "fchmodat")]
    assert [each.name for each in done] == [
        "mkdir", "open", "write", "fsync", "rename", "fsync", "rmdir",
    ]  # fmt: skip
    left = left_behind(disk, done)
    contents = [{tree["file"] for tree in trees} for trees in left]
    assert contents == [{b"before"}] * 5 + [{b"before", b"after"}] + [{b"after"}] * 2
    assert disk.now() == read_tree(folder) == {"file": b"after"}


@pytest.mark.parametrize(
    "forgotten", [0, 1], ids=["without its content flushed", "without its name flushed"]
)
def test_a_file_replaced_carelessly_is_lost(folder: Path, forgotten: int) -> None:
    disk, done = recorded(folder, lambda: replace_file(folder / "file", b"after"))
    done.remove([each for each in done if each.name == "fsync"][forgotten])
    contents = {tree.get("file") for tree in left_behind(disk, done)[-1]}
    assert contents > {b"after"}


def test_a_folder_published_is_whole_or_not_there(folder: Path) -> None:
    def work() -> None:
        with new_artifact(folder / "above" / "artifact") as (temporary, fields):
            (temporary / "data").write_bytes(b"data" * 1000)
            fields["kind"] = "test"

    disk, done = recorded(folder, work)
    left = left_behind(disk, done)
    whole = read_tree(folder)
    names = {name for name in whole if name.startswith("above/artifact")}
    assert len(names) == 3
    for tree in (tree for trees in left for tree in trees):
        there = {name for name in tree if name.startswith("above/artifact")}
        assert not there or {name: tree[name] for name in names} == {
            name: whole[name] for name in names
        }
    assert left[-1] == [whole] * len(left[-1])
    disk, done = recorded(folder, lambda: remove_folder(folder / "above" / "artifact"))
    for tree in (tree for trees in left_behind(disk, done) for tree in trees):
        there = {name for name in tree if name.startswith("above/artifact")}
        assert not there or {name: tree[name] for name in there} == {
            name: whole[name] for name in names
        }


def test_a_folder_made_stays(folder: Path) -> None:
    disk, done = recorded(folder, lambda: make_folder(folder / "a" / "b" / "c"))
    assert left_behind(disk, done)[-1] == [read_tree(folder)] * 60


def test_all_of_a_build_that_ended_is_on_the_disk(tmp_path: Path) -> None:
    """Also the folders that the first build makes, and what the store remembers of it."""
    place = Place(tmp_path)
    for folder in (place.disk, place.corpus):
        folder.mkdir()
    place.write_corpus(0)
    command = ["build", place.corpus, *COLUMNS, "--store", place.store, "--keep", "year"]
    disk, done = recorded(place.disk, lambda: place.must(*command, "--out", place.index))
    for operation in done:
        disk.apply(operation)
    (_, flushed), *_ = disk.after_power_cuts(0)
    there = place.tree()
    assert disk.now() == there
    # A lock is nothing to whoever comes after a power cut.
    locks = {name for name in there if name.endswith(".lock")}
    lost = {name for name in there if flushed.get(name, "lost") != there[name]}
    assert lost <= locks
    place.put(flushed)
    status, _ = in_fork(place, lambda: place.run("verify", place.index))
    assert status == 0, place.said()


def test_operations_of_all_kinds_are_seen(folder: Path) -> None:
    def work() -> None:
        with (folder / "text").open("w", encoding="utf-8") as text:
            text.write("ab\ncd")
            text.flush()
            os.ftruncate(text.fileno(), 4)
        with (folder / "text").open("r+b") as both:
            both.seek(1)
            both.write(b"XYZ!")
            both.truncate(5)
        with (folder / "file").open("ab") as more:
            more.write(b" and more")
        descriptor = os.open(folder / "low", os.O_RDWR | os.O_CREAT)
        os.write(descriptor, b"low")
        os.posix_fallocate(descriptor, 0, 10)
        os.close(descriptor)
        os.link(folder / "low", folder / "linked")
        (folder / "sub").mkdir()
        (folder / "text").rename(folder / "sub" / "text")
        (folder / "low").unlink()
        (folder / "gone").mkdir()
        (folder / "gone" / "file").write_bytes(b"gone")
        shutil.copyfile(folder / "file", folder / "copied")
        shutil.rmtree(folder / "gone")
        with tempfile.NamedTemporaryFile(dir=folder):
            pass

    disk, done = recorded(folder, work)
    for operation in done:
        disk.apply(operation)
    assert disk.now() == read_tree(folder)
    assert disk.now()["sub/text"] == b"aXYZ!"
    assert disk.now()["copied"] == b"before and more"
    assert disk.now()["linked"] == b"low" + bytes(7)
