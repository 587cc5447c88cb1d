"""The sample that a transform is chosen on: documents, their pieces, and what is around them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.batch import TextBatch
from whiten_index.draw import drawn_parts, drawn_rows, row_starts
from whiten_index.encode import EncodeReport
from whiten_index.errors import OutputError
from whiten_index.pieces import RECIPE, Pieces, cut_pieces
from whiten_index.progress import Stages
from whiten_index.shard import ShardWork
from whiten_index.store import CorpusRecord, EmbeddingStore, StoreDtype, as_kept
from whiten_index.whitening.choice import LEAST_SAMPLE

_MOST_CANDIDATES = 5_000
# Texts looked at for one that is long enough.
_TRIES = 20
# Below this share of texts long enough, the corpus is one of short texts.
_LEAST_SHARE = 0.2
_CHUNK = 125
_SECONDS, _SHARE_OF_BUILD = 40.0, 0.04
_KINDS = ("sentences", "others", "windows")


@dataclass(frozen=True, eq=False)
class Sample:
    """m documents and their pieces, encoded.

    Attributes:
        rows: (m,) row numbers of the documents in the corpus.
        candidates: (n,) row numbers, the documents' own first, then others drawn at random.
        sentences: (m, d) a sentence of each document, as a query.
        others: (m, d) the document without it.
        windows: (m, d) 8 to 20 words of the document, as a query.
    """

    rows: NDArray[np.int64]
    candidates: NDArray[np.int64]
    sentences: NDArray[np.floating]
    others: NDArray[np.floating]
    windows: NDArray[np.floating]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class TooShort:
    """Why there is no sample of pieces.

    Attributes:
        why: half a sentence for the user.
    """

    why: str


def sample_pieces(encoded: EncodeReport, size: int, seed: int, stages: Stages) -> Sample | TooShort:
    """Return the sample of a corpus, from the store where it was drawn before.

    Args:
        encoded: the corpus in its store.
        size: documents at most; no more than half of the corpus are taken.
        seed: of the draw.
        stages: where the time is shown.

    Raises:
        CorpusError: the corpus can no longer be read.
    """
    store, record = encoded.store, encoded.record
    key = _key(encoded, size, seed)
    if (kept := _kept(store, key)) is not None:
        return kept
    work = encoded.work
    if work is None or work.corpus.dim is not None:
        return TooShort("there are no texts to cut into pieces, only embeddings")
    if record.rows < 2 * LEAST_SAMPLE:
        return TooShort(f"{record.rows} documents are too few to choose from")
    drawn = _Draw(record, work, np.random.default_rng(seed))
    cut = drawn.pieces(min(size, record.rows // 2))
    if isinstance(cut, TooShort):
        return cut
    with stages.stage("encode pieces", len(cut)) as watcher:
        limit = max(_SECONDS, _SHARE_OF_BUILD * sum(_whole(stages.seconds)))
        parts, started = list[list[NDArray[np.float32]]](), time.perf_counter()
        for start in range(0, len(cut), _CHUNK):
            if time.perf_counter() - started > limit and start >= 2 * LEAST_SAMPLE:
                break
            chunk = [pieces for _, pieces in cut[start : start + _CHUNK]]
            parts.append(_encode(work, chunk))
            watcher.advance(len(chunk))
    # As the store keeps them, so that a sample found again chooses the same.
    embeddings = [
        as_kept(np.concatenate(part), StoreDtype.FLOAT16) for part in zip(*parts, strict=True)
    ]
    rows = np.array([row for row, _ in cut[: len(embeddings[0])]], dtype=np.int64)
    sample = Sample(rows, drawn.around(rows), *embeddings)
    # A store that cannot be written still serves: the next build draws the same sample again.
    with contextlib.suppress(OutputError):
        store.save_sample(key, vars(sample))
    return sample


@dataclass(frozen=True, eq=False)
class _Draw:
    """Rows drawn from a few shards, so that a huge corpus is not read again."""

    record: CorpusRecord
    work: ShardWork
    rng: np.random.Generator

    def pieces(self, size: int) -> list[tuple[int, Pieces]] | TooShort:
        """Return up to ``size`` documents long enough, by row number, with their pieces."""
        most_words = int(self.work.store.encoder["max_length"])
        found, tried = list[tuple[int, Pieces]](), 0
        for row, text in self._texts():
            if len(found) >= size or tried >= _TRIES * size:
                break
            tried += 1
            if (pieces := cut_pieces(text, self.rng, most_words=most_words)) is not None:
                found.append((row, pieces))
        if len(found) < _LEAST_SHARE * tried:
            return TooShort(f"{tried - len(found)} of {tried} texts are too short to cut in pieces")
        if len(found) < LEAST_SAMPLE:
            return TooShort(f"{len(found)} documents are too few to choose from")
        return found

    def around(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``rows`` and after them others of the corpus, without repeats."""
        more = drawn_rows(self.record, _MOST_CANDIDATES, self.rng)
        more = more[~np.isin(more, rows)]
        return np.concatenate([rows, more[: max(_MOST_CANDIDATES - len(rows), 0)]])

    def _texts(self) -> Iterator[tuple[int, str]]:
        """Yield texts with their row numbers, in an order drawn at random."""
        starts = row_starts(self.record)
        texts: list[tuple[int, str]] = []
        for position in drawn_parts(self.record, self.rng):
            batch = self.work.batch_of(self.work.corpus.shards[position])
            assert isinstance(batch, TextBatch)
            texts += zip(range(starts[position], starts[position + 1]), batch.texts, strict=True)
        return (texts[place] for place in self.rng.permutation(len(texts)))


def _encode(work: ShardWork, pieces: list[Pieces]) -> list[NDArray[np.float32]]:
    encoder = work.encoder()
    queries = encoder.encode_queries(
        [piece.sentence for piece in pieces] + [piece.window for piece in pieces]
    )
    others = encoder.encode([piece.others for piece in pieces])
    return [queries[: len(pieces)], others, queries[len(pieces) :]]


def _key(encoded: EncodeReport, size: int, seed: int) -> dict[str, Any]:
    return {
        "corpus": encoded.record.fingerprint,
        "recipe": RECIPE,
        "size": size,
        "seed": seed,
        # Sentences and windows are encoded as queries, and the store's name is of documents.
        "query_prompt": encoded.store.encoder.get("query_prompt"),
    }


def _kept(store: EmbeddingStore, key: Mapping[str, Any]) -> Sample | None:
    shapes = {"rows": "m", "candidates": "n", **dict.fromkeys(_KINDS, "md")}
    tensors = store.sample(key, shapes)
    return None if tensors is None else Sample(**tensors)


def _whole(seconds: Mapping[str, float]) -> list[float]:
    """Return the seconds of stages, without those of their parts."""
    return [spent for stage, spent in seconds.items() if "/" not in stage]
