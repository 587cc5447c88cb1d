"""SIGTERM and Ctrl-C: the first one stops a command or job as ``KeyboardInterrupt``."""

import signal
import sys
from types import FrameType
from typing import Any

INTERRUPTED = 130


class _State:
    stopped = False


def stop_on_signals() -> None:
    """Treat a scheduler's SIGTERM like Ctrl-C, also where Ctrl-C is ignored (``nohup``).

    A second Ctrl-C behaves as Python's own. A second SIGTERM is ignored, since ``timeout`` sends
    two at once.
    """
    _State.stopped = False
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    sys.unraisablehook = _again


def raise_if_interrupted() -> None:
    """Stop here if a signal came before.

    Libraries drop an exception that is raised in a callback, so progress reports ask again.
    """
    if _State.stopped:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt


def status_of(status: int) -> int:
    """Return the status to end with: click ends with 1 if a signal comes while it reads options."""
    return INTERRUPTED if _State.stopped and status == 1 else status


def _stop(_: int, __: FrameType | None) -> None:
    _State.stopped = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise KeyboardInterrupt


def _again(dropped: Any) -> None:
    """Stop a moment later if Python dropped the exception, as in ``__del__`` and in callbacks."""
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
