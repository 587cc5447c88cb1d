"""Labels as trials: judged queries find their documents, pairs find or resemble each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.manifest import fingerprint
from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.judgements import Pairs, read_pairs, read_qrels, read_queries
from whiten_index.evaluation.metrics import evaluate_each, require_evaluator, spearman
from whiten_index.store.sampling import drawn_rows, embeddings_of, ids_of
from whiten_index.whitening.selection import Scores, Trial, Vectors, reciprocal_ranks

if TYPE_CHECKING:
    from whiten_index.encoding.encoder import Encoder
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.encode import EncodeReport
    from whiten_index.progress import Stages

_LEAST_QUERIES, _LEAST_PAIRS = 10, 30
_MOST_QUERIES = _MOST_PAIRS = 2_000
_QUERY_BLOCK = 256
_MOST_DISTRACTORS = 10_000
_DEPTH = 10
_METRIC = f"ndcg@{_DEPTH}"
_FOLDS, _PAIRS_A_FOLD = 20, 10


@dataclass(frozen=True, eq=False)
class Labels:
    """What a user knows of good answers: judged queries, or pairs.

    Attributes:
        source: file names, for messages.
        queries: query id -> text.
        qrels: query id -> document id -> grade.
        pairs: of texts, None where there are judged queries.
    """

    source: str
    queries: Mapping[str, str]
    qrels: Mapping[str, Mapping[str, int]]
    pairs: Pairs | None

    def digest(self) -> str:
        """Return the identity of the labels themselves, whatever their files are called."""
        pairs = self.pairs
        scores = None if pairs is None or pairs.scores is None else pairs.scores.tolist()
        sides = None if pairs is None else [list(pairs.first), list(pairs.second), scores]
        qrels = {query: dict(grades) for query, grades in self.qrels.items()}
        return fingerprint({"queries": dict(self.queries), "qrels": qrels, "pairs": sides})

    def require_usable(self) -> None:
        """Refuse, before anything is encoded, labels that cannot choose.

        Raises:
            CorpusError: they are too few, or all scores are equal.
            ConfigError: what evaluates them is not installed.
        """
        if self.pairs is None:
            answered = sum(query in self.queries for query in self.qrels)
            self.require_queries(answered, f"{answered} of {len(self.qrels)} have a text")
            require_evaluator()
        elif len(self.pairs.first) < _LEAST_PAIRS:
            raise CorpusError(
                f"{self.source} holds {len(self.pairs.first)} pairs, too few to choose from; give "
                f"{_LEAST_PAIRS} or more"
            )
        elif self.pairs.scores is not None and np.ptp(self.pairs.scores) == 0:
            raise CorpusError(
                f"all scores in {self.source} are equal, so nothing can be chosen by them; leave "
                "the scores out if the pairs belong together"
            )

    def require_queries(self, count: int, why: str) -> None:
        """Refuse to choose by fewer than ten queries.

        Raises:
            CorpusError: there are fewer.
        """
        if count < _LEAST_QUERIES:
            raise CorpusError(
                f"{self.source} leaves {count} queries to choose by ({why}); {_LEAST_QUERIES} are "
                "needed, so judge more or leave the labels out"
            )


def read_labels(config: BuildConfig) -> Labels | None:
    """Read the labels that the transform is chosen by, None where there are none.

    Raises:
        ConfigError: only one of queries and qrels is named, or pairs beside them.
        CorpusError: a file cannot be used.
    """
    queries, qrels, pairs, split = config.queries, config.qrels, config.pairs, config.qrels_split
    if pairs is not None:
        if queries is not None or qrels is not None or split is not None:
            raise ConfigError(
                "--pairs and --qrels are two kinds of labels; give one of them, and --queries "
                "and --qrels-split with --qrels only"
            )
        return Labels(pairs, {}, {}, read_pairs(Path(pairs)))
    if queries is None and qrels is None:
        if split is not None:
            raise ConfigError(f"--qrels-split {split} needs --qrels FILE")
        return None
    if queries is None or qrels is None:
        missing = "--queries" if queries is None else "--qrels"
        raise ConfigError(
            f"{missing} is missing: --queries FILE holds the texts and --qrels FILE says which "
            "documents answer them"
        )
    return Labels(qrels, read_queries(Path(queries)), read_qrels(Path(qrels), split=split), None)


@dataclass(frozen=True)
class Labelled:
    """Labels, encoded and ready to be scored.

    Attributes:
        trials: what is scored.
        count: queries or pairs.
        measure: what the scores are, in words.
        why: one sentence for the user.
        errors: how many standard errors a gentler setting may stay behind.
    """

    trials: Sequence[Trial]
    count: int
    measure: str
    why: str
    errors: float = 0.0


def labelled_trials(encoded: EncodeReport, labels: Labels, seed: int, stages: Stages) -> Labelled:
    """Encode the labels' texts and lay out what they are to find.

    Raises:
        CorpusError: the labels do not fit the corpus, or are too few.
        ConfigError: there is no encoder.
    """
    assert encoded.work is not None, "labels without a corpus are refused before"
    encoder, rng = encoded.work.encoder(), np.random.default_rng(seed)
    if labels.pairs is not None:
        return _pairs(encoder, _drawn(labels.pairs, rng), labels.source, stages)
    return _Judged(encoded, labels, rng).trials(encoder, stages)


def _drawn(pairs: Pairs, rng: np.random.Generator) -> Pairs:
    """Return up to 2,000 of the pairs, drawn at random, in their order."""
    if len(pairs) <= _MOST_PAIRS:
        return pairs
    rows = np.sort(rng.choice(len(pairs), _MOST_PAIRS, replace=False))
    return replace(
        pairs,
        first=[pairs.first[row] for row in rows],
        second=[pairs.second[row] for row in rows],
        scores=None if pairs.scores is None else pairs.scores[rows],
    )


def _pairs(encoder: Encoder, pairs: Pairs, source: str, stages: Stages) -> Labelled:
    count = len(pairs)
    with stages.stage("encode labels", count) as watcher:
        first, second = encoder.encode_queries(pairs.first), encoder.encode(pairs.second)
        watcher.advance(count)
    if pairs.scores is None:
        trial = Trial(first, second, reciprocal_ranks(np.arange(count)))
        measure = "MRR of each text's partner among the second texts"
    else:
        trial = Trial(first, second, _spearman_by_fold(pairs.scores))
        measure = "Spearman correlation of cosines and scores, mean over folds"
    dropped = f" ({pairs.dropped} without a score left out)" if pairs.dropped else ""
    return Labelled([trial], count, measure, f"the best on {count} pairs of {source}{dropped}")


def _spearman_by_fold(gold: NDArray[np.float64]) -> Callable[[Vectors, Vectors], Scores]:
    """Return what scores pairs by folds of them: a correlation of one pair there is not."""
    folds = min(_FOLDS, len(gold) // _PAIRS_A_FOLD)
    # Every fold has its share of high and of low scores.
    order = np.argsort(gold, kind="stable")
    members = [order[fold::folds] for fold in range(folds)]
    members = [rows for rows in members if np.ptp(gold[rows]) > 0]

    def score(first: Vectors, second: Vectors) -> Scores:
        cosines = np.einsum("nk,nk->n", first, second).astype(np.float64)
        # A transform that makes all cosines equal says nothing of the scores.
        flat = [np.ptp(cosines[rows]) == 0 for rows in members]
        return np.array(
            [
                0.0 if same else spearman(gold[rows], cosines[rows])
                for rows, same in zip(members, flat, strict=True)
            ]
        )

    return score


@dataclass(frozen=True, eq=False)
class _Judged:
    encoded: EncodeReport
    labels: Labels
    rng: np.random.Generator

    def trials(self, encoder: Encoder, stages: Stages) -> Labelled:
        found = self._rows_of_judged()
        usable = self._usable(found)
        judged = {document for query in usable for document in self.labels.qrels[query]}
        rows = np.concatenate([found[document] for document in sorted(judged & found.keys())])
        store, record = self.encoded.store, self.encoded.record
        candidates = np.union1d(rows, drawn_rows(record, _MOST_DISTRACTORS, self.rng))
        with stages.stage("encode labels", len(usable)) as watcher:
            queries = encoder.encode_queries([self.labels.queries[query] for query in usable])
            watcher.advance(len(usable))
        names = ids_of(store, record, candidates)
        score = _ndcg(usable, names, self.labels.qrels)
        measure = f"nDCG@{_DEPTH} among {len(set(names)):,} documents"
        why = f"the best on {len(usable)} judged queries of {self.labels.source}"
        trial = Trial(queries, embeddings_of(store, record, candidates), score)
        return Labelled([trial], len(usable), measure, why)

    def _rows_of_judged(self) -> dict[str, NDArray[np.int64]]:
        """Return document id -> its rows, of the judged documents that the corpus has."""
        judged = {document for grades in self.labels.qrels.values() for document in grades}
        rows: dict[str, list[int]] = {}
        start, some = 0, ""
        for part in self.encoded.record.parts:
            if part.rows:
                for row, name in enumerate(self.encoded.store.documents(part)[ID].to_pylist()):
                    some = some or str(name)
                    if str(name) in judged:
                        rows.setdefault(str(name), []).append(start + row)
            start += part.rows
        if not rows:
            raise CorpusError(
                f"{self.labels.source} names no document of the corpus: it judges "
                f"{min(judged)!r} and others, and the corpus has ids such as {some!r}; check "
                "--id-column"
            )
        return {name: np.array(found, dtype=np.int64) for name, found in rows.items()}

    def _usable(self, found: Mapping[str, object]) -> list[str]:
        """Return queries that have a text and a relevant document in the corpus.

        They are drawn at random until there are 2,000 of them, or 10,000 documents judged.
        """
        qrels, usable, documents = self.labels.qrels, list[str](), 0
        relevant = [
            query
            for query, grades in qrels.items()
            if any(grade > 0 and document in found for document, grade in grades.items())
        ]
        answered = sorted(query for query in relevant if query in self.labels.queries)
        why = f"{len(relevant)} have a relevant document in the corpus"
        self.labels.require_queries(len(answered), why)
        for place in self.rng.permutation(len(answered)):
            documents += len(qrels[answered[place]])
            if len(usable) >= _LEAST_QUERIES and documents > _MOST_DISTRACTORS:
                break
            usable.append(answered[place])
        return sorted(usable[:_MOST_QUERIES])


def _ndcg(
    queries: Sequence[str], names: Sequence[str], qrels: Mapping[str, Mapping[str, int]]
) -> Callable[[Vectors, Vectors], Scores]:
    """Return what scores queries by nDCG@10, a document by the best of its rows.

    Args:
        queries: ids of the queries.
        names: ids of the candidates' documents, several rows of which may be of one.
        qrels: their judgements.
    """
    judged = {query: dict(qrels[query]) for query in queries}
    documents, of_row = np.unique(np.array(names, dtype=object), return_inverse=True)
    order = np.argsort(of_row, kind="stable")
    starts = np.flatnonzero(np.diff(of_row[order], prepend=-1))

    def run_of(vectors: Vectors, candidates: Vectors) -> Iterator[dict[str, float]]:
        best = np.maximum.reduceat((vectors @ candidates.T)[:, order], starts, axis=1)
        cut = min(_DEPTH, len(documents))
        nearest = np.argpartition(best, -cut, axis=1)[:, -cut:]
        for row, cosines in zip(nearest, np.take_along_axis(best, nearest, axis=1), strict=True):
            yield dict(zip(documents[row].tolist(), cosines.tolist(), strict=True))

    def score(vectors: Vectors, candidates: Vectors) -> Scores:
        runs = [
            run
            for start in range(0, len(queries), _QUERY_BLOCK)
            for run in run_of(vectors[start : start + _QUERY_BLOCK], candidates)
        ]
        each = evaluate_each(judged, dict(zip(queries, runs, strict=True)), _METRIC)
        return np.array([each[query] for query in queries])

    return score
