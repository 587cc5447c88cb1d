"""The only import of faiss, and the writing of its files."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from threadpoolctl import threadpool_limits

from whiten_index.errors import ConfigError, StorageError

INDEX = "index.faiss"
OLDEST = (1, 15)
_INSTALL = "pip install 'whiten-index[cpu]' (or 'whiten-index[gpu]' on a CUDA machine)"
# FAISS 1.15 takes a matrix product only from this many queries on; its default is never.
_BLAS_FROM_QUERIES = 20
_WAITING = "OMP_WAIT_POLICY"
_most_threads: int | None = None


@functools.cache
def load_faiss() -> Any:
    """Return the faiss module, of the cpu or the gpu package alike."""
    try:
        with _resting_threads():
            import faiss
    except ModuleNotFoundError as error:
        raise ConfigError(f"FAISS is not installed; {_INSTALL}") from error
    except (ImportError, OSError, MemoryError, RuntimeError) as error:
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
    """Let FAISS's threads rest between its calls, unless the user set their policy."""
    # OpenMP reads this once, when it is loaded. Threads that spin hold the cores that numpy's BLAS
    # waits for: a product of 0.05 ms after a call of FAISS took 8, two ticks of the scheduler.
    if _WAITING in os.environ:
        yield
        return
    os.environ[_WAITING] = "passive"
    try:
        yield
    finally:
        del os.environ[_WAITING]


def describe_faiss() -> dict[str, Any]:
    """Return the release of FAISS, its variant (cpu or gpu) and the number of GPUs."""
    faiss = load_faiss()
    gpus = int(faiss.get_num_gpus()) if hasattr(faiss, "get_num_gpus") else 0
    variant = "gpu" if hasattr(faiss, "StandardGpuResources") else "cpu"
    return {"version": faiss.__version__, "variant": variant, "gpus": gpus}


def set_threads(threads: int | None) -> None:
    """Load FAISS, and set the CPU threads of it and of BLAS; None leaves both as they are."""
    global _most_threads
    faiss = load_faiss()
    if threads is not None:
        _most_threads = threads
        faiss.omp_set_num_threads(threads)
        threadpool_limits(limits=threads, user_api="blas")


@contextlib.contextmanager
def threads_for(queries: int) -> Iterator[None]:
    """Give FAISS one thread for one query, else the number of ``set_threads``.

    More would only be woken and waited for: with lists, graphs and codes, and up to 65,536 lists,
    none was quicker on 2 and on 16 cores. Flat indexes are not searched by FAISS; see ``exact.py``.
    """
    faiss = load_faiss()
    # OpenMP keeps this number for each thread of the process.
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1 if queries == 1 else _most_threads or before)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def first_line(error: Exception) -> str:
    """Return the message of a FAISS error without the C++ function and file before it."""
    text = str(error).strip().rpartition("\n")[2] or str(error)
    return text.rpartition(": ")[2][:200] if "Error in" in text else text[:200]


def write_index(index: Any, path: Path) -> None:
    """Write a FAISS index; unlike FAISS's own writer, notice a disk that fills up."""
    faiss = load_faiss()
    with path.open("wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
        file.flush()
        os.fsync(file.fileno())


def release_memory() -> None:
    """Return freed memory that Arrow or the C library keep to the system."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
