"""The simulated schedule: nothing lost or done twice, never quicker than the work allows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import cluster_schedule
from benchmarks.cluster_schedule import CALM, Mishaps, Outcome, Simulation
from benchmarks.results_file import read
from benchmarks.scaling_rates import Pace
from whiten_index.runners.schedule import Schedule

PACE = Pace(80.0, 0.25, 0.02)
ROUGH = Mishaps(
    worker_hours=1.0, machine_hours=2.0, failures=0.05, slow_tries=0.05, slow_workers=0.05, poison=2
)


def simulated(shards: int, workers: int, mishaps: Mishaps, seed: int = 0) -> Outcome:
    return Simulation(shards, workers, PACE, mishaps, seed=seed).run()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("workers", [1, 8, 40])
@pytest.mark.parametrize("mishaps", [CALM, Mishaps(), ROUGH], ids=["calm", "stated", "rough"])
def test_never_quicker_than_the_work_divided_by_the_workers(
    workers: int, mishaps: Mishaps, seed: int
) -> None:
    found = simulated(150, workers, mishaps, seed)
    least = mishaps.machine_seconds + found.useful_seconds / workers
    assert found.makespan >= least - 1e-6
    assert found.useful_seconds <= found.busy_seconds
    aside = {each.number for each in found.schedule.set_aside}
    assert len(found.finished) == len(set(found.finished))
    assert aside | set(found.finished) == set(range(150))


@pytest.mark.parametrize("workers", [1, 8, 64])
def test_paper_is_right_where_nothing_goes_wrong_and_shards_are_many(workers: int) -> None:
    found = simulated(100 * workers, workers, CALM)
    paper = CALM.machine_seconds + 100 * PACE.seconds
    assert 0.99 < found.makespan / paper < 1.05
    assert found.schedule.events.deaths == found.schedule.events.failures == 0
    assert not found.schedule.set_aside


def test_more_workers_are_not_slower() -> None:
    taken = [simulated(600, workers, CALM).makespan for workers in (2, 8, 32)]
    assert taken == sorted(taken, reverse=True)


def test_the_poison_is_set_aside_alone() -> None:
    simulation = Simulation(300, 8, PACE, Mishaps(poison=3))
    found = simulation.run()
    assert {each.number for each in found.schedule.set_aside} == simulation._poison


def test_a_simulation_is_repeatable() -> None:
    first, second = (simulated(200, 8, ROUGH, seed=3) for _ in range(2))
    assert first.finished == second.finished
    assert first.makespan == second.makespan
    assert first.finished != simulated(200, 8, ROUGH, seed=4).finished


class Forgetful(Schedule):
    """Gives out what is done."""

    def next_for(self, worker: str, now: float) -> tuple[int, Any] | None:
        given = super().next_for(worker, now)
        return given if given is None or given[0] != 20 else (0, 0)


class Careless(Schedule):
    """Counts everything as done once it is given out."""

    @property
    def finished(self) -> bool:
        return self._drawn >= 20


@pytest.mark.parametrize(
    ("kind", "said"), [(Forgetful, "given out again"), (Careless, "a shard was lost")]
)
def test_a_schedule_that_errs_is_found_out(
    monkeypatch: pytest.MonkeyPatch, kind: type[Schedule], said: str
) -> None:
    monkeypatch.setattr(cluster_schedule, "Schedule", kind)
    with pytest.raises(AssertionError, match=said):
        simulated(40, 2, CALM)


def test_the_stored_results_hold_what_is_said_of_them() -> None:
    rows = read("cluster_schedule")
    assert {(row["shards"], row["workers"]) for row in rows} == {
        (shards, workers)
        for shards in cluster_schedule.SHARDS
        for workers in cluster_schedule.WORKERS
    }
    for row in rows:
        over = row["simulated_seconds"] / row["paper_seconds"]
        many = row["shards"] / row["workers"] > 100
        calm = row["kind"] == "calm"
        assert row["set_aside"] == (0 if calm else 1)
        assert over >= 0.99
        if many:
            assert over <= (1.02 if calm else 1.16)
            assert calm or over >= 1.095


def test_the_time_a_shard_takes_to_simulate_does_not_grow_with_the_shards() -> None:
    micros = {
        (row["kind"], row["shards"], row["workers"]): row["process_seconds"] / row["shards"]
        for row in read("cluster_schedule")
    }
    for kind in ("calm", "mishaps"):
        for workers in cluster_schedule.WORKERS:
            assert micros[kind, 100_000, workers] < 1.5 * micros[kind, 10_000, workers]
