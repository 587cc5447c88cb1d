"""Raw embeddings by content: each text is encoded once, whitened and indexed many times.

Layout below the root, one folder an encoder::

    <encoder-fingerprint>/
        manifest.json                     the encoder
        samples/<fingerprint>.safetensors pieces of documents that a transform is chosen on
        unfinished/<f…>.safetensors       what an interrupted run had encoded of a segment
        choices/<fingerprint>.json        transforms chosen
        runtimes/<fingerprint>.json       versions of the libraries that computed embeddings
        segments/<name>/                  embeddings with the digests of their texts, moments of d
                                          rows or more, manifest (last)
        digests/<name>.zst                digests of the texts of a part of a corpus, in order
        rows/<name>.zst                   its ids and kept columns
        corpora/<source-fingerprint>.json the parts of a corpus, in order
        indexes/<fingerprint>.json        place of an index built from here
        registered/<fingerprint>.json     the same again

The rows of a bridged version of a migration are in such a folder of their own, ``bridged-<digest of
the index, the encoder and the map>``. Only versions need them: it has no records of corpora, no
index is registered with it, and it can be made again.

A row is known by the digest of its text and of the type that it is kept in, so that it is found
again under any file name, id or metadata column, and in whichever segment it is.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts import manifest
from whiten_index.artifacts.atomic import (
    make_folder,
    remove_leftovers,
    rename_unless_taken,
    temporary_folder,
)
from whiten_index.artifacts.cached_storage import BucketStorage, place_of
from whiten_index.artifacts.files import (
    exists,
    fsync_path,
    is_folder,
    is_link,
    list_folder,
    require_target,
    writing,
)
from whiten_index.artifacts.limits import canonical_json
from whiten_index.artifacts.lock import only_writer, require_marks
from whiten_index.artifacts.manifest import EncoderName, Schema, Sealed
from whiten_index.artifacts.storage import Place, Storage
from whiten_index.encoding.canary import keeping_canary
from whiten_index.encoding.spec import EncoderFacts, RemoteSpec, Spec, recorded_spec
from whiten_index.errors import ArtifactError
from whiten_index.store.dtypes import keeps_moments
from whiten_index.store.notes import INDEXES, MIGRATIONS, IndexRegistry, ResultCache, owner_of
from whiten_index.store.part_files import DIGESTS, ROWS, PartFiles
from whiten_index.store.records import CorpusPart, CorpusRecord
from whiten_index.store.segments import EmbeddingRows, Segments, finite
from whiten_index.whitening.moments import Moments

# In the name of a folder of rows that a migration mapped to the space of a new model.
BRIDGED = "bridged-"
_BRIDGED_NAME = re.compile(rf"{BRIDGED}[0-9a-f]{{32}}")
# Rows of small parts whose moments are taken together.
_ROWS_TOGETHER = 1024


class StoreManifest(Sealed):
    """Manifest of the folder of an encoder."""

    encoder: EncoderFacts
    fingerprint: EncoderName


SCHEMA = Schema("store", 1, StoreManifest)


class EmbeddingStore(Segments, PartFiles):
    """The embeddings of one encoder below a root folder.

    Attributes:
        root: the store's folder, which may hold other encoders too; of a store in a bucket, that
            of the copies on this machine.
        mirror: the bucket, if there is one.
        encoder: the encoder as JSON values.
        folder: this encoder's folder.
        results: choices, samples and runtimes that are remembered.
        indexes: registry of the indexes built from here.
        verify: whether a segment's content is compared with its checksums before its first row is
            read, once for each opened store; else only sizes are compared.

    Examples:
        >>> store = EmbeddingStore.open("store")
        >>> [part.rows for part in store.corpus().parts]
        [60]
    """

    def __init__(
        self,
        root: Place | BucketStorage,
        encoder: Mapping[str, Any],
        fingerprint: str,
        verify: bool = True,
    ) -> None:
        self.root, mirror = place_of(root)
        super().__init__(self.root / fingerprint, mirror, encoder.get("dim"), verify=verify)
        self.encoder = dict(encoder)
        self._compared = False  # whether the encoder's canary was compared here
        self.results = ResultCache(self.folder, self.mirror)
        self.indexes = IndexRegistry(self.folder, self.mirror)

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddingStore, (self.place, self.encoder, self.fingerprint, self.verify)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the encoder, or name of bridged rows."""
        return self.folder.name

    @property
    def dim(self) -> int:
        """Dimensions of the embeddings."""
        return int(self.encoder["dim"])

    @classmethod
    def create(
        cls, root: Path | str, encoder: Mapping[str, Any], fingerprint: str
    ) -> "EmbeddingStore":
        """Open the store of an encoder, making it where it is new.

        Raises:
            StorageError: the folder cannot be written.
            EncoderError: a model behind an API is no longer the one that filled it.
        """
        store = cls(root, encoder, fingerprint)
        with writing(store.folder):
            if not (store.mirror.uri or exists(store.folder)):
                # Whole or not at all: without a manifest, nobody would clean it.
                make_folder(store.root)
                with temporary_folder(store.folder) as temporary:
                    for each in _folders(temporary / "new"):
                        make_folder(each)
                    # Copies of a store may leave out empty folders, as this one is until a build.
                    (temporary / "new" / INDEXES / ".keep").touch()
                    manifest.write_manifest(temporary / "new" / manifest.MANIFEST, store._fields())
                    rename_unless_taken(temporary / "new", store.folder)
                fsync_path(store.root)
            if store.mirror.uri:
                for each in _folders(store.folder):
                    make_folder(each)
            elif missing := [str(each) for each in _folders(store.folder) if not exists(each)]:
                # Made again, they would be taken for empty.
                raise ArtifactError(
                    f"{missing[0]} is missing; mount its disk or restore the store from a copy. If "
                    f"there was nothing in it, run: mkdir {shlex.join(missing)}"
                )
            store._record_encoder(encoder)
        return store

    def _fields(self) -> dict[str, Any]:
        return SCHEMA.headed(encoder=self.encoder, fingerprint=self.fingerprint)

    def _record_encoder(self, encoder: Mapping[str, Any]) -> None:
        """Write the encoder into the manifest, with the canary that was recorded first."""
        # Its name, query prompt or canary may have changed since.
        recorded = self._recorded_encoder()
        self.encoder = dict(encoder if recorded is None else keeping_canary(encoder, recorded))
        if recorded != self.encoder:
            with writing(self.folder):
                manifest.write_manifest(self.folder / manifest.MANIFEST, self._fields())
            self.mirror.push(self.folder / manifest.MANIFEST)

    def keep_canary(self, loaded: Callable[[], Spec]) -> None:
        """Compare the canary of a loaded model with the recorded one, or record it.

        Only the first call computes it.

        Raises:
            EncoderError: the model has changed.
        """
        if not self._compared and self.encoder["kind"] != "column":
            self._record_encoder({**self.encoder, "canary": loaded().canary})
            # Another worker may have recorded its own meanwhile.
            self.read_canary()
            self._compared = True

    def read_canary(self) -> None:
        """Take the canary that another process has recorded, and compare it with a known one.

        Raises:
            EncoderError: the model of the other process gives other embeddings.
        """
        if (recorded := self._recorded_encoder()) is not None:
            self.encoder = dict(keeping_canary(self.encoder, recorded))

    def _recorded_encoder(self) -> Mapping[str, Any] | None:
        """Return the encoder in the manifest, None without one.

        A damaged one is written again, but for a model behind an API: what that gave is not known.
        """
        try:
            return read_encoder(self.folder, self.mirror)
        except ArtifactError:
            there = self.mirror.holds(self.folder / manifest.MANIFEST)
            if there and isinstance(recorded_spec(self.encoder), RemoteSpec):
                raise
            return None

    @classmethod
    def open(
        cls, root: Path | str, *, fingerprint: str | None = None, verify: bool = True
    ) -> "EmbeddingStore":
        """Open an existing store, whose encoder may be left out where it is the only one.

        Raises:
            ArtifactError: no store is there, it is damaged, or several encoders are in it.
        """
        place, mirror = place_of(root)
        folders = [each for each in mirror.folders(place) if not _is_bridged(each)]
        folders = folders if fingerprint is None else [place / fingerprint]
        if not mirror.uri:
            for each in folders:
                require_target(each / manifest.MANIFEST)
        folders = [each for each in folders if mirror.holds(each / manifest.MANIFEST)]
        if not folders:
            raise ArtifactError(
                f"{root} holds no store of embeddings"
                + (f" of encoder {fingerprint}" if fingerprint else "")
                + "; check the path, or fill one with: whiten-index encode CORPUS --store DIR"
            )
        if len(folders) > 1:
            found = [(read_encoder(folder, mirror), folder.name[:8]) for folder in folders]
            names = ", ".join(f"{e.get('model', e.get('column'))} {name}" for e, name in found)
            raise ArtifactError(
                f"{root} holds embeddings of {len(folders)} encoders ({names}); name the corpus "
                "and the encoder's options as when they were encoded"
            )
        # A bucket is not listed twice.
        there = mirror if isinstance(mirror, BucketStorage) else place
        return cls(there, read_encoder(folders[0], mirror), folders[0].name, verify)

    def tidy(self) -> int:
        """Remove unfinished files of a writer that died; return how many there were.

        The caller holds the lock.
        """
        folders = (self.folder, *filter(is_folder, list_folder(self.folder)))
        return sum(map(remove_leftovers, folders))

    def embeddings(self, part: CorpusPart) -> EmbeddingRows:
        """Return the embeddings (n, d) of a part, of which only rows that are touched are read.

        Raises:
            ArtifactError: some are in no segment, or in a damaged one.
        """
        rows, shape = self.rows(part.digests, lambda: self.digests(part)), (part.rows, self.dim)
        if rows.shape != shape:
            raise ArtifactError(
                f"{self.place} holds {rows.shape} numbers for a part of the corpus, and {shape} "
                "are needed; encode the corpus again"
            )
        return rows

    def moments(self, part: CorpusPart) -> Moments:
        """Return the moments of the embeddings of a part as kept."""
        return self.moments_of(part.digests, lambda: self.digests(part))

    def total_moments(self, parts: Iterable[CorpusPart]) -> Moments:
        """Return the sum of the moments of parts."""
        return Moments.total(chain([Moments.empty(self.dim)], self._moments_of_all(parts)))

    def _moments_of_all(self, parts: Iterable[CorpusPart]) -> Iterator[Moments]:
        """Yield moments that add up; many small parts share one d × d matrix."""
        together: list[NDArray[np.floating]] = []
        for part in parts:
            if keeps_moments(part.rows, self.dim):
                yield self.moments(part)
                continue
            together.append(self.embeddings(part)[np.arange(part.rows)])
            if sum(map(len, together)) >= _ROWS_TOGETHER:
                yield Moments.of(finite(np.concatenate(together), self.folder))
                together.clear()
        if together:
            yield Moments.of(finite(np.concatenate(together), self.folder))

    def missing_rows(self, part: CorpusPart, *, verify: bool = False) -> int:
        """Return how many rows of a part are in no segment, by the sizes of files.

        ``verify`` compares their content. In a bucket, a segment's name suffices.
        """
        if not part.rows:
            return 0
        if self.mirror.uri and not verify:
            whole = self.mirror.holds(self.segments_folder / part.digests)
        else:
            whole = self.segment(part.digests, verify=verify) is not None
        if whole:
            return 0
        try:
            digests = self.digests(part)
        except ArtifactError:
            return part.rows
        return int(np.count_nonzero(~self.index(verify=verify).find(digests).known))

    def has(self, part: CorpusPart) -> bool:
        """Return whether the rows of a part are there, checked against their checksums."""
        if not part.rows:
            return True
        paths = self.part_files(part)
        sound = all(self._checked_bytes(path) is not None for path in paths)
        if not sound or self.missing_rows(part, verify=True):
            return False
        for path in paths:
            self.mirror.keep(path)
        return True

    def fetch_corpus(self, source: Mapping[str, Any] | None = None, *, rows: bool = True) -> None:
        """Download the parts of a corpus, or of all, and their ``rows``, many files at a time."""
        only = None if source is None else self._corpus_path(source).name
        if source is not None:
            # The record of a later release is refused before any work is done.
            self._owner_of(self._corpus_path(source))
        for name in self._corpus_names() if self.mirror.uri else ():
            with suppress(ArtifactError):
                parts = self.record(name).parts if only in (None, name) else ()
                there = [part for part in parts if part.rows]
                segments = (self.segments_folder / part.digests for part in there if rows)
                files = (path for part in there for path in self.part_files(part))
                self.mirror.fetch_all(chain(segments, files))

    def save_corpus(self, record: CorpusRecord, *, index: Place | None = None) -> None:
        """Write the record of a corpus, replacing an earlier one; bridged rows have none."""
        if _is_bridged(self.folder):
            return
        path, owner = self._corpus_path(record.source), owner_of(index)
        before = self._owner_of(path)
        both = owner if before in (None, owner) else ""
        require_marks()
        # A damaged one is for gc to refuse.
        if self.results.files(MIGRATIONS):
            # From now on, no record of a corpus is no sign that all migrations were given up.
            self.results.save_migration(owner_of(None), False)
        replace(record, index=both).save(path)
        self.mirror.push(path)

    def forget_corpus(self, source: Mapping[str, Any], *, index: Place) -> None:
        """Remove the record of a corpus that is kept for an index alone."""
        path = self._corpus_path(source)
        if self._owner_of(path) == owner_of(index):
            with writing(path):
                self.mirror.remove(path)

    def _corpus_path(self, source: Mapping[str, Any]) -> Path:
        return self._corpora / f"{manifest.fingerprint(dict(source))}.json"

    def _owner_of(self, path: Path) -> str | None:
        try:
            return self.record(path.name).index if self.mirror.holds(path) else None
        except ArtifactError:
            return ""  # it may have been a user's, and none's is not forgotten

    def corpus(self, source: Mapping[str, Any] | None = None) -> CorpusRecord:
        """Return the record of a corpus; ``source`` may be left out if there is only one.

        Raises:
            ArtifactError: no corpus was encoded to the end, or there are several to choose from.
        """
        names = self._corpus_names()
        if source is not None:
            names = [self._corpus_path(source).name]
        records = [self.record(n) for n in names if self.mirror.holds(self._corpora / n)]
        if not records:
            raise ArtifactError(
                f"no corpus was encoded to its end into {self.place}; run whiten-index encode "
                "CORPUS --store DIR again, which takes up where it stopped"
            )
        if len(records) > 1:
            found = "; ".join(canonical_json(dict(r.source)) for r in records)
            raise ArtifactError(
                f"{self.place} holds {len(records)} corpora ({found}); name the corpus to index "
                "and its columns, as when it was encoded"
            )
        return records[0]

    def _corpus_names(self) -> list[str]:
        return self.mirror.names(self._corpora, "[!.]*.json")

    def record_paths(self) -> list[Path]:
        """Return the files with the records of corpora, hidden ones and copies among them.

        No record is passed over for its name, since the segments that only it names would go.
        """
        return [self._corpora / name for name in self.mirror.names(self._corpora, "*.json*")]

    def record(self, name: str) -> CorpusRecord:
        """Return the record in a file of that name."""
        path = self._corpora / name
        self.mirror.latest(path)
        record = CorpusRecord.load(path)
        if self._corpus_path(record.source) != path:
            raise ArtifactError(
                f"{path} is damaged: it is the record of another corpus; encode it again"
            )
        return record

    @property
    def _corpora(self) -> Path:
        return self.folder / "corpora"


