"""Verification of indexes, in folders and in buckets, with the stores that they read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from whiten_index.artifacts.cached_storage import place_of, required_place
from whiten_index.artifacts.files import exists
from whiten_index.artifacts.storage import Place, settled
from whiten_index.errors import ArtifactError
from whiten_index.paths import absolute, is_uri
from whiten_index.store.embedding_store import encoder_folders
from whiten_index.versions.documents import Documents
from whiten_index.versions.provenance import corpus_record, missing_rows, store_places
from whiten_index.versions.published import (
    CANDIDATES,
    CURRENT,
    DOCUMENTS,
    INDEX_ID,
    RECORD,
    VERSIONS,
    Current,
    Version,
    read_current,
    read_index_id,
    read_version,
    strange_entries,
    version_number,
)
from whiten_index.versions.references import is_index, version_folders
from whiten_index.versions.verify_store import Check, Remedy, VerifyReport, as_report, verify_store


def verify_index(root: Place, *, with_store: bool = True) -> VerifyReport:
    """Check ``CURRENT`` and every version and candidate of an index against its checksums.

    From a bucket, every object of its versions is read. Nothing is locked or written. Damage is
    looked at once more, since a job that runs meanwhile may just have removed the version. A file
    that could not be read once is reported.

    Args:
        root: the index folder, or its URI.
        with_store: also look whether the store has the rows of each, by the sizes of files.
    """
    place = required_place(root)
    if not is_index(place):
        raise ArtifactError(f"{place} is no index: it has no {CURRENT}; check the path")
    check = _IndexCheck(place, with_store=with_store)
    damaged = check.damaged()
    again = [_IndexCheck(place, with_store=with_store, first=check)] if damaged else []
    return as_report("index", place, [check], again)


class _IndexCheck(Check):
    """One look at an index, or a second one at everything that the first found damaged."""

    def __init__(self, place: Place, *, with_store: bool, first: _IndexCheck | None = None) -> None:
        root, mirror = place_of(place)
        super().__init__(mirror, None if first is None else first.damaged())
        self.root, self.with_store = place, with_store
        self.current: Current | None = None
        self.sound: list[str] = [] if first is None else first.sound
        folders = version_folders(root, mirror)
        with self.counting("CURRENT", root / CURRENT):
            current = self.current = read_current(root, mirror)
            # If another was published meanwhile, and this one removed, the second look shows it.
            if root / VERSIONS / current.version not in folders:
                raise ArtifactError(f"{root / CURRENT} names {current.version}, which is not there")
        if mirror.uri:
            folders = [folder for folder in folders if folder.parent.name == VERSIONS]
        else:
            with self.reporting("index id", root / INDEX_ID):
                read_index_id(root)
            for path in strange_entries(root):
                why = f"{path} is a link, no folder, or has the name of no version, and is not read"
                self.add("strange entries", path, ArtifactError(why))
        for folder in self.asked(folders):
            with self.counting(folder.parent.name, folder), mirror.opened(folder) as copy:
                # One that vanished meanwhile was pruned.
                if exists(copy):
                    self._check(folder, copy)

    def _check(self, folder: Path, copy: Path) -> None:
        in_versions = folder.parent.name == VERSIONS
        published = self.current if in_versions and self._publishes(folder) else None
        sha256 = None if published is None else published.manifest_sha256
        version = read_version(copy, sha256=sha256).check()
        fields = version.fields
        self.stores += [
            str(each) for each in store_places(self.root, fields) if encoder_folders(each)
        ][:1]
        counts = {
            DOCUMENTS: len(Documents(version.file(DOCUMENTS))),
            RECORD: corpus_record(version).rows,
        }
        wrong = [f"{name} of {n}" for name, n in counts.items() if n != fields["rows"]]
        if wrong:
            raise ArtifactError(
                f"{folder} is damaged: {' and '.join(wrong)} rows, and the index has "
                f"{fields['rows']}"
            )
        if self._has_rows(folder, version) and in_versions:
            self.sound.append(folder.name)

    def _has_rows(self, folder: Path, version: Version) -> bool:
        store, missing = missing_rows(self.root, version) if self.with_store else ("", 0)
        if store is None:
            self.notes.append(
                f"the store of {_named(folder)} is not there, and was not looked at; "
                "searching needs it only to rank candidates again"
            )
        if missing:
            why = ArtifactError(
                f"the store {store} lacks {missing:,} of the rows of {_named(folder)}: it "
                "can be searched, but neither ranked again nor updated"
            )
            self.add("rows", folder, why)
        return not missing

    def _publishes(self, folder: Path) -> bool:
        return self.current is not None and self.current.version == folder.name

    def remedy(self, kind: str, path: Path) -> Remedy:
        """Return the version that is damaged, and what mends it, which depends on the others."""
        if kind == "strange entries":
            return (), f"put the folder itself there under its own name, or move {path} away"
        if kind == "index id":
            return (), (
                "restore it from a copy, or build or update the index again, which gives it a new "
                "id"
            )
        if path.parent.name == CANDIDATES:
            advice = f"remove {path}: it is not published, and the next update makes another"
            return (_named(path),), advice
        latest = self._to_go_back_to()
        ways = [
            "run the same build again, which makes the version from the store and encodes just the "
            "rows that are missing; or restore what is missing from a copy"
        ]
        if kind != "CURRENT" and self.current is not None and not self._publishes(path):
            ways.insert(0, f"nobody reads it: whiten-index prune {self.root} --keep N removes it")
        elif latest is not None:
            ways.insert(0, f"whiten-index rollback {self.root} --to {latest}, which is sound")
        return () if kind == "CURRENT" else (_named(path),), "; or ".join(ways)

    def _to_go_back_to(self) -> str | None:
        """Return the newest sound version, if possible an older one that is not withdrawn."""
        if self.current is None:
            return max(self.sound, key=version_number, default=None)
        limit, withdrawn = version_number(self.current.version), self.current.withdrawn
        gone = {self.current.version, *self.current.removed}
        others = [name for name in self.sound if name not in gone]
        good = [name for name in others if name not in withdrawn]
        older = [name for name in good if version_number(name) < limit]
        found = next((names for names in (older, good, others) if names), [])
        return max(found, key=version_number, default=None)


def _named(folder: Path) -> str:
    kind = "candidate" if folder.parent.name == CANDIDATES else "version"
    return f"{kind} {folder.name}"


def verify_paths(paths: Iterable[Place], *, with_stores: bool = True) -> list[VerifyReport]:
    """Verify indexes, with the stores they read, and stores.

    Args:
        paths: folders of indexes or of stores, or their URIs.
        with_stores: verify the stores of the indexes too.
    """
    places = [required_place(absolute(path)) for path in paths]
    indexes = {settled(place): place for place in places if is_index(place)}
    stores = [place for place in places if settled(place) not in indexes]
    for place in stores:
        if not encoder_folders(place):
            raise ArtifactError(
                f"{place} is neither an index nor a store of embeddings; check the path"
            )
    found = [verify_index(place, with_store=with_stores) for place in indexes.values()]
    if with_stores:
        named = (store for report in found for store in report.stores)
        stores += [store if is_uri(store) else Path(store) for store in named]
    unique = {settled(store): store for store in stores}
    return [*found, *map(verify_store, unique.values())]
