"""The one place that imports faiss, and says what to install where it is missing or too old."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

from threadpoolctl import threadpool_limits

from whiten_index.errors import ConfigError, StorageError

OLDEST = (1, 15)
_INSTALL = "pip install 'whiten-index[cpu]' (or 'whiten-index[gpu]' on a CUDA machine)"
# FAISS 1.15 takes a matrix product only from this many queries on; its default is never.
_BLAS_FROM_QUERIES = 20
_WAITING = "OMP_WAIT_POLICY"


@functools.cache
def load_faiss() -> Any:
    """Return the faiss module, of the cpu or the gpu package alike.

    Raises:
        ConfigError: neither is installed, or the release is too old.
        StorageError: the system does not let it be loaded, as with too little memory.
    """
    try:
        with _resting_threads():
            import faiss
    except ModuleNotFoundError as error:
        raise ConfigError(f"FAISS is not installed; {_INSTALL}") from error
    except (ImportError, OSError, MemoryError) as error:
        raise StorageError(
            f"FAISS is installed and cannot be loaded ({error}); fix that and run the same command "
            "again"
        ) from error
    if tuple(int(part) for part in faiss.__version__.split(".")[:2]) < OLDEST:
        raise ConfigError(
            f"FAISS {faiss.__version__} is too old, 1.15 is the oldest that works; {_INSTALL}"
        )
    faiss.cvar.distance_compute_blas_threshold = _BLAS_FROM_QUERIES
    return faiss


@contextlib.contextmanager
def _resting_threads() -> Iterator[None]:
    """Have FAISS's threads rest between its calls, unless the user set how they wait.

    Its OpenMP reads this once, when it is loaded. Threads that spin hold the cores that numpy's
    BLAS waits for: a product of 0.05 ms after a call of FAISS took 8, two ticks of the scheduler.
    """
    if _WAITING in os.environ:
        yield
        return
    os.environ[_WAITING] = "passive"
    try:
        yield
    finally:
        del os.environ[_WAITING]


def describe_faiss() -> dict[str, Any]:
    """Return release and variant of FAISS: whether it was built for GPUs, and how many it sees."""
    faiss = load_faiss()
    gpus = int(faiss.get_num_gpus()) if hasattr(faiss, "get_num_gpus") else 0
    built_for_gpu = hasattr(faiss, "StandardGpuResources")
    return {
        "version": faiss.__version__,
        "variant": "gpu" if built_for_gpu else "cpu",
        "gpus": gpus,
    }


def set_threads(threads: int) -> None:
    """Set how many CPU threads FAISS uses, and BLAS, which takes its own number otherwise."""
    load_faiss().omp_set_num_threads(threads)
    threadpool_limits(limits=threads, user_api="blas")


def first_line(error: Exception) -> str:
    """Return what FAISS meant to say, without the C++ function and file it prints before."""
    text = str(error).strip().rpartition("\n")[2] or str(error)
    return text.rpartition(": ")[2][:200] if "Error in" in text else text[:200]
