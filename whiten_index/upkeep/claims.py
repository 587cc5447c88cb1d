"""Who needs which shards of a store: the corpora it remembers, and the versions of its indexes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from whiten_index.artifacts.files import exists, is_file, is_folder
from whiten_index.artifacts.lock import LOCK
from whiten_index.artifacts.manifest import MANIFEST, records_in
from whiten_index.errors import ArtifactError, ConfigError, FormatError
from whiten_index.index import (
    CANDIDATES,
    CURRENT,
    RECORD,
    VERSIONS,
    Version,
    VersionManifest,
    read_version,
    require_published,
    strange_entries,
    version_names,
)
from whiten_index.origin import corpus_record
from whiten_index.store import CorpusRecord, EmbeddingStore

_PARTS = (CURRENT, VERSIONS, CANDIDATES)


@dataclass(frozen=True)
class Claim:
    """A list of shards that something is made of.

    Attributes:
        by: what it is, in words.
        encoder: fingerprint of the encoder, None where that is not known: of any.
        record: the shards and rows.
    """

    by: str
    encoder: str | None
    record: CorpusRecord

    def is_of(self, store: EmbeddingStore) -> bool:
        """Tell whether these may be shards of a store."""
        return self.encoder in (None, store.fingerprint)


def is_index(folder: Path) -> bool:
    """Tell whether a folder is that of an index, or was to be."""
    return any(exists(folder / name) for name in _PARTS)


def indexes_of(
    root: Path, stores: Iterable[EmbeddingStore], *, but: Collection[Path] = ()
) -> list[Path]:
    """Return the indexes that are built from a store, and the one it lies in, each once.

    Args:
        root: of the store.
        stores: of the encoders in it.
        but: files that name indexes, not to be heeded.

    Raises:
        ArtifactError: a file that names one is damaged.
    """
    known = [
        pair for store in stores for pair in store.users.indexes().items() if pair[0] not in but
    ]
    # One that was moved and linked to its old place is registered by both.
    found = {real_place(index): None for _, index in known}
    around = real_place(root).parent
    if is_index(around):
        found[around] = None
    return list(found)


def real_place(path: Path | str) -> Path:
    """Return a path without links, as far as these lead anywhere."""
    return Path(os.path.realpath(path))


def require_there(index: Path, root: Path) -> None:
    """Check that an index can be asked what it needs.

    Raises:
        ArtifactError: it is gone, or the disk it is on is not there.
    """
    # A folder without any of these may be where a disk is mounted at other times.
    if any(exists(index / name) for name in (*_PARTS, LOCK)):
        return
    raise ArtifactError(
        f"{index}, an index built from {root}, is not there, so that it cannot be told which "
        "shards it needs; bring its disk back; or, if it was moved, name its new place first, so "
        f"that what its versions need is kept: whiten-index gc {root} --index NEW_PLACE --forget "
        f"{index}; or, if it is gone for good: whiten-index gc {root} --forget {index}"
    )


def files_naming(
    root: Path,
    stores: Collection[EmbeddingStore],
    forget: Collection[Path | str],
    named: Collection[Path] = (),
) -> list[Path]:
    """Return the files by which stores remember indexes that are to be forgotten.

    Args:
        root: of the stores.
        stores: of the encoders.
        forget: places of indexes as they are registered; links are not followed.
        named: real places of indexes that will be registered.

    Raises:
        ConfigError: one is not among those they remember, or it is there.
    """
    known = [pair for store in stores for pair in store.users.indexes().items()]
    found = list[Path]()
    for index in forget:
        files = [file for file, place in known if place in _spellings(index)]
        if not files:
            places = ", ".join(dict.fromkeys(str(place) for _, place in known)) or "none"
            raise ConfigError(f"{root} knows of no index {index} to forget; it knows {places}")
        found += files
    asked = {*indexes_of(root, stores, but=found), *named}
    for file, place in known:
        if file in found and is_index(place) and real_place(place) not in asked:
            raise ConfigError(
                f"index {place} is there, and its versions need what they are made of; --forget "
                "is for those that are gone: remove its folder first, or leave it out"
            )
    return found


def _spellings(index: Path | str) -> set[Path]:
    """Return how the place of an index may be registered, its last part not followed."""
    absolute = Path(index).absolute()
    return {Path(index), absolute, real_place(absolute.parent) / absolute.name}


def stores_of(index: Path, root: Path, stores: Collection[EmbeddingStore]) -> list[EmbeddingStore]:
    """Return the stores that an index's versions need something of.

    Raises:
        ConfigError: it is no index, or none that was built from these.
        ArtifactError: of a version it cannot be told.
    """
    if not is_index(index):
        raise ConfigError(f"--index {index} is no index: it has no {CURRENT}; check the path")
    claims = list(index_claims(index, root, stores))
    found = [store for store in stores if any(claim.is_of(store) for claim in claims)]
    if not found:
        raise ConfigError(
            f"--index {index} was not built from {root}: no version of it has embeddings of an "
            "encoder in that store; check both paths"
        )
    return found


def corpora_claims(store: EmbeddingStore) -> Iterator[Claim]:
    """Yield what the corpora need that a store remembers.

    Raises:
        ArtifactError: the record of one is damaged.
    """
    for path in record_paths(store):
        record = store.record(path.name)
        yield Claim(f"corpus {corpus_name(record)}", store.fingerprint, record)


def record_paths(store: EmbeddingStore) -> list[Path]:
    """Return the files of a store that remember corpora."""
    return records_in(store.folder / "corpora")


def corpus_name(record: CorpusRecord) -> str:
    """Return what a person calls a corpus: the files, folders or globs that it is read from."""
    sources = record.source.get("sources")
    named = sources if isinstance(sources, list | tuple) else [dict(record.source)]
    return ", ".join(map(str, named))


def version_folders(index: Path) -> list[Path]:
    """Return the folders of an index's versions and candidates."""
    return [
        index / inside / name
        for inside in (VERSIONS, CANDIDATES)
        for name in version_names(index, inside=inside)
    ]


