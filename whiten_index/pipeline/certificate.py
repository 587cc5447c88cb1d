"""Certificate of an index: what its searches lose to exact search of the raw embeddings.

Each question is asked of both, and scored by nDCG@10. The interval of the mean difference comes
from a paired bootstrap over the questions (Efron and Tibshirani 1993), of all of them and of
strata: parts of the questions by a kept column of what answers them, or by their own length.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.corpus.arrow_types import times_as_numbers
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.judgements import read_judged
from whiten_index.evaluation.metrics import evaluate_each, mean_interval
from whiten_index.index.exact import Rows, Scores, Vectors, exact_neighbours
from whiten_index.index.vector_search import search_documents
from whiten_index.paths import shown
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.pseudo_queries import sample_pieces
from whiten_index.pipeline.update_config import LEAST_QUESTIONS
from whiten_index.search.rerank import Reranker
from whiten_index.store.sampling import CorpusEmbeddings, ids_of
from whiten_index.versions.bundle import Bundle

METRIC, _TOP_K = "ndcg@10", 10
_MOST = 2_000
# A column of more values is cut into thirds.
_MOST_VALUES = 20


@dataclass(frozen=True, eq=False)
class Questions:
    """Questions: raw embeddings (q, d), what answers each by name, and texts if there are any."""

    embeddings: Vectors
    qrels: Mapping[str, Mapping[str, int]]
    rows: Rows  # (q,) of the best answer of each in the index
    texts: Sequence[str] | None
    judgements: str | None = None  # digest of the judged queries that they were drawn from

    @classmethod
    def ask(
        cls, inputs: Mapping[str, Any], build: BuildConfig, encoded: EncodeReport, candidate: Bundle
    ) -> "Questions":
        """Read the judged queries that ``inputs`` name, or cut pieces of documents.

        Of those that the index has an answer to, 2,000 are drawn.
        """
        if inputs["queries"] is None:
            sample = sample_pieces(encoded, build.choose_sample, build.seed + 1)
            if isinstance(sample, str):
                raise ConfigError(f"{sample}; give judged queries with --queries and --qrels")
            names = ids_of(encoded.store, encoded.record, sample.rows)
            answers = {f"piece {number}": {name: 1} for number, name in enumerate(names)}
            return cls(sample.windows.astype(np.float32), answers, sample.rows, None)
        judged = read_judged(inputs["queries"], inputs["qrels"], split=inputs["qrels_split"])
        names = sorted({name for grades in judged.qrels.values() for name in grades})
        places = candidate.documents.places(pa.array(names, pa.large_string()))
        # The first row of each that the index has.
        which, first = np.unique(places, return_index=True)
        known = {
            names[n]: row for n, row in zip(which.tolist(), first.tolist(), strict=True) if n >= 0
        }
        best = {
            query: max((grade, -known[name]) for name, grade in grades.items() if name in known)
            for query, grades in judged.qrels.items()
            if any(grade > 0 and name in known for name, grade in grades.items())
        }
        if len(best) < LEAST_QUESTIONS:
            judged.missing(known)
            raise CorpusError(
                f"{len(best)} queries of {judged.source} have an answer in the index, and a "
                f"certificate needs {LEAST_QUESTIONS}; judge more"
            )
        answered = list(best)
        order = np.random.default_rng(build.seed).permutation(len(answered))[:_MOST]
        chosen = [answered[place] for place in np.sort(order)]
        texts = [judged.texts[name] for name in chosen]
        given = encoded.embed_queries(build, texts)
        rows = np.array([-best[name][1] for name in chosen], dtype=np.int64)
        qrels = {name: judged.qrels[name] for name in chosen}
        return cls(given, qrels, rows, texts, judged.digest)


def certificate(
    candidate: Bundle, encoded: EncodeReport, build: BuildConfig, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the certificate of a version over its store, as the manifest has it.

    Figures are points of nDCG@10, in 0 … 100. ``at_most`` is the greatest upper end of all
    intervals.
    """
    if unknown := [name for name in inputs["by"] if name not in candidate.documents.columns]:
        raise ConfigError(
            f"--by {unknown[0]} is no kept column of the index; it keeps "
            f"{', '.join(candidate.documents.columns) or 'none'}"
        )
    questions = Questions.ask(inputs, build, encoded, candidate)
    with encoded.stages.whole("certify", encoded.record.rows):
        raw, found = _each(candidate, encoded, questions)
    loss = raw - found
    strata, left_out = list[dict[str, Any]](), 0
    for by, value, inside in _strata(candidate, questions, inputs["by"]):
        if inside.sum() < LEAST_QUESTIONS:
            left_out += 1
        else:
            strata.append({"by": by, "value": value, **_figures(loss[inside])})
    overall = _figures(loss)
    return {
        "inputs": dict(inputs),
        "judgements": questions.judgements,
        "measure": METRIC,
        "raw": float(raw.mean()),
        "index": float(found.mean()),
        **overall,
        "strata": strata,
        "strata_left_out": left_out,
        "at_most": max(each["interval"][1] for each in (overall, *strata)),
    }


