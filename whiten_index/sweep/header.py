"""The line that starts a run: what the figures depend on, and the identity made of it."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import whiten_index
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.index import describe_faiss, gpu_name
from whiten_index.sweep.config import SweepConfig
from whiten_index.sweep.dataset import Dataset

# Raised when a figure comes to be measured in another way.
_MEASURES = 3
# What of a machine tells its figures from another's.
_TELLING = ("processor", "cores", "gpu")


def header(config: SweepConfig, dataset: Dataset, threads: int) -> dict[str, Any]:
    """Return the record that starts a run.

    Its ``run`` names all that a figure depends on but for the point itself, so that points may be
    added later to those measured before, and never stand beside figures of something else.
    """
    machine, versions = _machine(config.build.index_device), _versions()
    settings = _settings(config, dataset, threads, machine)
    judged = dataset.judged
    identity = {
        "corpus": dataset.encoded.record.fingerprint,
        "encoder": dataset.encoded.store.fingerprint,
        "queries": None if judged is None else judged.digest(dataset.encoded.store.encoder),
        "settings": settings,
        "machine": [machine[name] for name in _TELLING if name in machine],
        "versions": versions,
        "measures": _MEASURES,
    }
    return {
        "type": "sweep",
        "run": fingerprint(identity)[:12],
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "versions": versions,
        "commit": _commit(),
        "settings": {
            **settings,
            "k": list(config.ks),
            "transforms": [str(wish) for wish in config.transforms],
            "codecs": list(config.codecs),
            "indexes": list(config.indexes),
            "baselines": config.baselines,
            "rerank": config.rerank,
        },
        "dataset": dataset.facts,
        "spectrum": {
            "eigenvalues": dataset.spectrum.eigenvalues.tolist(),
            "rank": dataset.spectrum.rank,
        },
    }


def _settings(
    config: SweepConfig, dataset: Dataset, threads: int, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what holds for every point."""
    settings: dict[str, Any] = {
        "target_recall": config.build.target_recall,
        "threads": threads,
        "seed": config.build.seed,
        "sample": config.sample if dataset.judged is None else None,
        "choose_sample": config.build.choose_sample,
    }
    if "gpu" in machine:
        settings["index_device"] = "gpu"
    return settings


def _machine(index_device: str) -> dict[str, Any]:
    memory = None
    with contextlib.suppress(ValueError, OSError, AttributeError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "system": platform.system(),
    }
    if index_device != "cpu" and (gpu := gpu_name()) is not None:
        found["gpu"] = gpu
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    return {
        "whiten_index": whiten_index.__version__,
        "faiss": str(describe_faiss()["version"]),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _commit() -> str | None:
    """Return the commit of this package's own checkout, None where it is installed.

    It says where the package differs from the commit.
    """
    folder = Path(whiten_index.__file__).parent

    def git(*arguments: str) -> str:
        found = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
        return found.stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if git("ls-files", "__init__.py"):
            changed = git("status", "--porcelain", "--", ".")
            return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    return None
