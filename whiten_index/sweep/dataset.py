"""What every point of a sweep is measured on: rows, queries, and what is true of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.assemble import blocks
from whiten_index.batch import ID
from whiten_index.encode import EncodeReport
from whiten_index.errors import CorpusError
from whiten_index.moments import Moments
from whiten_index.progress import Stages
from whiten_index.store import total_moments
from whiten_index.sweep.config import SweepConfig
from whiten_index.sweep.files import file_array
from whiten_index.sweep.judged import Judged
from whiten_index.whitening import Spectrum

_TUNING_QUERIES, _ENOUGH_QUERIES = 500, 100
_LEAST_ROWS = 100


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
class Tuning:
    """What lists and graphs are tuned with: none of the queries that are measured.

    Attributes:
        rows: (t, d) float32 raw embeddings.
        own: (t,) row numbers, None where they are other queries.
    """

    rows: NDArray[np.float32]
    own: NDArray[np.int64] | None


@dataclass(frozen=True, eq=False)
class Dataset:
    """Raw embeddings in a file, queries, and the corpus's own spectrum.

    Attributes:
        encoded: the corpus in its store.
        moments: of the embeddings that are indexed.
        spectrum: of their covariance.
        raw: (n, d) of the rows that are indexed, as the store keeps them, in a file.
        queries: (q, d) float32 raw embeddings.
        numbers: (n,) number of each row in the corpus: all of them, but for those held out.
        tuning: what is tuned with.
        documents: of each row, None where nothing is judged.
        judged: None where the queries are rows held out.
        facts: what the results say of the dataset.
    """

    encoded: EncodeReport
    moments: Moments
    spectrum: Spectrum
    raw: NDArray[np.floating]
    queries: NDArray[np.float32]
    numbers: NDArray[np.int64]
    tuning: Tuning
    documents: Documents | None
    judged: Judged | None
    facts: dict[str, Any]

    @property
    def rows(self) -> int:
        """Rows n that each index holds."""
        return len(self.raw)

    @property
    def dim(self) -> int:
        """Width d of the raw embeddings."""
        return int(self.raw.shape[1])

    @classmethod
    def prepare(
        cls,
        config: SweepConfig,
        encoded: EncodeReport,
        judged: Judged | None,
        folder: Path,
        stages: Stages,
    ) -> Dataset:
        """Encode or hold out the queries, and lay the raw embeddings out in ``folder``.

        Raises:
            ConfigError: there is no encoder for the queries.
            CorpusError: the judgements name no document of the corpus, or it is too small.
            StorageError: the folder cannot be written.
        """
        store, record = encoded.store, encoded.record
        if record.rows < _LEAST_ROWS:
            raise CorpusError(
                f"{record.rows} rows are too few to compare indexes on; sweep a corpus of "
                f"{_LEAST_ROWS} or more"
            )
        documents = None if judged is None else Documents.of(encoded)
        missing = 0 if judged is None or documents is None else judged.missing(documents.names)
        asked = None
        if judged is not None:
            asked = judged.encoded(encoded, list(judged.texts.values()), stages)
        rng = np.random.default_rng(config.build.seed)
        held = np.zeros(record.rows, dtype=bool)
        if asked is None:
            count = min(config.sample, record.rows // 5)
            if count < config.sample:
                stages.watcher.note(
                    f"note: {count} rows are held out as queries, a fifth of all, and not the "
                    f"--sample of {config.sample}"
                )
            held[rng.choice(record.rows, count, replace=False)] = True
        with stages.stage("lay out", record.rows) as watcher:
            raw, held_rows = _laid_out(encoded, held, folder / "raw", watcher.advance)
            shards = [part.shard for part in record.parts if part.rows]
            moments = total_moments(store, shards, raw.shape[1])
            if len(held_rows):
                moments = moments - Moments.of(held_rows)
        queries = held_rows if asked is None else asked
        tuning = _tuning(raw, judged, encoded, stages, rng)
        made = cls(
            encoded,
            moments,
            Spectrum.of(moments.covariance()),
            raw,
            queries,
            np.flatnonzero(~held),
            tuning,
            documents,
            judged,
            {},
        )
        made.facts.update(_facts(made, config, missing=missing))
        return made


def _tuning(
    raw: NDArray[np.floating],
    judged: Judged | None,
    encoded: EncodeReport,
    stages: Stages,
    rng: np.random.Generator,
) -> Tuning:
    """Return queries that are not judged where there are enough, else rows."""
    if judged is not None and len(judged.others) >= _ENOUGH_QUERIES:
        others = judged.others[:_TUNING_QUERIES]
        return Tuning(judged.encoded(encoded, others, stages), None)
    count = min(_TUNING_QUERIES, len(raw) // 2)
    own = np.sort(rng.choice(len(raw), count, replace=False))
    return Tuning(raw[own].astype(np.float32), own)


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
        "stored_bytes_per_row": dataset.raw.dtype.itemsize * dim,
        "held_out": dataset.encoded.record.rows - dataset.rows,
        "tuned_with": "queries" if dataset.tuning.own is None else "rows",
        "relevant_documents_missing": missing,
        "judged_queries_without_text": 0 if judged is None else judged.left_out,
        "judgement_splits": [] if judged is None else list(judged.splits),
        "fingerprint": dataset.encoded.record.fingerprint,
    }


def _laid_out(
    encoded: EncodeReport, held: NDArray[np.bool_], path: Path, advance: Any
) -> tuple[NDArray[np.floating], NDArray[np.float32]]:
    """Write the rows that are not held out to a file; return them, and those that are."""
    store, record = encoded.store, encoded.record
    dtypes = {np.dtype(shard.dtype) for shard in _shards(encoded)}
    shape = (len(held) - int(held.sum()), int(store.encoder["dim"]))
    raw = file_array(path, np.result_type(*dtypes), shape)
    out, start, filled = list[NDArray[np.floating]](), 0, 0
    for block in blocks(store, record):
        inside = held[start : start + len(block)]
        kept = block[~inside] if inside.any() else block
        raw[filled : filled + len(kept)] = kept
        out.append(block[inside])
        start, filled = start + len(block), filled + len(kept)
        advance(len(block))
    return raw, np.concatenate(out).astype(np.float32)


def _shards(encoded: EncodeReport) -> Iterator[Any]:
    for part in encoded.record.parts:
        if part.rows:
            yield encoded.store.require(part.shard, verify=False)
