"""Embeddings of judged queries, kept in the store of their corpus for runs to come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.manifest import fingerprint
from whiten_index.encoding import recorded_spec
from whiten_index.errors import StorageError
from whiten_index.progress import Stages
from whiten_index.store import EmbeddingStore


def query_embeddings(
    store: EmbeddingStore | None,
    texts: Sequence[str],
    encode: Callable[[Sequence[str]], NDArray[np.floating]],
    stages: Stages,
) -> NDArray[np.float32]:
    """Return the raw embeddings (q, d) of queries, from the store where they are known.

    Args:
        store: of the corpus, which names the encoder; None keeps nothing.
        texts: the queries.
        encode: called for what is not known.
        stages: where the time is shown.
    """
    texts = list(texts)
    key: dict[str, Any] = {}
    if store is not None:
        key = {"queries": fingerprint({"texts": texts}), **asked_by(store.encoder)}
        if (kept := store.notes.sample(key, {"queries": "qd"})) is not None:
            return kept["queries"].astype(np.float32)
    with stages.stage("encode queries", len(texts)) as watcher:
        found = encode(texts).astype(np.float32)
        watcher.advance(len(texts))
    if store is not None:
        # A store that cannot be written still serves: the queries are encoded again next time.
        with contextlib.suppress(StorageError):
            store.notes.save_sample(key, {"queries": found})
    return found


def asked_by(encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells the embedding of a query, beside its text and the store's encoder."""
    spec = recorded_spec(encoder)
    return {"query_encoder": spec and spec.query_fingerprint}
