"""The work on a cluster: the schedule says who does what, Ray carries it there and back."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from whiten_index.errors import (
    ClusterError,
    ConfigError,
    SetAsideError,
    StorageError,
    WhitenIndexError,
)
from whiten_index.runners.calls import Call
from whiten_index.runners.crew import Crew, Member
from whiten_index.runners.local import Work
from whiten_index.runners.schedule import Events, Limits, Schedule, SetAside
from whiten_index.runners.serving import How, Outcome
from whiten_index.runners.slots import Slot

# Errors that a worker would meet with the next item as well.
_OF_A_WORKER = (ConfigError, StorageError)
_NAMED = 5
_SECONDS_BETWEEN_LOOKS = 1.0


class RayRunner:
    """Does the work on a crew.

    Attributes:
        events: what happened beside the plain course.
    """

    def __init__(
        self,
        crew: Crew,
        work_for: Callable[[Slot], Work[Any, Any]],
        *,
        events: Events | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Take the crew and the work.

        Args:
            crew: of workers.
            work_for: gives the work of a worker, by what it has; it must pickle.
            events: to count on from.
            limits: see ``Limits``.
        """
        self._crew, self._work_for = crew, work_for
        self._limits = limits or Limits()
        self.events = events or Events()

    def map(
        self, items: Iterable[Any], advance: Callable[[int], None] | None = None
    ) -> Iterator[Any]:
        """Yield what is made of every item, in the order of the items.

        For an item that failed every time a ``SetAside`` is yielded; all the others are done.

        Args:
            items: must pickle.
            advance: told the rows of an item when it is done.

        Raises:
            ClusterError: no worker is left, and none can be had.
        """
        limits, most = self._limits, math.inf
        if isinstance(items, Sized):
            limits, most = limits.shared(len(items), self._crew.places), len(items)
        schedule = Schedule(items, limits, events=self.events)
        run = _Run(self._crew, schedule, self._work_for, most, self._crew.next_phase())
        try:
            yield from _in_order(run.outcomes(advance), schedule.set_aside)
        finally:
            run.end()


def refusal(aside: Sequence[tuple[str, int, SetAside]], *, what: str) -> SetAsideError:
    """Return the error for items that were set aside, neighbours of one reason told as one.

    Args:
        aside: how the items are called, how many they are, and one of them.
        what: an item is.
    """
    items = [{"name": name, f"{what}s": many, "why": reason(each)} for name, many, each in aside]
    shown = "; ".join(f"{each['name']}: {each['why']}" for each in items[:_NAMED])
    more = f"; and {len(items) - _NAMED} more places" if len(items) > _NAMED else ""
    total = sum(many for _, many, _ in aside)
    counted = f"{total} {what}{'s' if total > 1 else ''} failed every time and "
    return SetAsideError(
        f"{counted}{'were' if total > 1 else 'was'} set aside ({shown}{more}); all the others are "
        "done and kept: mend what is named, and run the same command again",
        items=items,
    )


def reason(aside: SetAside) -> str:
    """Return why an item was set aside."""
    if aside.why is None:
        return "its workers died, perhaps for want of memory"
    return str(aside.why) or type(aside.why).__name__


def _in_order(outcomes: Iterable[tuple[int, Any]], set_aside: Sequence[SetAside]) -> Iterator[Any]:
    """Yield results by number, among them those set aside, which are told of by and by."""
    waiting: dict[int, Any] = {}
    wanted = passed = 0
    for number, result in chain(outcomes, [(-1, None)]):
        waiting[number] = result
        waiting |= {each.number: each for each in set_aside[passed:]}
        passed = len(set_aside)
        while wanted in waiting:
            yield waiting.pop(wanted)
            wanted += 1


