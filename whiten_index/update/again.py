"""Texts that came with a version which was rolled back, and come again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whiten_index import index as faiss_index
from whiten_index.changes import apart
from whiten_index.errors import ArtifactError, StorageError
from whiten_index.origin import corpus_record
from whiten_index.row_keys import KeyTable, digest_keys
from whiten_index.store import CorpusPart, CorpusRecord, EmbeddingStore, KnownRows
from whiten_index.update.base import Base


def told_again(base: Base, record: CorpusRecord, store: EmbeddingStore) -> Iterator[str]:
    """Yield a sentence for each withdrawn version that is there, some of whose new texts return.

    Good rows come again as bad ones do: this is only noted, and so is a version that the system
    does not let be read.
    """
    try:
        yield from _come_again(base, record, store)
    except StorageError as error:
        yield f"note: texts of withdrawn versions that come again were not looked for: {error}"


def _come_again(base: Base, record: CorpusRecord, store: EmbeddingStore) -> Iterator[str]:
    withdrawn = _withdrawn(base.folder.parents[1])
    others = (*withdrawn.values(), record)
    gone = {id(part): part for each in others for part in apart(base.record, each)[0]}
    _, coming, _ = apart(base.record, record)
    before: KnownRows | None = None
    for name, each in withdrawn.items():
        # Of what was pruned, shards may be dropped.
        with contextlib.suppress(ArtifactError):
            # Where few rows of each shard changed, nearly all rows are in parts that differ.
            if before is None:
                before = KnownRows(_digests(base.store, gone.values()))
            _, came, _ = apart(base.record, each)
            brought = KeyTable(
                [
                    digest_keys(digests[~before.find(digests).known])
                    for _, digests in _digests(base.store, came)
                ]
            )
            again = np.zeros(len(brought), dtype=np.bool_)
            for _, digests in _digests(store, coming):
                row = brought.find(digest_keys(digests))
                again[row[row >= 0]] = True
            if again.any():
                yield (
                    f"note: {np.count_nonzero(again):,} of the "
                    f"{np.count_nonzero(brought.counts()):,} texts that version {name} brought, "
                    "which was rolled back, come again"
                )


def _withdrawn(root: Path) -> dict[str, CorpusRecord]:
    """Return the records of the versions that were rolled back, of those that can be read."""
    found = {}
    for name in faiss_index.withdrawn_versions(root):
        with contextlib.suppress(ArtifactError):
            version = faiss_index.read_version(root / faiss_index.VERSIONS / name)
            found[name] = corpus_record(version)
    return found


def _digests(
    store: EmbeddingStore, parts: Iterable[CorpusPart]
) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    return ((part.shard, store.shards.digests(part.shard)) for part in parts if part.rows)
