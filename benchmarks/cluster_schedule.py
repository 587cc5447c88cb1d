"""The schedule of a cluster build, simulated: deaths, lost machines, stragglers, a poison shard.

Run ``python -m benchmarks.cluster_schedule``. The rules are the library's own ``Schedule``; only
the clock, the workers and their mishaps are simulated. Shards take what MiniLM took here for as
many rows on two cores, with the spread that was measured; how often something goes wrong is
assumed, and stated in ``Mishaps``.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.results_file import write
from benchmarks.scaling_rates import SHARD_ROWS, Pace, Rates
from whiten_index.runners.schedule import Limits, Schedule

SHARDS, WORKERS = (1_000, 10_000, 100_000), (8, 64, 512)
_POLL_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Mishaps:
    """What goes wrong, all assumed: worse than published rates of interruption, so that it shows.

    Attributes:
        worker_hours: mean time until a worker's process dies.
        machine_hours: mean time until a machine is lost, with all of its workers.
        workers_a_machine: that are lost together.
        machine_seconds: until a lost machine is replaced, and until the first are there.
        process_seconds: until a process that died is replaced.
        failures: share of tries that end in an error.
        slow_tries: share of tries that take ``slower`` times as long.
        slow_workers: share of workers whose tries all do.
        slower: times.
        poison: shards that kill each worker that does them.
    """

    worker_hours: float = 24.0
    machine_hours: float = 24.0
    workers_a_machine: int = 8
    machine_seconds: float = 300.0
    process_seconds: float = 10.0
    failures: float = 0.001
    slow_tries: float = 0.01
    slow_workers: float = 0.01
    slower: float = 10.0
    poison: int = 1


CALM = Mishaps(
    worker_hours=math.inf,
    machine_hours=math.inf,
    failures=0,
    slow_tries=0,
    slow_workers=0,
    poison=0,
)


@dataclass
class _Worker:
    """A simulated worker: what it does, and since when."""

    name: str
    place: int
    slowness: float
    doing: int | None = None
    started: float = 0.0


@dataclass
class Outcome:
    """What a simulated build came to.

    Attributes:
        makespan: seconds from the request of the machines to the end.
        finished: shards in the order that they were first done.
        useful_seconds: of workers, spent on the tries that came first.
        busy_seconds: of workers, spent on any try.
        lost_machines: that took all of their workers with them.
        schedule: after its end.
    """

    makespan: float = 0.0
    finished: list[int] = field(default_factory=list)
    useful_seconds: float = 0.0
    busy_seconds: float = 0.0
    lost_machines: int = 0
    schedule: Schedule = field(default_factory=lambda: Schedule(()))


class Simulation:
    """Shards, workers and a clock that jumps from one event to the next."""

    def __init__(
        self, shards: int, workers: int, pace: Pace, mishaps: Mishaps, *, seed: int = 0
    ) -> None:
        """Plan a build.

        Args:
            shards: to do.
            workers: that there are at a time; together as fast as their number of equal ones.
            pace: seconds a shard takes, and their spread.
            mishaps: what goes wrong.
            seed: of all that is random.
        """
        self.pace, self.mishaps, self.shards = pace, mishaps, shards
        self._rng = random.Random(seed)
        self._poison = set(self._rng.sample(range(shards), min(mishaps.poison, shards)))
        self.schedule = Schedule(range(shards), Limits().shared(shards, workers))
        self.outcome = Outcome(schedule=self.schedule)
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = itertools.count()
        self._places: list[_Worker | None] = [None] * workers
        self._idle: dict[str, _Worker] = {}
        self._done = bytearray(shards)
        self._names = itertools.count()
        speeds = [1 / self._rng.lognormvariate(0, pace.worker_spread) for _ in range(workers)]
        self._slowness = [sum(speeds) / workers / speed for speed in speeds]

    def run(self) -> Outcome:
        """Simulate the build to its end.

        Raises:
            AssertionError: a shard was done twice, given out after it was done, or lost.
        """
        places, mishaps = len(self._places), self.mishaps
        for place in range(places):
            self._at(mishaps.machine_seconds, "join", place)
        for machine in range(math.ceil(places / mishaps.workers_a_machine)):
            self._next_loss(machine, mishaps.machine_seconds)
        self._at(mishaps.machine_seconds + _POLL_SECONDS, "poll", None)
        while not self.schedule.finished:
            now, _, kind, what = heapq.heappop(self._events)
            self.outcome.makespan = now
            getattr(self, f"_{kind}")(now, what)
        self._check()
        return self.outcome

    def _at(self, when: float, kind: str, what: Any) -> None:
        if when < math.inf:
            heapq.heappush(self._events, (when, next(self._order), kind, what))

    def _join(self, now: float, place: int) -> None:
        rng, mishaps = self._rng, self.mishaps
        slowness = self._slowness[place]
        if rng.random() < mishaps.slow_workers:
            slowness *= mishaps.slower
        worker = _Worker(f"w{next(self._names)}", place, slowness)
        self._places[place] = worker
        self.schedule.join(worker.name)
        self._at(now + _until(rng, mishaps.worker_hours), "die", worker)
        self._start(now, worker)

    def _start(self, now: float, worker: _Worker) -> None:
        """Let a worker take what it may hold, and begin with the oldest."""
        while (given := self.schedule.next_for(worker.name, now)) is not None:
            assert not self._done[given[0]], "a shard that is done was given out again"
        held = self.schedule.held_by(worker.name)
        if not held:
            self._idle[worker.name] = worker
            return
        self._idle.pop(worker.name, None)
        if worker.doing is None:
            worker.doing, worker.started = held[0], now
            self._at(now + self._seconds(worker), "end", (worker, held[0]))

    def _seconds(self, worker: _Worker) -> float:
        rng, pace = self._rng, self.pace
        seconds = pace.seconds * worker.slowness
        seconds *= rng.lognormvariate(-(pace.shard_spread**2) / 2, pace.shard_spread)
        slow = rng.random() < self.mishaps.slow_tries
        return seconds * self.mishaps.slower if slow else seconds

    def _end(self, now: float, what: tuple[_Worker, int]) -> None:
        worker, number = what
        if self._places[worker.place] is not worker or worker.doing != number:
            return
        if number in self._poison:
            self._kill(now, worker, self.mishaps.process_seconds)
            return
        spent = now - worker.started
        self.outcome.busy_seconds += spent
        worker.doing = None
        if self._rng.random() < self.mishaps.failures:
            self.schedule.failed(worker.name, number, RuntimeError("as planned"), now)
        elif self.schedule.done(worker.name, number, now):
            assert not self._done[number], "a shard counted as done twice"
            self._done[number] = 1
            self.outcome.finished.append(number)
            self.outcome.useful_seconds += spent
        self._start(now, worker)

    def _die(self, now: float, worker: _Worker) -> None:
        if self._places[worker.place] is worker:
            self._kill(now, worker, self.mishaps.process_seconds)

    def _lose(self, now: float, machine: int) -> None:
        size = self.mishaps.workers_a_machine
        there = [worker for worker in self._places[machine * size :][:size] if worker is not None]
        self.outcome.lost_machines += bool(there)
        for worker in there:
            self._kill(now, worker, self.mishaps.machine_seconds)
        self._next_loss(machine, now + self.mishaps.machine_seconds)

    def _next_loss(self, machine: int, now: float) -> None:
        self._at(now + _until(self._rng, self.mishaps.machine_hours), "lose", machine)

    def _kill(self, now: float, worker: _Worker, until: float) -> None:
        if worker.doing is not None:
            self.outcome.busy_seconds += now - worker.started
        self._places[worker.place] = None
        self._idle.pop(worker.name, None)
        self.schedule.died(worker.name)
        self._at(now + until, "join", worker.place)

    def _poll(self, now: float, _: None) -> None:
        """Ask for those who have nothing: what others dropped, or who is late."""
        for worker in list(self._idle.values()):
            self._start(now, worker)
        self._at(now + _POLL_SECONDS, "poll", None)

    def _check(self) -> None:
        aside = [each.number for each in self.schedule.set_aside]
        assert len(set(aside)) == len(aside), "a shard was set aside twice"
        assert not any(self._done[number] for number in aside), "a shard done was set aside"
        assert sum(self._done) + len(aside) == self.shards, "a shard was lost"


def _until(rng: random.Random, hours: float) -> float:
    return rng.expovariate(1 / (3600 * hours)) if hours < math.inf else math.inf


def one(shards: int, workers: int, mishaps: Mishaps, rates: Rates) -> dict[str, Any]:
    """Simulate one build; return what it came to beside the figure on paper."""
    pace = rates.pace()
    started = time.process_time()
    outcome = Simulation(shards, workers, pace, mishaps).run()
    spent = time.process_time() - started
    paper = mishaps.machine_seconds + shards * pace.seconds / workers
    return {
        "kind": "calm" if mishaps == CALM else "mishaps",
        "shards": shards,
        "rows_a_shard": SHARD_ROWS,
        "workers": workers,
        "paper_seconds": paper,
        "simulated_seconds": outcome.makespan,
        "useful_share": outcome.useful_seconds / outcome.busy_seconds,
        "set_aside": len(outcome.schedule.set_aside),
        "lost_machines": outcome.lost_machines,
        "events": outcome.schedule.events.to_json(),
        "process_seconds": spent,
        "pace": vars(pace),
        "mishaps": {name: None if v == math.inf else v for name, v in vars(mishaps).items()},
    }


def main(arguments: Sequence[str]) -> None:
    """Simulate each number of shards and workers, or those given as SHARDS WORKERS."""
    rates = Rates.read()
    if arguments:
        shards, workers = map(int, arguments)
        print(one(shards, workers, Mishaps(), rates))
        return
    rows = []
    for shards, workers in itertools.product(SHARDS, WORKERS):
        for mishaps in (CALM, Mishaps()):
            rows.append(one(shards, workers, mishaps, rates))
            print(shards, workers, rows[-1]["kind"], f"{rows[-1]['process_seconds']:.1f} s")
    print(write("cluster_schedule", rows))


if __name__ == "__main__":
    main(sys.argv[1:])
