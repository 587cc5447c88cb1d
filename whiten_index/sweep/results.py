"""The results file: JSON lines, a line that starts a run, then a line a point; it only grows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import exists, writing
from whiten_index.report.records import cut_torn_line, line_of, read_lines

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
            ArtifactError: a line before the last is damaged.
            StorageError: the file cannot be written.
        """
        results = cls.read(path)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if exists(path):
                cut_torn_line(path)
        return results

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a results file, empty where there is none, but for a torn last line.

        Raises:
            ArtifactError: a line before the last is damaged.
        """
        results = cls(path)
        for _, record in read_lines(path) if exists(path) else ():
            results._note(record)
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
        line = line_of(record)
        with writing(self.path), self.path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._note(json.loads(line))

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
