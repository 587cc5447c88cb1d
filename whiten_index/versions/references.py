"""References to the rows of a store: its corpora, and the versions of indexes built from it.

And back from a version: the store that it was built from, and its rows there.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.files import exists, is_link, require_target, resolved
from whiten_index.artifacts.lock import CLEANER, marked, only_writer
from whiten_index.artifacts.object_store import is_without_bucket
from whiten_index.artifacts.storage import LOCAL, Place, Storage, settled
from whiten_index.corpus.batches import DIGEST_BYTES
from whiten_index.errors import ArtifactError, ConfigError, StorageError
from whiten_index.paths import cut, is_uri
from whiten_index.store.embedding_store import (
    EmbeddingStore,
    bridged_folders,
    encoder_folders,
    holds_encoder,
)
from whiten_index.store.notes import RegisteredIndex
from whiten_index.store.records import CorpusPart, CorpusRecord
from whiten_index.versions.published import (
    CANDIDATES,
    CURRENT,
    INDEX_ID,
    RECORD,
    VERSIONS,
    Version,
    read_index_id,
    read_version,
    require_published,
    strange_entries,
    version_names,
    version_number,
)


@dataclass(frozen=True)
class Reference:
    """A list of rows that something is made of."""

    encoder: str
    record: CorpusRecord

    def is_of(self, store: EmbeddingStore) -> bool:
        """Return whether these are rows of a store."""
        return self.encoder == store.fingerprint


def parts_of(store: EmbeddingStore, references: Iterable[Reference]) -> Iterator[CorpusPart]:
    """Yield the parts with rows that references need of a store."""
    for each in references:
        if each.is_of(store):
            yield from (part for part in each.record.parts if part.rows)


def needed_digests(store: EmbeddingStore, references: Iterable[Reference]) -> NDArray[np.uint8]:
    """Return the digests (n, 16) of the rows of a store that these need."""
    records = [each.record for each in references if each.is_of(store)]
    parts = {part.digests: part for record in records for part in record.distinct_parts}
    nothing = np.empty((0, DIGEST_BYTES), dtype=np.uint8)
    return np.concatenate([nothing, *map(store.digests, parts.values())])


def is_index(place: Place) -> bool:
    """Return whether a place is that of an index, or was to be."""
    folder, mirror = place_of(place)
    mirror.latest(folder / CURRENT)
    parts = [folder / name for name in (CURRENT, VERSIONS, CANDIDATES)]
    there = (exists(part) or is_link(part) for part in (parts[:1] if mirror.uri else parts))
    return any(there) or any(map(version_number, mirror.names(folder / VERSIONS)))


def lock_stores(root: Place, stores: Iterable[EmbeddingStore], locks: contextlib.ExitStack) -> None:
    """Let nobody else write to a store."""
    for store in stores:
        locks.enter_context(only_writer(store.folder, what="store"))
    locks.enter_context(marked(root, CLEANER))
    for store in stores:
        # What was listed before may be gone by now.
        store.look_again()


def lock_indexes(indexes: Iterable[Place], root: Place, locks: contextlib.ExitStack) -> None:
    """Let nobody else write to indexes: an update under way needs rows that no version names yet.

    Who builds from a store in a bucket has a mark there, and else one at the index.
    """
    for index in indexes:
        locks.enter_context(only_writer(place_of(index)[0], what="index"))
        if isinstance(root, Path):
            locks.enter_context(marked(index, CLEANER))


def indexes_of(
    root: Place, stores: Iterable[EmbeddingStore], *, but: Collection[Path] = ()
) -> list[Place]:
    """Return the indexes that are built from a store, and the one around it, each once."""
    known = [each for each in registered(stores) if each.file not in but]
    for each in known:
        require_at_its_place(each, root)
    # One that was moved and linked to its old place is registered by both.
    found = {settled(each.place): None for each in known}
    if around := index_around(root):
        found[around] = None
    return list(found)


def index_around(root: Place) -> Place | None:
    """Return the index that a store is in, None without one."""
    if isinstance(root, Path):
        around: Place = resolved(root).parent
    else:
        around = root.rpartition("/")[0]
    return around if not str(around).endswith("/") and is_index(around) else None


def require_at_its_place(index: RegisteredIndex, root: Place) -> None:
    """Check that the needs of an index can be read."""
    if is_at_its_place(index):
        return
    place = index.place
    # An empty folder may be where a disk is mounted at other times.
    later = not is_uri(place) and exists(Path(place) / INDEX_ID)
    other = " (another index is, built later)" if later else ""
    raise ArtifactError(
        f"{place}, an index built from {root}, is not there{other}, and its versions may need "
        "rows; mount its disk; or, if it was moved, register its new place: whiten-index gc "
        f"{root} --index NEW_PLACE --forget {place}; or, if it is gone for good: whiten-index gc "
        f"{root} --forget {place}"
    )


def is_at_its_place(index: RegisteredIndex) -> bool:
    """Return whether an index is where it is registered, and not another one."""
    if is_uri(index.place):
        return is_index(index.place)
    folder = Path(index.place)
    if is_index(folder) or exists(folder / INDEX_ID):
        return read_index_id(folder) == index.id
    return False


def _is_gone(index: RegisteredIndex) -> bool:
    """Return whether an index that the user calls gone is, as its bucket may be too."""
    try:
        return not is_at_its_place(index)
    except StorageError as error:
        if is_without_bucket(error):
            return True
        raise


def registered(stores: Iterable[EmbeddingStore]) -> list[RegisteredIndex]:
    """Return all entries in the registers of stores."""
    return [each for store in stores for each in store.indexes.registered()]


def registered_as(
    root: Place, known: Collection[RegisteredIndex], forget: Collection[Place]
) -> list[RegisteredIndex]:
    """Return those of the known entries that are of the indexes to forget."""
    found = list[RegisteredIndex]()
    for index in forget:
        # The last link of a path is not followed.
        absolute = Path(index).absolute()
        spellings = {Path(index), absolute, resolved(absolute.parent) / absolute.name}
        here = [each for each in known if Path(each.place) in spellings]
        if not here:
            places = ", ".join(dict.fromkeys(each.place for each in known)) or "none"
            raise ConfigError(f"{root} knows of no index {index} to forget; it knows {places}")
        # Where another index is at its place now, that one stays registered.
        found += list(filter(_is_gone, here)) or here
    return found


def require_gone(forget: Iterable[RegisteredIndex], asked: Collection[Place]) -> None:
    """Refuse to forget an index that is there, unless it is asked by another name."""
    for each in forget:
        if not _is_gone(each) and settled(each.place) not in asked:
            raise ConfigError(
                f"index {each.place} is there, and its versions need what they are made of; "
                "--forget is for those that are gone: remove its folder first, or leave it out"
            )


def stores_of(
    index: Place, root: Place, stores: Collection[EmbeddingStore]
) -> list[EmbeddingStore]:
    """Return the stores that an index was built from; refuse one that lacks its rows.

    An index with bridged versions alone is one of every encoder.
    """
    if not is_index(index):
        raise ConfigError(f"--index {index} is no index: it has no {CURRENT}; check the path")
    names = {store.fingerprint for store in stores} | {each.name for each in bridged_folders(root)}
    found = list(index_references(index, root, names))
    if not found:
        raise ConfigError(
            f"--index {index} was not built from {root}: no version of it has embeddings of an "
            "encoder in that store; check both paths"
        )
    uses = [(store, each.record) for each in found for store in stores if each.is_of(store)]
    if lacking := sum(sum(map(store.missing_rows, own.distinct_parts)) for store, own in uses):
        raise ArtifactError(
            f"{index} is not registered: {root} lacks {lacking:,} rows that its versions need; "
            "name the store that it was built from"
        )
    return list(dict.fromkeys(store for store, _ in uses)) or list(stores)


def is_being_filled(store: EmbeddingStore, ended: Collection[str] = ()) -> bool:
    """Return whether a migration fills a store, but for those of ``ended`` indexes."""
    # An index that is not at its place may have moved.
    found = store.results.migrations()
    return any(note and index not in ended for index, note in found.items())


def lacks_record(store: EmbeddingStore) -> bool:
    """Return whether a store has rows, and not said of which corpus: nobody knows who needs them.

    Rows of migrations that were given up are needed by none.
    """
    notes = store.results.migrations()
    given_up = bool(notes) and False not in notes.values()
    return not store.record_paths() and not given_up and bool(store.segment_names())


def references_of(
    root: Place,
    stores: Collection[EmbeddingStore],
    indexes: Iterable[Place],
    *,
    bridged: Collection[str] = (),
) -> list[Reference]:
    """Return the references of the corpora of stores, and of the versions of indexes.

    Those to ``bridged`` rows, by their names, are among the latter.
    """
    found = list[Reference]()
    for store in stores:
        if lacks_record(store):
            raise ArtifactError(
                f"{store.folder / 'corpora'} has no record of a corpus, so that it is not known "
                "which rows are needed; mount its disk, run the encode that was interrupted to its "
                f"end, or, if nothing needs them, remove {store.folder}"
            )
        paths = store.record_paths()
        found += [Reference(store.fingerprint, store.record(path.name)) for path in paths]
    for index in indexes:
        found += index_references(index, root, {store.fingerprint for store in stores} | {*bridged})
    return found


def version_folders(index: Path, mirror: Storage = LOCAL) -> list[Path]:
    """Return the folders of an index's versions, and of the candidates on this machine."""
    versions = [index / VERSIONS / name for name in version_names(index, mirror)]
    candidates = version_names(index, inside=CANDIDATES)
    return versions + [index / CANDIDATES / name for name in candidates]