def _folders(folder: Path) -> list[Path]:
    return [folder / name for name in (DIGESTS, ROWS, "corpora", INDEXES, "segments")]


def read_encoder(folder: Path, mirror: Storage) -> EncoderFacts:
    """Return the encoder that a folder of a store is of."""
    mirror.latest(folder / manifest.MANIFEST)
    found = manifest.read_manifest(folder, SCHEMA)
    if found["fingerprint"] != folder.name:
        raise ArtifactError(
            f"{folder / manifest.MANIFEST} is damaged: it is of the encoder "
            f"{found['fingerprint']}; {manifest.REMEDY}"
        )
    return found["encoder"]


def encoder_folders(root: Place) -> list[Path]:
    """Return the folders of encoders in a store, damaged ones among them."""
    place, mirror = place_of(root)
    return [
        folder
        for folder in mirror.folders(place)
        if not _is_bridged(folder)
        and (
            any(mirror.holds(folder / name) for name in (manifest.MANIFEST, "segments"))
            or mirror.names(folder / "segments")
        )
    ]


def bridged_folders(root: Place) -> list[Path]:
    """Return the folders of bridged rows in a store, damaged ones among them."""
    place, mirror = place_of(root)
    # What is behind a link is nothing that a migration made.
    return [each for each in mirror.folders(place) if _is_bridged(each) and not is_link(each)]


