"""Stages side by side: order, bounds, and what happens when one of them fails."""

from __future__ import annotations

import threading

import pytest

from whiten_index.artifacts.prefetch import overlapped

STAGES = ("read", "prepare", "work", "finish")


def stages(log: list, **replaced):
    def stage(name):
        def call(item):
            log.append((name, item, threading.current_thread().name))
            return item

        return replaced.get(name, call)

    return {name: stage(name) for name in STAGES}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 20])
def test_results_come_in_order_and_each_stage_has_its_thread(count):
    log = []
    assert list(overlapped(range(count), **stages(log))) == list(range(count))
    for name in STAGES:
        calls = [(item, thread) for stage, item, thread in log if stage == name]
        assert [item for item, _ in calls] == list(range(count))
        assert len({thread for _, thread in calls}) <= 1
    assert all(t == threading.current_thread().name for s, _, t in log if s == "work")


def test_no_more_than_five_items_exist_at_a_time():
    alive, most, lock = set(), [], threading.Lock()

    def read(item):
        with lock:
            alive.add(item)
            most.append(len(alive))
        return item

    def finish(item):
        with lock:
            alive.discard(item)
        return item

    list(overlapped(range(50), **stages([], read=read, finish=finish)))
    assert max(most) <= 5


@pytest.mark.parametrize("stage", STAGES)
def test_what_was_worked_on_before_a_failure_is_finished(stage):
    finished, log = [], []

    def failing(item):
        if item == 3:
            raise ValueError("broken")
        return keep(item) if stage == "finish" else item

    def keep(item):
        finished.append(item)
        return item

    replaced = {"finish": keep, stage: failing}
    with pytest.raises(ValueError, match="broken"):
        list(overlapped(range(10), **stages(log, **replaced)))
    assert finished[:3] == [0, 1, 2]
    assert 3 not in finished


def test_a_caller_who_stops_asking_leaves_nothing_running():
    finished = []
    steps = stages([], finish=lambda item: finished.append(item) or item)
    results = overlapped(range(100), **steps)
    assert next(results) == 0
    results.close()
    assert len(finished) < 10
    names = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith(("ahead", "finish")) for name in names)


def test_an_interruption_between_batches_still_finishes_what_was_done():
    finished = []

    def work(item):
        if item == 2:
            raise KeyboardInterrupt
        return item

    with pytest.raises(KeyboardInterrupt):
        list(overlapped(range(9), **stages([], work=work, finish=finished.append)))
    assert finished == [0, 1]
