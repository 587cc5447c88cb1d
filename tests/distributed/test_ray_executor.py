"""Workers of a real cluster: every item is done, whatever dies or fails."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import neg
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.squares import Square, accept, refuse, squares
from whiten_index.distributed.executors import Failure
from whiten_index.distributed.ray_executor import RayExecutor, cluster
from whiten_index.errors import ConfigError, StorageError

pytestmark = pytest.mark.service


@contextmanager
def connected(
    address: str,
    *,
    workers: int | None = None,
    gpu: bool | None = False,
    check: Callable[[], None] = accept,
    notes: list[str] | None = None,
    ready: int = 0,
) -> Iterator[RayExecutor]:
    """Connect, and wait until so many workers are ready."""
    note = (notes if notes is not None else []).append
    with cluster(address, workers=workers, gpu=gpu, check=check, note=note) as executor:
        deadline = time.monotonic() + 60
        while len(executor._ready) < ready:
            assert time.monotonic() < deadline
            for ref in executor._ray.wait([*executor._starting], timeout=1.0)[0]:
                executor._greet(ref)
        yield executor


def run(address: str, work: Square, items: int | Iterable[int], **options: Any) -> list[Any]:
    with connected(address, **options) as executor:
        numbers = range(items) if isinstance(items, int) else items
        return list(executor.map_unordered(work, numbers))


def test_every_item_is_done_once_by_all_workers(two_nodes: Any, tmp_path: Path) -> None:
    with connected(two_nodes.address, ready=2) as executor:
        for count in (0, 1, 40):
            rows: list[int] = []
            work = Square(tmp_path / f"log{count}", seconds=0.02)
            results = list(executor.map_unordered(work, range(count), rows.append))
            assert squares(results) == [n**2 for n in range(count)]
            assert sum(rows) == sum(range(count))
            assert sorted(work.log_of("end")) == list(range(count))
            pids = {pid for _, (_, pid) in results}
            assert os.getpid() not in pids
            assert len(pids) == min(count, 2)
        assert executor.to_json() == {"deaths": 0, "failures": 0}
        assert list(executor.map(neg, range(5))) == [0, -1, -2, -3, -4]


def test_a_worker_that_dies_is_replaced_and_finished_items_are_not_repeated(
    two_nodes: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notes: list[str] = []
    work = Square(tmp_path / "log", trouble=((11, "once"), (20, "once")), seconds=0.02)
    with connected(two_nodes.address, notes=notes) as executor:
        results = list(executor.map_unordered(work, range(40)))
        assert executor.deaths == 2
    assert squares(results) == [n**2 for n in range(40)]
    assert [" died; others do what it had" in note for note in notes] == [True, True]
    # Standard output is for results.
    assert capfd.readouterr().out == ""
    assert sorted(work.log_of("end")) == list(range(40))


def test_items_that_fail_or_kill_are_reported_and_all_others_are_done(
    two_nodes: Any, tmp_path: Path
) -> None:
    work = Square(tmp_path / "log", trouble=((7, "raise"), (15, "die")), seconds=0.01)
    results = dict(run(two_nodes.address, work, 30))
    failed = {n: results.pop(n) for n in (7, 15)}
    assert all(isinstance(each, Failure) for each in failed.values())
    assert {n: each.item for n, each in failed.items()} == {7: 7, 15: 15}
    assert str(failed[7].error) == "7 is damaged"
    assert "its workers died" in str(failed[15].error)
    assert {n: square for n, (square, _) in results.items()} == {n: n**2 for n in results}
    assert len(results) == 28


def test_an_error_that_every_item_would_meet_ends_the_run(two_nodes: Any, tmp_path: Path) -> None:
    work = Square(tmp_path / "log", trouble=((3, "full"),), seconds=0.01)
    with pytest.raises(StorageError, match="the disk is full"):
        run(two_nodes.address, work, 1000)
    assert len(work.log_of("end")) < 100


def test_a_check_that_fails_on_every_machine_is_raised(two_nodes: Any, tmp_path: Path) -> None:
    notes: list[str] = []
    check = partial(refuse, "the disk")
    with pytest.raises(ConfigError, match="the disk is not there"):
        run(two_nodes.address, Square(tmp_path / "log"), 3, check=check, notes=notes)
    assert any("no worker on machine" in note for note in notes)


def test_a_given_number_of_workers(two_nodes: Any, tmp_path: Path) -> None:
    work = Square(tmp_path / "log", seconds=0.05)
    results = run(two_nodes.address, work, 12, workers=1, ready=1)
    assert len({pid for _, (_, pid) in results}) == 1
    notes: list[str] = []
    results = run(two_nodes.address, work, 12, workers=100, notes=notes, ready=2)
    assert len({pid for _, (_, pid) in results}) == 2
    assert notes == [
        "note: the cluster has 2 cores and 0 GPUs, too few for 100 workers unless the cluster grows"
    ]
    with pytest.raises(ConfigError, match="the cluster has none"):
        run(two_nodes.address, work, 1, gpu=True)


def test_two_builds_of_one_process_share_the_connection(two_nodes: Any, tmp_path: Path) -> None:
    first, second = (Square(tmp_path / name, seconds=0.02) for name in ("first", "second"))
    found: list[int] = []
    with connected(two_nodes.address, workers=1, ready=1) as outer:
        results = outer.map_unordered(first, range(40))
        next(results)

        def build() -> None:
            found.extend(squares(run(two_nodes.address, second, 20, workers=1)))

        thread = threading.Thread(target=build)
        thread.start()
        thread.join(60)
        assert found == [n**2 for n in range(20)]
        # The second build that ended did not disconnect the first.
        assert len(list(results)) == 39


def test_a_machine_that_dies_loses_nothing_and_one_that_joins_helps(
    mortal: Any, tmp_path: Path
) -> None:
    work = Square(tmp_path / "log", seconds=0.1)
    drawn: list[int] = []

    def items() -> Iterator[int]:
        # As many as it takes the new machine to begin.
        while len(drawn) < 2_000 and len(work.workers()) < 3:
            drawn.append(len(drawn))
            yield drawn[-1]

    def replace_machine() -> None:
        while len(work.log_of("end")) < 6:
            time.sleep(0.05)
        mortal.nodes.pop(next(iter(mortal.nodes))).kill()
        mortal.add()

    killer = threading.Thread(target=replace_machine)
    killer.start()
    results = run(mortal.address, work, items(), ready=2)
    killer.join()
    assert squares(results) == [n**2 for n in drawn]
    # Items whose results were lost with the machine were done again: three at most.
    assert set(work.log_of("end")) == set(drawn)
    assert len(work.log_of("end")) <= len(drawn) + 3
    assert len(drawn) < 2_000
