"""The crew on a cluster that is played: machines that are busy, workers that hang or die."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from whiten_index.errors import ClusterError
from whiten_index.runners import Crew, Size
from whiten_index.runners import crew as crew_module


class PlayedError(Exception):
    """What the played Ray raises for a worker that died."""


@dataclass(eq=False)
class Ref:
    """An answer that is there as soon as ``ready`` says so."""

    ready: Callable[[], bool]
    value: Any = None
    error: Callable[[], BaseException | None] = lambda: None


class Remote:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class Worker:
    def __init__(self, cluster: Played, node: str) -> None:
        self.cluster, self.node, self.alive = cluster, node, True
        self.hello = Remote(
            lambda check: Ref(lambda: node not in cluster.busy, (node, None), self.died)
        )
        # A dead worker's answer is there, and is an error.
        self.sign = Remote(
            lambda: Ref(lambda: not self.alive or node not in cluster.hung, None, self.died)
        )

    def died(self) -> BaseException | None:
        return None if self.alive else PlayedError("it was killed")


class Played:
    """As much of Ray as a crew uses."""

    exceptions = types.SimpleNamespace(RayError=PlayedError)

    def __init__(self, machines: int) -> None:
        self.machines = [f"n{number:03}" for number in range(machines)]
        self.busy, self.hung = set[str](), set[str]()
        self.workers = list[Worker]()

    def remote(self, _: type) -> Any:
        return self

    def options(self, *, scheduling_strategy: Any, **_: Any) -> Any:
        def start(*_: Any) -> Worker:
            self.workers.append(Worker(self, scheduling_strategy.node))
            return self.workers[-1]

        return Remote(start)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0 * len(self.machines)}

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "Alive": True, "Resources": {"CPU": 2.0}} for name in self.machines
        ]

    def wait(self, refs: list[Ref], *, num_returns: int = 1, timeout: float) -> Any:
        return [ref for ref in refs if ref.ready()][:num_returns], []

    def get(self, ref: Ref) -> Any:
        if (error := ref.error()) is not None:
            raise error
        return ref.value

    def kill(self, worker: Worker) -> None:
        worker.alive = False


@dataclass
class Clock:
    now: float = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(crew_module, "time", clock)
    strategies = types.SimpleNamespace(
        NodeAffinitySchedulingStrategy=lambda node, soft: types.SimpleNamespace(node=node)
    )
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.util", types.ModuleType("ray.util"))
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)  # type: ignore[arg-type]
    return clock


def started(cluster: Played, notes: list[str]) -> Crew:
    crew = Crew(cluster, Size(gpu=False), notes.append)
    # Machines come in any order; these in that of their names.
    crew._posts.sort(key=lambda post: post.slot.node)
    crew.start()
    return crew


def looks(crew: Crew, clock: Clock, seconds: float) -> Iterator[list[Any]]:
    """Let the crew look after its workers every five seconds and a bit."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 5.1
        yield crew.tend()


def test_machines_that_are_busy_hold_up_no_other(clock: Clock) -> None:
    cluster, notes = Played(100), list[str]()
    cluster.busy = set(cluster.machines[:64])
    crew = started(cluster, notes)
    assert len(cluster.workers) == 64
    for _ in looks(crew, clock, 30):
        # The disk with the model serves no more than these at a time.
        assert len(cluster.workers) == 64
    assert not crew.members
    for _ in looks(crew, clock, 60):
        pass
    assert len(crew.members) == 36
    for _ in looks(crew, clock, 600):
        pass
    late = [note for note in notes if "are not ready" in note]
    assert late == [
        "note: 64 of 100 workers are not ready after 300 seconds, the others work; look at ray "
        "status"
    ]
    cluster.busy.clear()
    for _ in looks(crew, clock, 10):
        pass
    assert len(crew.members) == 100


def test_a_thousand_machines_start_by_and_by(clock: Clock) -> None:
    cluster = Played(1_000)
    crew, before = started(cluster, []), 64
    assert len(cluster.workers) == 64
    for _ in looks(crew, clock, 100):
        assert len(cluster.workers) - before <= 64
        before = len(cluster.workers)
    assert len(crew.members) == 1_000


def test_a_worker_without_a_sign_of_life_is_ended_and_told_of_as_dead(clock: Clock) -> None:
    cluster, notes = Played(2), list[str]()
    crew = started(cluster, notes)
    for dead in looks(crew, clock, 60):
        assert dead == []
    cluster.hung = {"n001"}
    found = [each for dead in looks(crew, clock, 290) for each in dead]
    assert not found
    assert all(worker.alive for worker in cluster.workers)
    found = [each for dead in looks(crew, clock, 40) for each in dead]
    assert [worker.node for worker in cluster.workers if not worker.alive] == ["n001"]
    assert notes == ["note: worker-2 on n001 gave no sign of life for 300 seconds, and is ended"]
    (member, why), *again = found
    assert (member.name, str(why)) == ("worker-2", "it was killed")
    assert {each.name for each, _ in again} <= {"worker-2"}
    cluster.hung.clear()
    crew.lose(member, why)
    for _ in looks(crew, clock, 10):
        pass
    assert {each.node for each in crew.members.values()} == {"n000", "n001"}
    assert crew.deaths == 1


def test_signs_that_come_late_are_signs(clock: Clock) -> None:
    cluster, notes = Played(1), list[str]()
    crew = started(cluster, notes)
    for dead in looks(crew, clock, 20):
        assert dead == []
    # Whoever looks after the workers was busy with something else.
    clock.now += 10_000
    assert crew.tend() == []
    assert not notes
    assert cluster.workers[0].alive


def test_a_cluster_without_room_is_given_up(clock: Clock) -> None:
    cluster = Played(3)
    cluster.busy = set(cluster.machines)
    crew = started(cluster, [])
    with pytest.raises(ClusterError, match="no worker could be started on the cluster within 300"):
        for _ in looks(crew, clock, 600):
            pass
