"""Certificate of an index: what its searches lose to exact search of the raw embeddings.

Each question is asked of both, and scored by nDCG@10. The interval of the mean difference comes
from a paired bootstrap over the questions (Efron and Tibshirani 1993), of all of them and of
strata: parts of the questions by a kept column of what answers them, or by their own length.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.judgements import read_judged
from whiten_index.evaluation.metrics import evaluate_each, mean_interval
from whiten_index.index.exact import Rows, Scores, exact_neighbours
from whiten_index.index.vector_search import search_documents
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.gates import Gate
from whiten_index.pipeline.pseudo_queries import sample_pieces
from whiten_index.pipeline.shard_encoding import LazyEncoder
from whiten_index.search.query_encoder import query_embeddings
from whiten_index.search.rerank import Reranker
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.store.sampling import CorpusEmbeddings, ids_of
from whiten_index.versions.bundle import Bundle

if TYPE_CHECKING:
    from whiten_index.pipeline.encode import EncodeReport

METRIC, _TOP_K = "ndcg@10", 10
_LEAST, _MOST = 30, 2_000
# A column of more values is cut into thirds.
_MOST_VALUES = 20


@dataclass(frozen=True, eq=False)
class Questions:
    """Questions: raw embeddings (q, d), what answers each by name, and texts if there are any."""

    embeddings: NDArray[np.float32]
    qrels: Mapping[str, Mapping[str, int]]
    texts: Sequence[str] | None

    @classmethod
    def ask(
        cls, inputs: Mapping[str, Any], build: BuildConfig, encoded: "EncodeReport"
    ) -> "Questions":
        """Read the judged queries that ``inputs`` name, or cut pieces of documents."""
        if inputs["queries"] is None:
            # Other documents than those that the transform was chosen by.
            sample = sample_pieces(encoded, build.choose_sample, build.seed + 1)
            if isinstance(sample, str):
                raise ConfigError(f"{sample}; give judged queries with --queries and --qrels")
            names = ids_of(encoded.store, encoded.record, sample.rows)
            answers = {f"piece {number}": {name: 1} for number, name in enumerate(names)}
            return cls(sample.windows.astype(np.float32), answers, None)
        judged = read_judged(inputs["queries"], inputs["qrels"], split=inputs["qrels_split"])
        if build.embedding_column is not None and build.model is None:
            raise ConfigError(
                "the index was built from an embedding column, so that nothing is known to encode "
                "the queries with; name the model of the column with --model"
            )
        order = np.random.default_rng(build.seed).permutation(len(judged.texts))[:_MOST]
        names = [list(judged.texts)[place] for place in np.sort(order)]
        texts = [judged.texts[name] for name in names]
        encoder = LazyEncoder(build.encoder_config())
        given = query_embeddings(
            encoded.store, texts, lambda some: encoder().encode_queries(some), encoded.stages
        )
        return cls(given, {name: judged.qrels[name] for name in names}, texts)


def certificate(
    candidate: Bundle, encoded: "EncodeReport", build: BuildConfig, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the certificate of a version over its store, as the manifest has it.

    Figures are points of nDCG@10, in 0 … 100. ``at_most`` is the greatest upper end of all
    intervals: no stratum loses more, each with a confidence of 97.5 %.
    """
    questions = Questions.ask(inputs, build, encoded)
    rows = _answers(candidate, questions, str(inputs["qrels"] or "the corpus"))
    if (count := int((rows >= 0).sum())) < _LEAST:
        raise CorpusError(
            f"{count} questions have an answer in the index, and a certificate needs {_LEAST}; "
            "judge more queries"
        )
    with encoded.stages.stage("certify", encoded.record.rows) as watcher:
        raw, found = _each(candidate, encoded.store, encoded.record, questions)
        watcher.advance(encoded.record.rows)
    answered = rows >= 0
    loss = (raw - found)[answered]
    strata, left_out = list[dict[str, Any]](), 0
    for by, value, inside in _strata(candidate, questions, rows, tuple(inputs["by"])):
        if inside[answered].sum() < _LEAST:
            left_out += 1
        else:
            strata.append({"by": by, "value": value, **_figures(loss[inside[answered]])})
    overall = _figures(loss)
    return {
        "inputs": dict(inputs),
        "measure": METRIC,
        "raw": float(raw[answered].mean()),
        "index": float(found[answered].mean()),
        **overall,
        "strata": strata,
        "strata_left_out": left_out,
        "at_most": max(each["interval"][1] for each in (overall, *strata)),
    }


