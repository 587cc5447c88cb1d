"""Python's collector of cycles, held back where it works long and finds nothing.

Importing torch and transformers makes some million objects that stay. Walking them over and over
while more are made, and once more when the process ends, took a third of the 6.9 seconds in which
a process loaded a small model, encoded a sentence and was gone (2 cores, measured).
"""

from __future__ import annotations

import atexit
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Held:
    """How many callers hold the collector back, and whether it was on before the first."""

    lock = threading.Lock()
    callers = 0
    was_on = False
    for_good = False


@contextmanager
def collector_held_back() -> Iterator[None]:
    """Collect no cycles while large packages are imported; threads may hold it back together."""
    with _Held.lock:
        if not _Held.callers:
            _Held.was_on = gc.isenabled()
            gc.disable()
        _Held.callers += 1
    try:
        yield
    finally:
        with _Held.lock:
            _Held.callers -= 1
            if not _Held.callers and _Held.was_on:
                if _Held.for_good:
                    gc.freeze()
                gc.enable()


def spare_what_was_imported() -> None:
    """Let this process never walk over what was imported, not even at its end.

    For a process that is this package's own: whatever else is there by then is never collected
    either. Exit handlers still run, all of them before the end.
    """
    _Held.for_good = True
    # The first that is registered is called last.
    atexit.register(gc.freeze)
