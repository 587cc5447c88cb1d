"""Data that every point of a sweep is measured on: rows, queries, and their exact neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.judgements import JudgedQueries, read_judged
from whiten_index.evaluation.metrics import require_evaluator
from whiten_index.index.exact import exact_neighbours
from whiten_index.measure.sweep_config import (
    AUTO,
    FAISS,
    RAW,
    SweepConfig,
    Vectors,
    parse_transform,
)
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.fit import fit_whitening
from whiten_index.progress import Stages
from whiten_index.search.query_encoder import query_embeddings
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.spectrum import Spectrum, unit_rows
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

TOP_K = 10
_LEAST_ROWS = 100


def read_queries(config: SweepConfig) -> JudgedQueries | None:
    """Read the judged queries of a sweep, None if it has none.

    Raises:
        ConfigError: a file has an unknown ending, pytrec_eval is not installed, or the corpus is
            a column of embeddings whose model is not named, so that nothing encodes the queries.
        CorpusError: a file cannot be used, or the two have no query in common.
    """
    if config.queries is None or config.qrels is None:
        return None
    require_evaluator()
    judged = read_judged(config.queries, config.qrels, split=config.qrels_split)
    if config.build.embedding_column is not None and config.build.model is None:
        raise ConfigError(
            f"{judged.source} judges texts, which are to be encoded; name the model of the "
            "embedding column with --model, or leave --queries and --qrels out"
        )
    return judged


@dataclass(frozen=True, eq=False)
class Dataset:
    """Corpus in its store, queries, and spectrum of the corpus.

    ``subset`` has the row numbers (n,) that are indexed, in rising order, None for all. With
    judgements ``documents`` names the document of each row.
    """

    encoded: EncodeReport
    embeddings: CorpusEmbeddings
    moments: Moments
    spectrum: Spectrum
    queries: NDArray[np.float32]
    subset: NDArray[np.int64] | None
    judged: JudgedQueries | None
    documents: NDArray[np.object_] | None
    facts: dict[str, Any]

    @property
    def rows(self) -> int:
        """Rows n of each index."""
        return self.embeddings.rows

    @property
    def dim(self) -> int:
        """Width d of the raw embeddings."""
        return int(self.facts["dim"])

    @cached_property
    def document_numbers(self) -> NDArray[np.int64]:
        """Number of the document of each row, the same for its passages."""
        known = dict[str, int]()
        names = () if self.documents is None else self.documents
        return np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int64)


def prepare_dataset(
    config: SweepConfig, encoded: EncodeReport, judged: JudgedQueries | None, stages: Stages
) -> Dataset:
    """Encode the queries, or hold out rows that serve as queries."""
    store, record = encoded.store, encoded.record
    if record.rows < _LEAST_ROWS:
        raise CorpusError(
            f"{record.rows} rows are too few to compare indexes on; sweep a corpus of "
            f"{_LEAST_ROWS} or more"
        )
    dim, parts = store.dim, [part for part in record.parts if part.rows]
    moments = store.total_moments(parts)
    documents = subset = None
    missing = 0
    if judged is None:
        held, subset = _held_out(config, record.rows, stages)
        queries = CorpusEmbeddings(store, record).at(held).astype(np.float32)
        moments = moments - Moments.of(queries)
    else:
        names = [str(name) for p in parts for name in store.documents(p)[ID].to_pylist()]
        missing = judged.missing(names)
        documents = np.array(names, dtype=object)
        queries = _encode_queries(encoded, judged, stages)
    facts = {
        "name": config.dataset_name,
        "rows": record.rows if subset is None else len(subset),
        "dim": dim,
        "encoder": store.encoder.get("model") or store.encoder.get("column"),
        "queries": len(queries),
        "judged": judged is not None,
        "raw_bytes_per_row": 4 * dim,
        "stored_bytes_per_row": max(-(-part.bytes // part.rows) for part in parts),
        "held_out": 0 if subset is None else record.rows - len(subset),
        "relevant_documents_missing": missing,
        "judged_queries_without_text": 0 if judged is None else judged.left_out,
        "fingerprint": record.fingerprint,
    }
    spectrum = Spectrum.of(moments.covariance())
    rows = CorpusEmbeddings(store, record, subset)
    return Dataset(encoded, rows, moments, spectrum, queries, subset, judged, documents, facts)


def _held_out(
    config: SweepConfig, rows: int, stages: Stages
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row numbers held out as queries, and the others, both in rising order."""
    count = min(config.sample, rows // 5)
    if count < config.sample:
        stages.watcher.note(
            f"note: {count} rows are held out as queries, a fifth of all, and not the "
            f"--sample of {config.sample}"
        )
    held = np.random.default_rng(config.build.seed).choice(rows, count, replace=False)
    return np.sort(held), np.setdiff1d(np.arange(rows), held)


def _encode_queries(
    encoded: EncodeReport, judged: JudgedQueries, stages: Stages
) -> NDArray[np.float32]:
    """Return the raw embeddings (q, d) of queries, from the store if it has them."""

    def encode(texts: Sequence[str]) -> NDArray[np.floating]:
        if encoded.work is None:
            raise ConfigError(
                f"{judged.source} judges texts, which are to be encoded; name the corpus too, as "
                "when it was encoded, or leave --queries and --qrels out"
            )
        return encoded.work.encoder().encode_queries(texts)

    return query_embeddings(encoded.store, list(judged.texts.values()), encode, stages)


@dataclass(frozen=True, eq=False)
class Space:
    """Unit vectors of the corpus under one transform."""

    whitening: Whitening
    truth: NDArray[np.int64]


def open_space(config: SweepConfig, dataset: Dataset, where: Vectors, stages: Stages) -> Space:
    """Fit a transform and find the exact neighbours among its vectors, by numpy."""
    whitening = Whitening.fit(dataset.moments, _transform(config, dataset, where, stages))
    with stages.stage("exact neighbours", dataset.rows) as watcher:

        def vectors(raw: NDArray[np.floating]) -> NDArray[np.float32]:
            watcher.advance(len(raw))
            return unit_rows(whitening.apply(raw)).astype(np.float32)

        queries = unit_rows(whitening.apply(dataset.queries)).astype(np.float32)
        blocks = map(vectors, dataset.embeddings.blocks())
        return Space(whitening, exact_neighbours(blocks, queries, TOP_K)[1])


def _transform(
    config: SweepConfig, dataset: Dataset, where: Vectors, stages: Stages
) -> WhiteningConfig:
    if where.family in (RAW, FAISS):
        return WhiteningConfig(kind=Kind.NONE)
    name, exponent = parse_transform(where.transform)
    if name != AUTO:
        seed = config.build.seed
        return WhiteningConfig(kind=Kind(name), k=where.k, exponent=exponent, seed=seed)
    build = replace(config.build, k=where.k)
    chosen = fit_whitening(build, replace(dataset.encoded, stages=stages), None).whitening
    # The choice may see the rows held out; the basis must not, so it is fitted again.
    return WhiteningConfig(
        kind=chosen.kind, k=where.k, exponent=chosen.exponent, center=chosen.center
    )
