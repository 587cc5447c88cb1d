"""The interface of all executors, and the executor of this process."""

import functools
import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from whiten_index.artifacts.files import unforeseen
from whiten_index.artifacts.prefetch import overlapped
from whiten_index.errors import ClusterError, WhitenIndexError, first_line
from whiten_index.progress import Progress, Stages

Advance = Callable[[int], None]


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

    @property
    def reason(self) -> str:
        """Why it failed, as text."""
        return str(self.error) or type(self.error).__name__


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
            )
        )

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Yield the function's result for every item, in the order of the items."""
        return map(function, items)


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

    The worker's stages and notes are replayed to ``stages`` when it is done.
    """
    if not executor.remote:
        return function(stages, *args)
    ((result, remote),) = executor.map(functools.partial(_recorded, function), [args])
    for name, *arguments in remote.watcher.events:
        getattr(stages.watcher, name)(*arguments)
        if name == "start":
            stages.watcher.advance(arguments[1])
    stages.add(remote.seconds, remote.rows)
    return result


def _recorded(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Stages]:
    stages = Stages(_Recorder())
    return function(stages, *args), stages


class _Recorder(Progress):
    """Keeps names and arguments of calls but advances: a replayed stage advances as a whole."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def start(self, stage: str, total: int) -> None:
        self.events.append(("start", stage, total))

    def finish(self, stage: str, seconds: float) -> None:
        self.events.append(("finish", stage, seconds))

    def note(self, message: str) -> None:
        self.events.append(("note", message))
