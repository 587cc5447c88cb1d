"""What a version of an index was built from: the store of raw embeddings, and its rows there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import exists
from whiten_index.errors import ArtifactError, FormatError
from whiten_index.given import cut, is_uri
from whiten_index.index import RECORD, read_version
from whiten_index.objects import Place
from whiten_index.store import CorpusRecord, EmbeddingStore


def store_places(root: Place, fields: Mapping[str, Any]) -> Iterator[Place]:
    """Yield where the store may be: beside or inside the index as it was built, or where it was.

    Args:
        root: the index folder, or its URI.
        fields: the version's manifest.
    """
    told, out = (fields["config"].get(name) for name in ("store", "out"))
    if told is None:
        yield f"{root}/store" if isinstance(root, str) else root / "store"
        return
    if is_uri(told):
        yield str(told)
        return
    beside = isinstance(root, Path) and out is not None and not is_uri(out)
    if beside and Path(told).is_absolute() == Path(out).is_absolute():
        yield Path(os.path.normpath(Path(root).absolute() / os.path.relpath(told, out)))
    # What was told may be relative to wherever the build was started.
    yield Path(fields.get("store", told))


def open_store(
    root: Place,
    fields: Mapping[str, Any],
    *,
    given: Path | str | None,
    reader: str,
    remedy: str,
) -> EmbeddingStore:
    """Open the store that a version was built from.

    Args:
        root: the index folder, or its URI.
        fields: the version's manifest.
        given: where it is, where that was said.
        reader: what reads it, for the error.
        remedy: what to do without it, for the error.

    Raises:
        ArtifactError: none of the places has a store of the version's encoder.
    """
    encoder = fields["encoder_fingerprint"]
    places = [given] if given is not None else list(dict.fromkeys(store_places(root, fields)))
    for place in places:
        try:
            return EmbeddingStore.open(place, fingerprint=encoder)
        except ArtifactError as error:
            reason = error
    raise ArtifactError(
        f"{reader} reads the store of raw embeddings of encoder {encoder[:8]}, and there is none "
        f"in {' or '.join(cut(str(place), most=200) for place in places)}; {remedy}"
    ) from reason


def corpus_record(
    folder: Path, fields: Mapping[str, Any], store: EmbeddingStore
) -> CorpusRecord | None:
    """Return which shards have the rows of a version, in its order.

    An earlier release left that to the store, which may have moved on to other rows since: None.

    Args:
        folder: of the version.
        fields: its manifest.
        store: that it was built from.

    Raises:
        ArtifactError: the record is damaged.
    """
    own, corpus = folder / RECORD, fields["corpus"]
    if exists(own):
        return CorpusRecord.load(own)
    try:
        record = store.corpus(corpus["source"])
    except ArtifactError:
        return None
    return record if record.fingerprint == corpus["fingerprint"] else None


def missing_shards(root: Place, folder: Path) -> tuple[Place | None, list[str]]:
    """Return the store of a version, None where it cannot be reached, and what it lacks of it.

    Args:
        root: the index folder, or its URI.
        folder: of the version, sound.

    Returns:
        The store's root folder, and the shards of the version that are missing in it or, by their
        sizes, damaged; none of a version of an earlier release whose shards are not known.

    Raises:
        ArtifactError: the version is damaged.
        FormatError: a later release wrote the store.
    """
    fields = read_version(folder, verify="manifest")
    for place in dict.fromkeys(store_places(root, fields)):
        try:
            store = EmbeddingStore.open(place, fingerprint=fields["encoder_fingerprint"])
        except FormatError:
            raise
        except ArtifactError:
            continue
        if not exists(folder / RECORD):
            return place, []
        record = CorpusRecord.load(folder / RECORD)
        return place, [name for name in record.shards if not store.seems_there(name)]
    return None, []
