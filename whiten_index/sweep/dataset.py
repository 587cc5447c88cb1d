"""What every point of a sweep is measured on: rows, queries, and what is true of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.assemble import blocks
from whiten_index.corpus.batches import ID
from whiten_index.errors import CorpusError
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.progress import Stages
from whiten_index.store import CorpusRecord, EmbeddingStore, total_moments
from whiten_index.store.sampling import CorpusEmbeddings, embeddings_of
from whiten_index.sweep.config import SweepConfig
from whiten_index.sweep.judged import Judged
from whiten_index.whitening import Spectrum
from whiten_index.whitening.moments import Moments

_LEAST_ROWS, _BLOCK_ROWS = 100, 8_192


@dataclass(frozen=True, eq=False)
class Documents:
    """Which document each row is of; several rows are of one where texts are cut into passages.

    Attributes:
        names: (n,) of each row.
        number_of: (n,) the document of each row as a number.
    """

    names: NDArray[np.object_]
    number_of: NDArray[np.int64]

    @classmethod
    def of(cls, encoded: EncodeReport) -> Documents:
        """Read the ids of all rows, numbers as texts."""
        found = [
            str(name)
            for part in encoded.record.parts
            if part.rows
            for name in encoded.store.documents(part)[ID].to_pylist()
        ]
        numbers: dict[str, int] = {}
        number_of = [numbers.setdefault(name, len(numbers)) for name in found]
        return cls(np.array(found, dtype=object), np.array(number_of, dtype=np.int64))

    @property
    def several(self) -> bool:
        """Whether any document has several rows."""
        return bool(len(self.number_of) > self.number_of.max() + 1)


@dataclass(frozen=True, eq=False)
class Dataset:
    """The corpus in its store, queries, and the corpus's own spectrum.

    Attributes:
        encoded: the corpus in its store.
        moments: of the embeddings that are indexed.
        spectrum: of their covariance.
        queries: (q, d) float32 raw embeddings.
        subset: (n,) row numbers of the corpus that are indexed, in rising order; None for all.
        documents: of each row, None where nothing is judged.
        judged: None where the queries are rows held out.
        facts: what the results say of the dataset.
    """

    encoded: EncodeReport
    moments: Moments
    spectrum: Spectrum
    queries: NDArray[np.float32]
    subset: NDArray[np.int64] | None
    documents: Documents | None
    judged: Judged | None
    facts: dict[str, Any]

    @property
    def store(self) -> EmbeddingStore:
        """The store that holds the embeddings."""
        return self.encoded.store

    @property
    def record(self) -> CorpusRecord:
        """The corpus in that store."""
        return self.encoded.record

    @property
    def rows(self) -> int:
        """Rows n that each index holds."""
        return self.record.rows if self.subset is None else len(self.subset)

    @property
    def dim(self) -> int:
        """Width d of the raw embeddings."""
        return int(self.store.encoder["dim"])

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the raw embeddings (m, d) of some of the n rows, by their numbers 0 to n - 1."""
        numbers = rows if self.subset is None else self.subset[rows]
        return embeddings_of(self.store, self.record, numbers)

    def blocks(self) -> Iterator[NDArray[np.floating]]:
        """Yield the raw embeddings of the n rows in order, some thousand at a time."""
        if self.subset is None:
            yield from blocks(self.store, self.record)
            return
        embeddings = CorpusEmbeddings(self.store, self.record)
        for start in range(0, len(self.subset), _BLOCK_ROWS):
            yield embeddings.at(self.subset[start : start + _BLOCK_ROWS])

    @classmethod
    def prepare(
        cls,
        config: SweepConfig,
        encoded: EncodeReport,
        judged: Judged | None,
        stages: Stages,
    ) -> Dataset:
        """Encode the queries, or hold rows out that serve as queries.

        Raises:
            ConfigError: there is no encoder for the queries.
            CorpusError: the judgements name no document of the corpus, or it is too small.
        """
        store, record = encoded.store, encoded.record
        if record.rows < _LEAST_ROWS:
            raise CorpusError(
                f"{record.rows} rows are too few to compare indexes on; sweep a corpus of "
                f"{_LEAST_ROWS} or more"
            )
        documents = None if judged is None else Documents.of(encoded)
        missing = 0 if judged is None or documents is None else judged.missing(documents.names)
        shards = [part.shard for part in record.parts if part.rows]
        moments = total_moments(store, shards, int(store.encoder["dim"]))
        subset = None
        if judged is not None:
            queries = judged.encoded(encoded, list(judged.texts.values()), stages)
        else:
            held, subset = _held_out(config, record.rows, stages)
            queries = embeddings_of(store, record, held).astype(np.float32)
            moments = moments - Moments.of(queries)
        spectrum = Spectrum.of(moments.covariance())
        made = cls(encoded, moments, spectrum, queries, subset, documents, judged, {})
        made.facts.update(_facts(made, config, missing=missing))
        return made


def _held_out(
    config: SweepConfig, rows: int, stages: Stages
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row numbers that are held out as queries, and the others, both in rising order."""
    count = min(config.sample, rows // 5)
    if count < config.sample:
        stages.watcher.note(
            f"note: {count} rows are held out as queries, a fifth of all, and not the "
            f"--sample of {config.sample}"
        )
    held = np.random.default_rng(config.build.seed).choice(rows, count, replace=False)
    return np.sort(held), np.setdiff1d(np.arange(rows), held)


def _facts(dataset: Dataset, config: SweepConfig, *, missing: int) -> dict[str, Any]:
    """Return what the results say of a dataset."""
    store, judged, dim = dataset.encoded.store, dataset.judged, dataset.dim
    return {
        "name": config.dataset_name,
        "rows": dataset.rows,
        "dim": dim,
        "encoder": store.encoder.get("model") or store.encoder.get("column"),
        "queries": len(dataset.queries),
        "judged": judged is not None,
        "raw_bytes_per_row": 4 * dim,
        "stored_bytes_per_row": _stored_bytes(dataset.encoded) * dim,
        "held_out": dataset.encoded.record.rows - dataset.rows,
        "relevant_documents_missing": missing,
        "judged_queries_without_text": 0 if judged is None else judged.left_out,
        "judgement_splits": [] if judged is None else list(judged.splits),
        "fingerprint": dataset.encoded.record.fingerprint,
    }


def _stored_bytes(encoded: EncodeReport) -> int:
    """Return the bytes of a number in the store, of its widest shard."""
    shards = (encoded.store.require(p.shard, verify=False) for p in encoded.record.parts if p.rows)
    return max(np.dtype(shard.dtype).itemsize for shard in shards)
