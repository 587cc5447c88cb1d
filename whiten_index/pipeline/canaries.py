"""Canaries: rows that must find themselves and their neighbours, and queries with known answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from whiten_index.artifacts.files import exists, is_file, reading
from whiten_index.corpus.batches import TextBatch
from whiten_index.corpus.corpus_config import CorpusConfig
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.errors import ConfigError, CorpusError, StorageError, WhitenIndexError
from whiten_index.index.exact import exact_neighbours
from whiten_index.index.factory import inner_of, is_exact, is_graph
from whiten_index.index.transforms import is_lossy
from whiten_index.index.tuning import OperatingPoint
from whiten_index.index.vector_search import nearest
from whiten_index.paths import cut
from whiten_index.pipeline.update_config import GateConfig
from whiten_index.progress import Progress, Stages
from whiten_index.search.rerank import Reranker
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.store.sampling import CorpusEmbeddings, embeddings_of
from whiten_index.versions.bundle import Bundle
from whiten_index.whitening.spectrum import unit_rows

Encode = Callable[[Sequence[str]], NDArray[np.floating]]
Vectors = NDArray[np.float32]
Rows = NDArray[np.int64]

TOP_K = 10
# How far below what the index was set to the canaries' recall may be. Of fewer canaries than are
# enough, or an index set by fewer, it may be further: the error of a mean goes with 1/√n.
_RECALL_MARGIN, _ENOUGH = 0.05, 200
# So many of the sampled rows must find themselves where codes lose little, as a recall above this
# bound shows. Graphs do not reach every row where many are copies of one.
_FINE_RECALL, _LEAST_SELF, _LEAST_SELF_OF_GRAPH = 0.85, 0.99, 0.95
# Cosines nearer than this are equal: float32 adds up k products.
_TIED = 1e-5


TEXT, EMBEDDING, EXPECTED = "text", "embedding", "expected"
MOST_QUERIES = 10_000


@dataclass(frozen=True, eq=False)
class CanaryFile:
    """Queries, and the documents that must be among the ten nearest of each.

    Attributes:
        path: the file.
        texts: of the queries, None where they are embeddings.
        embeddings: (q, d) raw, None where they are texts.
        expected: the ids that each must find, none where it names none.
    """

    path: str
    texts: tuple[str, ...] | None
    embeddings: NDArray[np.float32] | None
    expected: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.expected)

    @property
    def needs_encoder(self) -> bool:
        """Whether the queries are texts."""
        return self.texts is not None

    def query_name(self, place: int) -> str:
        """Return how messages call a query, whose place counts from 0: by its row, from 1."""
        said = "" if self.texts is None else f" ({cut(' '.join(self.texts[place].split()))!r})"
        return f"row {place + 1} of the canary file{said}"

    @classmethod
    def read(cls, path: Path | str, *, dim: int) -> CanaryFile:
        """Read the column ``text`` or ``embedding``, and ``expected`` where there is one.

        ``expected`` holds an id, or a list of ids, strings or integers as in the index; null asks
        for none.

        Args:
            path: a Parquet file.
            dim: width of the embeddings that the index takes.

        Raises:
            CorpusError: the file or a row of it cannot be used.
        """
        name = str(path)
        schema = _schema(Path(path))
        asked = [column for column in (TEXT, EMBEDDING) if column in schema.names]
        if len(asked) != 1:
            has = "both" if asked else "neither"
            raise CorpusError(
                f"canary queries come in one column, {TEXT} or {EMBEDDING}, and {name} has "
                f"{has}; its columns are {', '.join(schema.names)}: rename or drop one"
            )
        odd = [column for column in schema.names if column not in (TEXT, EMBEDDING, EXPECTED)]
        if odd:
            # A column of ids under another name would be thought to be looked at.
            raise CorpusError(
                f"{name} has {', '.join(odd)}, which no gate reads; ids that a query must find "
                f"come in column {EXPECTED}: rename or drop it"
            )
        config = CorpusConfig(
            sources=(name,),
            text_columns=(TEXT,) if asked == [TEXT] else (),
            embedding_column=EMBEDDING if asked == [EMBEDDING] else None,
            keep=(EXPECTED,) if EXPECTED in schema.names else (),
            # To count them, and to refuse the file in words that name no option of a corpus.
            on_bad_row="skip",
        )
        corpus = ParquetCorpus.open(config)
        if corpus.dim not in (None, dim):
            raise CorpusError(
                f"the embeddings of {name} have {corpus.dim} dims, and those of the index {dim}; "
                "take both from one encoder"
            )
        if corpus.rows > MOST_QUERIES:
            raise CorpusError(
                f"{name} holds {corpus.rows} queries, each of which is compared with every row of "
                f"the index; keep {MOST_QUERIES} at most"
            )
        return _read(name, corpus)


def _read(name: str, corpus: ParquetCorpus) -> CanaryFile:
    texts: list[str] = []
    embeddings: list[NDArray[np.floating]] = []
    expected: list[tuple[str, ...]] = []
    for batch in corpus.batches():
        if batch.skipped:
            bad = ", ".join(f"{n} {why.replace('_', ' ')}" for why, n in batch.skipped.items())
            raise CorpusError(
                f"{name} has rows that cannot be used as queries ({bad}); mend or drop them"
            )
        if isinstance(batch, TextBatch):
            texts += batch.texts
        else:
            embeddings.append(batch.embeddings)
        if corpus.config.keep:
            values = batch.documents[EXPECTED].to_pylist()
            expected += [_ids(name, value) for value in values]
        else:
            expected += [()] * batch.documents.num_rows
    if corpus.config.keep and not any(expected):
        raise CorpusError(f"column {EXPECTED} of {name} names no document; fill it, or drop it")
    if corpus.config.text_columns:
        return CanaryFile(name, tuple(texts), None, tuple(expected))
    with np.errstate(over="ignore"):
        queries = np.concatenate(embeddings).astype(np.float32)
    if not np.isfinite(queries).all():
        raise CorpusError(f"the embeddings of {name} are beyond float32; scale them down")
    return CanaryFile(name, None, queries, tuple(expected))


def _ids(name: str, value: Any) -> tuple[str, ...]:
    """Return the ids a row names, numbers as texts."""
    if value is None:
        return ()
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, str | int):
            raise CorpusError(
                f"column {EXPECTED} of {name} holds {each!r}, and ids are strings or integers; "
                "mend the row"
            )
    return tuple(dict.fromkeys(str(each) for each in values))


def _schema(path: Path) -> pa.Schema:
    try:
        # Opening a pipe would wait for someone to write to it.
        with reading(path):
            found = None if exists(path) and not is_file(path) else pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        reason = cut(str(error).splitlines()[0], most=200)
        raise CorpusError(
            f"{cut(str(path), most=200)} cannot be read as Parquet ({reason}); canary queries come "
            f"in a Parquet file with a column {TEXT} or {EMBEDDING}"
        ) from error
    if found is None:
        raise CorpusError(
            f"{cut(str(path), most=200)} is no file; canary queries come in a Parquet file with a "
            f"column {TEXT} or {EMBEDDING}"
        )
    return found


@dataclass(frozen=True, eq=False)
class Trial:
    """A new version on trial: what it finds, beside what there is to find.

    Attributes:
        candidate: the version.
        store: of its embeddings.
        record: the corpus, row by row that of the version.
        stages: where the time is shown.
    """

    candidate: Bundle
    store: EmbeddingStore
    record: CorpusRecord
    stages: Stages

    @property
    def rerank(self) -> int:
        """Candidates a query that are scored again as the version is searched, 0 for none."""
        return int(self.candidate.manifest["factory"].get("rerank") or 0)

    def exact(self, queries: NDArray[np.float64], watcher: Progress) -> Vectors:
        """Return the best cosines (q, 11) of raw queries with all rows, projected afresh."""
        whitening = self.candidate.whitening

        def projected() -> Iterator[Vectors]:
            for block in CorpusEmbeddings(self.store, self.record).blocks():
                yield unit_rows(whitening.apply(block)).astype(np.float32)
                watcher.advance(len(block))

        vectors = unit_rows(whitening.apply(queries)).astype(np.float32)
        scores, _ = exact_neighbours(projected(), vectors, TOP_K + 1)
        return scores

    def found(self, queries: NDArray[np.float64]) -> tuple[Rows, Vectors]:
        """Return the rows (q, <= 11) that the version finds, and their exact cosines."""
        most = min(max(self.rerank, TOP_K + 1), len(self.candidate))
        inner = inner_of(self.candidate.index)
        narrow = np.ascontiguousarray(queries, dtype=np.float32)
        _, rows = nearest(inner, self.candidate.transforms(narrow), most)
        cosines = self._exact_scores(most)(narrow, rows)
        if self.rerank:
            order = np.argsort(-cosines, axis=1, kind="stable")
            rows = np.take_along_axis(rows, order, axis=1)
            cosines = np.take_along_axis(cosines, order, axis=1)
        return rows[:, : TOP_K + 1], cosines[:, : TOP_K + 1]

    def reranker(self) -> Reranker | None:
        """Return what scores the version's hits again, None where nothing does."""
        return self._exact_scores(self.rerank) if self.rerank else None

    def _exact_scores(self, most: int) -> Reranker:
        whitening = self.candidate.whitening
        return Reranker(self.store, self.record, whitening, candidates=most)


