"""Workers on a Ray cluster: Ray places and starts them, and this module hands them items."""

import contextlib
import os
import platform
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

from whiten_index import __version__
from whiten_index.distributed.executors import Advance, Executor, Failure, Work, ignore, portable
from whiten_index.errors import (
    ClusterError,
    ConfigError,
    StorageError,
    WhitenIndexError,
    first_line,
    require_installed,
)
from whiten_index.paths import require_no_secret

# Errors that the next item would meet as well.
_FATAL = (ConfigError, StorageError)
# A worker reads and prepares the next items while it runs one.
_ITEMS_PER_WORKER = 3
# Deaths of workers, or failures without any success, that are accepted.
_DEATHS_PER_ITEM, _FAILED_STARTS, _FAILURES_AT_FIRST = 3, 8, 16
_SECONDS_TO_CONNECT, _SECONDS_WITHOUT_WORKER = 10.0, 300.0
_SOFTWARE = __version__, platform.python_version()


class _Worker:
    """A worker process. Ray calls it in several threads, each step of the work one at a time."""

    def __init__(self, device: str, threads: int) -> None:
        # Tokenizers take every core of the machine otherwise.
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        self._device, self._threads = device, threads
        self._steps = [threading.Lock() for _ in range(4)]
        self._loading = threading.Lock()
        self._work_id = -1
        self._work: Work | None = None

    def check(
        self, sender: tuple[str, str], check: Callable[[], None]
    ) -> tuple[str, BaseException | None]:
        """Return the name of this machine, and the reason why it cannot do the work."""
        here = _SOFTWARE
        if here != sender:
            return platform.node(), ClusterError(
                f"it has whiten-index {here[0]} on Python {here[1]}, and the build was started "
                f"with {sender[0]} on {sender[1]}; install the same on all machines"
            )
        try:
            check()
        except Exception as error:
            return platform.node(), portable(error)
        return platform.node(), None

    def run(self, work_id: int, given: list[Any], item: Any) -> tuple[Any, int]:
        """Return the item's result, or its failure, and the rows done."""
        import ray

        rows: list[int] = []
        result = item
        try:
            with self._loading:
                if self._work is None or work_id != self._work_id:
                    # The encoder of the previous work would stay in memory next to the new one.
                    self._work = None
                    # In a list, so that Ray does not unpickle it for every item.
                    self._work = ray.get(given[0]).on_device(self._device, self._threads)
                    self._work_id = work_id
                work = self._work
            steps = work.read, work.prepare, lambda made: work.run(made, rows.append), work.finish
            for lock, step in zip(self._steps, steps, strict=True):
                with lock:
                    result = step(result)
        except Exception as error:
            return Failure(item, portable(error)), 0
        return result, sum(rows)


@dataclass(eq=False)
class _Handle:
    actor: Any  # Ray's handle
    node: str = ""  # machine, empty until it is ready
    load: int = 0  # items that it holds


@dataclass
class _Task:
    """An item that is not done; it is retried alone after a worker died with it."""

    position: int
    item: Any
    deaths: int = 0


@dataclass
class _Run:
    fresh: Iterator[tuple[int, Any]]  # items in order, drawn as they are needed
    suspects: deque[_Task] = field(default_factory=deque)  # tasks whose worker died
    # Reference of a result -> worker and task.
    running: dict[Any, tuple[_Handle, _Task]] = field(default_factory=dict)
    done: int = 0  # items that succeeded
    failed: int = 0  # items that failed

    def draw(self, worker: _Handle) -> _Task | None:
        """Return the next task for a worker; suspects only where it holds nothing."""
        for position, item in self.fresh:
            return _Task(position, item)
        return self.suspects.popleft() if self.suspects and not worker.load else None


