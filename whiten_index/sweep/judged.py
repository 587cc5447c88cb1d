"""Judged queries of a sweep: read and checked early, encoded once, scored."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.encode import EncodeReport
from whiten_index.errors import ConfigError, CorpusError, OutputError
from whiten_index.labels import qrels_splits, read_qrels, read_queries
from whiten_index.manifest import fingerprint
from whiten_index.metrics import evaluate, require_evaluator
from whiten_index.progress import Stages
from whiten_index.sweep.config import SweepConfig

Found = tuple[NDArray[np.float32], NDArray[np.int64]]

METRICS = ("ndcg@10", "recall@100", "mrr@10")
DEPTH = 100


@dataclass(frozen=True, eq=False)
class Judged:
    """Queries with their texts and what answers them.

    Attributes:
        source: file of the judgements, for messages.
        texts: query id -> text, of the judged queries in their order.
        qrels: query id -> document id -> grade, of the same queries.
        others: texts of queries that are not judged here, which indexes can be tuned with.
        left_out: judged queries that have no text.
        splits: of the judgements, where several are used together.
    """

    source: str
    texts: Mapping[str, str]
    qrels: Mapping[str, Mapping[str, int]]
    others: Sequence[str]
    left_out: int
    splits: tuple[str, ...] = ()

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
        every = read_queries(Path(config.queries))
        qrels = read_qrels(Path(config.qrels), split=config.qrels_split)
        relevant = {
            query: grades
            for query, grades in qrels.items()
            if any(grade > 0 for grade in grades.values())
        }
        texts = {query: every[query] for query in relevant if query in every}
        if not texts:
            raise CorpusError(
                f"no query of {config.qrels} is in {config.queries}: the judgements name "
                f"{_some(relevant)}, the queries are {_some(every)}; give files that belong "
                "together"
            )
        kept = {query: relevant[query] for query in texts}
        asked = set(texts.values())
        others = [text for text in dict.fromkeys(every.values()) if text not in asked]
        splits = qrels_splits(config.qrels) if config.qrels_split is None else ()
        left_out = len(relevant) - len(texts)
        return cls(config.qrels, texts, kept, others, left_out, splits if len(splits) > 1 else ())

    def digest(self, encoder: Mapping[str, Any]) -> str:
        """Return the identity of judgements and embedded queries, whatever their files are called.

        Args:
            encoder: of the store, which may name another one for queries, or a prompt of theirs.
        """
        qrels = {query: dict(grades) for query, grades in self.qrels.items()}
        return fingerprint({"texts": dict(self.texts), "qrels": qrels, **_asked_by(encoder)})

    def missing(self, names: NDArray[np.object_]) -> int:
        """Return how many relevant documents the corpus lacks.

        Args:
            names: (n,) document of each row.

        Raises:
            CorpusError: it lacks all of them.
        """
        relevant = {
            document
            for grades in self.qrels.values()
            for document, grade in grades.items()
            if grade > 0
        }
        there = relevant & set(names.tolist())
        if not there:
            raise CorpusError(
                f"{self.source} names no document of the corpus: it judges {_some(relevant)}, and "
                f"the corpus has ids such as {_some(names[:3].tolist())}; check --id-column"
            )
        return len(relevant) - len(there)

    def encoded(
        self, encoded: EncodeReport, texts: Sequence[str], stages: Stages
    ) -> NDArray[np.float32]:
        """Return the raw embeddings (q, d) of queries, from the store where they are known.

        Raises:
            ConfigError: there is no encoder to encode them with.
        """
        store, texts = encoded.store, list(texts)
        key = {"queries": fingerprint({"texts": texts}), **_asked_by(store.encoder)}
        if (kept := store.sample(key, {"queries": "qd"})) is not None:
            return kept["queries"].astype(np.float32)
        if encoded.work is None:
            raise ConfigError(
                f"{self.source} judges texts, which are to be encoded; name the corpus too, as "
                "when it was encoded, or leave --queries and --qrels out"
            )
        with stages.stage("encode queries", len(texts)) as watcher:
            found = encoded.work.encoder().encode_queries(texts).astype(np.float32)
            watcher.advance(len(texts))
        # A store that cannot be written still serves: the queries are encoded again next time.
        with contextlib.suppress(OutputError):
            store.save_sample(key, {"queries": found})
        return found

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


def _asked_by(encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells the embedding of a query, beside its text and the store's encoder."""
    return {"prompt": encoder.get("query_prompt"), "encoder": encoder.get("query_encoder")}


def _some(names: Any) -> str:
    return " and ".join(repr(name) for name in list(names)[:2])
