"""The state of a migration to another model, as an index and its stores show it."""

import contextlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.storage import Place
from whiten_index.corpus.batches import DIGEST_BYTES
from whiten_index.encoding.spec import recorded_spec
from whiten_index.errors import ArtifactError, StorageError
from whiten_index.paths import is_uri
from whiten_index.store.embedding_store import MIGRATING, EmbeddingStore, model_place, open_stores
from whiten_index.store.notes import owner_of
from whiten_index.store.records import CorpusPart, CorpusRecord
from whiten_index.versions.published import VERSIONS, Version, read_published, read_version
from whiten_index.versions.references import corpus_record, open_store
from whiten_index.versions.retention import before_bridged

BRIDGE = {"note": "bridge"}  # by which a bridged store keeps the facts of its bridge


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


def migration_status(index: Place) -> dict[str, Any] | None:
    """Return how far a migration of an index is, None if none is known to be under way.

    Without its store, only that of a published bridged version is known.
    """
    published = read_published(index)
    fields, found = published.fields, dict[str, Any]()
    if bridged := model_place(fields["store"]) is not None:
        found = {"from": _old_model(index), "to": _name(published), "rows": fields["rows"]}
    elif is_uri(fields["store"]) and not is_uri(index):
        # Of a bucket that this machine may not reach.
        return None
    try:
        with contextlib.suppress(ArtifactError):
            found |= _in_store(index, published, bridged=bridged)
    except StorageError as error:
        found["unread"] = str(error)
    return found or None


def _in_store(index: Place, published: Version, *, bridged: bool) -> dict[str, Any]:
    """Return what the store knows of a migration, empty if there is none."""
    root, mirror = place_of(index)
    spec, owner = recorded_spec(published.fields["encoder"]), owner_of(index)
    store = open_store(
        mirror.uri or root, published.fields, given=None, reader="inspect", remedy=""
    )
    filled = list[tuple[bool, str, EmbeddingStore]]()
    for each in open_stores(model_place(store.place) or store.place):
        since = (each.results.choice(MIGRATING) or {}).get(owner)
        same = bridged and spec is not None and each.fingerprint == spec.fingerprint
        if since or same:
            filled.append((same, since or "", each))
    if not filled:
        return {}
    _, since, new = max(filled, key=lambda each: each[:2])
    encoded = encoded_rows(store, corpus_record(published), new, verify=False)
    found = dict[str, Any]()
    if not bridged:
        found = {"from": _name(published), "to": _model(new.encoder)}
    found |= {"rows": published.fields["rows"], "encoded": encoded, "since": since or None}
    return {**found, "bridge": store.results.choice(BRIDGE)} if bridged else found


def _old_model(index: Place) -> str | None:
    """Return the name of the model that the migration of a bridged index comes from."""
    if (old := before_bridged(index)) is None:
        return None
    root, mirror = place_of(index)
    mirror.fetch(root / VERSIONS / old, names=())
    return _name(read_version(root / VERSIONS / old, verify="manifest", mirror=mirror))


def _name(version: Version) -> str | None:
    return _model(version.fields["encoder"])


def _model(encoder: Any) -> str | None:
    return getattr(recorded_spec(encoder), "name", None)
