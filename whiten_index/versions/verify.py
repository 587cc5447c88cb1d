"""Verification of indexes and stores, in folders and in buckets: damage, and what mends it."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.cached_storage import place_of, required_place
from whiten_index.artifacts.files import exists
from whiten_index.artifacts.manifest import MANIFEST
from whiten_index.artifacts.storage import Place, settled
from whiten_index.errors import (
    ArtifactError,
    ConfigError,
    FormatError,
    StorageError,
    WhitenIndexError,
    named,
)
from whiten_index.paths import absolute, is_uri
from whiten_index.store.digest_index import DigestIndex
from whiten_index.store.embedding_store import (
    EmbeddingStore,
    encoder_folders,
    read_encoder,
    require_encoder_folders,
)
from whiten_index.store.notes import RESULTS
from whiten_index.store.records import CorpusPart
from whiten_index.versions.documents import Documents
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
    require_published,
    strange_entries,
    version_number,
)
from whiten_index.versions.references import (
    Reference,
    corpus_record,
    index_around,
    is_index,
    missing_rows,
    require_at_its_place,
    store_places,
    version_folders,
    version_reference,
)


@dataclass(frozen=True)
class Damage:
    """A file or folder that is damaged or missing, or cannot be read."""

    path: str
    why: str
    remedy: str  # advice, and its cost


@dataclass(frozen=True)
class VerifyReport:
    """Result of a verification."""

    path: str  # of the index or store
    kind: str  # `index` or `store`
    checked: Mapping[str, int]  # kind of thing -> how many were looked at
    bytes: int  # of these
    damages: tuple[Damage, ...]  # everything damaged
    stores: tuple[str, ...]  # folders of the stores that an index reads
    notes: tuple[str, ...]  # things that were not looked at, without being damaged
    # Everything that the system does not let be read: it may be sound or damaged.
    unread: tuple[Damage, ...]

    @property
    def sound(self) -> bool:
        """True if everything was read, and nothing is damaged."""
        return not self.damages and not self.unread

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "sound": self.sound}


def verify_paths(paths: Iterable[Place]) -> list[VerifyReport]:
    """Verify indexes, with the stores they read, and stores.

    Args:
        paths: folders of indexes or of stores, or their URIs.
    """
    places = [required_place(absolute(path)) for path in paths]
    indexes = {settled(place): place for place in places if is_index(place)}
    stores = [place for place in places if settled(place) not in indexes]
    for place in stores:
        if not encoder_folders(place):
            raise ArtifactError(
                f"{place} is neither an index nor a store of embeddings; check the path"
            )
    found = [verify_index(place) for place in indexes.values()]
    by_index = (store for report in found for store in report.stores)
    stores += [store if is_uri(store) else Path(store) for store in by_index]
    unique = {settled(store): store for store in stores}
    return [*found, *map(verify_store, unique.values())]


def verify_index(root: Place) -> VerifyReport:
    """Check ``CURRENT`` and every version and candidate of an index against its checksums.

    From a bucket, every object of its versions is read. Nothing is locked or written. Damage is
    looked for once more, since a job that runs meanwhile may just have removed the version. A file
    that could not be read once is reported. Whether the store has the rows of each version is
    judged by the sizes of files.
    """
    place = required_place(root)
    if not is_index(place):
        raise ArtifactError(f"{place} is no index: it has no {CURRENT}; check the path")
    return _report("index", place, _IndexCheck, lambda: [place_of(place)[0]])


def verify_store(root: Place) -> VerifyReport:
    """Check everything in a store against its checksums, of every encoder.

    From a bucket, every object is read. Nothing is locked or written. Damage is looked at once
    more, since a job that runs meanwhile may just have moved or removed the file. A file that could
    not be read once is reported.
    """
    place = required_place(root)
    require_encoder_folders(place)
    return _report("store", place, _StoreCheck, lambda: encoder_folders(place))


def _report(
    kind: str, place: Place, look: "Callable[..., _Check]", folders: Callable[[], list[Path]]
) -> VerifyReport:
    """Return the report of a look at folders, and of what a second one finds damaged again."""
    checks, again = [look(place, folder) for folder in folders()], list[_Check]()
    damaged = {path for check in checks for path in check.damaged()}
    if damaged:
        again = [look(place, each) for each in folders()]
    checked = sum((check.checked for check in checks), Counter[str]())
    unread = (damage for check in (*checks, *again) for damage in check.damages(unread=True))
    found = (damage for check in again for damage in check.damages())
    return VerifyReport(
        path=str(place),
        kind=kind,
        checked=dict(checked),
        bytes=sum(check.bytes for check in checks),
        damages=tuple(damage for damage in found if damage.path in damaged),
        stores=tuple(dict.fromkeys(store for check in checks for store in check.stores)),
        notes=tuple(dict.fromkeys(named(note) for check in checks for note in check.notes)),
        unread=tuple({damage.path: damage for damage in unread}.values()),
    )


class _Check:
    """One look at the files of a place."""

    def __init__(self, root: Place) -> None:
        self.root, self.mirror = root, place_of(root)[1]
        self.checked, self.bytes = Counter[str](), 0
        self.stores, self.notes = list[str](), list[str]()
        self.errors = list[tuple[str, Path, WhitenIndexError]]()

    def remedy(self, kind: str, path: Path) -> str:
        """Return what mends something that is damaged."""
        raise NotImplementedError

    @contextlib.contextmanager
    def checking(self, kind: str, path: Path, *, counted: bool = True) -> Iterator[None]:
        """Count a file or folder, and report an error of the block as one of it."""
        if counted:
            self.checked[kind] += 1
            self.bytes += self.mirror.size(path)
        try:
            yield
        except (ArtifactError, FormatError, StorageError) as error:
            self.errors.append((kind, path, error))

    def damaged(self) -> set[str]:
        """Return the paths of everything damaged, as a report names them."""
        errors = self.errors
        return {named(path) for _, path, error in errors if not isinstance(error, StorageError)}

    def damages(self, *, unread: bool = False) -> Iterator[Damage]:
        """Yield everything damaged, or everything that the system does not let be read."""
        for kind, path, error in self.errors:
            if isinstance(error, StorageError) == unread:
                advice = self.remedy(kind, path)
                if isinstance(error, FormatError):
                    advice = "upgrade whiten-index: a later release wrote it"
                if unread:
                    advice = "mend the disk, or the permissions, and verify again"
                yield Damage(named(path), named(_reason(error)), named(advice))


class _IndexCheck(_Check):
    def __init__(self, place: Place, root: Path) -> None:
        super().__init__(place)
        self.current: Current | None = None
        self.sound = list[str]()
        folders = version_folders(root, self.mirror)
        with self.checking("CURRENT", root / CURRENT):
            current = self.current = read_current(root, self.mirror)
            # If another was published meanwhile, and this one removed, the second look shows it.
            if root / VERSIONS / current.version not in folders:
                raise ArtifactError(f"{root / CURRENT} names {current.version}, which is not there")
        if self.mirror.uri:
            folders = [folder for folder in folders if folder.parent.name == VERSIONS]
        else:
            with self.checking("index id", root / INDEX_ID, counted=False):
                read_index_id(root)
            for path in strange_entries(root):
                why = f"{path} is a link, no folder, or has the name of no version, and is not read"
                self.errors.append(("strange entries", path, ArtifactError(why)))
        for folder in folders:
            with self.checking(folder.parent.name, folder), self.mirror.opened(folder) as copy:
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
        store, missing = missing_rows(self.root, version)
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
            self.errors.append(("rows", folder, why))
        return not missing

    def _publishes(self, folder: Path) -> bool:
        return self.current is not None and self.current.version == folder.name

    def remedy(self, kind: str, path: Path) -> str:
        """Return what mends a version, which depends on the others."""
        if kind == "strange entries":
            return f"put the folder itself there under its own name, or move {path} away"
        if kind == "index id":
            return "restore it from a copy, or build or update again, which gives it a new id"
        if path.parent.name == CANDIDATES:
            return f"remove {path}: it is not published, and the next update makes another"
        ways = [
            "run the same build again, which makes the version from the store and encodes just the "
            "rows that are missing; or restore what is missing from a copy"
        ]
        if kind != "CURRENT" and self.current is not None and not self._publishes(path):
            ways.insert(0, f"nobody reads it: whiten-index prune {self.root} --keep N removes it")
        elif (latest := self._to_go_back_to()) is not None:
            ways.insert(0, f"whiten-index rollback {self.root} --to {latest}, which is sound")
        return "; or ".join(ways)

    def _to_go_back_to(self) -> str | None:
        """Return the newest sound version, if possible an older one that is not withdrawn."""
        if self.current is None:
            return max(self.sound, key=version_number, default=None)
        limit, withdrawn = version_number(self.current.version), self.current.withdrawn
        gone = {self.current.version, *self.current.removed}
        others = [name for name in self.sound if name not in gone]
        good = [name for name in others if name not in withdrawn]
        older = [name for name in good if version_number(name) < limit]
        return max(older or good or others, key=version_number, default=None)


def _named(folder: Path) -> str:
    kind = "candidate" if folder.parent.name == CANDIDATES else "version"
    return f"{kind} {folder.name}"


def _reason(error: Exception) -> str:
    """Return the first part of an error, without its advice."""
    return str(error).partition("; ")[0]


class _StoreCheck(_Check):
    """A look at all that an encoder has in a store."""

    def __init__(self, root: Place, folder: Path) -> None:
        super().__init__(root)
        encoder: Mapping[str, Any] = {}
        with self.checking("manifests", folder / MANIFEST):
            encoder = read_encoder(folder, self.mirror)
        self.store = EmbeddingStore(root, encoder, folder.name)
        # Digests of the rows of sound segments.
        self._sound = dict[str, NDArray[np.uint8]]()
        self._references = list[Reference]()
        for path in self.store.record_paths():
            with self.checking("corpora", path):
                record = self.store.record(path.name)
                self._references.append(Reference(self.store.fingerprint, record))
        self._read_versions()
        # The files of parts, those that are needed and missing among them.
        parts = dict[Path, CorpusPart]()
        for each in self._references:
            for part in each.record.parts:
                parts |= dict.fromkeys(self.store.part_files(part) if part.rows else (), part)
        for path in dict.fromkeys([*self.store.all_part_files(), *parts]):
            with self.checking("part_files", path):
                self.store.check_part_file(path, parts.get(path))
        self._check_segments()
        for kind in RESULTS:
            for path in self.store.results.files(kind):
                with self.checking(kind, path):
                    self.store.results.check(path)

    def _read_versions(self) -> None:
        """Read the references of versions that can be read; indexes are verified apart."""
        indexes = dict[Place, None]()
        for path in self.store.indexes.files():
            with self.checking("registered indexes", path):
                found = self.store.indexes.read(path)
                try:
                    require_at_its_place(found, self.root)
                    indexes[settled(found.place)] = None
                except (ArtifactError, ConfigError) as error:
                    self.notes.append(_reason(error))
        if around := index_around(self.root):
            indexes[around] = None
        for index, mirror in map(place_of, indexes):
            with self.checking("indexes", index / CURRENT, counted=False):
                mirror.latest(index / CURRENT)
                require_published(index, mirror)
            for folder in version_folders(index, mirror):
                # A damaged version is reported when its index is verified.
                with (
                    self.checking("indexes", folder, counted=False),
                    contextlib.suppress(ArtifactError),
                ):
                    reference = version_reference(folder, self.root, [self.store], mirror)
                    if reference is not None:
                        self._references.append(reference)

    def _check_segments(self) -> None:
        """Check the segments, and that each row that something needs is in a sound one."""
        folder, most = self.store.segments_folder, 0
        for name in self.store.segment_names():
            with self.checking("segments", folder / name):
                self._sound[name] = self.store.check_kept(name)
        if any(kind == "segments" and isinstance(e, StorageError) for kind, _, e in self.errors):
            return
        index = DigestIndex(self._sound.items())
        for each in self._references:
            lacking = sum(self._lacking_rows(part, index) for part in each.record.distinct_parts)
            most = max(most, lacking)
        if most and not self.damaged():
            why = ArtifactError(f"{folder} lacks {most:,} needed rows")
            self.errors.append(("segments", folder, why))

    def _lacking_rows(self, part: CorpusPart, sound: DigestIndex) -> int:
        try:
            whole = part.digests in self._sound
            return 0 if whole else int((~sound.find(self.store.digests(part)).known).sum())
        except ArtifactError:
            return part.rows

    def remedy(self, kind: str, path: Path) -> str:
        """Return what mends a file of a store."""
        if kind == "registered indexes":
            return (
                "update or build again each index that is built from this store, which writes it "
                f"again; if the index is gone, remove {path}"
            )
        if kind == "indexes":
            return f"verify {path.parent}, which says more"
        if kind in RESULTS:
            return f"remove {path}: it is made again when it is next needed"
        again = "run the same encode, build or update again, which encodes just what is missing"
        if kind == "corpora":
            return f"{again}; if that corpus is gone, remove {path}"
        return (
            f"{again}; what nothing needs goes with whiten-index gc {self.root} --keep-days 0; "
            "versions of rows that no corpus has any more can be searched, but neither ranked "
            "again from the store nor updated: whiten-index prune removes them"
        )