def _is_bridged(folder: Path) -> bool:
    return _BRIDGED_NAME.fullmatch(folder.name) is not None


def remove_bridged(root: Place, name: str) -> None:
    """Remove a folder of bridged rows; in a bucket last its manifest, by which it is found again.

    Raises:
        BusyError: another process writes there.
        StorageError: it cannot be removed; the next gc removes the rest.
    """
    place, mirror = place_of(root)
    folder = place / name
    with only_writer(folder, what="store"):
        if isinstance(mirror, BucketStorage):
            inside = {each.partition("/")[0] for each in mirror.sizes(folder)}
            mirror.remove(*(folder / each for each in inside - {manifest.MANIFEST}))
        mirror.remove(folder)


def holds_encoder(root: Place, fingerprint: str) -> bool:
    """Return whether a store has the manifest of an encoder, sound or damaged."""
    place, mirror = place_of(root)
    return mirror.holds(place / fingerprint / manifest.MANIFEST)


def require_encoder_folders(root: Place) -> list[Path]:
    """Return the folders of encoders in a store, or raise ``ArtifactError``."""
    if found := encoder_folders(root):
        return found
    raise ArtifactError(
        f"{root} holds no store of embeddings; check the path: it is what was named to --store, or "
        "the folder store of an index"
    )


def open_stores(root: Place) -> list[EmbeddingStore]:
    """Open the stores of all the encoders in a store."""
    folders = require_encoder_folders(root)
    return [EmbeddingStore.open(root, fingerprint=folder.name) for folder in folders]
