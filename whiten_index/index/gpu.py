"""Train, fill and search an index on a GPU if FAISS was built for one; files stay the CPU's.

Only the index behind the transforms goes there: FAISS's transforms do not clone to a GPU.
"""

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from whiten_index.errors import ConfigError
from whiten_index.index.library import first_line, load_faiss

DEVICES = ("auto", "cpu", "gpu")
# The kinds that keep their codes as they are on both sides, with the id of every row.
_KINDS = ("IndexFlat", "IndexFlatIP", "IndexIVFFlat", "IndexIVFScalarQuantizer", "IndexIVFPQ")
_FIRST = 0
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Rows a query, and lists it looks into, that FAISS's kernels can take.
MOST_ON_GPU = 2_048
# As the CUDA runtime, RMM and C++ say it.
_OUT_OF_MEMORY = ("out of memory", "out_of_memory", "bad_alloc")


class GpuMemoryError(ConfigError):
    """The memory of a GPU ran out."""


@dataclass(frozen=True, eq=False)
class DeviceIndex:
    """An index on the device that works on it."""

    index: Any  # on the GPU, or the CPU's own
    device: str  # `gpu` or `cpu`
    resources: Any = None  # of the GPU, kept as long as the index
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def place(
        cls,
        inner: Any,
        device: str,
        *,
        note: Callable[[str], None] | None = None,
        to_search: bool = False,
    ) -> "DeviceIndex":
        """Move the index behind the transforms to the GPU, or leave it where it is.

        ``auto`` takes a GPU if there is one that can hold this kind, and notes the reason if not;
        ``gpu`` insists. ``to_search`` checks the index's own settings too.
        """
        require_device(device)
        if device == "cpu" or _missing() is not None:
            return cls(inner, "cpu")
        try:
            return cls._moved(inner, to_search=to_search)
        except ConfigError as error:
            if device == "gpu":
                raise ConfigError(f"--index-device gpu: {error}; use cpu or auto") from error
            if note is not None:
                done = "searched" if to_search else "made"
                note(f"note: the index is {done} on the CPU: {error}")
        return cls(inner, "cpu")

    @classmethod
    def _moved(cls, inner: Any, *, to_search: bool) -> "DeviceIndex":
        faiss = load_faiss()
        kind = type(faiss.downcast_index(inner)).__name__
        if not runs_on_gpu(inner):
            raise ConfigError(f"{kind} is not known to GPUs")
        if to_search and (lists := getattr(inner, "nprobe", 0)) > MOST_ON_GPU:
            raise ConfigError(f"a query looks into {lists} lists, and a GPU takes {MOST_ON_GPU}")
        resources = faiss.StandardGpuResources()
        try:
            return cls(faiss.index_cpu_to_gpu(resources, _FIRST, inner), "gpu", resources)
        except RuntimeError as error:
            raise ConfigError(f"the GPU does not take {kind} ({first_line(error)})") from error

    def on_cpu(self) -> Any:
        """Return the index in the CPU's form, with its rows and settings."""
        return self.index if self.device == "cpu" else load_faiss().index_gpu_to_cpu(self.index)

    @contextlib.contextmanager
    def working(self) -> Iterator[Any]:
        """Give the index to work on; ``GpuMemoryError`` if the memory of a GPU runs out."""
        try:
            yield self.index
        except (RuntimeError, ConfigError) as error:
            causes = [error, *([error.__cause__] if error.__cause__ else [])]
            ran_out = any(words in str(each).lower() for each in causes for words in _OUT_OF_MEMORY)
            if self.device == "cpu" or not ran_out:
                raise
            raise GpuMemoryError(
                "--index-device gpu: the GPU's memory ran out; use cpu or auto, a codec of fewer "
                "bits such as IVF1024,SQ8, or free memory on the GPU"
            ) from error


def require_device(device: str) -> None:
    """Refuse an unknown device, or a GPU that FAISS cannot use."""
    if device not in DEVICES:
        raise ConfigError(f"--index-device {device!r} is unknown; use {', '.join(DEVICES)}")
    if device == "gpu" and (reason := _missing()) is not None:
        raise ConfigError(f"--index-device gpu: {reason}; use cpu or auto")


def runs_on_gpu(inner: Any) -> bool:
    """Return whether this kind of index can be moved to a GPU."""
    return type(load_faiss().downcast_index(inner)).__name__ in _KINDS


def most_on_gpu(inner: Any) -> int:
    """Return the rows a query that FAISS's kernels take of this index; more end the process.

    12 bytes a row in each of 4 warps, and 8 bytes a dim of an 8-bit codec, must fit 48 KiB
    (facebookresearch/faiss#3207).
    """
    if not hasattr(inner, "sq"):
        return MOST_ON_GPU
    most = ((48 << 10) - 8 * inner.d) // 48
    return 1 << most.bit_length() - 1 if most >= 32 else 0


def gpu_name() -> str | None:
    """Return the name of the GPU that indexes go to, None without one."""
    if _missing() is not None:
        return None
    # The first that this process sees, by number or UUID.
    visible = os.environ.get(_VISIBLE, "").partition(",")[0].strip() or str(_FIRST)
    command = ["nvidia-smi", f"--id={visible}", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "a GPU"
    return found.stdout.strip() or "a GPU"


def _missing() -> str | None:
    """Return the reason why FAISS has no GPU, None if it has one."""
    faiss = load_faiss()
    if not hasattr(faiss, "StandardGpuResources"):
        return "this FAISS is built for CPUs alone (pip install 'whiten-index[gpu]')"
    return None if faiss.get_num_gpus() > 0 else "FAISS sees no GPU"
