"""Labels that a transform is chosen by: judged queries."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.judgements import JudgedQueries, read_judged
from whiten_index.evaluation.metrics import evaluate_each, require_evaluator
from whiten_index.store.sampling import CorpusEmbeddings, drawn_rows, ids_of
from whiten_index.whitening.selection import Rule, Scores, Trial, Vectors

if TYPE_CHECKING:
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.encode import EncodeReport

_LEAST_QUERIES, _MOST_QUERIES = 10, 2_000
_QUERY_BLOCK = 256
_MOST_DISTRACTORS = 10_000
_DEPTH = 10


@dataclass(frozen=True, eq=False)
class Evidence:
    """Trials that score settings of the transform, and the words that describe them.

    ``count`` are queries or documents. A gentler setting may stay ``errors`` standard errors
    behind the best. Trials that are made of ``rows`` of the corpus hold these out of the fit.
    """

    rule: Rule
    trials: Sequence[Trial]
    count: int
    measure: str
    why: str
    errors: float = 0.0
    rows: NDArray[np.int64] | None = None


def read_labels(config: "BuildConfig") -> JudgedQueries | None:
    """Read and check the labels that the transform is chosen by, None if the options name none."""
    if config.queries is None or config.qrels is None:
        return None
    judged = read_judged(config.queries, config.qrels, split=config.qrels_split)
    answered = len(judged.texts)
    _require_queries(judged, answered, f"{answered} of {answered + judged.left_out} have a text")
    require_evaluator()
    if not (config.corpus and (config.model or not config.embedding_column)):
        what = (
            "the model of the embedding column with --model" if config.corpus else "the corpus too"
        )
        raise ConfigError(
            f"{judged.source} judges texts, which must be encoded; name {what}, or leave the "
            "labels out"
        )
    return judged


def _require_queries(judged: JudgedQueries, count: int, why: str) -> None:
    if count < _LEAST_QUERIES:
        raise CorpusError(
            f"{judged.source} leaves {count} queries to choose by ({why}); {_LEAST_QUERIES} are "
            "needed, so judge more or leave the labels out"
        )


def labelled_trials(
    encoded: "EncodeReport", config: "BuildConfig", labels: JudgedQueries
) -> Evidence:
    """Encode the labels' texts and state what they must find."""
    assert encoded.work is not None, "read_labels refuses labels without a corpus"
    encoder, rng = encoded.work.encoder(), np.random.default_rng(config.seed)
    store, record = encoded.store, encoded.record
    found = _rows_of_judged(encoded, labels)
    usable = _usable_queries(labels, found, rng)
    judged = {document for query in usable for document in labels.qrels[query]}
    rows = np.concatenate([found[document] for document in sorted(judged & found.keys())])
    candidates = np.union1d(rows, drawn_rows(record, _MOST_DISTRACTORS, rng))
    with encoded.stages.whole("encode labels", len(usable)):
        queries = encoder.encode_queries([labels.texts[query] for query in usable])
    names = ids_of(store, record, candidates)
    score = _ndcg(usable, names, labels.qrels)
    measure = f"nDCG@{_DEPTH} among {len(set(names)):,} documents"
    why = f"the best on {len(usable)} judged queries of {labels.source}"
    trial = Trial(queries, CorpusEmbeddings(store, record).at(candidates), score)
    return Evidence("labels", [trial], len(usable), measure, why)


def _names(encoded: "EncodeReport") -> Iterator[str]:
    for part in encoded.record.parts:
        if part.rows:
            yield from map(str, encoded.store.documents(part)[ID].to_pylist())


def _rows_of_judged(encoded: "EncodeReport", judged: JudgedQueries) -> dict[str, NDArray[np.int64]]:
    """Return document id -> its rows, for the judged documents that the corpus has."""
    wanted = {document for grades in judged.qrels.values() for document in grades}
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(_names(encoded)):
        if name in wanted:
            rows.setdefault(name, []).append(row)
    if not rows:
        judged.missing(_names(encoded))
    return {name: np.array(found, dtype=np.int64) for name, found in rows.items()}


def _usable_queries(
    judged: JudgedQueries, found: Mapping[str, object], rng: np.random.Generator
) -> list[str]:
    """Return queries with a relevant document in the corpus, drawn until there are enough."""
    usable, documents = list[str](), 0
    answered = sorted(
        query
        for query, grades in judged.qrels.items()
        if any(grade > 0 and document in found for document, grade in grades.items())
    )
    why = f"{len(answered)} have a relevant document in the corpus"
    _require_queries(judged, len(answered), why)
    for place in rng.permutation(len(answered)):
        documents += len(judged.qrels[answered[place]])
        if len(usable) >= _LEAST_QUERIES and documents > _MOST_DISTRACTORS:
            break
        usable.append(answered[place])
    return sorted(usable[:_MOST_QUERIES])


def _ndcg(
    queries: Sequence[str], names: Sequence[str], qrels: Mapping[str, Mapping[str, int]]
) -> Callable[[Vectors, Vectors], Scores]:
    """Return a function that scores queries by nDCG@10, a document by the best of its rows."""
    judged = {query: dict(qrels[query]) for query in queries}
    documents, of_row = np.unique(np.array(names, dtype=object), return_inverse=True)
    order = np.argsort(of_row, kind="stable")
    starts = np.flatnonzero(np.diff(of_row[order], prepend=-1))
    cut = min(_DEPTH, len(documents))

    def score(vectors: Vectors, candidates: Vectors) -> Scores:
        run: dict[str, dict[str, float]] = {}
        for start in range(0, len(queries), _QUERY_BLOCK):
            block = slice(start, start + _QUERY_BLOCK)
            cosines = (vectors[block] @ candidates.T)[:, order]
            best = np.maximum.reduceat(cosines, starts, axis=1)
            places = np.argpartition(best, -cut, axis=1)[:, -cut:]
            found = np.take_along_axis(best, places, axis=1)
            for query, row, scores in zip(queries[block], places, found, strict=True):
                run[query] = dict(zip(documents[row].tolist(), scores.tolist(), strict=True))
        each = evaluate_each(judged, run, f"ndcg@{_DEPTH}")
        return np.array([each[query] for query in queries])

    return score
