"""Judged queries of a sweep: read and checked early, encoded once, scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.manifest import fingerprint
from whiten_index.errors import ConfigError
from whiten_index.evaluation.metrics import evaluate, require_evaluator
from whiten_index.labels import JudgedQueries, read_judged
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.progress import Stages
from whiten_index.search.query_encoder import asked_by, query_embeddings
from whiten_index.sweep.config import SweepConfig

Found = tuple[NDArray[np.float32], NDArray[np.int64]]

METRICS = ("ndcg@10", "recall@100", "mrr@10")
DEPTH = 100


class Judged(JudgedQueries):
    """Judged queries whose embeddings are kept in the store, and what a search of them is worth."""

    @classmethod
    def read(cls, config: SweepConfig) -> Judged | None:
        """Read the files named, None where there are none.

        Raises:
            ConfigError: a file has an unknown ending, or what evaluates is not installed.
            CorpusError: a file cannot be used, or the two have no query in common.
        """
        if config.queries is None or config.qrels is None:
            return None
        require_evaluator()
        return cls(**vars(read_judged(config.queries, config.qrels, split=config.qrels_split)))

    def digest(self, encoder: Mapping[str, Any]) -> str:
        """Return the identity of judgements and embedded queries, whatever their files are called.

        Args:
            encoder: of the store, which may name another one for queries, or a prompt of theirs.
        """
        qrels = {query: dict(grades) for query, grades in self.qrels.items()}
        return fingerprint({"texts": dict(self.texts), "qrels": qrels, **asked_by(encoder)})

    def encoded(
        self, encoded: EncodeReport, texts: Sequence[str], stages: Stages
    ) -> NDArray[np.float32]:
        """Return the raw embeddings (q, d) of queries, from the store where they are known.

        Raises:
            ConfigError: there is no encoder to encode them with.
        """

        def encode(texts: Sequence[str]) -> NDArray[np.floating]:
            if encoded.work is None:
                raise ConfigError(
                    f"{self.source} judges texts, which are to be encoded; name the corpus too, as "
                    "when it was encoded, or leave --queries and --qrels out"
                )
            return encoded.work.encoder().encode_queries(texts)

        return query_embeddings(encoded.store, texts, encode, stages)

    def quality(self, found: Mapping[int, Found], names: NDArray[np.object_]) -> dict[str, float]:
        """Return each metric in 0 … 1, by the search for as many hits as it counts.

        Args:
            found: hits asked for -> scores and rows (q, m), best first, −1 where there are none.
            names: (n,) document of each row.
        """
        values: dict[str, float] = {}
        for depth, (scores, rows) in found.items():
            run = {
                query: dict(zip(names[near[near >= 0]], best[near >= 0].tolist(), strict=True))
                for query, near, best in zip(self.texts, rows, scores, strict=True)
            }
            own = [metric for metric in METRICS if metric.endswith(f"@{depth}")]
            values |= evaluate(self.qrels, run, own)
        return values


def require_query_encoder(config: SweepConfig, judged: Judged | None) -> None:
    """Refuse before hours of work queries that nothing could encode after them.

    Raises:
        ConfigError: the corpus is a column of embeddings whose model is not named.
    """
    given = config.build.embedding_column is not None
    if judged is not None and given and config.build.model is None:
        raise ConfigError(
            f"{judged.source} judges texts, which are to be encoded; name the model of the "
            "embedding column with --model, or leave --queries and --qrels out"
        )