def check_canaries(
    trial: Trial,
    config: GateConfig,
    canaries: CanaryFile | None,
    encode: Encode | None,
    *,
    seed: int,
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return figures, bounds and faults of sampled rows and of queries with known answers.

    Recall is the share of the ten nearest that is found, where every row counts that is as near as
    the tenth (as in ANN-Benchmarks, Aumüller, Bernhardsson and Faithfull 2020), so that an index
    may give any of several equal rows.

    Raises:
        ConfigError: queries are texts and there is nothing to encode them with.
    """
    if canaries is not None and canaries.needs_encoder and encode is None:
        raise ConfigError(
            f"the canary queries of {canaries.path} are texts, and the index was built from an "
            "embedding column; give them a column embedding, or name the model with --model"
        )
    sampled = min(config.canaries, trial.record.rows)
    bound = _bounds(trial.candidate, config, sampled, 0 if canaries is None else len(canaries))
    try:
        found, faults = _measured(trial, config, canaries, encode, bound, seed=seed)
    except StorageError:
        # A failed read says nothing about the version.
        raise
    except WhitenIndexError as error:
        return {}, bound, [f"they could not be tried: {error}"]
    return found, bound, faults


def _bounds(candidate: Bundle, config: GateConfig, rows: int, queries: int) -> dict[str, Any]:
    """Return what canaries must reach: None where the index was set to no recall.

    Args:
        candidate: the version.
        config: names the recall, where the user does.
        rows: sampled.
        queries: of one's own.
    """
    least = _least_recall(candidate, config, rows)
    bound = {"recall": least, "self_found": _least_self(inner_of(candidate.index), least)}
    return bound | ({"query_recall": _least_recall(candidate, config, queries)} if queries else {})


def _least_self(inner: Any, least: float | None) -> float:
    """Return the share of the sampled rows that must find themselves."""
    if is_exact(inner):
        return 1.0
    if least is None:
        # Nothing is known of what its codes lose, should they lose anything.
        least = 0.0 if is_lossy(inner) else 1.0
    if least < _FINE_RECALL:
        # Codes so coarse that many rows share one, or a graph torn by copies of one row: a row is
        # found as its neighbours are.
        return least
    return _LEAST_SELF_OF_GRAPH if is_graph(inner) else _LEAST_SELF


def _least_recall(candidate: Bundle, config: GateConfig, canaries: int) -> float | None:
    if config.canary_recall is not None:
        return config.canary_recall
    tuned = OperatingPoint(**candidate.manifest["factory"].get("tuned") or {})
    if tuned.recall is None and not tuned.reached:
        return None
    # What is exact by its structure was not measured.
    measured = tuned.target if tuned.recall is None else min(tuned.recall, tuned.target)
    fewest = canaries if tuned.recall is None else min(tuned.queries, canaries)
    margin = _RECALL_MARGIN * math.sqrt(max(_ENOUGH / max(fewest, 1), 1.0))
    return max(round(measured - margin, 6), 0.0)


def _measured(
    trial: Trial,
    config: GateConfig,
    canaries: CanaryFile | None,
    encode: Encode | None,
    bound: dict[str, Any],
    *,
    seed: int,
) -> tuple[dict[str, Any], list[str]]:
    """Return what all canaries found, and what is wrong with it."""
    total = trial.record.rows
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(total, min(config.canaries, total), replace=False))
    asked = _queries(canaries, encode, trial)
    if not len(rows) and not len(asked):
        return {"sampled": 0}, []
    sampled = embeddings_of(trial.store, trial.record, rows)
    every = np.concatenate([sampled, asked])
    with trial.stages.stage("check canaries", total) as watcher:
        best = trial.exact(every, watcher)
        near, cosines = trial.found(every)
    found: dict[str, Any] = {}
    faults: list[str] = []
    findings: list[tuple[dict[str, Any], list[str]]] = []
    mine, theirs = slice(0, len(rows)), slice(len(rows), None)
    if len(rows):
        findings.append(_sampled(trial, rows, best[mine], near[mine], cosines[mine], bound))
    if canaries is not None:
        findings.append(_asked(best[theirs], cosines[theirs], bound))
        findings.append(_answered(trial, canaries, asked))
    for some, wrong in findings:
        found |= some
        faults += wrong
    lacking = int(np.count_nonzero(near < 0))
    found["hits_missing"] = lacking
    if lacking:
        faults.append(f"{lacking} of the {near.size} hits asked for are no row")
    return found, faults


def _queries(
    canaries: CanaryFile | None, encode: Encode | None, trial: Trial
) -> NDArray[np.float64]:
    """Return the raw embeddings (q, d) of the queries of one's own."""
    dim = trial.candidate.dim
    if canaries is None:
        return np.empty((0, dim))
    if canaries.texts is None or encode is None:
        assert canaries.embeddings is not None
        return canaries.embeddings.astype(np.float64)
    return encode(canaries.texts).astype(np.float64)


def _sampled(
    trial: Trial, rows: Rows, best: Vectors, near: Rows, cosines: Vectors, bound: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return what rows found of themselves and of their neighbours, themselves left out."""
    own = near == rows[:, None]
    # None is nearer than the row itself, and one that is as near is equal to it.
    itself = (own | (cosines >= best[:, :1] - _TIED)).any(axis=1)
    found: dict[str, Any] = {"sampled": len(rows), "self_found": float(itself.mean())}
    faults = []
    if found["self_found"] < bound["self_found"]:
        lost = rows[~itself]
        first = trial.candidate.documents.ids([int(lost[0])])[0]
        faults.append(
            f"{len(lost)} of {len(rows)} sampled rows do not find themselves, the first being that "
            f"of id {first!r}"
        )
    others = own.copy()
    others[~own.any(axis=1), -1] = True
    found["recall"] = recall(best[:, 1:], cosines[~others].reshape(len(rows), -1))
    return found, faults + _below(found["recall"], bound["recall"], "sampled rows")


def _asked(
    best: Vectors, cosines: Vectors, bound: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return what queries of one's own found of their exact neighbours."""
    share = recall(best[:, :TOP_K], cosines[:, :TOP_K])
    found = {"queries": len(best), "query_recall": share}
    return found, _below(share, bound["query_recall"], "canary queries")


def recall(best: Vectors, cosines: Vectors) -> float | None:
    """Return the share of the nearest rows that are found, None where there are none.

    Args:
        best: (q, n) cosines of the nearest, falling, −inf where there are fewer rows.
        cosines: (q, m) of the rows found, −inf where none was.
    """
    there = np.isfinite(best)
    wanted = there.sum(axis=1)
    if not wanted.any():
        return None
    least = np.where(there, best, np.inf).min(axis=1, initial=np.inf)
    right = np.isfinite(cosines) & (cosines >= least[:, None] - _TIED)
    return float(np.minimum(right.sum(axis=1), wanted).sum() / wanted.sum())


def _below(share: float | None, least: float | None, what: str) -> list[str]:
    if share is None or least is None or share >= least:
        return []
    return [f"{what} find {share:.1%} of their {TOP_K} exact neighbours, below {least:.1%}"]


def _answered(
    trial: Trial, canaries: CanaryFile, queries: NDArray[np.float64]
) -> tuple[dict[str, Any], list[str]]:
    """Return whether the documents expected are among the ten nearest, as a user would see them."""
    asked = [place for place, ids in enumerate(canaries.expected) if ids]
    if not asked:
        return {}, []
    candidate = trial.candidate
    given = queries[asked].astype(np.float32)
    _, near = candidate.search(given, TOP_K, rescorer=trial.reranker())
    missed: list[tuple[int, str]] = []
    for place, rows in zip(asked, near, strict=True):
        seen = {str(name) for name in candidate.documents.ids(rows[rows >= 0].tolist())}
        missed += [(place, name) for name in canaries.expected[place] if name not in seen]
    total = sum(len(ids) for ids in canaries.expected)
    found = {"expected": total, "expected_found": total - len(missed)}
    if not missed:
        return found, []
    place, name = missed[0]
    there = "" if _holds(candidate, name) else ", which the index does not hold"
    return found, [
        f"{len(missed)} of {total} documents expected are not among the {TOP_K} nearest, the "
        f"first being {name!r} of {canaries.query_name(place)}{there}"
    ]


def _holds(candidate: Bundle, name: str) -> bool:
    try:
        candidate.documents.find(name)
    except CorpusError:
        return False
    return True
