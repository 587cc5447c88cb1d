"""Verification of indexes, in folders and in buckets, with the stores that they read."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from whiten_index.artifacts.atomic import require_path
from whiten_index.artifacts.cached_storage import BucketStorage, naming, place_of, stamp
from whiten_index.artifacts.files import is_folder, size_of
from whiten_index.artifacts.manifest import MANIFEST, sealed_json
from whiten_index.errors import ArtifactError, StorageError
from whiten_index.paths import absolute, is_uri
from whiten_index.store.live_set import encoder_folders
from whiten_index.versions.documents import Documents
from whiten_index.versions.provenance import corpus_record, missing_shards, store_places
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
from whiten_index.versions.references import is_index, real_place, version_folders
from whiten_index.versions.verify_store import (
    Damage,
    VerifyReport,
    reason,
    remedy_for,
    verify_store,
)


def verify_index(root: Path | str, *, with_store: bool = True) -> VerifyReport:
    """Check ``CURRENT`` and every version and candidate of an index against its checksums.

    Nothing is locked or written. Damage is looked at once more, since a job that runs meanwhile may
    just have removed the version. A file that could not be read once is reported.

    Args:
        root: the index folder.
        with_store: also look whether the store has the shards of each, by names and sizes.

    Raises:
        ArtifactError: there is no index.
    """
    place = require_path(root)
    if not is_index(place):
        raise ArtifactError(f"{place} is no index: it has no {CURRENT}; check the path")
    check = _Check(place, version_folders(place), with_store=with_store)
    damages, unread = check.damages, check.unread
    if damages:
        paths = {damage.path for damage in damages}
        suspects = [folder for folder in version_folders(place) if str(folder) in paths]
        again = _Check(place, suspects, with_store=with_store)
        damages = [damage for damage in again.damages if damage.path in paths]
        unread += again.unread
    return VerifyReport(
        path=str(place),
        kind="index",
        checked=dict(check.counted),
        bytes=check.bytes,
        damages=tuple(_with_remedy(place, damage, check) for damage in damages),
        stores=tuple(dict.fromkeys(check.stores)),
        notes=tuple(check.notes),
        unread=tuple({damage.path: damage for damage in unread}.values()),
    )


class _Check:
    """One look at an index: at what is published, and at some versions and candidates."""

    def __init__(self, root: Path, folders: Iterable[Path], *, with_store: bool) -> None:
        self.root, self.with_store = root, with_store
        self.current: Current | None = None
        self.counted, self.bytes = Counter[str](), 0
        self.damages, self.unread = list[Damage](), list[Damage]()
        self.sound, self.stores, self.notes = list[str](), list[str](), list[str]()
        # Folders of versions whose store lacks shards.
        self.lacking = set[str]()
        try:
            self.current = self._published()
            self.counted["CURRENT"] += 1
            self.bytes += size_of(root / CURRENT)
        except (ArtifactError, StorageError) as error:
            self._add(root / CURRENT, error)
        try:
            read_index_id(root)
        except (ArtifactError, StorageError) as error:
            self._add(root / INDEX_ID, error)
        for path in strange_entries(root):
            why = f"{path} is a link, no folder, or has the name of no version, and is not read"
            remedy = f"put the folder itself there under its own name, or move {path} away"
            self.damages.append(Damage(str(path), why, (), remedy))
        for folder in folders:
            self.counted[folder.parent.name] += 1
            self.bytes += size_of(folder)
            try:
                self._check(folder)
            except (ArtifactError, StorageError) as error:
                self._add(folder, error, f"{_kind(folder)} {folder.name}")
            else:
                if folder.parent.name == VERSIONS:
                    self.sound.append(folder.name)

    def _add(self, path: Path, error: ArtifactError | StorageError, *touches: str) -> None:
        found = self.unread if isinstance(error, StorageError) else self.damages
        found.append(Damage(str(path), reason(error), touches, remedy_for(error, "")))

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
        version = read_version(folder, sha256=sha256 if in_versions else None).check()
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
        if self.with_store:
            self._check_store(version)

    def _check_store(self, version: Version) -> None:
        folder = version.folder
        store, missing = missing_shards(self.root, version)
        if store is None:
            self.notes.append(
                f"the store of {_kind(folder)} {folder.name} is not there, and was not looked at; "
                "searching needs it only to rank candidates again"
            )
        elif missing:
            self.lacking.add(str(folder))
            raise ArtifactError(
                f"the store {store} lacks {len(missing):,} of the shards of {_kind(folder)} "
                f"{folder.name}, first {missing[0]}: it can be searched, but neither ranked again "
                "nor updated"
            )


def _kind(folder: Path) -> str:
    return "candidate" if folder.parent.name == CANDIDATES else "version"


def _with_remedy(root: Path, damage: Damage, check: _Check) -> Damage:
    """Return a damage with a remedy, which depends on the other versions."""
    if damage.remedy:
        return damage
    path = Path(damage.path)
    latest = _to_go_back_to(check)
    again = (
        "run the same build again: it makes the version from the store, and encodes nothing that "
        "is there"
    )
    published = check.current is not None and check.current.version == path.name
    if path.name == CURRENT:
        remedy = again if latest is None else f"whiten-index rollback {root} --to {latest}"
    elif path.parent.name == CANDIDATES:
        remedy = f"remove {path}: it is not published, and the next update makes another"
    elif damage.path in check.lacking:
        remedy = (
            "where its corpus still has these rows, run whiten-index build (or encode) with it "
            "again, which encodes just them; or restore the store from a copy"
        )
        if published and latest is not None:
            remedy += f"; or whiten-index rollback {root} --to {latest}"
        elif check.current is not None and not published:
            remedy += f"; or, as nobody reads it, remove it with whiten-index prune {root} --keep N"
    elif check.current is not None and not published:
        remedy = f"nobody reads it: whiten-index prune {root} --keep N removes it"
    elif latest is None:
        remedy = again
    else:
        remedy = f"whiten-index rollback {root} --to {latest}, which is sound; or {again}"
    return replace(damage, remedy=remedy)


def _to_go_back_to(check: _Check) -> str | None:
    """Return the newest sound version, if possible older than the published and not withdrawn."""
    if check.current is None:
        return check.sound[-1] if check.sound else None
    limit, withdrawn = version_number(check.current.version), check.current.withdrawn
    others = [name for name in check.sound if name != check.current.version]
    good = [name for name in others if name not in withdrawn]
    older = [name for name in good if version_number(name) < limit]
    return next((names[-1] for names in (older, good, others) if names), None)


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
    damages, current = list[Damage](), None
    published = mirror.latest(folder / CURRENT) is not None
    if not published and not names:
        raise ArtifactError(
            f"{mirror.uri} holds no index; check the URI. A store is verified in a folder: copy it "
            "to one"
        )
    try:
        with naming():
            current = read_current(folder, mirror)
    except ArtifactError as error:
        damages.append(Damage(f"{mirror.uri}/{CURRENT}", reason(error), (), ""))
    sound, size = [], 0
    for name in names:
        found = list(_damages(mirror, folder / VERSIONS / name, current))
        damages += found
        sound += [] if found else [name]
        size += sum(mirror.sizes(folder / VERSIONS / name).values())
    if current is not None and current.version not in names:
        why = f"{CURRENT} names {current.version}, which has no {MANIFEST}"
        damages.append(Damage(f"{mirror.uri}/{VERSIONS}/{current.version}", why, (), ""))
    others = [name for name in sound if current is None or name != current.version]
    remedy = f"{_AGAIN}; or whiten-index rollback {mirror.uri} --to {others[-1]}" if others else ""
    return VerifyReport(
        path=mirror.uri,
        kind="index",
        checked={CURRENT: int(published), "versions": len(names)},
        bytes=size,
        damages=tuple(replace(damage, remedy=remedy or _AGAIN) for damage in damages),
        notes=("the store in the bucket, if there is one, was not looked at",),
    )


def _damages(mirror: BucketStorage, folder: Path, current: Current | None) -> Iterator[Damage]:
    """Yield the damaged objects of a version."""
    place, touches = f"{mirror.uri}/{VERSIONS}/{folder.name}", (f"version {folder.name}",)
    data = mirror.manifest(folder) or b""
    wanted = current.manifest_sha256 if current and current.version == folder.name else None
    try:
        fields = json.loads(data)
        files = {name: (each["bytes"], each["sha256"]) for name, each in fields["files"].items()}
        whole = sealed_json(fields) == data
    except (ValueError, KeyError, TypeError, AttributeError):
        files, whole = {}, False
    if not whole or wanted not in (None, hashlib.sha256(data).hexdigest()):
        why = "its fields do not match its digest" if not whole else f"it does not match {CURRENT}"
        yield Damage(f"{place}/{MANIFEST}", f"{MANIFEST} is damaged: {why}", touches, "")
        return
    for name, described in files.items():
        found = mirror.digest(folder / stamp(data) / name)
        if found != described:
            why = "is missing" if found is None else (
                f"has {found[0]} bytes instead of {described[0]}"
                if found[0] != described[0] else "does not match its checksum"
            )  # fmt: skip
            yield Damage(f"{place}/{stamp(data)}/{name}", f"{name} {why}", touches, "")


def verify_paths(paths: Iterable[Path | str], *, with_stores: bool = True) -> list[VerifyReport]:
    """Verify indexes, with the stores they read, and stores.

    Args:
        paths: folders of indexes or of stores, or URIs of indexes in a bucket.
        with_stores: verify the stores of the indexes too.

    Raises:
        ArtifactError: a path is neither.
        ConfigError: it is too long to be one.
    """
    given = list(map(absolute, paths))
    places = [require_path(place) for place in given if not is_uri(place)]
    for place in places:
        if not is_index(place) and not any(encoder_folders(place)):
            raise ArtifactError(
                f"{place} is neither an index nor a store of embeddings; check the path"
            )
    found = {
        real_place(place): verify_index(place, with_store=with_stores)
        for place in places
        if is_index(place)
    }
    stores = [place for place in places if not is_index(place)]
    if with_stores:
        stores += [Path(store) for report in found.values() for store in report.stores]
    stores = [store for store in stores if any(encoder_folders(store))]
    unique = {real_place(store): store for store in stores}
    there = [verify_bucket(str(uri)) for uri in dict.fromkeys(given) if is_uri(uri)]
    return [*there, *found.values(), *map(verify_store, unique.values())]
