"""Checks every checksum of an index again, and says what mends what is damaged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whiten_index.errors import ArtifactError, OutputError
from whiten_index.index import (
    CANDIDATES,
    CURRENT,
    DOCUMENTS,
    RECORD,
    VERSIONS,
    Current,
    Documents,
    read_current,
    read_version,
    version_names,
)
from whiten_index.rerank import store_places
from whiten_index.store import CorpusRecord
from whiten_index.upkeep.claims import is_index, version_folders
from whiten_index.upkeep.inventory import size_of
from whiten_index.upkeep.report import Damage, VerifyReport, reason, remedy_for


def verify_index(root: Path | str) -> VerifyReport:
    """Check ``CURRENT`` and every version and candidate of an index against its checksums.

    Nothing is locked or written. What is found damaged is looked at once more, since a job that
    runs meanwhile may just have removed it.

    Raises:
        ArtifactError: there is no index.
    """
    place = Path(root)
    if not is_index(place):
        raise ArtifactError(f"{place} is no index: it has no {CURRENT}; check the path")
    check = _Check(place)
    check.run(version_folders(place))
    damages = check.damages
    if damages:
        again = _Check(place)
        paths = {damage.path for damage in damages}
        again.run([folder for folder in version_folders(place) if str(folder) in paths])
        damages = [damage for damage in again.damages if damage.path in paths]
    return VerifyReport(
        str(place),
        "index",
        dict(check.counted),
        check.bytes,
        tuple(_with_remedy(place, damage, check) for damage in damages),
        tuple(dict.fromkeys(check.stores)),
    )


@dataclass
class _Check:
    """One look at an index.

    Attributes:
        root: its folder.
        current: what is published, None where that cannot be told.
        counted: kind -> how many were looked at.
        bytes: of these.
        damages: found, the remedy being what is to be said for want of a better one.
        sound: names of the versions that are whole.
        stores: that they were built from, as far as these are there.
    """

    root: Path
    current: Current | None = None
    counted: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    damages: list[Damage] = field(default_factory=list)
    sound: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)

    def run(self, folders: list[Path]) -> None:
        """Look at what is published and at these versions and candidates."""
        path = self.root / CURRENT
        try:
            self.current = self._published()
            self.counted["CURRENT"] += 1
            self.bytes += size_of(path)
        except (ArtifactError, OutputError) as error:
            self.damages.append(Damage(str(path), reason(error), (), remedy_for(error, "")))
        for folder in folders:
            self.counted[folder.parent.name] += 1
            self.bytes += size_of(folder)
            try:
                self._check(folder)
            except (ArtifactError, OutputError) as error:
                remedy = remedy_for(error, "")
                touches = (f"{_kind(folder)} {folder.name}",)
                self.damages.append(Damage(str(folder), reason(error), touches, remedy))
            else:
                self.sound += [folder.name] if folder.parent.name == VERSIONS else []

    def _published(self) -> Current:
        current = read_current(self.root)
        if current.version in version_names(self.root):
            return current
        # Another may have been published, and this one removed, since.
        current = read_current(self.root)
        if current.version not in version_names(self.root):
            raise ArtifactError(
                f"{self.root / CURRENT} names {current.version}, which is not there"
            )
        return current

    def _check(self, folder: Path) -> None:
        published = self.current is not None and self.current.version == folder.name
        in_versions = folder.parent.name == VERSIONS
        sha256 = self.current.manifest_sha256 if self.current and published else None
        fields = read_version(folder, verify="full", sha256=sha256 if in_versions else None)
        self._note_store(fields)
        counts = {DOCUMENTS: len(Documents(folder / DOCUMENTS))}
        if (folder / RECORD).exists():
            counts[RECORD] = CorpusRecord.load(folder / RECORD).rows
        wrong = [f"{name} of {n}" for name, n in counts.items() if n != fields["rows"]]
        if wrong:
            raise ArtifactError(
                f"{folder} is damaged: {' and '.join(wrong)} rows, and the index has "
                f"{fields['rows']}"
            )

    def _note_store(self, fields: dict[str, Any]) -> None:
        there = (place for place in store_places(self.root, fields) if place.is_dir())
        self.stores += [str(place) for place in there][:1]


def _kind(folder: Path) -> str:
    return "candidate" if folder.parent.name == CANDIDATES else "version"


def _with_remedy(root: Path, damage: Damage, check: _Check) -> Damage:
    """Return a damage with what mends it, by what is sound beside it."""
    if damage.remedy:
        return damage
    path = Path(damage.path)
    latest = check.sound[-1] if check.sound else None
    again = (
        "run the same build again: it makes the version anew from the store, and encodes nothing "
        "that is there"
    )
    if path.name == CURRENT:
        remedy = again if latest is None else f"whiten-index rollback {root} --to {latest}"
    elif path.parent.name == CANDIDATES:
        remedy = f"remove {path}: it is not published, and the next update makes another"
    elif check.current is not None and check.current.version != path.name:
        remedy = f"nobody reads it: whiten-index prune {root} --keep N removes it"
    elif latest is None:
        remedy = again
    else:
        remedy = f"whiten-index rollback {root} --to {latest}, which is sound; or {again}"
    return Damage(damage.path, damage.why, damage.touches, remedy)
