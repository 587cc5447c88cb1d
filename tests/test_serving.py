"""A worker's side: items handed in by several threads, each told of as soon as it is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest

from whiten_index.errors import CorpusError
from whiten_index.runners.serving import How, Server


@dataclass(frozen=True)
class Halving:
    """Halves numbers; an odd one fails in the step that ``fails`` names."""

    fails: str = "run"
    gate: threading.Event | None = None
    advance: Callable[[int], None] | None = None

    def telling(self, advance):
        return replace(self, advance=advance)

    def step(self, name, item):
        if name == self.fails and item % 2:
            raise CorpusError(f"{item} is odd")
        return item

    def read(self, item):
        return self.step("read", item)

    def prepare(self, item):
        return self.step("prepare", item)

    def run(self, item):
        if self.gate is not None:
            assert self.gate.wait(10)
        self.advance(item)
        return self.step("run", item)

    def finish(self, item):
        return self.step("finish", item) // 2


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_single_item_is_told_of_though_no_other_follows(one_by_one):
    server = Server(Halving(), one_by_one=one_by_one)
    for item in (4, 6):
        outcome = server.do(item, item)
        assert (outcome.how, outcome.value, outcome.rows) == (How.DONE, item // 2, item)
    server.close()


@pytest.mark.parametrize("fails", ["read", "prepare", "run", "finish"])
def test_a_failure_is_told_of_its_own_item_and_the_others_are_done_or_dropped(fails):
    server = Server(Halving(fails))
    with ThreadPoolExecutor(4) as threads:
        for round_ in range(20):
            first = 4 * round_
            items = range(first, first + 3)
            outcomes = dict(zip(items, threads.map(lambda n: server.do(n, n), items), strict=True))
            for item, outcome in outcomes.items():
                if item % 2:
                    assert outcome.how is How.FAILED
                    assert str(outcome.value) == f"{item} is odd"
                elif outcome.how is How.DROPPED:
                    assert server.do(item, item).value == item // 2
                else:
                    assert outcome.value == item // 2
    # It serves on.
    assert server.do(100, 100).value == 50
    server.close()


def test_steps_of_several_items_overlap():
    gate = threading.Event()
    server = Server(Halving(gate=gate))
    with ThreadPoolExecutor(3) as threads:
        coming = [threads.submit(server.do, n, n) for n in (2, 4, 6)]
        time.sleep(0.2)
        assert not any(each.done() for each in coming)
        gate.set()
        assert [each.result().value for each in coming] == [1, 2, 3]
    server.close()


def test_what_is_handed_in_after_the_end_is_dropped():
    server = Server(Halving())
    server.close()
    assert server.do(2, 2).how is How.DROPPED


def test_an_error_that_does_not_pickle_is_told_in_words():
    class Odd(Halving):
        def run(self, item):
            raise type("Local", (Exception,), {})("seven")

    server = Server(Odd())
    outcome = server.do(7, 7)
    assert outcome.how is How.FAILED
    assert isinstance(outcome.value, RuntimeError)
    assert "seven" in str(outcome.value)
    server.close()


@dataclass(frozen=True)
class Remembering(Halving):
    """Takes an item that it has seen for done, as identical shards are kept once."""

    seen: set[int] = field(default_factory=set)
    trouble: list[int] = field(default_factory=list)

    def telling(self, advance):
        return replace(self, advance=advance, seen=set())

    def read(self, item):
        there = item in self.seen
        self.seen.add(item)
        return item, there

    def prepare(self, read):
        return read

    def run(self, read):
        self.advance(1)
        return read

    def finish(self, ran):
        item, there = ran
        if item in self.trouble:
            self.trouble.remove(item)
            raise OSError("once")
        assert not there, f"{item} is missing"
        return item // 2


def test_items_that_a_neighbours_failure_dropped_are_done_when_they_come_again():
    server = Server(Remembering(trouble=[0, 6, 12]))
    with ThreadPoolExecutor(3) as threads:
        for first in (0, 6, 12):
            items = [first, first + 2, first + 4]
            outcomes = list(threads.map(lambda n: server.do(n, n), items))
            assert outcomes[0].how is How.FAILED
            assert str(outcomes[0].value) == "once"
            for item, outcome in zip(items, outcomes, strict=True):
                if outcome.how is not How.DONE:
                    outcome = server.do(item, item)
                assert outcome.value == item // 2
    server.close()


def test_a_server_that_breaks_lets_nobody_wait(monkeypatch):
    server = Server(Halving())
    assert server.do(2, 2).value == 1

    def broken(*_, **__):
        raise RuntimeError("no new thread can be started")

    monkeypatch.setattr("whiten_index.runners.serving.LocalRunner", broken)
    # A failure ends the pass, and the next cannot begin.
    assert server.do(3, 3).how is How.FAILED
    for item in (4, 6):
        outcome = server.do(item, item)
        assert outcome.how is How.FAILED
        assert "no new thread" in str(outcome.value)
    server.close()
