"""Connection to a Ray cluster, and the workers of a build on it."""

import contextlib
import os
import platform
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from whiten_index.distributed.ray_executor import RayExecutor
from whiten_index.errors import ClusterError, first_line, require_installed
from whiten_index.paths import require_no_secret

_SECONDS_TO_CONNECT = 10.0


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


class _Connection:
    """State of this process: sessions that share the connection, and its address."""

    lock = threading.Lock()
    sessions = 0
    address = ""


@contextlib.contextmanager
def _connection(ray: Any, address: str, note: Callable[[str], None]) -> Iterator[None]:
    """Be connected for the block; the last session of this process disconnects."""
    with _Connection.lock:
        connected = ray.is_initialized()
        # A connection that the user's program made is left alone.
        ours = not connected or _Connection.sessions > 0
        if not connected:
            _connect(ray, address)
            _Connection.address = address
        elif address not in ("", _Connection.address):
            note(f"note: Ray is connected already, so that {address} is ignored")
        _Connection.sessions += ours
    try:
        yield
    finally:
        with _Connection.lock:
            _Connection.sessions -= ours
            if ours and not _Connection.sessions:
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
        ) from error


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
    """Start a cluster that only this process can use."""
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
