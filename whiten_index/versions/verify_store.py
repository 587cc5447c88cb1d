"""Verification of a store, and the report that it shares with that of an index."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from whiten_index.artifacts.atomic import require_path
from whiten_index.artifacts.files import exists, list_folder, resolved, size_of
from whiten_index.artifacts.manifest import MANIFEST, fingerprint
from whiten_index.errors import (
    ArtifactError,
    ConfigError,
    FormatError,
    StorageError,
    WhitenIndexError,
)
from whiten_index.store.embedding_store import EmbeddingStore, read_encoder
from whiten_index.store.live_set import encoder_folders, require_encoder_folders
from whiten_index.store.records import CorpusPart, CorpusRecord
from whiten_index.store.shard_checks import ShardChecks
from whiten_index.versions.published import CURRENT, require_published
from whiten_index.versions.references import (
    Reference,
    corpus_name,
    is_index,
    record_paths,
    require_at_its_place,
    version_folders,
    version_reference,
)


@dataclass(frozen=True)
class Damage:
    """A file or folder that is damaged or missing, or cannot be read.

    Attributes:
        path: of it.
        why: the reason.
        touches: corpora and versions that need it.
        remedy: advice, and its cost.
    """

    path: str
    why: str
    touches: tuple[str, ...]
    remedy: str


@dataclass(frozen=True)
class VerifyReport:
    """Result of a verification.

    Attributes:
        path: of the index or store.
        kind: ``index`` or ``store``.
        checked: kind of thing -> how many were looked at.
        bytes: of these.
        damages: everything damaged.
        unread: everything that the system does not let be read: it may be sound or damaged.
        stores: folders of the stores that an index reads.
        notes: things that were not looked at, without being damaged.
    """

    path: str
    kind: str
    checked: Mapping[str, int]
    bytes: int
    damages: tuple[Damage, ...]
    stores: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unread: tuple[Damage, ...] = ()

    @property
    def sound(self) -> bool:
        """True if everything was read, and nothing is damaged."""
        return not self.damages and not self.unread

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "sound": self.sound}


def reason(error: WhitenIndexError) -> str:
    """Return the first part of an error, without its advice."""
    return str(error).partition("; ")[0]


def remedy_for(error: WhitenIndexError, usual: str) -> str:
    """Return advice on an error, ``usual`` where it is one of damage."""
    if isinstance(error, FormatError):
        return "upgrade whiten-index: a later release wrote it"
    if isinstance(error, StorageError):
        return "mend the disk, or the permissions, and verify again"
    return usual


_GC = "whiten-index gc {root} --keep-days 0"
_ENCODE = (
    "run whiten-index encode with one of its corpora and the same model again: it writes this file "
    "and encodes nothing"
)
T = TypeVar("T")
# Names of corpora and versions that need something, and what mends it.
_Remedy = tuple[Sequence[str], str]


def verify_store(root: Path | str) -> VerifyReport:
    """Check everything in a store against its checksums, of every encoder.

    Nothing is locked or written. Damage is looked at once more, since a job that runs meanwhile
    may just have moved or removed the file. A file that could not be read once is reported.

    Raises:
        ArtifactError: there is no store.
    """
    place = require_path(root)
    checks = [_Check(place, folder) for folder in require_encoder_folders(place)]
    again = list[_Check]()
    if only := frozenset(damage.path for check in checks for damage in check.damages):
        again = [_Check(place, folder, only) for folder in encoder_folders(place)]
    counted = Counter[str]()
    for check in checks:
        counted.update(check.counted)
    return VerifyReport(
        path=str(place),
        kind="store",
        checked=dict(counted),
        bytes=sum(check.bytes for check in checks),
        damages=tuple(damage for check in again for damage in check.damages),
        notes=tuple(dict.fromkeys(note for check in checks for note in check.notes)),
        unread=tuple({each.path: each for c in (*checks, *again) for each in c.unread}.values()),
    )


class _Check:
    """One look at all that an encoder has in a store, or at the paths ``only``."""

    def __init__(self, root: Path, folder: Path, only: frozenset[str] | None = None) -> None:
        self.root, self.folder, self.only = root, folder, only
        self.counted, self.bytes = Counter[str](), 0
        self.damages, self.unread = list[Damage](), list[Damage]()
        self.notes = list[str]()
        self.store = EmbeddingStore(root, {}, folder.name)
        self._checks = ShardChecks(self.store)
        self._references = list[Reference]()
        self._run()

    def _run(self) -> None:
        mending = partial(_nobody, _ENCODE)
        self._try("manifests", self.folder / MANIFEST, _check_manifest, mending)
        self._references += [*self._corpora(), *self._versions()]
        for name in self._checks.shards():
            path = self.store.shards_folder / name
            self._try("shards", path, self._checks.check_shard, partial(self._mending, (name,)))
        for path, members in self._checks.packs.items():
            self._try("packs", path, self._checks.check_pack, partial(self._mending, members))
        self._check_documents()
        self._check_missing_shards()
        for kind in ("choices", "samples", "runtimes"):
            for path in list_folder(self.folder / kind, "[!.]*"):
                remedy = f"remove {path}: it is made again when it is next needed"
                self._try(kind, path, self._check_result, partial(_nobody, remedy))

    def _try(
        self,
        kind: str,
        path: Path,
        check: Callable[[Path], T],
        mending: Callable[[], _Remedy],
        *,
        always: bool = False,
    ) -> T | None:
        """Check one thing and return what that returned; ``always`` even if nobody asks for it."""
        asked = self._asks_for(path)
        if asked:
            self.counted[kind] += 1
            self.bytes += size_of(path)
        elif not always:
            return None
        try:
            return check(path)
        except (ArtifactError, StorageError) as error:
            if asked:
                self._add(path, error, *mending())
        return None

    def _asks_for(self, path: Path) -> bool:
        return self.only is None or str(path) in self.only

    def _add(
        self, path: Path, error: WhitenIndexError, touches: Sequence[str], remedy: str
    ) -> None:
        found = Damage(str(path), reason(error), tuple(touches), remedy_for(error, remedy))
        (self.unread if isinstance(error, StorageError) else self.damages).append(found)

    # References

    def _corpora(self) -> Iterator[Reference]:
        for path in record_paths(self.store):
            mending = partial(self._mending_record, path)
            record = self._try("corpora", path, self._record, mending, always=True)
            if record is not None:
                name = f"corpus {corpus_name(record)}"
                yield Reference(name, self.store.fingerprint, record)

    def _record(self, path: Path) -> CorpusRecord:
        return self.store.record(path.name)

    def _versions(self) -> Iterator[Reference]:
        """Yield the references of versions that can be read; indexes are verified apart."""
        places = dict.fromkeys(self._registered())
        if is_index(around := resolved(self.root).parent):
            places[around] = None
        for index in places:
            with self._reporting(index / CURRENT):
                require_published(index)
            for folder in version_folders(index):
                # A damaged version is reported when its index is verified.
                with self._reporting(folder), contextlib.suppress(ArtifactError):
                    reference = version_reference(folder, self.root, [self.store])
                    if reference is not None:
                        yield reference

    @contextlib.contextmanager
    def _reporting(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (ArtifactError, StorageError) as error:
            if self._asks_for(path):
                self._add(path, error, (), f"verify {path.parent}, which says more")

    def _registered(self) -> Iterator[Path]:
        for path in self.store.indexes.files():
            remedy = (
                "update or build again each index that is built from this store, which writes it "
                f"again; if the index is gone, remove {path}"
            )
            mending = partial(_nobody, remedy)
            read = self.store.indexes.read
            found = self._try("registered indexes", path, read, mending, always=True)
            if found is None:
                continue
            try:
                require_at_its_place(found, self.root)
                yield found.folder
            except (ArtifactError, ConfigError) as error:
                self.notes.append(reason(error))

    # Checks

    def _check_documents(self) -> None:
        """Check the files of rows, those that are needed and missing among them."""
        parts = [part for each in self._references for part in each.record.parts if part.rows]
        rows = {part.documents: part.rows for part in parts}
        paths = self.store.documents_paths()
        paths |= {name: self.store.documents_path(name) for name in rows if name not in paths}
        for name, path in paths.items():

            def check(path: Path, name: str = name) -> None:
                found, wanted = (
                    self.store.documents(CorpusPart("", name, 0, 0, 0)).num_rows,
                    rows.get(name),
                )
                if wanted not in (None, found):
                    raise ArtifactError(f"{path} has {found} rows, and its embeddings are {wanted}")

            def mending(name: str = name) -> _Remedy:
                named = [
                    reference
                    for reference in self._references
                    if name in {part.documents for part in reference.record.parts}
                ]
                return self._remedy(named, rows=0)

            self._try("row_files", path, check, mending)

    def _check_missing_shards(self) -> None:
        packed = {shard for members in self._checks.packs.values() for shard in members}
        needed = [shard for each in self._references for shard in each.record.shards]
        for shard in dict.fromkeys(needed):
            path = self.store.shards_folder / shard
            if shard not in packed and self._asks_for(path) and not exists(path):
                error = self._checks.unread_pack or ArtifactError(f"shard {path} is missing")
                self._add(path, error, *self._mending((shard,)))

    def _check_result(self, path: Path) -> None:
        if not self.store.results.is_sound(path):
            raise ArtifactError(f"{path} is damaged: it does not match its digest")

    # Remedies

    def _mending(self, damaged: Collection[str]) -> _Remedy:
        """Return the corpora and versions that damaged shards touch, and what mends them."""
        near = set(damaged).union(*(self._checks.pickers.get(shard, ()) for shard in damaged))
        affected = {shard for shard in near if not self._is_readable(shard)}
        if near and not affected:
            gc = _GC.format(root=self.root)
            return (), f"all of it is read from sound copies in the store: run {gc}"
        touched = [each for each in self._references if affected & set(each.record.shards)]
        parts = [part for each in touched for part in each.record.parts]
        rows = {part.shard: part.rows for part in parts if part.shard in affected}
        return self._remedy(touched, rows=sum(rows.values()))

    def _is_readable(self, shard: str) -> bool:
        try:
            return self.store.find(shard) is not None
        except (ArtifactError, StorageError):
            return False

    def _remedy(self, touched: Sequence[Reference], *, rows: int) -> _Remedy:
        names = tuple(dict.fromkeys(reference.by for reference in touched))
        gc = _GC.format(root=self.root)
        corpora = [reference.by for reference in touched if reference.by.startswith("corpus ")]
        if corpora:
            cost = f"at most {rows:,} rows are encoded" if rows else "nothing is encoded"
            remedy = (
                f"run whiten-index encode (or update, or build) with {' and '.join(corpora)} "
                f"again: {cost}; what is still reported then goes with {gc}"
            )
        elif touched:
            remedy = (
                "no corpus has these rows any more: those versions can be searched, but not ranked "
                "again from the store, nor updated; remove them with whiten-index prune, and run "
                f"{gc}"
            )
        else:
            remedy = f"nothing needs it: run {gc}"
        return names, remedy

    def _mending_record(self, path: Path) -> _Remedy:
        """Return the corpus of a damaged record, by the versions made of it, and what mends it."""
        names = {
            f"corpus {corpus_name(reference.record)}"
            for reference in self._versions()
            if f"{fingerprint(dict(reference.record.source))}.json" == path.name
        }
        which = " and ".join(sorted(names)) if names else "the corpus that it is of"
        remedy = (
            f"run whiten-index encode (or update, or build) with {which} again: nothing is "
            f"encoded; if that corpus is gone, remove {path}"
        )
        return sorted(names), remedy


def _nobody(remedy: str) -> _Remedy:
    return (), remedy


def _check_manifest(path: Path) -> None:
    read_encoder(path.parent)
