"""One process a worker: each takes the next item that is left, and does it as ``LocalRunner`` does.

Workers are spawned, so a script that starts a build on several devices needs the usual guard
``if __name__ == "__main__":``.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

from whiten_index.errors import EncoderError
from whiten_index.runners.local import AnyItem, LocalRunner, Work
from whiten_index.runners.serving import portable

_HEARD_BY_THE_PARENT = (signal.SIGINT, signal.SIGTERM)
_SECONDS_TO_LOOK_AFTER_WORKERS = 1.0
_SECONDS_TO_FINISH = 60.0
_SECONDS_AFTER_A_KILL = 3.0


class ProcessRunner:
    """Does the work in several processes of this machine, one for each work given."""

    def __init__(self, works: Sequence[Work[Any, Any]]) -> None:
        """Take the work of each process; they differ in the device they use and must pickle."""
        self._works = works

    def map(
        self, items: Iterable[AnyItem], advance: Callable[[int], None] | None = None
    ) -> Iterator[Any]:
        """Yield what is made of every item, in the order of the items.

        Args:
            items: must pickle.
            advance: told how many rows are done, as they are, in this process.

        Raises:
            EncoderError: a process died; what it had finished is kept.
        """
        context = multiprocessing.get_context("spawn")
        todo, told, stop = context.Queue(), context.Queue(), context.Event()
        # What nobody takes any more must not hold up the end of this process.
        todo.cancel_join_thread()
        count = 0
        for count, item in enumerate(items, start=1):
            todo.put((count - 1, item))
        for _ in self._works:
            todo.put(None)
        share = max((os.cpu_count() or 1) // len(self._works), 1)
        workers = [
            context.Process(target=_serve, args=(work, todo, told, stop, share), daemon=True)
            for work in self._works
        ]
        try:
            _start(workers)
            yield from _in_order(_answers(workers, told, count, advance))
        finally:
            _end(workers, told, stop)


def _start(workers: Sequence[BaseProcess]) -> None:
    """Start the workers deaf to a Ctrl-C of the terminal, also before they run code of ours."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD_BY_THE_PARENT)
    try:
        for worker in workers:
            worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answers(
    workers: Sequence[BaseProcess], told: Any, count: int, advance: Callable[[int], None] | None
) -> Iterator[tuple[int, Any]]:
    """Yield the number and the outcome of each of ``count`` items, as they are done."""
    began: set[int] = set()
    heard = _heard(workers, told, began)
    while count:
        kind, value = next(heard)
        if kind == "began":
            began.add(value)
        elif kind == "advance":
            if advance is not None:
                advance(value)
        elif kind == "error":
            raise value
        else:
            count -= 1
            yield value


def _heard(
    workers: Sequence[BaseProcess], told: Any, began: Container[int | None]
) -> Iterator[tuple[str, Any]]:
    """Yield what the workers tell; raise when one has failed and all that it told is yielded."""
    look = time.monotonic() + _SECONDS_TO_LOOK_AFTER_WORKERS
    while True:
        with suppress(queue.Empty):
            yield told.get(timeout=max(look - time.monotonic(), 0))
        if time.monotonic() < look:
            continue
        # Looked at before the queue is emptied: what a dead worker told is all in there.
        ends = {worker.pid: worker.exitcode for worker in workers}
        if any(ends.values()) or None not in ends.values():
            yield from _taken(told)
            raise _failure(ends, began)
        look = time.monotonic() + _SECONDS_TO_LOOK_AFTER_WORKERS


def _taken(told: Any) -> list[tuple[str, Any]]:
    messages = []
    with suppress(queue.Empty):
        while True:
            messages.append(told.get_nowait())
    return messages


def _in_order(answers: Iterable[tuple[int, Any]]) -> Iterator[Any]:
    waiting: dict[int, Any] = {}
    wanted = 0
    for number, outcome in answers:
        waiting[number] = outcome
        while wanted in waiting:
            yield waiting.pop(wanted)
            wanted += 1


def _failure(ends: Mapping[int | None, int | None], began: Container[int | None]) -> EncoderError:
    """Return what to say of workers that ended too soon, by the status each ended with."""
    # One that was killed (a negative status) is the likeliest to have brought down the others.
    worker, status = min(
        ((worker, status) for worker, status in ends.items() if status is not None),
        key=lambda end: (not end[1], end[1]),
    )
    if status < 0:
        return EncoderError(
            f"a worker process ended with status {status} (killed, perhaps for want of memory); "
            "what was finished is kept: run the same command again, with fewer devices if memory "
            "is short"
        )
    if worker in began:
        return EncoderError(
            f"a worker process ended with status {status} before its work was done; its own "
            "message is above, and what was finished is kept: run the same command again"
        )
    return EncoderError(
        f"a worker process failed at its start, with status {status}; its own message is above. "
        "Each worker imports the script that starts it: one which builds on several devices must "
        'be a file, and start the build under: if __name__ == "__main__":'
    )


def _end(workers: Sequence[BaseProcess], told: Any, stop: Any) -> None:
    """Let each worker finish what it has encoded, but do not wait for ever."""
    started = [worker for worker in workers if worker.pid is not None]
    try:
        stop.set()
        _let_finish(started, told)
    finally:
        # Left to themselves, they would be waited for without limit at the end of this process.
        for worker in started:
            worker.kill()
        for worker in started:
            worker.join()


def _let_finish(workers: Sequence[BaseProcess], told: Any) -> None:
    started = time.monotonic()
    while any(worker.is_alive() for worker in workers):
        # One that was killed may have taken a lock along that the others wait for.
        killed = any((worker.exitcode or 0) < 0 for worker in workers)
        if time.monotonic() - started > (_SECONDS_AFTER_A_KILL if killed else _SECONDS_TO_FINISH):
            break
        # A worker does not end before what it told is taken.
        with suppress(queue.Empty):
            told.get(timeout=0.05)


def _serve(work: Work[Any, Any], todo: Any, told: Any, stop: Any, share: int) -> None:
    """Do items until none is left: the body of a worker process."""
    # The parent hears the signals and says when to stop.
    for number in _HEARD_BY_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    told.put(("began", os.getpid()))
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.setdefault("RAYON_NUM_THREADS", str(share))

    def advance(rows: int) -> None:
        told.put(("advance", rows))
        if stop.is_set():
            raise KeyboardInterrupt

    def left() -> Iterator[Any]:
        while not stop.is_set() and (task := todo.get()) is not None:
            yield task

    numbered = _Numbered(work.telling(advance))
    try:
        for answer in LocalRunner(numbered).map(left()):
            told.put(("done", answer))
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        told.put(("error", portable(error)))


class _Numbered:
    """Work on pairs of a number and an item."""

    def __init__(self, work: Work[Any, Any]) -> None:
        self._work = work

    def telling(self, advance: Callable[[int], None]) -> _Numbered:
        return _Numbered(self._work.telling(advance))

    def read(self, task: tuple[int, Any]) -> tuple[int, Any]:
        return task[0], self._work.read(task[1])

    def prepare(self, read: tuple[int, Any]) -> tuple[int, Any]:
        return read[0], self._work.prepare(read[1])

    def run(self, prepared: tuple[int, Any]) -> tuple[int, Any]:
        return prepared[0], self._work.run(prepared[1])

    def finish(self, ran: tuple[int, Any]) -> tuple[int, Any]:
        return ran[0], self._work.finish(ran[1])


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
