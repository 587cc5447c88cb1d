"""Verification of indexes, in folders and in buckets, with the stores that they read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from whiten_index.artifacts.atomic import require_path
from whiten_index.artifacts.cached_storage import BucketStorage, naming, place_of
from whiten_index.artifacts.files import is_folder, resolved
from whiten_index.artifacts.manifest import MANIFEST
from whiten_index.errors import ArtifactError, FormatError
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
    version_names,
    version_number,
)
from whiten_index.versions.references import is_index, version_folders
from whiten_index.versions.verify_store import (
    Check,
    Damage,
    Remedy,
    VerifyReport,
    as_report,
    reason,
    verify_store,
)


def verify_index(root: Path | str, *, with_store: bool = True) -> VerifyReport:
    """Check ``CURRENT`` and every version and candidate of an index against its checksums.

    Nothing is locked or written. Damage is looked at once more, since a job that runs meanwhile may
    just have removed the version. A file that could not be read once is reported.

    Args:
        root: the index folder.
        with_store: also look whether the store has the rows of each, by the sizes of files.
    """
    place = require_path(root)
    if not is_index(place):
        raise ArtifactError(f"{place} is no index: it has no {CURRENT}; check the path")
    check = _IndexCheck(place, with_store=with_store)
    damaged = check.damaged()
    again = [_IndexCheck(place, with_store=with_store, first=check)] if damaged else []
    return as_report("index", str(place), [check], again)


class _IndexCheck(Check):
    """One look at an index, or a second one at everything that the first found damaged."""

    def __init__(self, root: Path, *, with_store: bool, first: _IndexCheck | None = None) -> None:
        super().__init__(None if first is None else first.damaged())
        self.root, self.with_store = root, with_store
        self.current: Current | None = None
        self.sound: list[str] = [] if first is None else first.sound
        with self.counting("CURRENT", root / CURRENT):
            current = self.current = read_current(root)
            # If another was published meanwhile, and this one removed, the second look shows it.
            if current.version not in version_names(root):
                raise ArtifactError(f"{root / CURRENT} names {current.version}, which is not there")
        with self.reporting("index id", root / INDEX_ID):
            read_index_id(root)
        for path in strange_entries(root):
            why = f"{path} is a link, no folder, or has the name of no version, and is not read"
            self.add("strange entries", path, ArtifactError(why))
        for folder in self.asked(version_folders(root)):
            with self.counting(folder.parent.name, folder):
                self._check(folder)

    def _check(self, folder: Path) -> None:
        in_versions = folder.parent.name == VERSIONS
        published = self.current if in_versions and self._publishes(folder) else None
        sha256 = None if published is None else published.manifest_sha256
        version = read_version(folder, sha256=sha256).check()
        fields = version.fields
        places = (place for place in store_places(self.root, fields) if isinstance(place, Path))
        self.stores += [str(place) for place in places if is_folder(place)][:1]
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
        if self._has_rows(version) and in_versions:
            self.sound.append(folder.name)

    def _has_rows(self, version: Version) -> bool:
        store, missing = missing_rows(self.root, version) if self.with_store else ("", 0)
        if store is None:
            self.notes.append(
                f"the store of {_named(version.folder)} is not there, and was not looked at; "
                "searching needs it only to rank candidates again"
            )
        if missing:
            why = ArtifactError(
                f"the store {store} lacks {missing:,} of the rows of {_named(version.folder)}: it "
                "can be searched, but neither ranked again nor updated"
            )
            self.add("rows", version.folder, why)
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
        others = [name for name in self.sound if name != self.current.version]
        good = [name for name in others if name not in withdrawn]
        older = [name for name in good if version_number(name) < limit]
        found = next((names for names in (older, good, others) if names), [])
        return max(found, key=version_number, default=None)


def _named(folder: Path) -> str:
    kind = "candidate" if folder.parent.name == CANDIDATES else "version"
    return f"{kind} {folder.name}"


_AGAIN = (
    "run the same build again: it uploads what is damaged from a sound copy on the machine that "
    "runs it, or makes the version from the store"
)


def verify_bucket(uri: str) -> VerifyReport:
    """Check ``CURRENT`` and every version of an index in a bucket against its checksums.

    Every object is read from the bucket; nothing is locked or written.
    """
    folder, mirror = place_of(uri)
    if not isinstance(mirror, BucketStorage):
        raise ArtifactError(f"{uri} is not in a bucket; give the path of its folder")
    names = sorted(filter(version_number, mirror.names(folder / VERSIONS)))
    published = mirror.latest(folder / CURRENT) is not None
    if not published and not names:
        raise ArtifactError(
            f"{mirror.uri} holds no index; check the URI. A store is verified in a folder: copy it "
            "to one"
        )
    current, damages = None, list[tuple[str, str, tuple[str, ...]]]()
    try:
        with naming():
            current = read_current(folder, mirror)
    except (ArtifactError, FormatError) as error:
        damages.append((CURRENT, reason(error), ()))
    good = list[str]()
    for name in names:
        data = mirror.manifest(folder / VERSIONS / name) or b""
        found = mirror.damaged(folder / VERSIONS / name, data, content=True)
        if current is None or name != current.version:
            gone = found or (current is not None and name in current.removed)
            good += [] if gone else [name]
        elif not found and hashlib.sha256(data).hexdigest() != current.manifest_sha256:
            found = {MANIFEST: f"does not match {CURRENT}"}
        for key, why in found.items():
            said = f"{key.rpartition('/')[2]} {why}"
            damages.append((f"{VERSIONS}/{name}/{key}", said, (f"version {name}",)))
    if current is not None and current.version not in names:
        why = f"{CURRENT} names {current.version}, which has no {MANIFEST}"
        damages.append((f"{VERSIONS}/{current.version}", why, ()))
    roll = f"; or whiten-index rollback {mirror.uri} --to {good[-1]}" if good else ""
    return VerifyReport(
        path=mirror.uri,
        kind="index",
        checked={CURRENT: int(published), VERSIONS: len(names)},
        bytes=sum(sum(mirror.sizes(folder / VERSIONS / name).values()) for name in names),
        damages=tuple(
            Damage(f"{mirror.uri}/{name}", why, touches, _AGAIN + roll)
            for name, why, touches in damages
        ),
        notes=("the store in the bucket, if there is one, was not looked at",),
    )


def verify_paths(paths: Iterable[Path | str], *, with_stores: bool = True) -> list[VerifyReport]:
    """Verify indexes, with the stores they read, and stores.

    Args:
        paths: folders of indexes or of stores, or URIs of indexes in a bucket.
        with_stores: verify the stores of the indexes too.
    """
    given = list(map(absolute, paths))
    places = [require_path(place) for place in given if not is_uri(place)]
    for place in places:
        if not is_index(place) and not any(encoder_folders(place)):
            raise ArtifactError(
                f"{place} is neither an index nor a store of embeddings; check the path"
            )
    found = {
        resolved(place): verify_index(place, with_store=with_stores)
        for place in places
        if is_index(place)
    }
    stores = [place for place in places if not is_index(place)]
    if with_stores:
        stores += [Path(store) for report in found.values() for store in report.stores]
    stores = [store for store in stores if any(encoder_folders(store))]
    unique = {resolved(store): store for store in stores}
    there = [verify_bucket(str(uri)) for uri in dict.fromkeys(given) if is_uri(uri)]
    return [*there, *found.values(), *map(verify_store, unique.values())]