def certificate_gate(made: Mapping[str, Any], most: float) -> Gate:
    """Return the gate of a certificate: no stratum may lose more than ``most`` points."""
    gate = Gate("certificate", {"at_most": made["at_most"]}, {"at_most": most})
    for each in (made, *made["strata"]):
        least, greatest = each["interval"]
        what = f"questions with {each['by']} {each['value']}" if "by" in each else "all questions"
        said = (
            f"{what} lose {each['loss']:.2f} points of {METRIC} ({least:.2f} to {greatest:.2f}, "
            f"95 %), and {most:g} are allowed"
        )
        gate.blame({said: greatest > most})
    return gate


def _each(
    candidate: Bundle, store: EmbeddingStore, record: CorpusRecord, questions: Questions
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return nDCG@10 (q,) of exact search of raw embeddings and of the version, times 100."""
    whitening, documents = candidate.whitening, candidate.documents

    def exact(queries: NDArray[np.float32], most: int) -> tuple[Scores, Rows]:
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


def _answers(candidate: Bundle, questions: Questions, source: str) -> Rows:
    """Return the row (q,) of the best answer of each question, −1 where the index has none."""
    best = [max(grades, key=lambda name: grades[name]) for grades in questions.qrels.values()]
    ids = candidate.documents.id_column(0, len(candidate)).cast(pa.large_string())
    places = pc.index_in(pa.array(best, pa.large_string()), value_set=ids.combine_chunks())
    rows: Rows = places.fill_null(-1).to_numpy().astype(np.int64)
    if (rows < 0).all():
        raise CorpusError(
            f"{source} names no document of the index, which has ids such as {ids[0].as_py()!r}; "
            "check the judgements"
        )
    return rows


def _strata(
    candidate: Bundle, questions: Questions, rows: Rows, by: tuple[str, ...]
) -> Iterator[tuple[str, str, NDArray[np.bool_]]]:
    """Yield the strata of the questions: by what, of which value, and which (q,) are in it."""
    there = rows >= 0
    if questions.texts is not None:
        words = np.array([len(text.split()) for text in questions.texts], dtype=np.float64)
        yield from _thirds("words of the query", words, there)
    if unknown := [name for name in by if name not in candidate.documents.columns]:
        raise ConfigError(
            f"--by {unknown[0]} is no kept column of the index; it keeps "
            f"{', '.join(candidate.documents.columns) or 'none'}"
        )
    table = candidate.documents.take(np.maximum(rows, 0))
    for name in by:
        values = table[name].to_pylist()
        known = [value for value, is_there in zip(values, there, strict=True) if is_there]
        if len(distinct := set(map(repr, known))) <= _MOST_VALUES:
            for each in sorted(distinct):
                same = np.array([repr(value) == each for value in values])
                yield name, each, there & same
        elif pa.types.is_integer(kind := table.schema.field(name).type) or pa.types.is_floating(
            kind
        ):
            numbers = np.array([np.nan if v is None else float(v) for v in values])
            yield from _thirds(name, numbers, there & ~np.isnan(numbers))
        else:
            lengths = np.array([len(str(value)) for value in values], dtype=np.float64)
            yield from _thirds(f"length of {name}", lengths, there)


def _thirds(
    by: str, values: NDArray[np.float64], there: NDArray[np.bool_]
) -> Iterator[tuple[str, str, NDArray[np.bool_]]]:
    low, high = np.quantile(values[there], (1 / 3, 2 / 3)) if there.any() else (0.0, 0.0)
    for inside in (values <= low, (values > low) & (values <= high), values > high):
        if (inside := inside & there).any():
            some = values[inside]
            yield by, f"{some.min():g} to {some.max():g}", inside


def _figures(loss: NDArray[np.float64]) -> dict[str, Any]:
    return {"questions": len(loss), "loss": float(loss.mean()), "interval": mean_interval(loss)}