def index_references(index: Place, root: Place, encoders: Collection[str]) -> Iterator[Reference]:
    """Yield the references of the versions and candidates of an index to rows of encoders."""
    folder, mirror = place_of(index)
    mirror.latest(folder / CURRENT)
    require_published(folder, mirror)
    if not mirror.uri:
        _require_no_strangers(folder, root)
    for each in version_folders(folder, mirror):
        found = version_reference(each, root, encoders, mirror)
        if found is not None:
            yield found


def _require_no_strangers(index: Path, root: Place) -> None:
    """Refuse an index with a version behind a link or under a strange name, which is not read."""
    for path in strange_entries(index):
        require_target(path)
        raise ArtifactError(
            f"{path} is a link to a version or has the name of none, and is not read, so that "
            f"the rows of {root} that it needs are not known; put the folder itself there under "
            f"its own name, or move it out of {index}"
        )


def version_reference(
    folder: Path, root: Place, encoders: Collection[str], mirror: Storage = LOCAL
) -> Reference | None:
    """Return the reference of a version, None if it needs no rows of these encoders."""
    published = folder.parent.name == VERSIONS
    with (mirror if published else LOCAL).opened(folder, [RECORD]) as copy:
        # In a bucket one may have been pruned meanwhile.
        if not exists(copy):
            return None
        try:
            version = read_version(copy)
            encoder = version.fields["encoder_fingerprint"]
            return Reference(encoder, corpus_record(version)) if encoder in encoders else None
        except ArtifactError as error:
            way = "with whiten-index prune" if published else "as a folder"
            raise ArtifactError(
                f"{folder} is damaged and does not say which rows of {root} it needs; remove it "
                f"{way}, or restore it from a copy"
            ) from error


