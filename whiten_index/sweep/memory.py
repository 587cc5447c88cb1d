"""How much memory the machine has left."""

from __future__ import annotations

from pathlib import Path


def available_memory() -> int | None:
    """Return the bytes of memory that can still be used, None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return None
