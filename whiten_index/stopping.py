"""How a long job is stopped from outside: at its next batch, or at once when asked twice."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
# Whoever passes a signal on (timeout, uv) does so beside the terminal: both come at one moment.
_SECONDS_OF_ONE_REQUEST = 0.1
_LAST_WORDS = (
    b"Stopped at once. What was finished is kept; the same command takes up where this one "
    b"stopped.\n"
)


class _Stop:
    """Whether a stage is running, or all work is over with which status; when someone first asked.

    The status is None as long as it is not known.
    """

    in_stage = False
    over = False
    status: int | None = None
    asked: float | None = None


def stop_on_signals() -> None:
    """Treat a scheduler's SIGTERM like Ctrl-C, also where Ctrl-C itself is ignored (``nohup``).

    Within a stage the first signal is heeded between two batches: an exception raised wherever the
    interpreter happens to be can be lost in a callback of someone else's library. The second one
    ends the process there and then, since a thread that waits for the network would be waited for
    for ever; what is in the store is whole at every moment.
    """
    _Stop.over, _Stop.status, _Stop.asked = False, None, None
    signal.signal(signal.SIGTERM, _hear)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _hear)


def finish_undisturbed(status: int | None = None) -> None:
    """Let no single signal change how the process ends: what is left is to say that all is done.

    A second one still ends the process there and then, since a thread or a folder that hangs would
    be waited for for ever. The first may be the one that ended the work.

    Args:
        status: with which the process ends, also there and then; None leaves it as it was told
            before, or at 130.
    """
    _Stop.over = True
    if status is not None:
        _Stop.status = status
    # The interpreter takes handlers away before it has ended, and leaves ignored what is ignored.
    # Not at once: it first waits for threads, which a second signal need not.
    atexit.unregister(_ignore)
    atexit.register(_ignore)


def _ignore() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is _hear:
            signal.signal(number, signal.SIG_IGN)


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
    if _Stop.asked is not None:
        raise KeyboardInterrupt


def _hear(_: int, __: FrameType | None) -> None:
    now = time.monotonic()
    if _Stop.asked is None:
        _Stop.asked = now
        if not (_Stop.in_stage or _Stop.over):
            raise KeyboardInterrupt
    elif now - _Stop.asked > _SECONDS_OF_ONE_REQUEST:
        _exit_at_once()


def _exit_at_once() -> NoReturn:
    # Not through sys.stderr, in the middle of whose own writing the signal may have come.
    with suppress(OSError, ValueError, AttributeError):
        stderr = sys.stderr.fileno()
        os.write(stderr, b"\n" * os.isatty(stderr) + _LAST_WORDS)
    os._exit(INTERRUPTED if _Stop.status is None else _Stop.status)
