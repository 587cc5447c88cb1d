"""Verification of a store, and the report that it shares with that of an index."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from whiten_index.artifacts import manifest
from whiten_index.artifacts.files import exists, list_folder, require_path, resolved, size_of
from whiten_index.artifacts.manifest import MANIFEST, check_files
from whiten_index.errors import (
    ArtifactError,
    ConfigError,
    FormatError,
    StorageError,
    WhitenIndexError,
)
from whiten_index.store.embedding_store import EmbeddingStore, read_encoder
from whiten_index.store.packs import read_pack
from whiten_index.store.records import CorpusPart
from whiten_index.store.row_refs import other_sources
from whiten_index.store.shard_resolver import MOMENTS, InFolder, read_shard
from whiten_index.versions.live_set import encoder_folders, shard_names
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
from whiten_index.whitening.moments import Moments


@dataclass(frozen=True)
class Damage:
    """Something that is damaged or missing, or cannot be read.

    Attributes:
        path: of it.
        why: what is wrong with it.
        touches: corpora and versions that need it.
        remedy: what to do, and what that makes anew.
    """

    path: str
    why: str
    touches: tuple[str, ...]
    remedy: str


@dataclass(frozen=True)
class VerifyReport:
    """What was looked at, and what of it is damaged.

    Attributes:
        path: of the index or store.
        kind: ``index`` or ``store``.
        checked: kind of thing -> how many were looked at.
        bytes: of these.
        damages: what is damaged.
        unread: what the system does not let be read: it may be sound or damaged.
        stores: folders of the stores that an index reads.
        notes: what could not be looked at, and is no damage.
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
        """Whether everything was read, and nothing is damaged."""
        return not self.damages and not self.unread

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "sound": self.sound}


def reason(error: WhitenIndexError) -> str:
    """Return what an error says is wrong, without what it says to do."""
    return str(error).partition("; ")[0]


def remedy_for(error: WhitenIndexError, usual: str) -> str:
    """Return what to do about an error: the usual thing where it is one of damage."""
    if isinstance(error, FormatError):
        return "upgrade whiten-index: a later release wrote it"
    if isinstance(error, StorageError):
        return "mend the disk, or the permissions, and verify again"
    return usual


# Rows of what no corpus names.
_ANY = -1
_GC = "whiten-index gc {root} --keep-days 0"


def verify_store(root: Path | str) -> VerifyReport:
    """Check everything in a store against its checksums, of every encoder.

    Nothing is locked or written. What is found damaged is looked at once more, since a job that
    runs meanwhile may just have moved or removed it. What could not be read once is reported.

    Raises:
        ArtifactError: there is no store.
    """
    place = require_path(root)
    folders = list(encoder_folders(place))
    if not folders:
        raise ArtifactError(
            f"{place} holds no store of embeddings; check the path: it is the folder that was "
            "named to --store, or the folder store of an index"
        )
    checks = [_Check(place, folder).run() for folder in folders]
    notes = [note for check in checks for note in check.notes]
    unread = {damage.path: damage for check in checks for damage in check.unread}
    again = list[_Check]()
    if only := frozenset(damage.path for check in checks for damage in check.damages):
        again = [_Check(place, folder, only).run() for folder in encoder_folders(place)]
        unread |= {damage.path: damage for check in again for damage in check.unread}
    counted = Counter[str]()
    for check in checks:
        counted.update(check.counted)
    size = sum(check.bytes for check in checks)
    damages = tuple(damage for check in again for damage in check.damages)
    return VerifyReport(
        str(place),
        "store",
        dict(counted),
        size,
        damages,
        (),
        tuple(dict.fromkeys(notes)),
        tuple(unread.values()),
    )


