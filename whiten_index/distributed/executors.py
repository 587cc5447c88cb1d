"""The interface of all executors, and the executors of this machine."""

import contextlib
import functools
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from whiten_index.artifacts.files import unforeseen
from whiten_index.artifacts.prefetch import overlapped
from whiten_index.errors import ClusterError, EncoderError, WhitenIndexError, first_line
from whiten_index.progress import Progress, Stages

Advance = Callable[[int], None]
_SIGNALS_OF_THE_PARENT = (signal.SIGINT, signal.SIGTERM)
_SECONDS_BETWEEN_CHECKS = 1.0
_SECONDS_TO_FINISH = 60.0
_SECONDS_AFTER_A_DEATH = 3.0


def ignore(_: int) -> None:
    """Advance nothing."""


class Work:
    """Work on one item in four steps, of which those around the costly ``run`` overlap with it.

    Each step is called by one thread at a time. An item may be done again after a worker died.
    """

    def on_device(self, device: str, threads: int) -> "Work":  # noqa: ARG002
        """Return the same work for another process, which has this device and these cores."""
        return self

    def read(self, item: Any, /) -> Any:
        """Fetch what the item names."""
        return item

    def prepare(self, read: Any, /) -> Any:
        """Do what comes before the costly step, such as tokenising."""
        return read

    def run(self, prepared: Any, advance: Advance, /) -> Any:
        """Do the costly step, and report rows to ``advance`` as they are done."""
        raise NotImplementedError

    def finish(self, ran: Any, /) -> Any:
        """Do what comes after, such as writing."""
        return ran

    def stop(self, ran: Any) -> None:  # noqa: ARG002
        """Let what was run, and is being finished, end soon."""
        return


@dataclass(frozen=True)
class FunctionWork(Work):
    """A plain function as work; its result depends on the item alone."""

    function: Callable[[Any], Any]
    threads: int | None = None  # of BLAS and OpenMP; None leaves them as they are

    def on_device(self, device: str, threads: int) -> "FunctionWork":  # noqa: ARG002
        """Return the function limited to these cores."""
        return FunctionWork(self.function, threads)

    def run(self, prepared: Any, advance: Advance, /) -> Any:  # noqa: ARG002
        """Call the function."""
        import threadpoolctl

        with threadpoolctl.threadpool_limits(self.threads):
            return self.function(prepared)


@dataclass(frozen=True)
class Failure:
    """The result of an item that failed."""

    item: Any
    error: BaseException  # of its last try


class Executor(ABC):
    """Runs work on items."""

    # Whether other processes do it, perhaps on other machines. Work, items and results must pickle
    # then.
    remote = False

    @abstractmethod
    def map_unordered(
        self, work: Work, items: Iterable[Any], advance: Advance = ignore
    ) -> Iterator[tuple[int, Any]]:
        """Yield the position and the result of every item as it is done.

        Items are drawn as they are needed, and rows done reported to ``advance`` in this thread.
        """

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Yield the function's result for every item, in the order of the items."""
        waiting: dict[int, Any] = {}
        wanted = 0
        for position, result in self.map_unordered(FunctionWork(function), items):
            if isinstance(result, Failure):
                raise _step_error(result.error) from result.error
            waiting[position] = result
            while wanted in waiting:
                yield waiting.pop(wanted)
                wanted += 1

    def to_json(self) -> dict[str, int] | None:
        """Return the counts of deaths and failures; None for this machine alone."""
        return None


class SerialExecutor(Executor):
    """Runs work in this process, with the steps of several items side by side."""

    def __init__(self, *, one_by_one: bool = False) -> None:
        """Make an executor; with ``one_by_one``, memory holds one item.

        Otherwise two are prepared ahead in other threads, and one is finished behind.
        """
        self._one_by_one = one_by_one

    def map_unordered(
        self, work: Work, items: Iterable[Any], advance: Advance = ignore
    ) -> Iterator[tuple[int, Any]]:
        """Yield position and result in the order of the items."""
        if self._one_by_one:
            for position, item in enumerate(items):
                prepared = work.prepare(work.read(item))
                yield position, work.finish(work.run(prepared, advance))
            return
        yield from enumerate(
            overlapped(
                items,
                read=work.read,
                prepare=work.prepare,
                work=lambda prepared: work.run(prepared, advance),
                finish=work.finish,
                stop=work.stop,
            )
        )

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Yield the function's result for every item, in the order of the items."""
        return map(function, items)


class ProcessExecutor(Executor):
    """Runs work in several processes of this machine, one for each device.

    Processes are spawned, so a script that starts a build on several devices needs the usual guard
    ``if __name__ == "__main__":``. Each takes the next item that is left.
    """

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


def portable(error: BaseException) -> BaseException:
    """Return an error that another process can unpickle, the same one where possible."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def _step_error(error: BaseException) -> WhitenIndexError:
    if isinstance(error, WhitenIndexError):
        return error
    return unforeseen(error, step="a step on a worker") or ClusterError(
        f"a step of the build failed ({first_line(error)}). Finished shards are kept: run the same "
        "command again"
    )


def remote_call(
    executor: Executor, stages: Stages, function: Callable[..., Any], *args: Any
) -> Any:
    """Return ``function(stages, *args)``, called on a worker where there are workers.

    The stages and notes of the worker are added to ``stages`` when it is done.
    """
    if not executor.remote:
        return function(stages, *args)
    ((result, remote),) = executor.map(functools.partial(_recorded, function), [args])
    for name, seconds in remote.seconds.items():
        stages.watcher.start(name, remote.rows[name])
        stages.watcher.advance(remote.rows[name])
        stages.watcher.finish(name, seconds)
    for message in remote.watcher.notes:
        stages.watcher.note(message)
    stages.add(remote.seconds, remote.rows)
    return result


def _recorded(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Stages]:
    stages = Stages(_Notes())
    return function(stages, *args), stages


class _Notes(Progress):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes = list[str]()

    def note(self, message: str) -> None:
        self.notes.append(message)