def index_claims(index: Path, root: Path, stores: Collection[EmbeddingStore]) -> Iterator[Claim]:
    """Yield what the versions of an index need, and its candidates.

    Raises:
        ArtifactError: of one it cannot be told, or the published version is missing.
        StorageError: the system does not let one be read.
    """
    require_published(index)
    _require_no_strangers(index, root)
    for folder in version_folders(index):
        found = version_claim(folder, root, stores)
        if found is not None:
            yield found


def _require_no_strangers(index: Path, root: Path) -> None:
    """Refuse an index that has a version behind a link or under a strange name, which is not read.

    A link that leads to nothing, or to what is a version here itself, does no harm.
    """
    here = {real_place(folder) for folder in version_folders(index)}
    for path in strange_entries(index):
        target = real_place(path)
        if target not in here and any(is_file(target / name) for name in (MANIFEST, RECORD)):
            raise ArtifactError(
                f"{path} is a link to a version or has the name of none, and is not read, so that "
                f"the shards of {root} that it needs are not known; put the folder {target} there "
                f"under its own name, or move it out of {index}"
            )


def version_claim(folder: Path, root: Path, stores: Collection[EmbeddingStore]) -> Claim | None:
    """Return what a version needs, None where that is nothing of these stores.

    Raises:
        ArtifactError: it cannot be told.
    """
    by = f"version {folder.name} of index {folder.parent.parent}"
    version = _version(folder)
    fields = None if version is None else version.fields
    encoder = None if fields is None else fields["encoder_fingerprint"]
    if not any(encoder in (None, store.fingerprint) for store in stores):
        return None
    try:
        # Without its manifest, a record that its own digest proves sound says what is needed.
        own = CorpusRecord.load(folder / RECORD) if version is None else corpus_record(version)
        return Claim(by, encoder, own)
    except FormatError:
        raise
    except ArtifactError:
        if fields is not None and _is_elsewhere(fields, root):
            return None
    raise ArtifactError(
        f"{by} is damaged and does not say which shards of {root} it needs; remove it with "
        f"whiten-index prune {folder.parent.parent} --keep N, or restore it from a copy"
        if folder.parent.name == VERSIONS
        else f"candidate {folder} is damaged and does not say which shards of {root} it needs; "
        "remove that folder: the next update makes another"
    )


def _version(folder: Path) -> Version | None:
    try:
        return read_version(folder)
    except FormatError:
        raise
    except ArtifactError:
        return None


def _is_elsewhere(fields: VersionManifest, root: Path) -> bool:
    """Tell whether a version was built from another store that is there."""
    built_from = Path(fields["store"])
    return is_folder(built_from) and real_place(built_from) != real_place(root)
