"""Who does which item next, and what becomes of an item that fails or takes its worker along.

Plain Python without clock, network or engine: who runs it says what happened and when, so that the
same rules serve a cluster, tests and a simulation.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

_FEW, _TIMES_KEPT = 16, 512


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much is borne.

    Attributes:
        held: items a worker has at a time, so that it reads the next while it does one.
        tries: failures after which an item is set aside; likewise deaths of workers that had
            nothing else.
        hits: deaths of workers that an item was with, among others, after which it is done alone.
        failures: in a row, after which a worker is given nothing while others succeed.
        late: times the usual duration after which an item is given to a second worker too.
        least_late: seconds that this is at least.
        hopeless: items set aside without a single one done, after which the rest is not tried.
    """

    held: int = 3
    tries: int = 3
    hits: int = 2
    failures: int = 3
    late: float = 3.0
    least_late: float = 20.0
    hopeless: int = 16

    def shared(self, items: int, workers: int) -> Limits:
        """Return the limits for so few items that workers would hold what others could do."""
        return replace(self, held=max(min(self.held, -(-items // max(workers, 1))), 1))


@dataclass
class Events:
    """What happened beside the plain course.

    Attributes:
        deaths: workers that died.
        failures: tries that failed.
        copies: items given to a second worker since the first was late.
        retired: workers that only failed.
    """

    deaths: int = 0
    failures: int = 0
    copies: int = 0
    retired: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the counts as JSON values."""
        return dict(vars(self))


@dataclass(frozen=True)
class SetAside:
    """An item that was given up.

    Attributes:
        number: its place among the items.
        item: itself.
        why: the error of its last try, None where its workers died.
    """

    number: int
    item: Any
    why: BaseException | None


@dataclass
class _Open:
    """An item that is not done."""

    item: Any
    failures: int = 0
    hits: int = 0
    deaths: int = 0
    alone: bool = False
    failed_at: set[str] = field(default_factory=set)
    waits_since: float | None = None
    why: BaseException | None = None


@dataclass
class _Worker:
    """What is known of a worker; ``since`` is when the oldest item that it holds was next."""

    held: dict[int, float] = field(default_factory=dict)
    since: float = 0.0
    failures: int = 0
    succeeded: bool = False
    retired: bool = False


class Schedule:
    """Items and workers; an item is drawn from its source when a worker can take it.

    Attributes:
        limits: how much is borne.
        events: what happened so far.
        set_aside: items given up.
    """

    def __init__(
        self,
        items: Iterable[Any],
        limits: Limits | None = None,
        *,
        events: Events | None = None,
    ) -> None:
        """Take the items, drawn as they are needed; ``events`` are counted on from."""
        self.limits, self.events = limits or Limits(), events or Events()
        self.set_aside: list[SetAside] = []
        self._source, self._drawn, self._exhausted = iter(items), 0, False
        self._open: dict[int, _Open] = {}
        self._again: deque[int] = deque()
        self._suspects: deque[int] = deque()
        self._workers: dict[str, _Worker] = {}
        self._holders: dict[int, set[str]] = {}
        self._durations: deque[float] = deque(maxlen=_TIMES_KEPT)
        self._usual: float | None = None
        self._late_at: float | None = None
        self._all_late: list[tuple[float, str, int]] = []

    @property
    def workers(self) -> list[str]:
        """Names of the workers that are given work."""
        return [name for name, worker in self._workers.items() if not worker.retired]

    @property
    def finished(self) -> bool:
        """Whether every item is done or set aside."""
        if not self._exhausted and not self._open and (drawn := self._draw()) is not None:
            self._again.append(drawn)
        return self._exhausted and not self._open

    @property
    def hopeless(self) -> bool:
        """Whether many items were set aside, and none was ever done."""
        return self._usual is None and len(self.set_aside) >= self.limits.hopeless

    def join(self, worker: str) -> None:
        """Count a worker in."""
        self._workers.setdefault(worker, _Worker())

    def held_by(self, worker: str) -> list[int]:
        """Return the numbers of the items that a worker has, the oldest first."""
        return list(self._workers[worker].held)

    def next_for(self, worker: str, now: float) -> tuple[int, Any] | None:
        """Give a worker an item, None where there is none for it now.

        Args:
            worker: that joined.
            now: seconds, by any clock that never runs back.
        """
        state = self._workers[worker]
        if state.retired or len(state.held) >= self.limits.held or self._holds_alone(state):
            return None
        if not state.succeeded and state.failures >= self.limits.failures:
            self._retire_hopeless(state)
            if state.retired or self._others_are_unknown(state):
                return None
        number = self._choose(worker, state, now)
        if number is None:
            return None
        if not state.held:
            state.since = now
        state.held[number] = now
        self._holders.setdefault(number, set()).add(worker)
        return number, self._open[number].item

    def done(self, worker: str, number: int, now: float) -> bool:
        """Note that a worker did an item; tell whether it was the first to."""
        state = self._workers.get(worker)
        if state is not None and number in state.held:
            self._remember(now - state.since)
            self._let_go(worker, state, number, now)
            state.failures, state.succeeded = 0, True
        return self._close(number)

    def failed(self, worker: str, number: int, why: BaseException, now: float) -> None:
        """Note that an item failed at a worker: tried again elsewhere, or set aside."""
        state = self._workers.get(worker)
        if state is not None and number in state.held:
            self._let_go(worker, state, number, now)
            state.failures += 1
            self._retire_hopeless(state)
        item = self._open.get(number)
        if item is None:
            return
        self.events.failures += 1
        item.failures, item.why = item.failures + 1, why
        item.failed_at.add(worker)
        if item.failures >= self.limits.tries:
            self._give_up(number)
        elif not self._holders.get(number):
            self._again.append(number)

    def unfit(self, worker: str, number: int, now: float) -> bool:
        """Note that a worker cannot do any item, for no fault of this one.

        Returns:
            Whether others can be given work.
        """
        self.interrupted(worker, number, now)
        state = self._workers.get(worker)
        if state is not None and not state.retired:
            state.retired = True
            self.events.retired += 1
        return bool(self.workers)

    def interrupted(self, worker: str, number: int, now: float) -> None:
        """Note that a worker dropped an item for no fault of the item's."""
        state = self._workers.get(worker)
        if state is not None and number in state.held:
            self._let_go(worker, state, number, now)
        if number in self._open and not self._holders.get(number):
            self._again.appendleft(number)

    def died(self, worker: str) -> None:
        """Note that a worker is no more; what it had is done again."""
        state = self._workers.pop(worker, None)
        if state is None:
            return
        self.events.deaths += 1
        numbers = [number for number in state.held if number in self._open]
        certain = len(numbers) == 1
        for number in numbers:
            self._holders[number].discard(worker)
            item = self._open[number]
            item.hits += 1
            item.deaths += certain
            if item.deaths >= self.limits.tries:
                self._give_up(number)
            elif not self._holders[number]:
                self._hand_back(number, item)
        if not self.workers:
            # Better those that failed than nobody.
            for each in self._workers.values():
                each.retired, each.failures = False, 0

    def _hand_back(self, number: int, item: _Open) -> None:
        """Let an item be done again: alone where it was with too many workers that died."""
        if item.hits >= self.limits.hits:
            item.alone = True
            self._suspects.append(number)
        else:
            self._again.append(number)

    def _choose(self, worker: str, state: _Worker, now: float) -> int | None:
        """Return which item is next: one to do again, a new one, a suspect, or a late one."""
        number = self._from(self._again, worker, now)
        if number is None:
            number = self._draw()
        if number is None and not state.held:
            number = self._from(self._suspects, worker, now)
            if number is None:
                number = self._late(worker, now)
                self.events.copies += number is not None
        return number

    def _from(self, queue: deque[int], worker: str, now: float) -> int | None:
        """Take the first item that did not fail at this worker.

        One that failed here is taken too if it did at all others, or if none of them came for it.
        """
        for number in queue:
            item = self._open[number]
            item.waits_since = now if item.waits_since is None else item.waits_since
            fresh = worker not in item.failed_at or now - item.waits_since > self._limit()
            if fresh or set(self.workers) - {worker} <= item.failed_at:
                queue.remove(number)
                item.waits_since = None
                return number
        return None

    def _limit(self) -> float:
        """Return the seconds after which an item is late."""
        return max(self.limits.late * (self._usual or 0.0), self.limits.least_late)

    def _draw(self) -> int | None:
        if self._exhausted:
            return None
        for item in self._source:
            number, self._drawn = self._drawn, self._drawn + 1
            self._open[number], self._holders[number] = _Open(item), set()
            return number
        self._exhausted = True
        return None

    def _late(self, worker: str, now: float) -> int | None:
        """Return the item that is late the longest, has one worker, and is not a suspect."""
        if self._usual is None:
            return None
        if self._late_at != now:
            # Whoever is asked for all workers at one time asks once.
            self._late_at, self._all_late = now, self._find_late(now)
        for _, holder, number in self._all_late:
            item = self._open.get(number)
            if item is None or item.alone or holder == worker or worker in item.failed_at:
                continue
            if len(self._holders[number]) == 1:
                return number
        return None

    def _find_late(self, now: float) -> list[tuple[float, str, int]]:
        """Return how late, at whom and which items are late, the latest first."""
        limit = self._limit()
        # What waits behind a late item is as late.
        found = [
            (now - state.since - place * 1e-6, name, number)
            for name, state in self._workers.items()
            if state.held and now - state.since > limit
            for place, number in enumerate(state.held)
        ]
        return sorted(found, reverse=True)

    def _remember(self, seconds: float) -> None:
        self._durations.append(seconds)
        done = len(self._durations)
        if done <= _FEW or done % 16 == 0 or self._usual is None:
            self._usual = statistics.median(self._durations)

    def _holds_alone(self, state: _Worker) -> bool:
        return any(number in self._open and self._open[number].alone for number in state.held)

    def _let_go(self, worker: str, state: _Worker, number: int, now: float) -> None:
        del state.held[number]
        state.since = now
        self._holders.get(number, set()).discard(worker)

    def _close(self, number: int) -> bool:
        if self._open.pop(number, None) is None:
            return False
        self._holders.pop(number, None)
        for queue in (self._again, self._suspects):
            if number in queue:
                queue.remove(number)
        return True

    def _give_up(self, number: int) -> None:
        item = self._open[number]
        self.set_aside.append(SetAside(number, item.item, item.why))
        self._close(number)

    def _others_are_unknown(self, state: _Worker) -> bool:
        """Tell whether there are workers besides one of whom it is not clear yet if they only fail.

        A machine that is broken fails fast, and would draw many items that are sound.
        """
        return any(
            each.failures < self.limits.failures and not each.retired
            for each in self._workers.values()
            if each is not state
        )

    def _retire_hopeless(self, state: _Worker) -> None:
        others = any(
            each.succeeded and not each.retired
            for each in self._workers.values()
            if each is not state
        )
        if state.failures >= self.limits.failures and others and not state.retired:
            state.retired = True
            self.events.retired += 1
