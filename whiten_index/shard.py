"""The work on one shard: read it, look whether it is done, encode it if not, keep it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whiten_index.batch import EmbeddingBatch, TextBatch
from whiten_index.corpus import ParquetCorpus, Shard
from whiten_index.store import CorpusPart, EmbeddingStore, StoredShard, StoreDtype

if TYPE_CHECKING:
    from whiten_index.encoding import Encoder


@dataclass(frozen=True)
class ShardResult:
    """What came of one shard.

    Attributes:
        part: where its embeddings and rows are.
        stored: the finished shard, None where every row was skipped.
        reused: whether the embeddings were there already.
        remade: whether damaged embeddings were replaced.
        skipped: reason -> rows left out.
        seconds: what was done -> wall seconds.
    """

    part: CorpusPart
    stored: StoredShard | None
    reused: bool
    remade: bool
    skipped: Mapping[str, int]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class ShardWork:
    """A callable that does one shard, whoever calls it.

    Attributes:
        corpus: where rows come from.
        store: where embeddings go.
        encoder: gives the encoder on first need; never called where all is reused.
        dtype: how embeddings are kept.
        advance: told how many rows are done, as they are.
    """

    corpus: ParquetCorpus
    store: EmbeddingStore
    encoder: Callable[[], Encoder]
    dtype: StoreDtype
    advance: Callable[[int], None] | None = None

    def __call__(self, shard: Shard) -> ShardResult:
        """Do ``shard``, unless the store has it.

        Raises:
            CorpusError: the file is damaged or a row cannot be used.
            OutputError: the store cannot be written.
        """
        clock = _Clock()
        batch = self.corpus.read(shard)
        if not len(batch):
            self._done(batch.read)
            part = CorpusPart("", "", 0, batch.read, 0)
            return ShardResult(part, None, False, False, batch.skipped, {"read": clock.lap()})
        digests = batch.digests()
        fingerprint = self.store.shard_fingerprint(digests, self.dtype)
        seconds = {"read": clock.lap()}
        stored = self.store.find(fingerprint)
        reused = stored is not None
        remade = not reused and self.store.is_damaged(fingerprint)
        if stored is None:
            embeddings, truncated = self._embed(batch)
            self._done(batch.read - len(batch))
            seconds["encode"] = clock.lap()
            stored = self.store.write(
                fingerprint, digests, embeddings, dtype=self.dtype, truncated=truncated
            )
        else:
            self._done(batch.read)
        documents = self.store.write_documents(batch.documents)
        part = CorpusPart(fingerprint, documents, len(batch), batch.read, stored.truncated)
        seconds["store"] = clock.lap()
        return ShardResult(part, stored, reused, remade, batch.skipped, seconds)

    def _embed(self, batch: TextBatch | EmbeddingBatch) -> tuple[NDArray[np.floating], int]:
        if isinstance(batch, TextBatch):
            encoded = self.encoder().encode_window(batch.texts, advance=self.advance)
            return encoded.embeddings, encoded.truncated
        self._done(len(batch))
        return batch.embeddings, 0

    def _done(self, rows: int) -> None:
        if self.advance is not None:
            self.advance(rows)


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        return passed
