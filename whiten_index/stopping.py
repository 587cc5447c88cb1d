"""How a long job is stopped from outside: at its next batch, or at once when asked twice."""

from __future__ import annotations

import signal
from types import FrameType

INTERRUPTED = 130


class _Stop:
    """Whether a stage is running, and whether someone asked it to end."""

    in_stage = False
    asked = False


def stop_on_signals() -> None:
    """Treat a scheduler's SIGTERM like Ctrl-C, also where Ctrl-C itself is ignored (``nohup``).

    Within a stage the first signal is heeded between two batches: an exception raised wherever the
    interpreter happens to be can be lost in a callback of someone else's library.
    """
    signal.signal(signal.SIGTERM, _hear)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _hear)


def enter_stage() -> None:
    """Say that ``heed_stop`` will be called from now on."""
    _Stop.in_stage = True


def leave_stage() -> None:
    """Say that it will not, so that signals act at once."""
    _Stop.in_stage = False


def heed_stop() -> None:
    """Stop here if a signal asked for it.

    Raises:
        KeyboardInterrupt: it did.
    """
    if _Stop.asked:
        raise KeyboardInterrupt


def _hear(_: int, __: FrameType | None) -> None:
    if _Stop.asked or not _Stop.in_stage:
        raise KeyboardInterrupt
    _Stop.asked = True
