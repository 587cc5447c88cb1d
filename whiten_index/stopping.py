"""How a long job is stopped from outside."""

from __future__ import annotations

import signal

INTERRUPTED = 130


def stop_on_sigterm() -> None:
    """Treat a scheduler's SIGTERM like Ctrl-C, also where Ctrl-C itself is ignored (``nohup``)."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
