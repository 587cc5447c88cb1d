"""The rules of who does what: every item once, whatever dies, fails or lags."""

from __future__ import annotations

import random

import pytest

from whiten_index.runners.schedule import Limits, Schedule

QUICK = Limits(held=2, least_late=5.0)


class Pool:
    """Workers of a simulated cluster; each does the oldest item that it holds, at its own pace."""

    def __init__(self, schedule, pace):
        self.schedule, self.pace, self.now, self.count = schedule, dict(pace), 0.0, len(pace)
        self.busy = {}
        self.finished = []
        for name in self.pace:
            schedule.join(name)

    def start(self, name):
        while self.schedule.next_for(name, self.now) is not None:
            pass
        held = self.schedule.held_by(name)
        if held and name not in self.busy:
            self.busy[name] = (held[0], self.now + self.pace[name])

    def die(self, name):
        self.schedule.died(name)
        self.busy.pop(name, None)
        pace = self.pace.pop(name)
        self.count += 1
        fresh = f"w{self.count}"
        self.pace[fresh] = pace
        self.schedule.join(fresh)


def run(items, pace, at_end, limits=QUICK, most=10_000):
    """Run a schedule to its end; ``at_end`` settles what becomes of an item at a worker."""
    schedule = Schedule(items, limits)
    pool = Pool(schedule, pace)
    for _ in range(most):
        if schedule.finished:
            return schedule, pool
        for name in list(pool.pace):
            pool.start(name)
        assert pool.busy, "nobody has anything to do, and items are left"
        name = min(pool.busy, key=lambda each: pool.busy[each][1])
        number, pool.now = pool.busy.pop(name)
        at_end(pool, name, number)
    raise AssertionError("no end")


def do(pool, name, number):
    if pool.schedule.done(name, number, pool.now):
        pool.finished.append(number)


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_every_item_is_done_once(count, workers):
    schedule, pool = run(range(count), {f"w{n}": 1.0 for n in range(workers)}, do)
    assert sorted(pool.finished) == list(range(count))
    assert schedule.set_aside == []
    assert schedule.events.to_json() == {"deaths": 0, "failures": 0, "copies": 0, "retired": 0}


@pytest.mark.parametrize("seed", range(30))
def test_workers_that_die_at_random_lose_nothing_and_finished_items_are_not_done_again(seed):
    rng, given = random.Random(seed), []

    def at_end(pool, name, number):
        given.append(number)
        assert number not in pool.finished
        if rng.random() < 0.25 and len(given) < 200:
            pool.die(name)
        else:
            do(pool, name, number)

    schedule, pool = run(range(40), {"a": 1.0, "b": 1.3, "c": 0.7}, at_end)
    assert len(pool.finished) == len(set(pool.finished))
    aside = {each.number for each in schedule.set_aside}
    assert aside | set(pool.finished) == set(range(40))
    assert aside.isdisjoint(pool.finished)
    # A quarter of all tries kill: given up is only what three workers died of and of nothing else.
    assert len(aside) <= 3


@pytest.mark.parametrize("seed", range(10))
def test_an_item_that_kills_its_workers_is_given_up_and_its_neighbours_are_not(seed):
    rng = random.Random(seed)
    deadly = rng.sample(range(30), 2)

    def at_end(pool, name, number):
        if number in deadly:
            pool.die(name)
        else:
            do(pool, name, number)

    schedule, pool = run(range(30), {"a": 1.0, "b": 1.1, "c": 0.9}, at_end)
    assert sorted(each.number for each in schedule.set_aside) == sorted(deadly)
    assert sorted(pool.finished) == [n for n in range(30) if n not in deadly]
    assert all(each.why is None for each in schedule.set_aside)
    assert schedule.events.deaths <= 2 * 5


def test_an_item_that_always_fails_is_tried_thrice_at_different_workers_then_given_up():
    tried = []

    def at_end(pool, name, number):
        if number == 4:
            tried.append(name)
            pool.schedule.failed(name, number, ValueError("four"), pool.now)
        else:
            do(pool, name, number)

    schedule, pool = run(range(30), {"a": 1.0, "b": 1.1, "c": 0.9}, at_end)
    assert [(each.number, each.item) for each in schedule.set_aside] == [(4, 4)]
    assert str(schedule.set_aside[0].why) == "four"
    assert sorted(tried) == ["a", "b", "c"]
    assert schedule.events.failures == 3
    assert len(pool.finished) == 29


def test_a_worker_where_everything_fails_is_given_nothing_more_and_no_item_is_given_up():
    def at_end(pool, name, number):
        if name == "bad":
            pool.schedule.failed(name, number, OSError("its disk"), pool.now)
        else:
            do(pool, name, number)

    schedule, pool = run(range(40), {"good": 1.0, "bad": 0.1, "fine": 1.0}, at_end)
    assert sorted(pool.finished) == list(range(40))
    assert schedule.set_aside == []
    assert schedule.events.retired == 1
    assert "bad" not in schedule.workers


def test_one_worker_alone_tries_an_item_again_itself():
    tries = []

    def at_end(pool, name, number):
        tries.append(number)
        if number == 2 and tries.count(2) < 3:
            pool.schedule.failed(name, number, ValueError("once more"), pool.now)
        else:
            do(pool, name, number)

    schedule, pool = run(range(4), {"a": 1.0}, at_end)
    assert sorted(pool.finished) == [0, 1, 2, 3]
    assert schedule.set_aside == []