@dataclass
class _Check:
    """One look at all that an encoder has in a store."""

    root: Path
    folder: Path
    only: frozenset[str] | None = None
    counted: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    damages: list[Damage] = field(default_factory=list)
    unread: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = EmbeddingStore(self.root, {}, self.folder.name)
        self._shards, self._packs = self.store.shards, self.store.shards.packs
        self._resolver = self._shards.resolver
        self._references = list[Reference]()
        # Shard -> those that pick rows from it.
        self._pickers: dict[str, set[str]] = {}
        self._members: dict[str, tuple[str, ...]] = {}
        # Of packs that cannot be read, any of which may hold any shard.
        self._unread_pack: StorageError | None = None

    def run(self) -> _Check:
        """Look at everything."""
        self._check_manifest()
        self._references = [*self._corpora(), *self._versions()]
        self._look_around()
        for name in shard_names(self._shards.folder):
            self._try("shards", self._shards.folder / name, self._check_shard, (name,))
        for name in self._packs.names():
            members = self._members.get(name, ())
            self._try("packs", self._packs.folder / name, self._check_pack, members)
        self._check_rows()
        self._check_needed()
        self._check_notes()
        return self

    def _try(
        self, kind: str, path: Path, check: Callable[[Path], None], inside: Collection[str] = ()
    ) -> None:
        """Check one thing, which shards are in."""
        if self._looks_at(kind, path):
            try:
                check(path)
            except (ArtifactError, StorageError) as error:
                self._add(path, error, *self._mending(inside))

    def _looks_at(self, kind: str, path: Path) -> bool:
        if self.only is not None and str(path) not in self.only:
            return False
        self.counted[kind] += 1
        self.bytes += size_of(path)
        return True

    def _add(
        self, path: Path, error: WhitenIndexError, touches: Sequence[str], remedy: str
    ) -> None:
        found = Damage(str(path), reason(error), tuple(touches), remedy_for(error, remedy))
        (self.unread if isinstance(error, StorageError) else self.damages).append(found)

    # What there is to check

    def _check_manifest(self) -> None:
        path = self.folder / MANIFEST
        if not self._looks_at("manifests", path):
            return
        try:
            read_encoder(self.folder)
        except (ArtifactError, StorageError) as error:
            remedy = (
                "run whiten-index encode with one of its corpora and the same model again: it "
                "writes this file and encodes nothing anew"
            )
            self._add(path, error, (), remedy)

    def _corpora(self) -> Iterator[Reference]:
        for path in record_paths(self.store):
            try:
                record = self.store.record(path.name)
            except (ArtifactError, StorageError) as error:
                if self._looks_at("corpora", path):
                    self._add(path, error, *self._mending_record(path))
                continue
            self._looks_at("corpora", path)
            yield Reference(f"corpus {corpus_name(record)}", self.store.fingerprint, record)

    def _versions(self) -> Iterator[Reference]:
        """Yield what versions need, as far as that can be told; indexes are verified apart."""
        places = dict.fromkeys(self._registered())
        if is_index(around := resolved(self.root).parent):
            places[around] = None
        for index in places:
            with self._reporting(index / CURRENT):
                require_published(index)
            for folder in version_folders(index):
                reference = None
                # A damaged version is reported when its index is verified.
                with self._reporting(folder), contextlib.suppress(ArtifactError):
                    reference = version_reference(folder, self.root, [self.store])
                if reference is not None:
                    yield reference

    @contextlib.contextmanager
    def _reporting(self, path: Path) -> Iterator[None]:
        """Report what is wrong in an index, without which it is not known what it needs."""
        try:
            yield
        except (ArtifactError, StorageError) as error:
            if self.only is None or str(path) in self.only:
                self._add(path, error, (), f"verify {path.parent}, which says more")

    def _registered(self) -> Iterator[Path]:
        users = self.store.indexes
        for path in users.files():
            looks = self._looks_at("registered indexes", path)
            try:
                found = users.read(path)
            except (ArtifactError, StorageError) as error:
                remedy = (
                    "update or build again each index that is built from this store, and it is "
                    f"written anew; if the index is gone, remove {path}"
                )
                if looks:
                    self._add(path, error, (), remedy)
                continue
            try:
                require_at_its_place(found, self.root)
                yield found.folder
            except (ArtifactError, ConfigError) as error:
                self.notes.append(reason(error))

    def _look_around(self) -> None:
        """Note which shards pick from which, and which are in which pack, as far as can be read."""
        for name in shard_names(self._shards.folder):
            # What cannot be read is reported where each is checked.
            shard = None
            with contextlib.suppress(ArtifactError, StorageError):
                shard = self._resolver.fields(name, verify=False)
            for source, _ in [] if shard is None else other_sources(shard):
                self._pickers.setdefault(source, set()).add(name)
        for name in self._packs.names():
            pack = None
            try:
                pack = self._packs.fields(name, verify=False)
            except FormatError:
                pass
            except StorageError as error:
                self._unread_pack = error
            members = () if pack is None else pack["members"]
            self._members[name] = tuple(member.fingerprint for member in members)

    def _check_shard(self, folder: Path) -> None:
        fields = read_shard(folder)
        check_files(folder, fields, content=True)
        place = InFolder(folder, fields)
        rows, picks = place.shard.rows, place.picks()
        own = len(place.tensor("embeddings"))
        lengths = {"digests": len(place.tensor("digests"))}
        if picks is None:
            lengths["embeddings"] = own
        else:
            lengths |= {"source": len(picks.source), "row": len(picks.row)}
        _require_lengths(folder, lengths, rows)
        if place.keeps_moments and Moments.load(folder / MOMENTS).count != rows:
            raise ArtifactError(f"{folder} is damaged: its moments are of other rows")
        if self._packs.find(folder.name, verify=True):
            # It is read from there; the folder stays for the rows that it holds itself.
            return
        for source, held_as in other_sources(fields):
            if self._resolver.find(source, verify=False, held_as=held_as) is None:
                raise ArtifactError(
                    f"{folder} picks rows from shard {source}, which is missing or another"
                )

    def _check_pack(self, folder: Path) -> None:
        fields = read_pack(folder)
        check_files(folder, fields, content=True)
        members = fields["members"]
        lengths = [len(self._packs.embeddings(member)) for member in members]
        lengths += [len(self._packs.tensor(member, "digests")) for member in members]
        if lengths != 2 * [member.rows for member in members]:
            raise ArtifactError(f"{folder} is damaged: it has fewer rows than its shards")
        for member in members:
            if member.moments and self._packs.moments(member).count != member.rows:
                raise ArtifactError(f"{folder / member.moments} is damaged: it is of other rows")

    def _check_rows(self) -> None:
        sizes = {
            part.documents: part
            for reference in self._references
            for part in reference.record.parts
            if part.rows
        }
        for digest, path in self.store.document_files.by_name().items():
            part = sizes.get(digest, CorpusPart("", digest, _ANY, 0, 0))
            self._check_documents(path, part)

    def _check_documents(self, path: Path, part: CorpusPart) -> None:
        if not self._looks_at("row_files", path):
            return
        try:
            self._require_rows(path, part)
        except (ArtifactError, StorageError) as error:
            touched = [
                reference
                for reference in self._references
                if part.documents in {each.documents for each in reference.record.parts}
            ]
            self._add(path, error, *self._remedy(touched, rows=0))

    def _require_rows(self, path: Path, part: CorpusPart) -> None:
        found: pa.Table = self.store.documents(part)
        if part.rows not in (_ANY, found.num_rows):
            raise ArtifactError(
                f"{path} has {found.num_rows} rows, and its embeddings are {part.rows}"
            )

    def _check_needed(self) -> None:
        """Find what is needed and not there at all."""
        for shard in dict.fromkeys(
            name for reference in self._references for name in reference.record.shards
        ):
            path = self._shards.folder / shard
            there = exists(path) or any(shard in members for members in self._members.values())
            if not there and (self.only is None or str(path) in self.only):
                error = self._unread_pack or ArtifactError(f"shard {path} is missing")
                self._add(path, error, *self._mending((shard,)))
        parts = (
            part for reference in self._references for part in reference.record.parts if part.rows
        )
        for part in {part.documents: part for part in parts}.values():
            path = self.store.document_files.path(part.documents)
            if not exists(path):
                self._check_documents(path, part)

    def _check_notes(self) -> None:
        for kind in ("choices", "samples", "runtimes"):
            for path in list_folder(self.folder / kind, "[!.]*"):
                if not self._looks_at(kind, path):
                    continue
                try:
                    self._require_note(path)
                except (ArtifactError, StorageError) as error:
                    remedy = f"remove {path}: it is made anew when it is next needed"
                    self._add(path, error, (), remedy)

    def _require_note(self, path: Path) -> None:
        if not self.store.results.is_sound(path):
            raise ArtifactError(f"{path} is damaged: it does not match its digest")

    # What mends it

    def _mending(self, damaged: Collection[str]) -> tuple[Sequence[str], str]:
        """Return who needs shards that are damaged, or picks from them, and what mends them."""
        near = set(damaged).union(*(self._pickers.get(shard, ()) for shard in damaged))
        affected = {shard for shard in near if not self._is_readable(shard)}
        if near and not affected:
            gc = _GC.format(root=self.root)
            return (), f"all of it is read from sound copies in the store: run {gc}"
        touched = [
            reference for reference in self._references if affected & set(reference.record.shards)
        ]
        rows = {
            part.shard: part.rows
            for reference in touched
            for part in reference.record.parts
            if part.shard in affected
        }
        return self._remedy(touched, rows=sum(rows.values()))

    def _is_readable(self, shard: str) -> bool:
        """Tell whether a shard is sound in some place."""
        try:
            return self._resolver.find(shard, verify=True) is not None
        except (ArtifactError, StorageError):
            return False

    def _remedy(self, touched: Sequence[Reference], *, rows: int) -> tuple[Sequence[str], str]:
        names = tuple(dict.fromkeys(reference.by for reference in touched))
        gc = _GC.format(root=self.root)
        corpora = [reference.by for reference in touched if reference.by.startswith("corpus ")]
        if corpora:
            anew = f"at most {rows:,} rows are encoded anew" if rows else "nothing is encoded anew"
            remedy = (
                f"run whiten-index encode (or update, or build) with {' and '.join(corpora)} "
                f"again: {anew}; what is still reported then goes with {gc}"
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

    def _mending_record(self, path: Path) -> tuple[Sequence[str], str]:
        """Return which corpus a damaged record was of, told by the versions made of it."""
        names = {
            corpus_name(reference.record)
            for reference in self._versions()
            if f"{manifest.fingerprint(dict(reference.record.source))}.json" == path.name
        }
        which = f"corpus {' and '.join(sorted(names))}" if names else "the corpus that it is of"
        remedy = (
            f"run whiten-index encode (or update, or build) with {which} again: nothing is encoded "
            f"anew; if that corpus is gone, remove {path}"
        )
        return tuple(f"corpus {name}" for name in sorted(names)), remedy


def _require_lengths(folder: Path, lengths: Mapping[str, int], rows: int) -> None:
    wrong = [f"{n} {name}" for name, n in lengths.items() if n != rows]
    if wrong:
        raise ArtifactError(f"{folder} is damaged: it has {', '.join(wrong)} for {rows} rows")
