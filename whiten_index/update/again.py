"""Texts that came with a version which was rolled back, and come again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from whiten_index import index as faiss_index
from whiten_index.changes import apart
from whiten_index.errors import ArtifactError
from whiten_index.store import CorpusPart, CorpusRecord, EmbeddingStore
from whiten_index.update.base import Base


def told_again(base: Base, record: CorpusRecord, store: EmbeddingStore) -> Iterator[str]:
    """Yield a sentence for each withdrawn version that is there, some of whose new texts return.

    Good rows come again as bad ones do, so that this is told and nothing is refused.
    """
    root = base.folder.parents[1]
    for name in faiss_index.withdrawn_versions(root):
        # What was pruned, or whose shards were dropped, can no longer be compared.
        with contextlib.suppress(ArtifactError):
            withdrawn = CorpusRecord.load(root / faiss_index.VERSIONS / name / faiss_index.RECORD)
            brought = _brought(base, withdrawn, base.store)
            again = len(brought & _brought(base, record, store))
            if again:
                yield (
                    f"note: {again:,} of the {len(brought):,} texts that version {name} brought, "
                    "which was rolled back, come again"
                )


def _brought(base: Base, record: CorpusRecord, store: EmbeddingStore) -> set[bytes]:
    """Return the digests of the texts that a corpus has and the base has not."""
    gone, came, _ = apart(base.record, record)
    return _digests(store, came) - _digests(base.store, gone)


def _digests(store: EmbeddingStore, parts: Iterable[CorpusPart]) -> set[bytes]:
    return {
        row.tobytes() for part in parts if part.rows for row in store.shards.digests(part.shard)
    }
