"""Certificate of an index: what its searches lose to exact search of the raw embeddings.

Each question is asked of both, and scored by nDCG@10. The interval of the mean difference comes
from a paired bootstrap over the questions (Efron and Tibshirani 1993), of all of them and of
strata: parts of the questions by a kept column of what answers them, or by their own length.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.lock import only_writer
from whiten_index.corpus.arrow_types import times_as_numbers
from whiten_index.errors import ArtifactError, ConfigError, CorpusError, GateError, require_config
from whiten_index.evaluation.judgements import read_judged
from whiten_index.evaluation.metrics import evaluate_each, mean_interval
from whiten_index.index.exact import Rows, Scores, Vectors, exact_neighbours
from whiten_index.index.library import load_faiss, set_threads
from whiten_index.index.vector_search import search_documents
from whiten_index.paths import shown
from whiten_index.pipeline.base_version import (
    BaseVersion,
    open_base,
    require_model,
    required_certificate,
)
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.changes import StoredRows, compare, count_documents
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.executor_session import executor_session
from whiten_index.pipeline.gates import certificate_gate
from whiten_index.pipeline.pseudo_queries import sample_pieces
from whiten_index.pipeline.shard_encoding import Counts
from whiten_index.pipeline.update_config import (
    LEAST_QUESTIONS,
    OTHER_JUDGEMENTS,
    CertifyConfig,
    PublishedOptions,
    UpdateConfig,
)
from whiten_index.progress import Progress, Stages
from whiten_index.search.rerank import Reranker
from whiten_index.store.sampling import CorpusEmbeddings, ids_of
from whiten_index.versions.bundle import Bundle, open_files
from whiten_index.versions.published import CHANGES, CURRENT, new_version, next_version, set_current

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


# Points that rounding may move: two near documents change places on another processor.
_TOLERANCE = 0.5


def certify_index(config: CertifyConfig, *, progress: Progress | None = None) -> dict[str, Any]:
    """Certify the published version of an index, and publish it again with its certificate.

    The new version has the files of the old one; into a bucket they are uploaded again. Without
    judged queries, windows of 8 to 20 words of documents ask for their document.

    Returns:
        JSON values: ``out``, ``version`` and ``certificate``.

    Raises:
        GateError: a stratum may lose more than ``config.gate``; nothing is published.
        CorpusError: fewer than 30 questions have an answer, or the corpus changed.
        WhitenIndexError: others; see ``update_index``.

    Examples:
        >>> config = CertifyConfig(index="index", queries="queries.jsonl", qrels="qrels.tsv")
        >>> certify_index(config)["certificate"]["questions"]
        40
    """
    require_config(config, CertifyConfig)
    stages = Stages(progress or Progress())
    out, mirror = place_of(config.index)
    set_threads(config.threads)
    with only_writer(out, what="index"):
        tag = mirror.latest(out / CURRENT)
        base, encoded = _opened(config, stages)
        made = certificate(open_files(base.source), encoded, base.config, config.inputs())
        if config.gate is not None and (gate := certificate_gate(made, config.gate)).faults:
            raise GateError(f"the index is not certified: {gate.why}", gates=[gate.to_json()])
        version = next_version(out, base.fields["identity"], mirror)
        with new_version(out, version, mirror) as (folder, fields):
            kept = base.source.fields["files"].keys() - {CHANGES}
            for name in kept:
                _link(base.source.file(name), folder / name)
            base.source.check_read(*kept)
            fields |= {**base.fields, "version": version, "certificate": made}
            none = StoredRows(base.store, [])
            documents = count_documents(base.store, base.record.parts, passages=base.passages)
            compare(none, none, same=documents).save(
                folder / CHANGES, base=base.source.name, whitening="keep"
            )
        set_current(out, version, mirror=mirror, tag=tag, made=True)
    return {"out": config.index, "version": version, "certificate": made}


def recertify(config: CertifyConfig, *, progress: Progress | None = None) -> dict[str, Any]:
    """Certify a published version again, write nothing, and compare with its certificate.

    Queries and judgements are those of ``config``, since a manifest from elsewhere may name any
    file. Without them the certificate must be one by pieces, which are taken from the store.

    Raises:
        ConfigError: queries are missing, or not wanted.
        ArtifactError: it has no certificate, or other figures come out.
    """
    stages = Stages(progress or Progress())
    load_faiss()
    base = BaseVersion.open(_update_config(config))
    known = required_certificate(base)
    if (config.queries is None) != (known["inputs"]["queries"] is None):
        what = "by judged queries: name them" if config.queries is None else "by pieces: leave"
        raise ConfigError(
            f"the certificate of {config.index} is {what} with --queries and --qrels"
            + " out" * (config.queries is not None)
        )
    asked = {"qrels_split": known["inputs"]["qrels_split"], "by": known["inputs"]["by"]}
    if config.queries is not None:
        require_model(base.config)
    encoded = EncodeReport(base.store, base.record, Counts(), stages)
    given = {**config.inputs(), **asked}
    made = certificate(open_files(base.source), encoded, base.config, given)
    if made["judgements"] != known["judgements"]:
        raise ConfigError(OTHER_JUDGEMENTS)
    if not _same(known, {**made, "inputs": known["inputs"]}):
        raise ArtifactError(
            f"version {base.source.name} of {config.index} does not keep its certificate: it says "
            f"{known['at_most']:.2f} points of {METRIC} at most, and {made['at_most']:.2f} come "
            "out now; if the judgements are the same, certify it again"
        )
    return made


def _same(known: Any, made: Any, most: float = 0.0) -> bool:
    """Return whether two certificates have the same figures, but for one question's ranks."""
    if isinstance(known, float) and isinstance(made, float):
        return abs(known - made) <= most
    if isinstance(known, dict) and isinstance(made, dict):
        most = max(_TOLERANCE, 100 / max(int(made.get("questions", 1)), 1))
        return known.keys() == made.keys() and all(_same(known[n], made[n], most) for n in known)
    if isinstance(known, list | tuple) and isinstance(made, list | tuple):
        return len(known) == len(made) and all(
            _same(one, other, most) for one, other in zip(known, made, strict=True)
        )
    return bool(known == made)


def _link(source: Path, target: Path) -> None:
    """Let a file have a second name, or a copy where the file system has no such links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _update_config(config: CertifyConfig) -> UpdateConfig:
    shared = PublishedOptions.__dataclass_fields__
    return UpdateConfig(**{name: getattr(config, name) for name in shared})


def _opened(config: CertifyConfig, stages: Stages) -> tuple[BaseVersion, EncodeReport]:
    """Return the published version and its corpus, whose texts are only read for pieces."""
    given = _update_config(config)
    if config.queries is not None:
        base = BaseVersion.open(given)
        require_model(base.config)
        return base, EncodeReport(base.store, base.record, Counts(), stages)
    base, corpus, _ = open_base(given, stages)
    with executor_session(base.config, stages) as executor:
        encoded = base.encode(corpus, stages, executor)
    if encoded.record.fingerprint != base.record.fingerprint:
        raise CorpusError(
            f"the corpus changed after {config.index} was built from it; run whiten-index update "
            "first, or give judged queries with --queries and --qrels"
        )
    return base, encoded
