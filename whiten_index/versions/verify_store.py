"""Verification of a store, and the check and the report that it shares with that of an index."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.cached_storage import named, place_of, required_place
from whiten_index.artifacts.manifest import MANIFEST, fingerprint
from whiten_index.artifacts.storage import Place, Storage, settled
from whiten_index.errors import (
    ArtifactError,
    ConfigError,
    FormatError,
    StorageError,
    WhitenIndexError,
)
from whiten_index.store.digest_index import DigestIndex
from whiten_index.store.embedding_store import (
    EmbeddingStore,
    encoder_folders,
    read_encoder,
    require_encoder_folders,
)
from whiten_index.store.notes import RESULTS
from whiten_index.store.records import CorpusPart
from whiten_index.versions.published import CURRENT, require_published
from whiten_index.versions.references import (
    Reference,
    corpus_reference,
    index_around,
    require_at_its_place,
    version_folders,
    version_reference,
)


@dataclass(frozen=True)
class Damage:
    """A file or folder that is damaged or missing, or cannot be read."""

    path: str
    why: str
    touches: tuple[str, ...]  # corpora and versions that need it
    remedy: str  # advice, and its cost


@dataclass(frozen=True)
class VerifyReport:
    """Result of a verification."""

    path: str  # of the index or store
    kind: str  # `index` or `store`
    checked: Mapping[str, int]  # kind of thing -> how many were looked at
    bytes: int  # of these
    damages: tuple[Damage, ...]  # everything damaged
    stores: tuple[str, ...] = ()  # folders of the stores that an index reads
    notes: tuple[str, ...] = ()  # things that were not looked at, without being damaged
    # Everything that the system does not let be read: it may be sound or damaged.
    unread: tuple[Damage, ...] = ()

    @property
    def sound(self) -> bool:
        """True if everything was read, and nothing is damaged."""
        return not self.damages and not self.unread

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "sound": self.sound}


# Names of corpora and versions that need something, and advice.
Remedy = tuple[Sequence[str], str]


class Check:
    """One look at the files of an index or of an encoder in a store; see ``VerifyReport``."""

    def __init__(self, mirror: Storage, only: frozenset[str] | None = None) -> None:
        """Take the paths to look at; None for all."""
        self.mirror, self.only = mirror, only
        self.checked, self.bytes = Counter[str](), 0
        self.stores, self.notes = list[str](), list[str]()
        self._errors = list[tuple[str, Path, WhitenIndexError]]()

    def remedy(self, kind: str, path: Path) -> Remedy:
        """Return who needs something that is damaged, and advice."""
        raise NotImplementedError

    def asked(self, paths: Iterable[Path]) -> list[Path]:
        """Return the paths that are to be looked at."""
        return [path for path in paths if self.only is None or str(path) in self.only]

    @contextlib.contextmanager
    def counting(self, kind: str, path: Path) -> Iterator[None]:
        """Count a file or folder, and report an error of the block as one of it."""
        if self.asked([path]):
            self.checked[kind] += 1
            self.bytes += self.mirror.size(path)
        with self.reporting(kind, path):
            yield

    @contextlib.contextmanager
    def reporting(self, kind: str, path: Path) -> Iterator[None]:
        """Report an error of the block as one of a file or folder."""
        try:
            yield
        except (ArtifactError, FormatError, StorageError) as error:
            self.add(kind, path, error)

    def add(self, kind: str, path: Path, error: WhitenIndexError) -> None:
        """Report an error of a file or folder, if that is to be looked at."""
        if self.asked([path]):
            self._errors.append((kind, path, error))

    def damaged(self) -> frozenset[str]:
        """Return the paths of everything damaged."""
        errors = self._errors
        return frozenset(str(path) for _, path, e in errors if not isinstance(e, StorageError))

    def damages(self, *, unread: bool = False) -> Iterator[Damage]:
        """Yield everything damaged, or everything that the system does not let be read."""
        for kind, path, error in self._errors:
            if isinstance(error, StorageError) == unread:
                touches, advice = self.remedy(kind, path)
                if isinstance(error, FormatError):
                    advice = "upgrade whiten-index: a later release wrote it"
                if unread:
                    advice = "mend the disk, or the permissions, and verify again"
                by = tuple(map(named, touches))
                yield Damage(named(path), named(reason(error)), by, named(advice))


def as_report(
    kind: str, place: Place, checks: Sequence[Check], again: Sequence[Check]
) -> VerifyReport:
    """Return the report of a first look, and of a second one at everything found damaged."""
    checked = Counter[str]()
    for check in checks:
        checked.update(check.checked)
    unread = (damage for check in (*checks, *again) for damage in check.damages(unread=True))
    return VerifyReport(
        path=str(place),
        kind=kind,
        checked=dict(checked),
        bytes=sum(check.bytes for check in checks),
        damages=tuple(damage for check in again for damage in check.damages()),
        stores=tuple(dict.fromkeys(store for check in checks for store in check.stores)),
        notes=tuple(dict.fromkeys(named(note) for check in checks for note in check.notes)),
        unread=tuple({damage.path: damage for damage in unread}.values()),
    )


def reason(error: Exception) -> str:
    """Return the first part of an error, without its advice."""
    return str(error).partition("; ")[0]


def verify_store(root: Place) -> VerifyReport:
    """Check everything in a store against its checksums, of every encoder.

    From a bucket, every object is read. Nothing is locked or written. Damage is looked at once
    more, since a job that runs meanwhile may just have moved or removed the file. A file that could
    not be read once is reported.
    """
    place = required_place(root)
    checks = {each: _StoreCheck(place, each) for each in require_encoder_folders(place)}
    damaged = any(check.damaged() for check in checks.values())
    folders = encoder_folders(place) if damaged else ()
    again = [_StoreCheck(place, each, checks[each]) for each in folders if each in checks]
    return as_report("store", place, list(checks.values()), again)


class _StoreCheck(Check):
    """One look at all that an encoder has in a store, or at what the ``first`` found damaged."""

    def __init__(self, root: Place, folder: Path, first: _StoreCheck | None = None) -> None:
        super().__init__(place_of(root)[1], None if first is None else first.damaged())
        self.root = root
        encoder: Mapping[str, Any] = {}
        with self.counting("manifests", folder / MANIFEST):
            encoder = read_encoder(folder, self.mirror)
        self.store = EmbeddingStore(root, encoder, folder.name)
        # Digests of the rows of sound segments.
        self._sound: dict[str, NDArray[np.uint8]] = {} if first is None else first._sound
        self._references = list[Reference]()
        # Those with rows that no sound segment has.
        self._lacking = list[Reference]()
        self._read_corpora()
        self._read_versions()
        self._check_part_files()
        self._check_segments()
        for kind in RESULTS:
            for path in self.asked(self.store.results.files(kind)):
                with self.counting(kind, path):
                    self.store.results.check(path)

    def _read_corpora(self) -> None:
        for path in self.store.record_paths():
            with self.counting("corpora", path):
                self._references.append(corpus_reference(self.store, path))

    def _read_versions(self) -> None:
        """Read the references of versions that can be read; indexes are verified apart."""
        indexes = dict[Place, None]()
        for path in self.store.indexes.files():
            with self.counting("registered indexes", path):
                found = self.store.indexes.read(path)
                try:
                    require_at_its_place(found, self.root)
                    indexes[settled(found.place)] = None
                except (ArtifactError, ConfigError) as error:
                    self.notes += [] if reason(error) in self.notes else [reason(error)]
        if around := index_around(self.root):
            indexes[around] = None
        for index, mirror in map(place_of, indexes):
            with self.reporting("indexes", index / CURRENT):
                mirror.latest(index / CURRENT)
                require_published(index, mirror)
            for folder in version_folders(index, mirror):
                # A damaged version is reported when its index is verified.
                with self.reporting("indexes", folder), contextlib.suppress(ArtifactError):
                    reference = version_reference(folder, self.root, [self.store], mirror)
                    if reference is not None:
                        self._references.append(reference)

    def _check_segments(self) -> None:
        """Check the segments, and that each row that something needs is in a sound one."""
        unread, names = False, self.store.segment_names()
        folder, most = self.store.segments_folder, 0
        # Those that were joined or removed since the first look are others now.
        self._sound = {name: self._sound[name] for name in names if name in self._sound}
        for name in names:
            if name not in self._sound:
                with self.counting("segments", folder / name):
                    try:
                        self._sound[name] = self.store.check_kept(name)
                    except StorageError:
                        unread = True
                        raise
        if unread:
            return
        index = DigestIndex(self._sound.items())
        for each in self._references:
            lacking = sum(self._lacking_rows(part, index) for part in each.record.distinct_parts)
            self._lacking += [each] if lacking else []
            most = max(most, lacking)
        if self._lacking and not self.damaged():
            self.add("segments", folder, ArtifactError(f"{folder} lacks {most:,} needed rows"))

    def _lacking_rows(self, part: CorpusPart, sound: DigestIndex) -> int:
        try:
            whole = part.digests in self._sound
            return 0 if whole else int((~sound.find(self.store.digests(part)).known).sum())
        except ArtifactError:
            return part.rows

    def _check_part_files(self) -> None:
        """Check the files of parts, those that are needed and missing among them."""
        parts = dict[Path, list[CorpusPart]]()
        for each in self._references:
            for part in each.record.parts:
                for path in self.store.part_files(part) if part.rows else ():
                    parts.setdefault(path, []).append(part)
        for path in self.asked(dict.fromkeys([*self.store.all_part_files(), *parts])):
            with self.counting("part_files", path):
                self.store.check_part_file(path, parts.get(path, ())[:1])

    def remedy(self, kind: str, path: Path) -> Remedy:
        """Return the corpora and versions that need something, and what mends it."""
        if kind == "registered indexes":
            return (), (
                "update or build again each index that is built from this store, which writes it "
                f"again; if the index is gone, remove {path}"
            )
        if kind == "indexes":
            return (), f"verify {path.parent}, which says more"
        if kind in RESULTS:
            return (), f"remove {path}: it is made again when it is next needed"
        touched = [each.by for each in self._references if self._needs(each, kind, path)]
        names = tuple(dict.fromkeys(touched))
        corpora = [name for name in names if name.startswith("corpus ")]
        gc = f"whiten-index gc {self.root} --keep-days 0"
        if kind in ("segments", "part_files") and not corpora:
            if not names:
                return names, f"nothing needs it: run {gc}"
            return names, (
                "no corpus has these rows any more: those versions can be searched, but not ranked "
                "again from the store, nor updated; remove them with whiten-index prune, and run "
                f"{gc}"
            )
        rest = (
            f"if that corpus is gone, remove {path}"
            if kind == "corpora"
            else (f"what is still reported then goes with {gc}")
        )
        return names, (
            f"run the same encode, build or update with {' and '.join(corpora) or 'its corpora'} "
            f"again, which encodes just what is missing; {rest}"
        )

    def _needs(self, reference: Reference, kind: str, path: Path) -> bool:
        if kind == "segments":
            return reference in self._lacking
        if kind == "corpora":
            return f"{fingerprint(dict(reference.record.source))}.json" == path.name
        parts = reference.record.parts if kind == "part_files" else ()
        return any(path in self.store.part_files(part) for part in parts if part.rows)