def store_places(root: Place, fields: Mapping[str, Any]) -> Iterator[Place]:
    """Yield places of the store: as near the index as when it was built, then its old place."""
    given, out = (fields["config"].get(name) for name in ("store", "out"))
    if given is None:
        yield f"{root}/store" if isinstance(root, str) else root / "store"
        return
    if is_uri(given):
        yield str(given)
        return
    beside = isinstance(root, Path) and out is not None and not is_uri(out)
    if beside and Path(given).is_absolute() == Path(out).is_absolute():
        yield Path(os.path.normpath(Path(root).absolute() / os.path.relpath(given, out)))
    # The given path may be relative to the folder in which the build was started.
    yield Path(fields.get("store", given))


def open_store(
    version: Version, *, given: Path | str | None, reader: str, remedy: str, verify: bool = True
) -> EmbeddingStore:
    """Open the store that a version was built from."""
    root, fields = version.place, version.fields
    encoder = fields["encoder_fingerprint"]
    places = [given] if given is not None else list(dict.fromkeys(store_places(root, fields)))
    damage: ArtifactError | None = None
    for place in places:
        try:
            return EmbeddingStore.open(place, fingerprint=encoder, verify=verify)
        except ArtifactError as error:
            reason = error
            if damage is None and holds_encoder(place, encoder):
                damage = error
    if damage is not None:
        # It is there, and what is wrong with it says what to do.
        raise damage
    if "bridge" in fields and any(map(encoder_folders, places)):
        remedy = (
            "it is of a bridged version: to make another, run whiten-index migrate again as "
            f"before; or give the migration up: whiten-index migrate {root} --give-up; or, if no "
            "version of the old model is left, roll back to one of the new"
        )
    raise ArtifactError(
        f"{reader} reads the store of raw embeddings of encoder {encoder[:8]}, and there is none "
        f"in {' or '.join(cut(str(place), most=200) for place in places)}; {remedy}"
    ) from reason


def corpus_record(version: Version) -> CorpusRecord:
    """Return the parts of the store that a version was made of, in its order."""
    return CorpusRecord.load(version.file(RECORD))
