"""One process per device; each takes the next item that is left.

Processes are spawned, so a script that starts a build on several devices needs the usual guard
``if __name__ == "__main__":``.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from whiten_index.distributed.executors import (
    Advance,
    Executor,
    SerialExecutor,
    Work,
    ignore,
    portable,
)
from whiten_index.errors import EncoderError

_SIGNALS_OF_THE_PARENT = (signal.SIGINT, signal.SIGTERM)
_SECONDS_BETWEEN_CHECKS = 1.0
_SECONDS_TO_FINISH = 60.0
_SECONDS_AFTER_A_DEATH = 3.0


class ProcessExecutor(Executor):
    """Runs work in several processes of this machine, one for each device."""

    remote = True

    def __init__(self, devices: Sequence[str], *, threads: int | None = None) -> None:
        """Make an executor on devices such as ``cuda:0`` and ``cuda:1``.

        All processes share ``threads``; None for one per core.
        """
        self._devices, self._threads = devices, threads or os.cpu_count() or 1

    def map_unordered(
        self, work: Work, items: Iterable[Any], advance: Advance = ignore
    ) -> Iterator[tuple[int, Any]]:
        """Yield the position and the result of every item as it is done."""
        context = multiprocessing.get_context("spawn")
        todo, events, stop = context.Queue(), context.Queue(), context.Event()
        # Items that nobody takes must not delay the end of this process.
        todo.cancel_join_thread()
        left = 0
        for left, item in enumerate(items, start=1):
            todo.put((left - 1, item))
        threads = max(self._threads // len(self._devices), 1)
        workers: list[BaseProcess] = []
        for device in self._devices:
            todo.put(None)
            given = work.on_device(device, threads), todo, events, stop, threads
            workers.append(context.Process(target=_serve, args=given, daemon=True))
        try:
            _start(workers)
            began = False
            while left:
                kind, value = _next_event(workers, events, began=began)
                began = True
                if kind == "error":
                    raise value
                if kind == "done":
                    left -= 1
                    yield value
                elif kind == "rows":
                    advance(value)
        finally:
            _end(workers, events, stop)


def _start(workers: Sequence[BaseProcess]) -> None:
    """Start the workers with the terminal's Ctrl-C blocked, also before they run our code."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_THE_PARENT)
    try:
        for worker in workers:
            worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _next_event(workers: Sequence[BaseProcess], events: Any, *, began: bool) -> Any:
    """Return what a worker reports next; raise when one died and nothing more is reported."""
    while True:
        # Checked before the queue: all that a dead worker reported is in there by then.
        statuses = [worker.exitcode for worker in workers]
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=_SECONDS_BETWEEN_CHECKS)
        if any(statuses) or None not in statuses:
            # A negative status names a signal, after which other workers may have failed.
            ended = (status or 0 for status in statuses)
            raise _died(max(ended, key=lambda status: (status < 0, status)), began=began)


def _died(status: int, *, began: bool) -> EncoderError:
    if status < 0:
        why = "was killed, perhaps for want of memory: use fewer devices if memory is short"
    elif began:
        why = f"ended with status {status}; its own message is above"
    else:
        why = (
            f"failed at its start with status {status}; its own message is above. Each worker "
            "imports the script that starts it: a script that builds on several devices must be a "
            'file, and start the build under: if __name__ == "__main__":'
        )
    return EncoderError(
        f"a worker process {why}. Finished shards are kept: run the same command again"
    )


def _end(workers: Sequence[BaseProcess], events: Any, stop: Any) -> None:
    """Let each worker finish what it has encoded, within limits of time."""
    started = [worker for worker in workers if worker.pid is not None]
    try:
        stop.set()
        since = time.monotonic()
        while any(worker.is_alive() for worker in started):
            # A worker that died may have held a lock that the others wait for.
            died = any(worker.exitcode for worker in started)
            limit = _SECONDS_AFTER_A_DEATH if died else _SECONDS_TO_FINISH
            if time.monotonic() - since > limit:
                break
            # A worker does not end before its events are taken.
            with contextlib.suppress(queue.Empty):
                events.get(timeout=0.05)
    finally:
        # The end of this process would wait for them without limit.
        for worker in started:
            worker.kill()
        for worker in started:
            worker.join()


def _serve(work: Work, todo: Any, events: Any, stop: Any, threads: int) -> None:
    """Do items until none is left: the body of a worker process."""
    # The parent receives the signals and sets `stop`.
    for number in _SIGNALS_OF_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    events.put(("began", None))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    positions: list[int] = []

    def advance(rows: int) -> None:
        events.put(("rows", rows))
        if stop.is_set():
            raise KeyboardInterrupt

    def pull() -> Iterator[Any]:
        while not stop.is_set() and (task := todo.get()) is not None:
            positions.append(task[0])
            yield task[1]

    try:
        for place, result in SerialExecutor().map_unordered(work, pull(), advance):
            events.put(("done", (positions[place], result)))
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        events.put(("error", portable(error)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
