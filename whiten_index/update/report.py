"""What an update did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.changes import Changes
from whiten_index.encode import EncodeReport


@dataclass(frozen=True, eq=False)
class UpdateReport:
    """What an update did.

    Attributes:
        out: the index folder.
        base: the version that was published before.
        version: the one that is published now.
        manifest: of that.
        changes: what became of the documents.
        encoded: the report of its first half.
        update: decision, drift and base; empty where nothing was to be done.
        gates: what was looked at before publishing.
    """

    out: Path
    base: str
    version: str
    manifest: Mapping[str, Any]
    changes: Changes
    encoded: EncodeReport
    update: Mapping[str, Any]
    gates: tuple[Mapping[str, Any], ...]

    @property
    def up_to_date(self) -> bool:
        """Whether nothing was published, since nothing had changed."""
        return self.version == self.base

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        counts, files = self.encoded.counts, len(self.encoded.record.files)
        return {
            "out": str(self.out),
            "store": str(self.encoded.store.place),
            "version": self.version,
            "base": self.base,
            "up_to_date": self.up_to_date,
            "rows": self.changes.to_json(),
            "ids": self.changes.ids_to_json(),
            "counts": counts.to_json(),
            "files": {"read": files - counts.kept_files, "skipped": counts.kept_files},
            "drift": self.update.get("drift"),
            "decision": self.update.get("decision"),
            "gates": [dict(gate) for gate in self.gates],
            "whitening": self.manifest["whitening"],
            "factory": self.manifest["factory"],
            "bytes": self.manifest["bytes"],
            "seconds": self.encoded.stages.seconds,
            "stage_rows": self.encoded.stages.rows,
            "created": self.manifest["created"],
        }
