r"""Standard output and error: what a terminal may be sent, and writes that fail.

Control characters are shown as escapes; see ``without_controls``. A write that fails never stops
the work: later text is dropped, and the process ends with another status.
"""

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from whiten_index.errors import StorageError, hide_secrets
from whiten_index.paths import without_controls

# A shell reports this status for a process that SIGPIPE ended.
PIPE_CLOSED = 141
_REASONS = {errno.ENOSPC: "the disk is full", errno.EBADF: "it is closed"}


class _Stream:
    """Standard output or error; its ``error`` is the first one of a write."""

    def __init__(self, stream: Any, name: str) -> None:
        self.error: OSError | None = None
        self.name = name
        self._closed = stream is None
        # Libraries ask for its encoding and other attributes.
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text with control characters as escapes."""
        if self._closed and self.error is None:
            self.error = OSError(errno.EBADF, os.strerror(errno.EBADF))
        # A progress bar goes back to the start of its line.
        start = "\r" if text.startswith("\r") and self.name == "standard error" else ""
        shown = start + without_controls(text[len(start) :])
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._try(self._stream.write, shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, work: Callable[..., object], *text: str) -> None:
        if self.error is not None:
            return
        try:
            work(*text)
        except OSError as error:
            self.error = error

    def silence(self) -> None:
        """Send what is still buffered nowhere, or the interpreter fails as it ends."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._stream.flush()


class Streams:
    """Standard output and error of a command."""

    def __init__(self) -> None:
        self.out = _Stream(sys.stdout, "standard output")
        self.err = _Stream(sys.stderr, "standard error")

    def end(self, status: int) -> int:
        """Flush both, report what could not be written, and return the status to end with."""
        self.out.flush()
        if self.out.error is not None and self.out.error.errno != errno.EPIPE:
            reason = _REASONS.get(self.out.error.errno or 0, self.out.error.strerror)
            self.err.write(
                f"Error: cannot write {self.out.name}: {reason}; what the command did is kept, but "
                "its output is not whole; send it elsewhere and run the same command again\n"
            )
        self.err.flush()
        failed = [stream for stream in (self.out, self.err) if stream.error is not None]
        for stream in failed:
            stream.silence()
        if status or not failed:
            return status
        pipes = all(each.error is not None and each.error.errno == errno.EPIPE for each in failed)
        return PIPE_CLOSED if pipes else StorageError.exit_code


@contextlib.contextmanager
def guarded() -> Iterator[Streams]:
    """Let all that this process prints during the block go through ``Streams``."""
    before, streams = (sys.stdout, sys.stderr), Streams()
    sys.stdout, sys.stderr = streams.out, streams.err
    try:
        yield streams
    finally:
        sys.stdout, sys.stderr = before


def print_exception(error: BaseException) -> None:
    """Print a traceback; the message of a library may name an address with its password."""
    sys.stderr.write(hide_secrets("".join(traceback.format_exception(error))))


def open_closed_descriptors() -> None:
    """Open those of standard input, output and error that are closed.

    Else the next file that is opened would take the place, and what a library prints go into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
