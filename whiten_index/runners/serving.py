"""A worker's side of a cluster: items come one by one, and go through the steps side by side."""

from __future__ import annotations

import pickle
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

from whiten_index.runners.local import LocalRunner, Work

_SECONDS_BETWEEN_LOOKS = 0.05


class How(Enum):
    """How an item ended at a worker."""

    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"


@dataclass(frozen=True)
class Outcome:
    """What came of an item.

    Attributes:
        how: it ended; dropped where another item's failure stopped the work on it.
        value: what the work made of it, or the error.
        rows: that the work told of.
    """

    how: How
    value: Any = None
    rows: int = 0


class Server:
    """Does items that are handed in by several threads, as ``LocalRunner`` does them."""

    def __init__(self, work: Work[Any, Any], *, one_by_one: bool = False) -> None:
        """Take the work; see ``LocalRunner`` for ``one_by_one``."""
        self._todo: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._under_way = _UnderWay()
        self._work, self._one_by_one = work, one_by_one
        self._closed = threading.Event()
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True, name="serve")
        self._thread.start()

    def do(self, number: int, item: Any) -> Outcome:
        """Do an item, beside others whose ``do`` waits in another thread."""
        coming = self._under_way.expect(number)
        self._todo.put((number, item))
        if self._closed.is_set():
            self._end_all()
        return coming.result()

    def close(self) -> None:
        """Finish what is worked on, and take nothing more."""
        self._closed.set()
        self._thread.join()
        self._end_all()

    def _end_all(self) -> None:
        """Let nobody wait: items are dropped, or fail with what broke the server."""
        how = How.DROPPED if self._broken is None else How.FAILED
        self._under_way.end_all(how, self._broken)

    def _serve(self) -> None:
        try:
            while not self._closed.is_set():
                self._serve_until_one_fails()
        except BaseException as error:
            self._broken = portable(error)
            self._closed.set()
            self._end_all()

    def _serve_until_one_fails(self) -> None:
        self._under_way.stop.clear()
        # Begun afresh: what came to no end in the last pass is not under way any more.
        work = _Told(self._work.telling(self._under_way.advance), self._under_way)
        try:
            for _ in LocalRunner(work, one_by_one=self._one_by_one).map(self._left()):
                pass
        except _FailedError as error:
            self._under_way.fail(error)
        self._under_way.drop_taken()

    def _left(self) -> Iterator[tuple[int, Any]]:
        while not self._closed.is_set() and not self._under_way.stop.is_set():
            try:
                task = self._todo.get(timeout=_SECONDS_BETWEEN_LOOKS)
            except queue.Empty:
                continue
            self._under_way.taken.add(task[0])
            yield task


class _FailedError(Exception):
    """An item's failure on its way through the steps."""

    def __init__(self, number: int, why: BaseException) -> None:
        super().__init__(number)
        self.number, self.why = number, why


class _UnderWay:
    """The items whose outcome is waited for."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.taken: set[int] = set()
        self.running: int | None = None
        self._coming: dict[int, Future[Outcome]] = {}
        self._rows: dict[int, int] = {}
        self._lock = threading.Lock()

    def expect(self, number: int) -> Future[Outcome]:
        with self._lock:
            coming = self._coming[number] = Future()
            self._rows[number] = 0
            return coming

    def advance(self, rows: int) -> None:
        """Count rows to the item in the costly step."""
        if self.running is not None:
            self._rows[self.running] = self._rows.get(self.running, 0) + rows

    def tell(self, number: int, how: How, value: Any = None) -> None:
        with self._lock:
            coming, rows = self._coming.pop(number, None), self._rows.pop(number, 0)
            self.taken.discard(number)
        if coming is not None:
            coming.set_result(Outcome(how, value, rows))

    def fail(self, error: _FailedError) -> None:
        self.tell(error.number, How.FAILED, portable(error.why))

    def drop_taken(self) -> None:
        """Tell of items that were taken up and, since another failed, came to no end."""
        for number in tuple(self.taken):
            self.tell(number, How.DROPPED)

    def end_all(self, how: How, value: Any = None) -> None:
        for number in tuple(self._coming):
            self.tell(number, how, value)


@dataclass(frozen=True)
class _Told:
    """Work on numbered items whose outcomes are told as they come, not when the next item does."""

    work: Work[Any, Any]
    under_way: _UnderWay

    def telling(self, advance: Callable[[int], None]) -> _Told:
        return _Told(self.work.telling(advance), self.under_way)

    def read(self, task: tuple[int, Any]) -> tuple[int, Any]:
        return self._step(self.work.read, task)

    def prepare(self, read: tuple[int, Any]) -> tuple[int, Any]:
        return self._step(self.work.prepare, read)

    def run(self, prepared: tuple[int, Any]) -> tuple[int, Any]:
        self.under_way.running = prepared[0]
        try:
            return self._step(self.work.run, prepared)
        finally:
            self.under_way.running = None

    def finish(self, ran: tuple[int, Any]) -> None:
        number, done = self._step(self.work.finish, ran)
        self.under_way.tell(number, How.DONE, done)

    def _step(self, step: Callable[[Any], Any], task: tuple[int, Any]) -> tuple[int, Any]:
        number, value = task
        try:
            return number, step(value)
        except BaseException as error:
            # Whoever waits for another item to read is not to wait for ever.
            self.under_way.stop.set()
            raise _FailedError(number, error) from error


def portable(error: BaseException) -> BaseException:
    """Return an error that another process can take, as it is where possible."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
