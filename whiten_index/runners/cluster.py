"""Connecting to a Ray cluster for the length of a build."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from whiten_index.artifacts.paths import require_no_secret
from whiten_index.errors import ClusterError, ConfigError
from whiten_index.runners.crew import Crew, first_line
from whiten_index.runners.knock import knock
from whiten_index.runners.slots import Size

# Who can reach its ports can run code: a cluster for one build has a token of its own, and is known
# by an address of loopback; for 127.0.0.1 Ray would take the address that other machines see.
_ON_THIS_MACHINE: dict[str, Any] = {"include_dashboard": False}
if platform.system() == "Linux":
    _ON_THIS_MACHINE["_node_ip_address"] = "127.0.0.2"


def load_ray() -> Any:
    """Return the module, imported on first need.

    Raises:
        ConfigError: it is not installed.
    """
    # Its own word on how it is used is not for those who only wanted an index.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ.get("RAY_AUTH_TOKEN"):
        # Else it is not looked at; the mode is read while the module is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Nobody is to be cut off from GPUs that Ray was not asked for.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "--runner ray needs Ray, which is not installed; run: pip install 'whiten-index[ray]'"
        ) from error
    # It prints what became of workers to standard output, which is for results; the crew tells.
    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = _say_nothing
    return ray


def _say_nothing(*_: Any, **__: Any) -> None:
    pass


@contextlib.contextmanager
def cluster(address: str | None, size: Size, note: Callable[[str], None]) -> Iterator[Crew]:
    """Connect to a cluster for the block, and start workers on it.

    Args:
        address: ``host:port`` of its head, ``auto`` for the one of this machine, ``local`` for
            one that is started here and ends with the block; None for what ``RAY_ADDRESS``
            names, else one of this machine that runs, else one started here.
        size: of the crew.
        note: told what a user should know.

    Raises:
        ConfigError: Ray is not installed, or its cluster is too small for what is asked.
        ClusterError: there is no cluster at that address.
    """
    ray = load_ray()
    with _CONNECTION.held(ray, _named(address), note):
        crew = Crew(ray, size, note)
        try:
            yield crew
        finally:
            crew.end()


def _named(address: str | None) -> str:
    """Return the address that counts, empty for that of a cluster of this machine, if any."""
    if address in (None, "auto"):
        # Ray does so too.
        address = os.environ.get("RAY_ADDRESS") or address or ""
    require_no_secret(address, what="--address")
    return address


class _Connection:
    """The connection of this process, which its builds share; the last of them ends it."""

    def __init__(self) -> None:
        self._lock, self._builds, self._address = threading.Lock(), 0, ""

    @contextlib.contextmanager
    def held(self, ray: Any, address: str, note: Callable[[str], None]) -> Iterator[None]:
        """Be connected for the block; a connection that the program itself made is left alone."""
        mine = False
        try:
            with self._lock:
                there = ray.is_initialized()
                mine = self._builds > 0 or not there
                self._builds += mine
                if not there:
                    _connect(ray, address)
                    self._address = address
            if there and address not in ("", self._address):
                note(f"note: Ray is connected already, so that {address} is not looked at")
            yield
        finally:
            with self._lock:
                self._builds -= mine
                if mine and not self._builds:
                    self._address = ""
                    with _own_handlers():
                        ray.shutdown()


_CONNECTION = _Connection()


def _connect(ray: Any, address: str) -> None:
    where = f"at {address}" if address else "on this machine"
    try:
        # Ray itself would try for minutes.
        knock(address)
        with _own_handlers():
            try:
                # Without a word, one that runs already.
                _init(ray, address or "auto")
            except ConnectionError:
                if address:
                    raise
                _init(ray, "local")
    except Exception as error:
        raise ClusterError(
            f"no Ray cluster can be reached {where} ({first_line(error)}); check --address, or "
            "RAY_ADDRESS, such as HEAD:6379; and, where it has a token, that RAY_AUTH_MODE=token "
            "and RAY_AUTH_TOKEN are set as it has them; or start one with: ray start --head"
        ) from error


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """Put what stops a build in good order back in place of what Ray puts there, or takes away."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _init(ray: Any, address: str) -> None:
    mine = _ON_THIS_MACHINE if address == "local" else {}
    if mine:
        # Ray wants one for a cluster that it starts, and would leave its own in the user's home,
        # where it counts for every other cluster too.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        _forget_tokens()
    ray.init(address=address, logging_level="ERROR", log_to_driver=False, **mine)


def _forget_tokens() -> None:
    """Have Ray look for a token again; looking for a cluster it may have found none."""
    with contextlib.suppress(ImportError, AttributeError):
        from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

        AuthenticationTokenLoader.instance().reset_cache()
