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
from whiten_index.labels import read_qrels, read_queries
from whiten_index.manifest import fingerprint
from whiten_index.metrics import evaluate, require_evaluator
from whiten_index.progress import Stages
from whiten_index.sweep.config import SweepConfig

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
    """

    source: str
    texts: Mapping[str, str]
    qrels: Mapping[str, Mapping[str, int]]
    others: Sequence[str]
    left_out: int

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
        return cls(config.qrels, texts, kept, others, len(relevant) - len(texts))

    def digest(self) -> str:
        """Return the identity of queries and judgements, whatever their files are called."""
        qrels = {query: dict(grades) for query, grades in self.qrels.items()}
        return fingerprint({"texts": dict(self.texts), "qrels": qrels})

    def missing(self, ids: NDArray[np.object_]) -> int:
        """Return how many relevant documents the corpus lacks.

        Raises:
            CorpusError: it lacks all of them.
        """
        relevant = {
            document
            for grades in self.qrels.values()
            for document, grade in grades.items()
            if grade > 0
        }
        there = relevant & set(ids.tolist())
        if not there:
            raise CorpusError(
                f"{self.source} names no document of the corpus: it judges {_some(relevant)}, and "
                f"the corpus has ids such as {_some(ids[:3].tolist())}; check --id-column"
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
        prompt = store.encoder.get("query_prompt")
        asked_by = store.encoder.get("query_encoder")
        key = {"queries": fingerprint({"texts": texts}), "prompt": prompt, "encoder": asked_by}
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

    def quality(
        self, rows: NDArray[np.int64], scores: NDArray[np.float32], ids: NDArray[np.object_]
    ) -> dict[str, float]:
        """Return each metric in 0 … 1, a document by the best of its rows.

        Args:
            rows: (q, m) rows found, best first, −1 where there are none.
            scores: (q, m) their cosines.
            ids: (n,) document of each row.
        """
        run = {
            query: _best_of_each(ids[found[found >= 0]], near[found >= 0])
            for query, found, near in zip(self.texts, rows, scores, strict=True)
        }
        return evaluate(self.qrels, run, METRICS)


def _best_of_each(ids: Sequence[Any], scores: Sequence[float]) -> dict[str, float]:
    best: dict[str, float] = {}
    for document, score in zip(ids, scores, strict=True):
        if len(best) == DEPTH:
            break
        best.setdefault(document, float(score))
    return best


def _some(names: Any) -> str:
    return " and ".join(repr(name) for name in list(names)[:2])
