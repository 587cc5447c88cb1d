"""The results file: JSON lines, a line that starts a run, then a line a point; it only grows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import exists, writing
from whiten_index.artifacts.limits import load_json
from whiten_index.errors import ArtifactError

RESULTS = "results.jsonl"


@dataclass(eq=False)
class Results:
    """A results file and what is in it.

    Attributes:
        path: of the file.
        headers: run -> the last line that started it.
        done: run -> keys of its points that were measured.
        skipped: run -> key -> why a point was not, the last time it was tried.
    """

    path: Path
    headers: dict[str, dict[str, Any]] = field(default_factory=dict)
    done: dict[str, set[str]] = field(default_factory=dict)
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Results:
        """Read a results file to go on with it, empty where there is none.

        A torn last line, of a writer who was stopped within it, is cut off.

        Raises:
            ArtifactError: a line before the last is no record.
            StorageError: the file cannot be written.
        """
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            results = cls.read(path)
            whole = _whole(path.read_bytes()) if exists(path) else b""
            if exists(path) and len(whole) < path.stat().st_size:
                os.truncate(path, len(whole))
        return results

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a results file, empty where there is none, but for a torn last line.

        Raises:
            ArtifactError: a line before the last is no record.
        """
        results = cls(path)
        data = path.read_bytes() if exists(path) else b""
        for number, line in enumerate(_whole(data).splitlines(), 1):
            results._take(line, number)
        return results

    def start(self, record: Mapping[str, Any]) -> None:
        """Write the line that starts a run, unless its last one says the same."""
        fresh = {key: value for key, value in record.items() if key != "time"}
        before = self.headers.get(record["run"])
        if before is None or {**before, "time": None} != {**fresh, "time": None}:
            self.append(record)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, whole on the disk when this returns.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with writing(self.path), self.path.open("ab") as file:
            file.write(line.encode("utf-8", "surrogatepass"))
            file.flush()
            os.fsync(file.fileno())
        self._note(json.loads(line))

    def _take(self, line: bytes, number: int) -> None:
        if not line.strip():
            return
        try:
            record = load_json(line)
            self._note(record)
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"line {number} of {self.path} is no record of a sweep; remove that line, or sweep "
                "into another folder"
            ) from error

    def _note(self, record: dict[str, Any]) -> None:
        run = record["run"]
        done, skipped = self.done.setdefault(run, set()), self.skipped.setdefault(run, {})
        if record["type"] == "sweep":
            self.headers[run] = record
        elif record["type"] == "skipped":
            skipped[record["key"]] = record["why"]
        else:
            done.add(record["key"])
            skipped.pop(record["key"], None)


def _whole(data: bytes) -> bytes:
    """Return the lines that have an end."""
    return data[: data.rfind(b"\n") + 1]
