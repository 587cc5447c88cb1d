"""The state of a migration to another model, as an index and its stores show it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.storage import Place
from whiten_index.corpus.batches import DIGEST_BYTES
from whiten_index.errors import ArtifactError, FormatError, StorageError
from whiten_index.paths import is_uri
from whiten_index.store.embedding_store import EmbeddingStore, encoder_folders, holds_encoder
from whiten_index.store.notes import ResultCache, owner_of
from whiten_index.store.records import CorpusPart, CorpusRecord
from whiten_index.versions.published import read_published
from whiten_index.versions.references import corpus_record, open_store, store_places


def known_rows(
    store: EmbeddingStore, new: EmbeddingStore, part: CorpusPart, *, verify: bool = True
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Return the digests (n, 16) of a part, and which rows (n,) the new model's store has.

    Stores of one corpus keep rows in one type, so that their digests are the same. Damaged rows do
    not count; without ``verify``, only sizes are compared.
    """
    if not part.rows:
        return np.empty((0, DIGEST_BYTES), np.uint8), np.empty(0, np.bool_)
    digests = store.digests(part)
    return digests, new.index(verify=verify).find(digests).known


def encoded_rows(
    store: EmbeddingStore, record: CorpusRecord, new: EmbeddingStore, *, verify: bool = True
) -> int:
    """Return how many rows of a corpus the new model has encoded."""
    new.look_again()
    parts = (known_rows(store, new, part, verify=verify) for part in record.parts)
    return sum(int(known.sum()) for _, known in parts)


def filled_for(index: Place, place: Place) -> list[tuple[EmbeddingStore, dict[str, Any]]]:
    """Return the stores at a place that a migration of an index fills, and their notes of it."""
    (_, mirror), owner = place_of(place), owner_of(index)
    notes = {
        folder.name: ResultCache(folder, mirror).migrations().get(owner)
        for folder in encoder_folders(place)
    }
    # Others may be damaged.
    return [
        (EmbeddingStore.open(place, fingerprint=name), note)
        for name, note in notes.items()
        if isinstance(note, dict)
    ]


def migration_status(index: Place) -> dict[str, Any] | None:
    """Return how far a migration of an index is, None for none or without its store."""
    published = read_published(index)
    fields, given = published.fields, published.fields["store"]
    if is_uri(given) and not published.mirror.uri and "bridge" not in fields:
        # Of a bucket that this machine may not reach.
        return None
    try:
        try:
            store = open_store(published, given=None, reader="inspect", remedy="")
        except ArtifactError:
            encoder = fields["encoder_fingerprint"]
            if any(holds_encoder(p, encoder) for p in store_places(published.place, fields)):
                raise
            return None
        filled = filled_for(index, store.place)
        if not filled:
            return None
        new, note = max(filled, key=lambda each: str(each[1].get("since")))
        encoded = encoded_rows(store, corpus_record(published), new, verify=False)
        bridge = {"bridge": fields["bridge"]} if "bridge" in fields else {}
        return {**note, "rows": fields["rows"], "encoded": encoded, **bridge}
    except (ArtifactError, FormatError, StorageError) as error:
        return {"unread": str(error)}
