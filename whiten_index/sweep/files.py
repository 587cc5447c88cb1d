"""Arrays in files: what many points read may be larger than the memory."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import writing


def file_array(path: Path, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array of zeros that lives in a new file, whose room on the disk is reserved.

    An array in an older file of that name stays as it is for whoever has it.

    Raises:
        StorageError: the disk has not that much room, or cannot be written.
    """
    size = max(math.prod(shape), 1) * np.dtype(dtype).itemsize
    with writing(path):
        path.unlink(missing_ok=True)
    with writing(path), path.open("wb") as file:
        # Writing to a mapped file on a full disk would end the process without a word.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)


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
