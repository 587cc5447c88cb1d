"""Training, adding and searching on a GPU, where FAISS was built for one; files stay the CPU's.

Only the index proper goes there: FAISS's transforms do not clone to a GPU.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False)
class Placed:
    """An index where it is worked on.

    Attributes:
        index: on the GPU, or the CPU's own.
        device: ``gpu`` or ``cpu``.
        resources: of the GPU, to be kept as long as the index is.
    """

    index: Any
    device: str
    resources: Any = None

    def on_cpu(self) -> Any:
        """Return the index as the CPU has it, with what it holds and is set to."""
        return self.index if self.device == "cpu" else load_faiss().index_gpu_to_cpu(self.index)

    def attempt(
        self,
        work: Callable[[Any], object],
        *,
        instead: Any,
        device: str,
        note: Callable[[str], None],
    ) -> Placed:
        """Work on the index; where a GPU's memory runs out, work on a CPU's from the start.

        Args:
            work: is given the index to change.
            instead: the CPU's own, as it was before the work.
            device: as asked for; ``gpu`` insists.
            note: hears that the CPU takes over.

        Returns:
            Where the work was done.

        Raises:
            ConfigError: the memory of a GPU that was asked for ran out.
        """
        try:
            work(self.index)
        except (RuntimeError, ConfigError) as error:
            if self.device == "cpu" or not _ran_out(error):
                raise
            if device == "gpu":
                raise ConfigError(
                    "--index-device gpu: the GPU's memory ran out; use cpu or auto, a codec of "
                    "fewer bits such as IVF1024,SQ8, or free memory on the GPU"
                ) from error
        else:
            return self
        note("note: the index is made on the CPU: the GPU's memory ran out")
        work(instead)
        return Placed(instead, "cpu")


def _ran_out(error: BaseException) -> bool:
    """Tell whether an error, or what caused it, is that of memory that ran out."""
    causes = [error, *([error.__cause__] if error.__cause__ else [])]
    return any(words in str(each).lower() for each in causes for words in _OUT_OF_MEMORY)


def place(
    inner: Any, device: str, *, note: Callable[[str], None], to_search: bool = False
) -> Placed:
    """Move an index to the GPU, or leave it where it is.

    Args:
        inner: the index proper, without transforms.
        device: ``auto`` takes a GPU where there is one that can hold this kind, ``gpu`` insists.
        note: hears why ``auto`` stays on the CPU though there is a GPU.
        to_search: whether it is searched there as it is set, and not only made.

    Raises:
        ConfigError: ``gpu`` was asked for and cannot be had.
    """
    require_device(device)
    if device == "cpu":
        return Placed(inner, "cpu")
    reason = _missing()
    if reason is None:
        try:
            if to_search:
                _require_few_lists(inner)
            return _moved(inner)
        except ConfigError as error:
            reason = str(error)
        if device == "auto":
            done = "searched" if to_search else "made"
            note(f"note: the index is {done} on the CPU: {reason}")
    if device == "gpu":
        raise ConfigError(f"--index-device gpu: {reason}; use cpu or auto")
    return Placed(inner, "cpu")


def require_device(device: str) -> None:
    """Refuse a device that is unknown, or a GPU where FAISS has none.

    Raises:
        ConfigError: it cannot be had.
    """
    if device not in DEVICES:
        raise ConfigError(f"--index-device {device!r} is unknown; use {', '.join(DEVICES)}")
    if device == "gpu" and (reason := _missing()) is not None:
        raise ConfigError(f"--index-device gpu: {reason}; use cpu or auto")


def quiet(_: str) -> None:
    """Say nothing of where an index is: what is made of it tells, or is the same everywhere."""


def takes(inner: Any) -> bool:
    """Tell whether a kind of index goes to GPUs at all."""
    return type(load_faiss().downcast_index(inner)).__name__ in _KINDS


def gpu_name() -> str | None:
    """Return the name of the GPU that indexes go to, None where there is none."""
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
    """Return what there is not, None where FAISS sees a GPU."""
    faiss = load_faiss()
    if not hasattr(faiss, "StandardGpuResources"):
        return "this FAISS is built for CPUs alone (pip install 'whiten-index[gpu]')"
    return None if faiss.get_num_gpus() > 0 else "FAISS sees no GPU"


def _require_few_lists(inner: Any) -> None:
    lists = getattr(inner, "nprobe", 0)
    if lists > MOST_ON_GPU:
        raise ConfigError(f"a query looks into {lists} lists, and a GPU takes {MOST_ON_GPU}")


def _moved(inner: Any) -> Placed:
    """Return an index on the first GPU.

    Raises:
        ConfigError: its kind does not go there, or the GPU cannot take it.
    """
    faiss = load_faiss()
    kind = type(faiss.downcast_index(inner)).__name__
    if not takes(inner):
        raise ConfigError(f"{kind} is not known to GPUs")
    resources = faiss.StandardGpuResources()
    try:
        return Placed(faiss.index_cpu_to_gpu(resources, _FIRST, inner), "gpu", resources)
    except RuntimeError as error:
        raise ConfigError(f"the GPU does not take {kind} ({first_line(error)})") from error