class RayExecutor(Executor):
    """Runs work on the workers of a cluster. An item that fails yields a ``Failure``."""

    remote = True

    def __init__(
        self,
        ray: Any,
        *,
        workers: int | None,
        gpu: bool | None,
        check: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        """Start the workers on a connected cluster; the options are those of ``cluster``."""
        self.deaths = self.failures = 0
        self._ray, self._workers, self._check, self._note = ray, workers, check, note
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if gpu and not gpus and workers is None:
            raise ConfigError(
                "--device names a GPU, and the cluster has none. Start its machines with "
                "--num-gpus, give the number of --workers it will have, or use --device cpu"
            )
        self._gpu = bool(gpus) if gpu is None else gpu
        self.device = "cuda" if self._gpu else "cpu"
        self._cpus = self._cores_per_worker()
        self._actor_class = ray.remote(_Worker)
        self._ready: list[_Handle] = []
        self._starting: dict[Any, _Handle] = {}
        self._refused: list[_Handle] = []
        self._failed_starts, self._runs = 0, 0
        self._why: BaseException | None = None
        self._none_since: float | None = None
        room = self._room(self._cpus)
        if self._workers is not None and room < self._workers:
            self._note(
                f"note: {self._size_text()}, too few for {self._workers} workers unless the "
                "cluster grows"
            )
        self._grow()
        if not self._starting:
            raise ConfigError(
                f"{self._size_text()}, too few for a worker; start more machines, or give the "
                "number of --workers it will have"
            )

    def to_json(self) -> dict[str, int]:
        """Return the counts of deaths and failures."""
        return {"deaths": self.deaths, "failures": self.failures}

    def close(self) -> None:
        """End all workers."""
        for worker in (*self._ready, *self._starting.values(), *self._refused):
            self._kill(worker)

    def map_unordered(
        self, work: Work, items: Iterable[Any], advance: Advance = ignore
    ) -> Iterator[tuple[int, Any]]:
        """Yield the position and the result of every item as it is done, or its ``Failure``."""
        self._runs += 1
        for worker in self._ready:
            # A run that was ended early may have left items.
            worker.load = 0
        run, sent = _Run(enumerate(items)), (self._runs, [self._ray.put(work)])
        most = _ITEMS_PER_WORKER
        if isinstance(items, Sized):
            # With few items, no worker holds those that others could do.
            workers = max(len(self._ready) + len(self._starting), 1)
            most = max(min(most, -(-len(items) // workers)), 1)
        while self._assign(run, sent, most):
            for ref in self._wait(run):
                if ref in self._starting:
                    self._greet(ref)
                    continue
                found = self._collect(run, ref)
                if found is not None:
                    task, result, rows = found
                    advance(rows)
                    yield task.position, result

    def _assign(self, run: _Run, sent: tuple[int, list[Any]], most: int) -> bool:
        """Give items to the workers with the fewest; return whether any item is left."""
        while self._ready:
            worker = min(self._ready, key=lambda each: each.load)
            task = run.draw(worker) if worker.load < most else None
            if task is None:
                break
            # A suspect takes up the whole worker.
            worker.load += most if task.deaths else 1
            run.running[worker.actor.run.remote(*sent, task.item)] = worker, task
        if run.running or run.suspects:
            return True
        if self._ready:
            return False
        # Without a worker nothing was drawn.
        task = run.draw(_Handle(None))
        run.suspects.extend([task] if task else [])
        return task is not None

    def _wait(self, run: _Run) -> list[Any]:
        """Return results that arrived and workers that started, after a moment at most."""
        self._require_workers()
        waiting = [*run.running, *self._starting]
        ready, left = self._ray.wait(waiting, num_returns=1, timeout=1.0)
        if not ready:
            self._grow()
        elif left:
            more, _ = self._ray.wait(left, num_returns=len(left), timeout=0)
            ready += more
        return list(ready)

    def _collect(self, run: _Run, ref: Any) -> tuple[_Task, Any, int] | None:
        """Return a task that is done, its result and rows; None if it is retried."""
        worker, task = run.running.pop(ref)
        worker.load = 0 if task.deaths else worker.load - 1
        try:
            result, rows = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            raise ClusterError(
                f"a worker cannot take the work ({error.cause!r}); install the same packages on "
                "all machines of the cluster"
            ) from error
        except self._ray.exceptions.RayError as error:
            self._lose(worker, error)
            task.deaths += 1
            if task.deaths < _DEATHS_PER_ITEM:
                run.suspects.append(task)
                return None
            died = ClusterError("its workers died, perhaps for want of memory")
            result, rows = Failure(task.item, died), 0
        if not isinstance(result, Failure):
            run.done += 1
            return task, result, rows
        run.failed += 1
        self.failures += 1
        # The next items would meet the same error.
        hopeless = not run.done and run.failed >= _FAILURES_AT_FIRST
        if isinstance(result.error, WhitenIndexError if hopeless else _FATAL):
            raise result.error
        return task, result, rows

    def _greet(self, ref: Any) -> None:
        worker = self._starting.pop(ref)
        try:
            worker.node, refusal = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self._why = error
            self._failed_starts += 1
            self._kill(worker)
            if self._failed_starts < _FAILED_STARTS:
                self._start()
            return
        if refusal is None:
            self._failed_starts = 0
            self._ready.append(worker)
            return
        # It stays, so that no other worker is started there.
        self._why = refusal
        self._refused.append(worker)
        self._note(f"note: no worker on machine {worker.node}: {refusal}")

    def _lose(self, worker: _Handle, error: BaseException) -> None:
        """Replace a worker that died, on any machine."""
        if worker not in self._ready:
            return
        self.deaths += 1
        self._why = error
        self._note(f"note: a worker on {worker.node} died; others do what it had")
        self._ready.remove(worker)
        # Perhaps only its answer was lost.
        self._kill(worker)
        self._start()

    def _start(self) -> None:
        actor = self._actor_class.options(
            num_cpus=self._cpus,
            num_gpus=int(self._gpu),
            max_restarts=0,
            max_concurrency=_ITEMS_PER_WORKER + 1,
            scheduling_strategy="SPREAD",
        ).remote(self.device, self._cpus)
        self._starting[actor.check.remote(_SOFTWARE, self._check)] = _Handle(actor)

    def _grow(self) -> None:
        wanted = self._room(self._cpus) if self._workers is None else self._workers
        there = len(self._ready) + len(self._starting) + len(self._refused)
        if self._failed_starts < _FAILED_STARTS:
            for _ in range(wanted - there):
                self._start()

    def _kill(self, worker: _Handle) -> None:
        with contextlib.suppress(Exception):
            self._ray.kill(worker.actor)

    def _require_workers(self) -> None:
        if self._ready:
            self._none_since = None
            return
        self._none_since = self._none_since or time.monotonic()
        if self._starting and time.monotonic() - self._none_since < _SECONDS_WITHOUT_WORKER:
            return
        if isinstance(self._why, WhitenIndexError):
            raise self._why
        why = f" ({first_line(self._why)})" if self._why else ""
        raise ClusterError(
            f"no worker could be started on the cluster{why}; look at ray status, and at whether "
            "whiten-index is installed on its machines. Finished shards are kept: run the same "
            "command again"
        )

    def _machines(self) -> list[tuple[int, int]]:
        resources = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in resources]

    def _room(self, share: int) -> int:
        """Return the number of workers with so many cores each that find room."""
        return sum(
            min(cpus // share, gpus) if self._gpu else cpus // share
            for cpus, gpus in self._machines()
        )

    def _cores_per_worker(self) -> int:
        """Return the most cores with which all workers find room."""
        machines = self._machines()
        per_machine = (gpus if self._gpu else min(cpus, 1) for cpus, gpus in machines)
        wanted = max(self._workers or sum(per_machine), 1)
        for share in range(sum(cpus for cpus, _ in machines) // wanted, 1, -1):
            if self._room(share) >= wanted:
                return share
        return 1

    def _size_text(self) -> str:
        cpus, gpus = (sum(each) for each in zip(*self._machines(), strict=True))
        return f"the cluster has {cpus} cores and {gpus} GPUs"


@contextlib.contextmanager
def cluster(
    address: str | None,
    *,
    workers: int | None,
    gpu: bool | None,
    check: Callable[[], None],
    note: Callable[[str], None],
) -> Iterator[RayExecutor]:
    """Connect to a cluster for the block, and start workers on it.

    Args:
        address: ``host:port`` of its head, ``auto`` for the one of this machine, ``local`` for
            one that is started here and ends with the block; None for the one that
            ``RAY_ADDRESS`` names, else one that runs on this machine, else one started here.
        workers: None for one per GPU, or one per machine where no GPU is used.
        gpu: whether each has a GPU; None to use those that the cluster has.
        check: called by every new worker; it raises where the machine cannot do the work.
        note: called with sentences for the user.
    """
    ray = _load_ray()
    if address in (None, "auto"):
        # Empty for a cluster of this machine, if any.
        address = os.environ.get("RAY_ADDRESS") or address or ""
    require_no_secret(address, what="--address")
    with _connection(ray, address, note):
        executor = RayExecutor(ray, workers=workers, gpu=gpu, check=check, note=note)
        try:
            yield executor
        finally:
            executor.close()


def _load_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ.get("RAY_AUTH_TOKEN"):
        # Ray ignores a token without this mode, which it reads while it is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Otherwise Ray hides GPUs from tasks that ask for none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    require_installed("ray", by="--runner ray", extra="ray")
    import ray

    # Ray prints deaths of workers to standard output, which is for results.
    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
    return ray


@contextlib.contextmanager
def _connection(ray: Any, address: str, note: Callable[[str], None]) -> Iterator[None]:
    """Be connected for the block; a connection that was made before it stays."""
    if ray.is_initialized():
        if address not in ("", ray.get_runtime_context().gcs_address):
            note(f"note: Ray is connected already, so that {address} is ignored")
        yield
        return
    _connect(ray, address)
    try:
        yield
    finally:
        with _kept_handlers():
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    where = f"at {address}" if address else "on this machine"
    try:
        _require_open_port(address)
        with _kept_handlers():
            if address == "local":
                _init_local(ray)
            elif address:
                _init(ray, address)
            else:
                try:
                    _init(ray, "auto")
                except ConnectionError:
                    _init_local(ray)
    except Exception as error:
        raise ClusterError(
            f"no Ray cluster can be reached {where} ({first_line(error)}); check --address, or "
            "RAY_ADDRESS, such as HEAD:6379; and, where it has a token, that RAY_AUTH_MODE=token "
            "and RAY_AUTH_TOKEN are set as it has them; or start one with: ray start --head"
        ) from None


def _require_open_port(address: str) -> None:
    """Fail soon for a wrong ``host:port``, or a silent one; Ray would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host and port.isdecimal():
        place = (host.strip("[]"), int(port))
        with socket.create_connection(place, _SECONDS_TO_CONNECT) as probe:
            # The first bytes of HTTP/2, which gRPC answers; an encrypted port hangs up.
            probe.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            probe.recv(1)


def _init(ray: Any, address: str, **options: Any) -> None:
    ray.init(address=address, logging_level="ERROR", log_to_driver=False, **options)


def _init_local(ray: Any) -> None:
    # Every process that reaches its ports can run code, so it has its own token and an address of
    # loopback. For 127.0.0.1 Ray would take the address that other machines see.
    if "RAY_AUTH_TOKEN" not in os.environ:
        # Otherwise Ray writes a token into the home folder, where it counts for every cluster.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Ray remembers that there was none.
        if loader := getattr(ray._raylet, "AuthenticationTokenLoader", None):
            loader.instance().reset_cache()
    loopback = {"_node_ip_address": "127.0.0.2"} if platform.system() == "Linux" else {}
    _init(ray, "local", include_dashboard=False, **loopback)


@contextlib.contextmanager
def _kept_handlers() -> Iterator[None]:
    """Restore the handlers of signals that Ray replaces."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
