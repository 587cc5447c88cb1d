"""Verification of indexes and stores, in folders and in buckets: damage, and what mends it."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.cached_storage import place_of, required_place
from whiten_index.artifacts.files import MANIFEST, exists
from whiten_index.artifacts.storage import Place, settled
from whiten_index.errors import ArtifactError, ConfigError, FormatError, StorageError, named
from whiten_index.paths import absolute, is_uri
from whiten_index.store.digest_index import DigestIndex
from whiten_index.store.embedding_store import (
    BRIDGED,
    EmbeddingStore,
    bridged_folders,
    encoder_folders,
    open_stores,
    read_encoder,
    require_encoder_folders,
)
from whiten_index.store.notes import RESULTS, remedy_of
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
    indexes_of,
    is_index,
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
    that could not be read once is reported. Whether a store has the rows of each version is looked
    at with the store.
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
    return _report(
        "store", place, _StoreCheck, lambda: encoder_folders(place) + bridged_folders(place)
    )


def _report(
    kind: str, place: Place, look: "Callable[..., _Check]", folders: Callable[[], list[Path]]
) -> VerifyReport:
    """Return the report of a look at folders, and of what a second one finds damaged again."""
    checks = [look(place, folder) for folder in folders()]
    damaged = {path for check in checks for path in check.damages}
    again = [look(place, folder) for folder in folders()] if damaged else []
    found = {path: each for check in again for path, each in check.damages.items()}
    unread = {path: each for check in (*checks, *again) for path, each in check.unread.items()}
    return VerifyReport(
        path=str(place),
        kind=kind,
        checked=dict(sum((check.checked for check in checks), Counter[str]())),
        bytes=sum(check.bytes for check in checks),
        damages=tuple(each for path, each in found.items() if path in damaged),
        stores=tuple(dict.fromkeys(store for check in checks for store in check.stores)),
        notes=tuple(dict.fromkeys(named(note) for check in checks for note in check.notes)),
        unread=tuple(unread.values()),
    )


# Advice, or the function that returns it when something is damaged.
_Remedy = str | Callable[[], str]


class _Check:
    def __init__(self, root: Place) -> None:
        self.root, self.mirror = root, place_of(root)[1]
        self.checked, self.bytes = Counter[str](), 0
        self.stores, self.notes = list[str](), list[str]()
        # By their paths.
        self.damages, self.unread = dict[str, Damage](), dict[str, Damage]()

    @contextlib.contextmanager
    def checking(
        self, kind: str, path: Path, remedy: _Remedy, *, counted: bool = True
    ) -> Iterator[None]:
        """Count a file or folder, and report an error of the block as one of it."""
        if counted:
            self.checked[kind] += 1
            self.bytes += self.mirror.size(path)
        try:
            yield
        except (ArtifactError, FormatError, StorageError) as error:
            found, advice = self.damages, remedy if isinstance(remedy, str) else remedy()
            if isinstance(error, FormatError):
                advice = "upgrade whiten-index: a later release wrote it"
            elif isinstance(error, StorageError):
                found, advice = self.unread, "mend the disk or its permissions, and verify again"
            found[named(path)] = Damage(named(path), named(_reason(error)), named(advice))

    def listed(self, kind: str, folder: Path, paths: Callable[[], Iterable[Path]]) -> list[Path]:
        """Return the paths of a folder, none and a report if it cannot be listed."""
        found = list[Path]()
        with self.checking(kind, folder, "restore the folder from a copy", counted=False):
            found += paths()
        return found


class _IndexCheck(_Check):
    def __init__(self, place: Place, root: Path) -> None:
        super().__init__(place)
        self.current: Current | None = None
        self.sound = list[str]()
        failed: Exception | None = None
        try:
            self.current = read_current(root, self.mirror)
        except (ArtifactError, FormatError, StorageError) as error:
            failed = error
        folders = version_folders(root, self.mirror)
        if self.mirror.uri:
            folders = [folder for folder in folders if folder.parent.name == VERSIONS]
        else:
            remedy = "restore it from a copy, or build or update again, which gives it a new id"
            with self.checking("index id", root / INDEX_ID, remedy, counted=False):
                read_index_id(root)
            for path in strange_entries(root):
                remedy = f"put the folder itself there under its own name, or move {path} away"
                with self.checking("strange entries", path, remedy, counted=False):
                    raise ArtifactError(
                        "it is a link, or has the name of no version, and is not read"
                    )
        # Others first, as they may be ways to go back from the published one.
        for folder in sorted(folders, key=self._publishes):
            with (
                self.checking(folder.parent.name, folder, partial(self._remedy, folder)),
                self.mirror.opened(folder) as copy,
            ):
                # One that vanished meanwhile was pruned.
                if exists(copy):
                    self._check(folder, copy)
        with self.checking(CURRENT, root / CURRENT, partial(self._remedy, root / CURRENT)):
            if failed is not None:
                raise failed
            # If another was published meanwhile, and this one removed, the second look shows it.
            if self.current is not None and not any(map(self._publishes, folders)):
                named_there = self.current.version
                raise ArtifactError(f"{root / CURRENT} names {named_there}, which is not there")

    def _check(self, folder: Path, copy: Path) -> None:
        sha256 = self.current.manifest_sha256 if self.current and self._publishes(folder) else None
        version = read_version(copy, sha256=sha256).check()
        fields = version.fields
        stores = [str(each) for each in store_places(self.root, fields) if encoder_folders(each)]
        self.stores += stores[:1]
        if not stores:
            self.notes.append(
                f"the store of {folder.name} is not there, and was not looked at; searching needs "
                "it only to rank candidates again"
            )
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
        if folder.parent.name == VERSIONS:
            self.sound.append(folder.name)

    def _publishes(self, folder: Path) -> bool:
        published = self.current is not None and self.current.version == folder.name
        return published and folder.parent.name == VERSIONS

    def _remedy(self, path: Path) -> str:
        """Return what mends a version or ``CURRENT``, which depends on the other versions."""
        if path.parent.name == CANDIDATES:
            return f"remove {path}: it is not published, and the next update makes another"
        # A build that finds CURRENT takes the disk of the version for one that is not mounted.
        gone = path.name == CURRENT and self.current is not None
        ways = [
            f"{f'mount its disk; or, if it is gone for good, remove {path} and ' if gone else ''}"
            "run the same build again, which makes the version from the store and encodes just the "
            "rows that are missing; or restore what is missing from a copy"
        ]
        if path.name != CURRENT and self.current is not None and not self._publishes(path):
            ways.insert(0, f"nobody reads it: whiten-index prune {self.root} --keep N removes it")
        elif (latest := self._to_go_back_to()) is not None:
            ways.insert(0, f"whiten-index rollback {self.root} --to {latest}, which is sound")
        return "; or ".join(ways)

    def _to_go_back_to(self) -> str | None:
        if self.current is None:
            return max(self.sound, key=version_number, default=None)
        limit, withdrawn = version_number(self.current.version), self.current.withdrawn
        gone = {self.current.version, *self.current.removed}
        others = [name for name in self.sound if name not in gone]
        good = [name for name in others if name not in withdrawn]
        older = [name for name in good if version_number(name) < limit]
        return max(older or good or others, key=version_number, default=None)


def _reason(error: Exception) -> str:
    """Return the first part of an error, without its advice."""
    return str(error).partition("; ")[0]


class _StoreCheck(_Check):
    def __init__(self, root: Place, folder: Path) -> None:
        super().__init__(root)
        encoder: Mapping[str, Any] = {}
        again = "run the same encode, build or update again, which encodes just what is missing"
        self._again = (
            f"{again}; what nothing needs goes with whiten-index gc {root} --keep-days 0; versions "
            "of rows that no corpus has any more can be searched, but neither ranked again from "
            "the store nor updated: whiten-index prune removes them"
        )
        if folder.name.startswith(BRIDGED):
            self._again = (
                "run whiten-index migrate --bridge again, which makes another version, then "
                "whiten-index prune, which removes the one of these rows, and gc"
            )
        with self.checking("manifests", folder / MANIFEST, self._again):
            encoder = read_encoder(folder, self.mirror)
        self.store = EmbeddingStore(root, encoder, folder.name)
        # Digests of the rows of sound segments.
        self._sound = dict[str, NDArray[np.uint8]]()
        self._references = list[Reference]()
        for path in self.listed("corpora", self.store.folder / "corpora", self.store.record_paths):
            remedy = f"{again}; if that corpus is gone, remove {path}"
            with self.checking("corpora", path, remedy):
                record = self.store.record(path.name)
                self._references.append(Reference(self.store.fingerprint, record))
        self._read_versions()
        # The files of parts, those that are needed and missing among them.
        parts = dict[Path, CorpusPart]()
        for each in self._references:
            for part in each.record.parts:
                parts |= dict.fromkeys(self.store.part_files(part) if part.rows else (), part)
        copied = f"whiten-index gc {root}, on a machine with a sound copy, puts it there again; or "
        remedy = f"{copied if self.mirror.uri else ''}{self._again}"
        there = self.listed("part_files", self.store.folder, self.store.all_part_files)
        for path in dict.fromkeys([*there, *parts]):
            with self.checking("part_files", path, remedy):
                self.store.check_part_file(path, parts.get(path))
        self._check_segments()
        for kind in RESULTS:
            results = partial(self.store.results.files, kind)
            for path in self.listed(kind, self.store.folder / kind, results):
                with self.checking(kind, path, remedy_of(path)):
                    self.store.results.check(path)

    def _read_versions(self) -> None:
        """Read the references of versions that can be read; indexes are verified apart."""
        indexes = dict[Place, None]()
        registry = self.store.indexes
        for path in self.listed("registered indexes", registry.folder, registry.files):
            remedy = (
                "update or build again each index that is built from this store, which writes it "
                f"again; if the index is gone, remove {path}"
            )
            with self.checking("registered indexes", path, remedy):
                found = self.store.indexes.read(path)
                try:
                    require_at_its_place(found, self.root)
                    indexes[settled(found.place)] = None
                except (ArtifactError, ConfigError) as error:
                    self.notes.append(_reason(error))
        if around := index_around(self.root):
            indexes[around] = None
        # Those registered with other encoders, whose own checks report their damage.
        with contextlib.suppress(ArtifactError, StorageError):
            indexes |= dict.fromkeys(indexes_of(self.root, open_stores(self.root)))
        for index, mirror in map(place_of, indexes):
            remedy = f"verify {index}, which says more"
            with self.checking("indexes", index / CURRENT, remedy, counted=False):
                mirror.latest(index / CURRENT)
                require_published(index, mirror)
            for folder in version_folders(index, mirror):
                # A damaged version is reported when its index is verified.
                with (
                    self.checking("indexes", folder, remedy, counted=False),
                    contextlib.suppress(ArtifactError),
                ):
                    reference = version_reference(
                        folder, self.root, [self.store.fingerprint], mirror
                    )
                    if reference is not None:
                        self._references.append(reference)

    def _check_segments(self) -> None:
        """Check the segments, and that each row that something needs is in a sound one."""
        folder, most = self.store.segments_folder, 0
        for name in self.store.segment_names():
            with self.checking("segments", folder / name, self._again):
                self._sound[name] = self.store.check_kept(name)
        if any(named(folder) in path for path in self.unread):
            return
        index = DigestIndex(self._sound.items())
        for each in self._references:
            lacking = sum(self._lacking_rows(part, index) for part in each.record.distinct_parts)
            most = max(most, lacking)
        with self.checking("segments", folder, self._again, counted=False):
            # Those of damaged segments are reported with them.
            if most and not any(f"{named(folder)}/" in path for path in self.damages):
                raise ArtifactError(f"{folder} lacks {most:,} needed rows")

    def _lacking_rows(self, part: CorpusPart, sound: DigestIndex) -> int:
        try:
            whole = part.digests in self._sound
            return 0 if whole else int((~sound.find(self.store.digests(part)).known).sum())
        except ArtifactError:
            return part.rows
        except StorageError:
            return 0  # its file is reported as unread