def test_a_straggler_holds_up_nobody_and_counts_once():
    schedule, pool = run(range(20), {"a": 1.0, "b": 1.0, "slow": 1_000.0}, do)
    assert sorted(pool.finished) == list(range(20))
    # What the straggler had is done by the others once it is late by more than their usual time.
    assert schedule.events.copies == 2
    assert pool.now < 40


def test_what_a_worker_drops_for_no_fault_of_the_item_is_done_again():
    dropped = []

    def at_end(pool, name, number):
        if number == 3 and len(dropped) < 5:
            dropped.append(name)
            pool.schedule.interrupted(name, number, pool.now)
        else:
            do(pool, name, number)

    schedule, pool = run(range(6), {"a": 1.0, "b": 1.0}, at_end)
    assert sorted(pool.finished) == list(range(6))
    assert schedule.events.failures == 0


def test_a_worker_that_joins_late_takes_its_share():
    def at_end(pool, name, number):
        if len(pool.finished) == 5 and "late" not in pool.pace:
            pool.pace["late"] = 0.1
            pool.schedule.join("late")
        do(pool, name, number)

    _, pool = run(range(60), {"a": 1.0}, at_end)
    assert pool.now < 20


@pytest.mark.parametrize("bad", [1, 2, 3, 5])
def test_machines_that_fail_fast_before_any_has_succeeded_spoil_hardly_an_item(bad):
    def at_end(pool, name, number):
        if name.startswith("bad"):
            pool.schedule.failed(name, number, OSError("its GPU"), pool.now)
        else:
            do(pool, name, number)

    pace = {f"good{n}": 90.0 for n in range(6)} | {f"bad{n}": 1.0 for n in range(bad)}
    schedule, pool = run(range(60), pace, at_end)
    # Each of them fails a few items before it is told from the others.
    assert len(schedule.set_aside) <= (0 if bad < 3 else bad)
    assert len(pool.finished) + len(schedule.set_aside) == 60
    assert schedule.events.failures <= 4 * bad


def test_a_worker_that_is_unfit_gets_no_more_and_its_items_are_not_blamed():
    def at_end(pool, name, number):
        if name == "full":
            assert pool.schedule.unfit(name, number, pool.now)
        else:
            do(pool, name, number)

    schedule, pool = run(range(20), {"full": 0.1, "a": 1.0, "b": 1.0}, at_end)
    assert sorted(pool.finished) == list(range(20))
    assert schedule.events.to_json() == {"deaths": 0, "failures": 0, "copies": 0, "retired": 1}


def test_where_all_are_unfit_it_is_told():
    schedule = Schedule(range(5), QUICK)
    for name in ("a", "b"):
        schedule.join(name)
    assert schedule.unfit("a", schedule.next_for("a", 0.0)[0], 1.0)
    assert not schedule.unfit("b", schedule.next_for("b", 0.0)[0], 1.0)


def test_a_worker_that_was_retired_is_better_than_none():
    schedule = Schedule(range(4), Limits(held=1))
    for name in ("poor", "good"):
        schedule.join(name)
    first, _ = schedule.next_for("poor", 0.0)
    assert schedule.unfit("poor", first, 0.0)
    assert schedule.next_for("poor", 1.0) is None
    assert schedule.done("good", schedule.next_for("good", 1.0)[0], 2.0)
    schedule.died("good")
    assert schedule.next_for("poor", 3.0) is not None


def test_an_item_that_failed_here_is_tried_here_again_when_nobody_comes_for_it():
    schedule = Schedule(range(3), Limits(held=1, least_late=5.0))
    for name in ("a", "hangs"):
        schedule.join(name)
    assert schedule.next_for("hangs", 0.0) == (0, 0)
    number, _ = schedule.next_for("a", 0.0)
    schedule.failed("a", number, OSError("once"), 1.0)
    other, _ = schedule.next_for("a", 1.0)
    assert schedule.done("a", other, 2.0)
    assert schedule.next_for("a", 2.0) is None
    assert schedule.next_for("a", 20.0) == (number, number)


def test_where_nothing_is_ever_done_the_rest_is_not_tried():
    schedule = Schedule(range(1_000), Limits(hopeless=4))
    names = ("a", "b", "c")
    for name in names:
        schedule.join(name)
    steps = 0
    while not schedule.hopeless:
        steps += 1
        assert steps < 50
        for name in names:
            task = schedule.next_for(name, float(steps))
            if task is not None:
                schedule.failed(name, task[0], ValueError("no model"), float(steps))
    assert len(schedule.set_aside) >= 4


@pytest.mark.parametrize(("items", "workers", "rounds"), [(1_000, 512, 2), (40, 16, 3), (9, 3, 3)])
def test_few_items_are_shared_evenly(items, workers, rounds):
    limits = Limits().shared(items, workers)
    _, pool = run(range(items), {f"w{n}": 1.0 for n in range(workers)}, do, limits=limits)
    assert pool.now == rounds
    assert limits.held <= Limits().held
    assert Limits().shared(10**6, workers) == Limits()
