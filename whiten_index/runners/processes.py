"""One process a worker: each takes the next item that is left, and does it as ``LocalRunner`` does.

Workers are spawned, so a script that starts a build on several devices needs the usual guard
``if __name__ == "__main__":``.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from whiten_index.errors import EncoderError
from whiten_index.runners.local import AnyItem, LocalRunner, Work

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
        for worker in workers:
            worker.start()
        try:
            yield from _in_order(_answers(workers, told, count, advance))
        finally:
            stop.set()
            _end(workers, told)
            todo.cancel_join_thread()


def _answers(
    workers: Sequence[BaseProcess], told: Any, count: int, advance: Callable[[int], None] | None
) -> Iterator[tuple[int, Any]]:
    """Yield the number and the outcome of each of ``count`` items, as they are done."""
    suspected = False
    while count:
        try:
            kind, value = told.get(timeout=_SECONDS_TO_LOOK_AFTER_WORKERS)
        except queue.Empty:
            # What a worker told last may still be on its way when its end is seen.
            if suspected:
                _require_alive(workers)
            suspected = True
            continue
        suspected = False
        if kind == "advance":
            if advance is not None:
                advance(value)
        elif kind == "error":
            raise value
        else:
            count -= 1
            yield value


def _in_order(answers: Iterable[tuple[int, Any]]) -> Iterator[Any]:
    waiting: dict[int, Any] = {}
    wanted = 0
    for number, outcome in answers:
        waiting[number] = outcome
        while wanted in waiting:
            yield waiting.pop(wanted)
            wanted += 1


def _require_alive(workers: Sequence[BaseProcess]) -> None:
    ends = [worker.exitcode for worker in workers if worker.exitcode is not None]
    failed = [end for end in ends if end] or (ends if len(ends) == len(workers) else [])
    if failed:
        raise EncoderError(
            f"a worker process ended with status {failed[0]} (killed, perhaps for want of memory); "
            "what was finished is kept: run the same command again, with fewer devices if memory "
            "is short"
        )


def _end(workers: Sequence[BaseProcess], told: Any) -> None:
    """Let each worker finish what it has encoded, but do not wait for ever."""
    started = time.monotonic()
    while any(worker.is_alive() for worker in workers):
        # One that was killed may have taken a lock along that the others wait for.
        killed = any((worker.exitcode or 0) < 0 for worker in workers)
        if time.monotonic() - started > (_SECONDS_AFTER_A_KILL if killed else _SECONDS_TO_FINISH):
            break
        try:
            # A worker does not end before what it told is taken.
            told.get(timeout=0.05)
        except queue.Empty:
            continue
    for worker in workers:
        if worker.is_alive():
            worker.kill()
        worker.join()


def _serve(work: Work[Any, Any], todo: Any, told: Any, stop: Any, share: int) -> None:
    """Do items until none is left: the body of a worker process."""
    # The parent hears the signals and says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
        told.put(("error", _portable(error)))


def _portable(error: BaseException) -> BaseException:
    """Return an error that another process can take, as it is where possible."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


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
