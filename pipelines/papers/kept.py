"""Results kept in a folder: what is computed once is found again by whatever it depends on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.artifacts.atomic import replace_file
from whiten_index.artifacts.files import writing
from whiten_index.artifacts.manifest import fingerprint, sealed, unsealed

# Raised when a change of this project changes figures.
_VERSION = 1


# What figures may change with.
_PACKAGES = ("whiten-index", "torch", "transformers", "numpy", "scikit-learn")


def made_by() -> dict[str, str]:
    """Return the releases that decide figures; those of an extra may be missing."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@dataclass
class Kept:
    """Results by their keys, a file each.

    Attributes:
        folder: where they are.
        computed: how many were made in this run.
        found: how many were there.
    """

    folder: Path
    computed: int = 0
    found: int = 0

    def get(self, key: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of ``key``, made where it is not there or cannot be read.

        Raises:
            StorageError: the folder cannot be written.
        """
        full = {"version": _VERSION, "made_by": made_by(), **key}
        path = self.folder / f"{fingerprint(full)}.json"
        kept = self._read(path)
        if kept is not None:
            self.found += 1
            return kept
        result = make()
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            # Figures take their order from the result.
            text = json.dumps(sealed({"key": full, "result": result}), indent=1)
            replace_file(path, text.encode())
        self.computed += 1
        return result

    @staticmethod
    def _read(path: Path) -> dict[str, Any] | None:
        try:
            kept = unsealed(json.loads(path.read_text(encoding="utf-8")))
            return kept["result"] if fingerprint(kept["key"]) == path.stem else None
        except (OSError, ValueError, KeyError):
            return None


def file_identity(path: str | Path | None) -> list[Any] | None:
    """Return what tells a large file, or a folder of them, from another: names, sizes, times."""
    if path is None:
        return None
    place = Path(path)
    files = sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]
    return [[str(file), (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files]