@dataclass
class _Run:
    """One pass over items."""

    crew: Crew
    schedule: Schedule
    work_for: Callable[[Slot], Work[Any, Any]]
    # Workers that are given the work at most: more than there are items would do nothing.
    most: float
    phase: int
    works: dict[Slot, Any] = field(default_factory=dict)
    # What is waited for: the opening of the work (None), or an item.
    waiting: dict[Any, tuple[Member, int | None]] = field(default_factory=dict)
    open: dict[str, Member] = field(default_factory=dict)
    opening: set[str] = field(default_factory=set)
    hungry: set[str] = field(default_factory=set)
    asked_all: float = 0.0

    def outcomes(self, advance: Callable[[int], None] | None) -> Iterator[tuple[int, Any]]:
        """Yield the number and the result of each item, as they are done."""
        if self.schedule.finished:
            return
        while not self.schedule.finished:
            for member, why in self.crew.tend():
                self._lose(member, why)
            if advance is not None:
                # So that whoever wants to stop is heard also while nothing is done.
                advance(0)
            for member in tuple(self.crew.members.values()):
                self._open(member)
            self._hand_out()
            for ref in self._ready():
                found = self._take(ref)
                if found is not None:
                    number, outcome = found
                    if advance is not None:
                        advance(outcome.rows)
                    yield number, outcome.value

    def end(self) -> None:
        """Leave no worker busy with what nobody waits for."""
        busy = {member.name for member, number in self.waiting.values() if number is not None}
        for name in self.opening | self.open.keys():
            member = self.crew.members.get(name)
            if member is None:
                continue
            if name in busy:
                self.crew.lose(member)
            else:
                # What the work loaded would stay in memory beside the next.
                member.actor.close.remote(self.phase)

    def _open(self, member: Member) -> None:
        if member.name in self.opening or len(self.opening & self.crew.members.keys()) >= self.most:
            return
        slot = Slot(member.slot.cpus, member.slot.gpus)
        if slot not in self.works:
            self.works[slot] = self.crew.ray.put(self.work_for(slot))
        self.opening.add(member.name)
        self.waiting[member.actor.open.remote(self.phase, self.works[slot])] = member, None

    def _hand_out(self) -> None:
        """Give an item to each worker that may take one, then another: none is to get all."""
        now = time.monotonic()
        if now - self.asked_all > _SECONDS_BETWEEN_LOOKS:
            # Those without anything to do may take over what is late by now.
            self.asked_all = now
            self.hungry.update(self.open)
        while self.hungry:
            for name in tuple(self.hungry):
                task = self.schedule.next_for(name, now) if name in self.open else None
                if task is None:
                    self.hungry.discard(name)
                else:
                    member = self.open[name]
                    self.waiting[member.actor.do.remote(*task)] = member, task[0]

    def _ready(self) -> list[Any]:
        """Wait a moment for anything, and return all that came."""
        ray, refs = self.crew.ray, [*self.waiting, *self.crew.starting()]
        if not refs:
            time.sleep(0.1)
            return []
        ready, left = ray.wait(refs, num_returns=1, timeout=1.0, fetch_local=False)
        if ready and left:
            more, _ = ray.wait(left, num_returns=len(left), timeout=0, fetch_local=False)
            ready += more
        return [ref for ref in ready if ref in self.waiting]

    def _take(self, ref: Any) -> tuple[int, Outcome] | None:
        """Note what came; return an item's number and outcome if it is the first of it."""
        if ref not in self.waiting:
            # Its worker died meanwhile, and was heard of by another of its items.
            return None
        member, number = self.waiting.pop(ref)
        ray = self.crew.ray
        try:
            outcome = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            raise _foreign(error) from error
        except ray.exceptions.RayError as error:
            self._lose(member, error)
            return None
        if number is None:
            self.open[member.name] = member
            self.hungry.add(member.name)
            self.schedule.join(member.name)
            return None
        self.hungry.add(member.name)
        return self._note(member, number, outcome)

    def _note(self, member: Member, number: int, outcome: Outcome) -> tuple[int, Outcome] | None:
        now = time.monotonic()
        if outcome.how is How.DONE:
            self.crew.proved(member)
            return (number, outcome) if self.schedule.done(member.name, number, now) else None
        if outcome.how is How.DROPPED:
            self.schedule.interrupted(member.name, number, now)
            return None
        if isinstance(outcome.value, _OF_A_WORKER):
            self.crew.note(f"note: {member.name} on {member.node} gets no more: {outcome.value}")
            if not self.schedule.unfit(member.name, number, now):
                raise outcome.value
            return None
        self.schedule.failed(member.name, number, outcome.value, now)
        if self.schedule.hopeless and isinstance(outcome.value, WhitenIndexError):
            raise outcome.value
        return None

    def _lose(self, member: Member, why: BaseException) -> None:
        self.crew.lose(member, why)
        self.schedule.died(member.name)
        self.open.pop(member.name, None)
        self.opening.discard(member.name)
        for ref, (holder, _) in tuple(self.waiting.items()):
            if holder is member:
                del self.waiting[ref]


def _foreign(error: Any) -> BaseException:
    """Return the error of a worker that is not an item's, such as work that cannot be unpickled."""
    return ClusterError(
        f"a worker cannot take the work ({error.cause!r}); install the same packages on all "
        "machines of the cluster"
    )


def _broken_step(function: Callable[..., Any], aside: SetAside) -> ClusterError:
    name: Any = function
    while isinstance(name, functools.partial):
        name = next((each for each in name.args if callable(each)), name.func)
    return ClusterError(
        f"step {getattr(name, '__name__', 'of the build').strip('_')} failed every time "
        f"({reason(aside)}); what was encoded is kept: run the same command again"
    )


class CrewCalls:
    """Calls on a crew."""

    elsewhere = True

    def __init__(self, crew: Crew) -> None:
        """Take the crew."""
        self.crew = crew
        self.events = Events()

    def to_json(self) -> dict[str, int]:
        """Return what happened beside the plain course as JSON values."""
        return {**self.events.to_json(), "deaths": self.crew.deaths}

    def map(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        *,
        advance: Callable[[int], None] | None = None,
    ) -> Iterator[Any]:
        """Yield what the function makes of every item, in the order of the items."""
        runner = RayRunner(
            self.crew, lambda slot: Threads(Call(function), slot.cpus), events=self.events
        )
        for result in runner.map(items, advance):
            if not isinstance(result, SetAside):
                yield result
            elif isinstance(result.why, WhitenIndexError):
                raise result.why
            elif isinstance(result.why, OSError):
                raise StorageError(
                    f"a worker cannot write or read ({result.why}); mend that and run the same "
                    "command again (the shards already finished are kept)"
                ) from result.why
            else:
                raise _broken_step(function, result) from result.why


@dataclass(frozen=True)
class Threads:
    """Calls, with as many threads of BLAS and OpenMP as a worker has cores."""

    call: Call
    cpus: int

    def telling(self, advance: Callable[[int], None]) -> Threads:
        """Return the same work that tells ``advance``."""
        return Threads(self.call.telling(advance), self.cpus)

    def read(self, item: Any) -> Any:
        """Return the item."""
        return item

    def prepare(self, read: Any) -> Any:
        """Return the item."""
        return read

    def run(self, prepared: Any) -> Any:
        """Call the function."""
        import threadpoolctl

        with threadpoolctl.threadpool_limits(self.cpus):
            return self.call.run(prepared)

    def finish(self, ran: Any) -> Any:
        """Return the result."""
        return ran
