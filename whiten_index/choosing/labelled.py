"""Labels as trials: judged queries find their documents, pairs find or resemble each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whiten_index.batch import ID
from whiten_index.draw import drawn_rows, embeddings_of, ids_of
from whiten_index.encode import EncodeReport
from whiten_index.errors import ConfigError
from whiten_index.labels import Pairs, read_pairs, read_qrels, read_queries
from whiten_index.manifest import fingerprint
from whiten_index.metrics import evaluate_each, spearman
from whiten_index.progress import Stages
from whiten_index.whitening.choice import Scores, Trial, Vectors, reciprocal_ranks

_LEAST_QUERIES, _LEAST_PAIRS = 10, 30
_MOST_QUERIES = 2_000
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

    @classmethod
    def read(
        cls, queries: str | None, qrels: str | None, pairs: str | None, *, split: str | None = None
    ) -> Labels | None:
        """Read the files that a user names, None where there are none.

        Args:
            queries: file of query texts.
            qrels: file of judgements.
            pairs: file of pairs.
            split: which judgements, where the file has a column of it.

        Raises:
            ConfigError: only one of queries and qrels is named, or pairs beside them.
            CorpusError: a file cannot be read.
        """
        if pairs is not None:
            if queries is not None or qrels is not None or split is not None:
                raise ConfigError(
                    "--pairs and --qrels are two kinds of labels; give one of them, and --queries "
                    "and --qrels-split with --qrels only"
                )
            return cls(pairs, {}, {}, read_pairs(Path(pairs)))
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
        return cls(qrels, read_queries(Path(queries)), read_qrels(Path(qrels), split=split), None)

    def digest(self) -> str:
        """Return the identity of the labels themselves, whatever their files are called."""
        pairs = self.pairs
        scores = None if pairs is None or pairs.scores is None else pairs.scores.tolist()
        sides = None if pairs is None else [list(pairs.first), list(pairs.second), scores]
        qrels = {query: dict(grades) for query, grades in self.qrels.items()}
        return fingerprint({"queries": dict(self.queries), "qrels": qrels, "pairs": sides})


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
        ConfigError: the labels do not fit the corpus, are too few, or there is no encoder.
    """
    if encoded.work is None or encoded.work.corpus.dim is not None:
        raise ConfigError(
            f"{labels.source} holds texts, and an encoder is needed to choose by them; name the "
            "corpus and its model, or leave the labels out"
        )
    if labels.pairs is not None:
        return _pairs(encoded, labels.pairs, labels.source, stages)
    return _Judged(encoded, labels, np.random.default_rng(seed)).trials(stages)


def _pairs(encoded: EncodeReport, pairs: Pairs, source: str, stages: Stages) -> Labelled:
    count = len(pairs.first)
    if count < _LEAST_PAIRS:
        raise ConfigError(
            f"{source} holds {count} pairs, too few to choose from; give {_LEAST_PAIRS} or more"
        )
    assert encoded.work is not None
    encoder = encoded.work.encoder()
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
    # Neighbours often come from one source; every fold has its share of each.
    members = [np.arange(fold, len(gold), folds) for fold in range(folds)]
    members = [rows for rows in members if np.ptp(gold[rows]) > 0]
    if not members:
        raise ConfigError("all scores of the pairs are equal, so nothing can be chosen by them")

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

    def trials(self, stages: Stages) -> Labelled:
        found = self._rows_of_judged()
        usable = self._usable(found)
        rows = np.unique(np.concatenate(list(found.values())))
        record = self.encoded.record
        more = drawn_rows(record, _MOST_DISTRACTORS, self.rng)
        candidates = np.union1d(rows, more)
        assert self.encoded.work is not None
        with stages.stage("encode labels", len(usable)) as watcher:
            texts = [self.labels.queries[query] for query in usable]
            queries = self.encoded.work.encoder().encode_queries(texts)
            watcher.advance(len(usable))
        embeddings = embeddings_of(self.encoded.store, record, candidates)
        names = ids_of(self.encoded.store, record, candidates)
        score = _ndcg(usable, names, self.labels.qrels)
        measure = f"nDCG@{_DEPTH} among {len(candidates):,} documents"
        why = f"the best on {len(usable)} judged queries of {self.labels.source}"
        return Labelled([Trial(queries, embeddings, score)], len(usable), measure, why)

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
            raise ConfigError(
                f"{self.labels.source} names no document of the corpus: it judges "
                f"{min(judged)!r} and others, and the corpus has ids such as {some!r}; check "
                "--id-column"
            )
        return {name: np.array(found, dtype=np.int64) for name, found in rows.items()}

    def _usable(self, found: Mapping[str, object]) -> list[str]:
        """Return the queries that have a text and a relevant document in the corpus."""
        relevant = [
            query
            for query, grades in self.labels.qrels.items()
            if any(grade > 0 and document in found for document, grade in grades.items())
        ]
        usable = sorted(query for query in relevant if query in self.labels.queries)
        if len(usable) < _LEAST_QUERIES:
            raise ConfigError(
                f"{self.labels.source} leaves {len(usable)} queries to choose by "
                f"({len(relevant)} have a relevant document in the corpus, {len(usable)} of them a "
                f"text); {_LEAST_QUERIES} are needed, so judge more or leave the labels out"
            )
        if len(usable) > _MOST_QUERIES:
            usable = sorted(self.rng.choice(usable, _MOST_QUERIES, replace=False).tolist())
        return usable


def _ndcg(
    queries: Sequence[str], names: Sequence[str], qrels: Mapping[str, Mapping[str, int]]
) -> Callable[[Vectors, Vectors], Scores]:
    judged = {query: dict(qrels[query]) for query in queries}
    # Rows of the same document are among the nearest together, at most as many as it has.
    depth = _DEPTH * max(Counter(names).values())

    def score(vectors: Vectors, candidates: Vectors) -> Scores:
        cosines = vectors @ candidates.T
        cut = min(depth, cosines.shape[1])
        nearest = np.argpartition(-cosines, cut - 1, axis=1)[:, :cut]
        run = {
            query: _best(names, row.tolist(), cosines[place, row].tolist())
            for place, (query, row) in enumerate(zip(queries, nearest, strict=True))
        }
        each = evaluate_each(judged, run, _METRIC)
        return np.array([each[query] for query in queries])

    return score


def _best(names: Sequence[str], rows: list[int], cosines: list[float]) -> dict[str, float]:
    """Return each document's best cosine."""
    best: dict[str, float] = {}
    for row, cosine in zip(rows, cosines, strict=True):
        best[names[row]] = max(best.get(names[row], -2.0), cosine)
    return best
