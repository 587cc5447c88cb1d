"""Provenance of a version: the store of raw embeddings, and the version's rows there."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whiten_index.artifacts.storage import Place
from whiten_index.errors import ArtifactError
from whiten_index.paths import cut, is_uri
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.versions.published import RECORD, Version


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
    root: Place,
    fields: Mapping[str, Any],
    *,
    given: Path | str | None,
    reader: str,
    remedy: str,
    verify: bool = True,
) -> EmbeddingStore:
    """Open the store that a version was built from."""
    encoder = fields["encoder_fingerprint"]
    places = [given] if given is not None else list(dict.fromkeys(store_places(root, fields)))
    for place in places:
        try:
            return EmbeddingStore.open(place, fingerprint=encoder, verify=verify)
        except ArtifactError as error:
            reason = error
    raise ArtifactError(
        f"{reader} reads the store of raw embeddings of encoder {encoder[:8]}, and there is none "
        f"in {' or '.join(cut(str(place), most=200) for place in places)}; {remedy}"
    ) from reason


def corpus_record(version: Version) -> CorpusRecord:
    """Return the parts of the store that a version was made of, in its order."""
    return CorpusRecord.load(version.file(RECORD))


def missing_rows(root: Place, version: Version) -> tuple[Place | None, int]:
    """Return the store of a version, None where it cannot be reached, and rows that it lacks."""
    for place in dict.fromkeys(store_places(root, version.fields)):
        try:
            store = EmbeddingStore.open(place, fingerprint=version.fields["encoder_fingerprint"])
        except ArtifactError:
            continue
        return place, sum(map(store.missing_rows, corpus_record(version).distinct_parts))
    return None, 0
