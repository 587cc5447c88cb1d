"""The runner on a real cluster: every item once and in order, whatever dies or fails."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from functools import partial
from operator import neg

import pytest

from tests.cluster.squares import Square, refuse
from whiten_index.errors import ClusterError, ConfigError, StorageError
from whiten_index.runners import CrewCalls, RayRunner, Size, cluster
from whiten_index.runners.schedule import Limits

pytestmark = pytest.mark.service
ON_CPU = Size(gpu=False)


def entries(diary, what):
    lines = diary.read_text().splitlines() if diary.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith(what)]


def run(
    address, work, count, *, told=None, limits=None, size=ON_CPU, notes=None, check=None, ready=0
):
    """Return results and events of a run over items, or over 0 … count - 1."""
    with cluster(address, size, (notes if notes is not None else []).append) as crew:
        crew.start(check)
        if ready:
            wait_for(crew, ready)
        runner = RayRunner(crew, lambda slot: work, limits=limits)
        items = range(count) if isinstance(count, int) else count
        return list(runner.map(items, told)), runner.events


def workers_in(diary):
    lines = diary.read_text().splitlines() if diary.exists() else []
    return {line.split()[2] for line in lines}


def wait_for(crew, count):
    """Wait until so many workers are ready."""
    while len(crew.members) < count:
        crew.tend()
        time.sleep(0.05)


def squares(results):
    return [square for square, _ in results]


@pytest.mark.parametrize("count", [0, 1, 40])
def test_every_item_is_done_once_in_order_by_all_workers(three_nodes, tmp_path, count):
    told = []
    work = Square(tmp_path / "diary", seconds=0.02)
    results, events = run(three_nodes.address, work, count, told=told.append, ready=3)
    assert squares(results) == [n**2 for n in range(count)]
    assert sum(told) == sum(range(count))
    assert Counter(entries(work.diary, "end")) == Counter(range(count))
    pids = {pid for _, pid in results}
    assert os.getpid() not in pids
    assert len(pids) == (3 if count == 40 else min(count, 3))
    assert events.to_json() == {"deaths": 0, "failures": 0, "copies": 0, "retired": 0}


def test_a_crew_serves_one_kind_of_work_after_the_other(three_nodes, tmp_path):
    with cluster(three_nodes.address, ON_CPU, print) as crew:
        crew.start()
        wait_for(crew, 3)
        first = RayRunner(crew, lambda slot: Square(tmp_path / "diary", seconds=0.1))
        pids = {pid for _, pid in first.map(range(12))}
        calls = CrewCalls(crew)
        assert list(calls.map(neg, range(5))) == [0, -1, -2, -3, -4]
        again = {pid for _, pid in first.map(range(12))}
        assert pids == again


def test_a_worker_that_dies_is_replaced_and_what_was_finished_is_not_done_again(
    three_nodes, tmp_path, capfd
):
    work, notes = Square(tmp_path / "diary", trouble=((11, "once"), (20, "once")), seconds=0.02), []
    results, events = run(three_nodes.address, work, 40, notes=notes)
    assert squares(results) == [n**2 for n in range(40)]
    assert events.deaths == 2
    assert len(notes) == 2
    assert all("died; what it had is done by others" in note for note in notes)
    # Standard output is for results.
    assert capfd.readouterr().out == ""
    assert Counter(entries(work.diary, "end")) == Counter(range(40))


def test_an_item_that_always_fails_or_kills_is_set_aside_and_all_others_are_done(
    three_nodes, tmp_path
):
    work = Square(tmp_path / "diary", trouble=((7, "raise"), (15, "die")), seconds=0.01)
    with cluster(three_nodes.address, ON_CPU, print) as crew:
        crew.start()
        seen = list(RayRunner(crew, lambda slot: work).map(range(30)))
    aside = [seen[7], seen[15]]
    assert [(each.number, each.item) for each in aside] == [(7, 7), (15, 15)]
    assert str(aside[0].why) == "7 is damaged"
    assert aside[1].why is None
    done = [each for each in seen if each not in aside]
    assert squares(done) == [n**2 for n in range(30) if n not in (7, 15)]
    assert entries(work.diary, "begin").count(7) == 3


def test_a_straggler_holds_up_nobody(three_nodes, tmp_path):
    work = Square(tmp_path / "diary", trouble=((5, "slow"),), seconds=0.05)
    limits = Limits(held=1, least_late=1.0)
    began = time.monotonic()
    results, events = run(three_nodes.address, work, 20, limits=limits)
    assert squares(results) == [n**2 for n in range(20)]
    assert events.copies == 1
    assert time.monotonic() - began < 90


def test_an_error_that_every_item_would_meet_ends_the_run_at_once(three_nodes, tmp_path):
    work = Square(tmp_path / "diary", trouble=((3, "full"),))
    with pytest.raises(StorageError, match="the disk is full"):
        run(three_nodes.address, work, 1000)
    assert len(entries(work.diary, "end")) < 100


def test_a_machine_that_dies_takes_nothing_along_and_one_that_joins_helps(make_cluster, tmp_path):
    made = make_cluster(nodes=2)
    work = Square(tmp_path / "diary", seconds=0.1)
    drawn = []

    def items():
        # As many as it takes the new machine to begin.
        while len(drawn) < 2_000 and len(workers_in(work.diary)) < 3:
            drawn.append(len(drawn))
            yield drawn[-1]

    def trouble():
        while len(entries(work.diary, "end")) < 6:
            time.sleep(0.05)
        made.nodes.pop("node0").kill()
        made.add()

    killer = threading.Thread(target=trouble)
    killer.start()
    results, events = run(made.address, work, items(), ready=2)
    killer.join()
    assert squares(results) == [n**2 for n in drawn]
    assert events.deaths == 1
    # What was done when the machine went, and not told of yet, was done again: three at most.
    assert set(entries(work.diary, "end")) == set(drawn)
    assert len(entries(work.diary, "end")) <= len(drawn) + 3
    assert len(drawn) < 2_000


def test_a_check_that_fails_everywhere_is_told_as_it_is(three_nodes, tmp_path):
    notes = []
    with pytest.raises(ConfigError, match="the disk is not there"):
        run(
            three_nodes.address, Square(tmp_path / "diary"), 3,
            check=partial(refuse, "the disk"), notes=notes,
        )  # fmt: skip
    assert any("no worker on machine" in note for note in notes)


def test_as_many_workers_as_are_asked_for(three_nodes, tmp_path):
    work = Square(tmp_path / "diary", seconds=0.05)
    results, _ = run(three_nodes.address, work, 12, size=Size(workers=2, gpu=False), ready=2)
    assert len({pid for _, pid in results}) == 2
    notes = []
    size = Size(workers=4, gpu=False)
    results, _ = run(three_nodes.address, work, 12, size=size, notes=notes, ready=3)
    assert len({pid for _, pid in results}) == 3
    assert notes == [
        "note: the cluster has 3 cores and 0 GPUs, too few for 4 workers unless the cluster grows"
    ]
    with pytest.raises(ConfigError, match="the cluster has none"):
        run(three_nodes.address, work, 1, size=Size(gpu=True))


def test_an_address_where_no_cluster_is_told(tmp_path):
    from benchmarks.local_cluster import free_port

    address = f"127.0.0.2:{free_port()}"
    with pytest.raises(ClusterError, match=f"no Ray cluster can be reached at {address}"):
        run(address, Square(tmp_path / "diary"), 1)


def test_a_cluster_of_this_machine_alone(tmp_path):
    results, _ = run("local", Square(tmp_path / "diary"), 5, size=Size(workers=1, gpu=False))
    assert squares(results) == [0, 1, 4, 9, 16]


def test_a_worker_that_hangs_is_ended_and_what_it_had_is_done_again(
    three_nodes, tmp_path, monkeypatch
):
    monkeypatch.setattr("whiten_index.runners.crew._SECONDS_WITHOUT_SIGN", 5.0)
    monkeypatch.setattr("whiten_index.runners.crew._SECONDS_BETWEEN_LOOKS", 0.5)
    work, notes = Square(tmp_path / "diary", trouble=((0, "hang"),)), []
    # One item, as most steps of an index are: no idle worker would take it over.
    results, events = run(three_nodes.address, work, 1, notes=notes)
    assert squares(results) == [0]
    assert entries(work.diary, "begin") == [0, 0]
    assert events.deaths == 1
    assert any("gave no sign of life for 5 seconds, and is ended" in note for note in notes)


def test_far_more_workers_than_there_is_room_for(three_nodes, tmp_path):
    work, notes = Square(tmp_path / "diary", seconds=0.02), []
    results, _ = run(
        three_nodes.address, work, 30, size=Size(workers=1_000, gpu=False), notes=notes, ready=3
    )
    assert squares(results) == [n**2 for n in range(30)]
    assert len({pid for _, pid in results}) == 3
    assert "too few for 1000 workers" in notes[0]


def test_two_builds_of_one_process_do_not_disturb_each_other(three_nodes, tmp_path):
    begun, found = threading.Event(), []

    def second():
        work = Square(tmp_path / "second", seconds=0.05)
        size = Size(workers=1, gpu=False)
        results, _ = run(
            three_nodes.address, work, 100, size=size, told=lambda rows: rows and begun.set()
        )
        found.extend(squares(results))

    thread = threading.Thread(target=second)

    def told(_):
        if thread.ident is None:
            thread.start()
            # The first ends while the second works.
            assert begun.wait(60)

    work = Square(tmp_path / "first", seconds=0.02)
    results, _ = run(three_nodes.address, work, 20, size=Size(workers=2, gpu=False), told=told)
    assert squares(results) == [n**2 for n in range(20)]
    assert thread.is_alive()
    thread.join(120)
    assert found == [n**2 for n in range(100)]
