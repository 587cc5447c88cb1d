"""Texts that came with a version which was rolled back, and come again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from whiten_index import index as faiss_index
from whiten_index.changes import apart
from whiten_index.errors import ArtifactError, OutputError
from whiten_index.store import CorpusPart, CorpusRecord, EmbeddingStore, KnownRows
from whiten_index.update.base import Base


def told_again(base: Base, record: CorpusRecord, store: EmbeddingStore) -> Iterator[str]:
    """Yield a sentence for each withdrawn version that is there, some of whose new texts return.

    Good rows come again as bad ones do, so that this is told and nothing is refused.
    """
    root = base.folder.parents[1]
    coming: set[bytes] | None = None
    for name in faiss_index.withdrawn_versions(root):
        # What was pruned, or whose shards were dropped, can no longer be compared; nor can what the
        # disk does not give.
        with contextlib.suppress(ArtifactError, OutputError):
            withdrawn = CorpusRecord.load(root / faiss_index.VERSIONS / name / faiss_index.RECORD)
            brought = _brought(base, withdrawn, base.store)
            if coming is None:
                coming = _brought(base, record, store)
            again = len(brought & coming)
            if again:
                yield (
                    f"note: {again:,} of the {len(brought):,} texts that version {name} brought, "
                    "which was rolled back, come again"
                )


def _brought(base: Base, record: CorpusRecord, store: EmbeddingStore) -> set[bytes]:
    """Return the digests of the texts that a corpus has and the base has not."""
    gone, came, _ = apart(base.record, record)
    # Where few rows of each shard changed, nearly all rows are in parts that differ.
    before = KnownRows(_digests(base.store, gone))
    brought = set[bytes]()
    for _, digests in _digests(store, came):
        brought.update(row.tobytes() for row in digests[~before.find(digests).known])
    return brought


def _digests(
    store: EmbeddingStore, parts: Iterable[CorpusPart]
) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    return ((part.shard, store.shards.digests(part.shard)) for part in parts if part.rows)