def _each(
    candidate: Bundle, encoded: EncodeReport, questions: Questions
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return nDCG@10 (q,) of exact search of raw embeddings and of the version, times 100."""
    whitening, documents = candidate.whitening, candidate.documents
    store, record = encoded.store, encoded.record

    def exact(queries: Vectors, most: int) -> tuple[Scores, Rows]:
        blocks = CorpusEmbeddings(store, record).blocks()
        rows = (whitening.compared(np.ascontiguousarray(b, np.float32)) for b in blocks)
        return exact_neighbours(rows, queries, most)

    queries = whitening.compared(questions.embeddings)
    if candidate.grouped:
        known = documents.first_rows
        raw = search_documents(exact, known, queries, top_k=_TOP_K, rows=record.rows)
    else:
        raw = exact(queries, min(_TOP_K, record.rows))
    most = int(candidate.manifest["factory"]["rerank"] or 0)
    again = Reranker(store, record, whitening, candidates=most) if most else None
    found = candidate.search(questions.embeddings, _TOP_K, rescorer=again)
    scored = []
    for scores, rows in (raw, found):
        run = {
            name: dict(
                zip(map(str, documents.ids(near[near >= 0].tolist())), best.tolist(), strict=False)
            )
            for name, near, best in zip(questions.qrels, rows, scores, strict=True)
        }
        each = evaluate_each(questions.qrels, run, METRIC)
        scored.append(100 * np.array([each[name] for name in questions.qrels]))
    return scored[0], scored[1]


def _strata(
    candidate: Bundle, questions: Questions, by: Sequence[str]
) -> Iterator[tuple[str, str, NDArray[np.bool_]]]:
    """Yield the strata of the questions: by what, of which value, and which (q,) are in it."""
    if questions.texts is not None:
        words = np.array([len(text.split()) for text in questions.texts], dtype=np.float64)
        yield from _thirds("words of the query", words)
    table = candidate.documents.take(questions.rows)
    for name in by:
        column = times_as_numbers(table[name].combine_chunks())
        values = column.to_pylist()
        if len(distinct := {shown(value) for value in values}) <= _MOST_VALUES:
            for each in sorted(distinct):
                yield name, each, np.array([shown(value) == each for value in values])
        elif all(isinstance(value, str | None) for value in values):
            lengths = [np.nan if value is None else len(value) for value in values]
            yield from _thirds(f"length of {name}", np.array(lengths, dtype=np.float64))
        else:
            try:
                numbers = np.array([np.nan if v is None else float(v) for v in values])
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"--by {name} is a column of {table.schema.field(name).type}, which is neither "
                    "text nor numbers nor times; name another"
                ) from error
            yield from _thirds(f"{name}, in thirds", numbers)


def _thirds(by: str, values: NDArray[np.float64]) -> Iterator[tuple[str, str, NDArray[np.bool_]]]:
    """Yield thirds of the numbers (q,); NaN is in none."""
    known = values[~np.isnan(values)]
    low, high = np.quantile(known, (1 / 3, 2 / 3)) if len(known) else (0.0, 0.0)
    for inside in (values <= low, (values > low) & (values <= high), values > high):
        if inside.any():
            yield by, f"{values[inside].min():g} to {values[inside].max():g}", inside


def _figures(loss: NDArray[np.float64]) -> dict[str, Any]:
    return {"questions": len(loss), "loss": float(loss.mean()), "interval": mean_interval(loss)}
