"""Trial of the points of a sweep: make each index, and measure bytes, time and quality."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import discard
from whiten_index.artifacts.files import writing
from whiten_index.artifacts.prefetch import blocks
from whiten_index.errors import ConfigError, WhiteningError
from whiten_index.evaluation.judgements import JudgedQueries
from whiten_index.evaluation.metrics import evaluate_each, mean_interval
from whiten_index.index.choice import choose_factory
from whiten_index.index.exact import (
    Rows,
    Scores,
    Vectors,
    exact_neighbours,
    flat_vectors,
    rounding,
    use_large_pages,
)
from whiten_index.index.factory import inner_index, inner_of, peer_index
from whiten_index.index.faiss_build import build_faiss_index
from whiten_index.index.gpu import DeviceIndex, runs_on_gpu
from whiten_index.index.library import INDEX, load_faiss, write_index
from whiten_index.index.sizes import IndexBytes, measured_bytes
from whiten_index.index.training import train
from whiten_index.index.transforms import Transforms
from whiten_index.index.vector_search import Search, search_documents
from whiten_index.measure.results import AGREEMENT, INTERVAL
from whiten_index.measure.sweep_config import (
    AUTO,
    FAISS,
    FP32,
    NONE,
    RAW,
    Point,
    SweepConfig,
    parse_transform,
)
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.fit import fit_whitening, mean_score, piece_evidence
from whiten_index.pipeline.pseudo_queries import sample_pieces
from whiten_index.progress import Progress, Stages
from whiten_index.search.rerank import Reranker
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.versions.bundle import Bundle
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.spectrum import Spectrum
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import Kind, Similarity, WhiteningConfig

TOP_K = 10
# Hits searched for -> metrics measured on them.
_METRICS = {TOP_K: ("ndcg@10", "mrr@10"), 100: ("recall@100",)}
# In each round: single queries until a number or a time, but never fewer than the least; a batch.
_ROUNDS, _SINGLE, _SINGLE_SECONDS, _LEAST_SINGLE, _WARM = 3, 300, 0.3, 30, 3
_BATCH = 1_000
# Rows whose exact scores are looked at, at once.
_ROWS_AT_ONCE = 8192
# Rows that FAISS's own transforms learn from.
_PEER_ROWS = 1 << 16


@dataclass(frozen=True, eq=False)
class Dataset:
    """Corpus in its store, queries, and spectrum of the corpus.

    ``subset`` are the rising numbers of the rows (n,) that are indexed, None for all; with
    judgements ``documents`` are the documents of rows.
    """

    encoded: EncodeReport
    embeddings: CorpusEmbeddings
    moments: Moments
    spectrum: Spectrum
    queries: Vectors
    subset: Rows | None
    judged: JudgedQueries | None
    documents: NDArray[np.object_] | None
    facts: dict[str, Any]

    @property
    def rows(self) -> int:
        """Rows n of each index."""
        return self.embeddings.rows

    @property
    def dim(self) -> int:
        """Width d of the raw embeddings."""
        return int(self.facts["dim"])

    @property
    def similarity(self) -> Similarity:
        """Similarity that ranks rows."""
        return cast(Similarity, self.facts["similarity"])

    @cached_property
    def document_numbers(self) -> Rows:
        """Number of the document of each row, the same for its passages."""
        known = dict[str, int]()
        names = () if self.documents is None else self.documents
        return np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Truth:
    """Exact neighbours of the queries among the vectors (n, k) of a corpus."""

    embeddings: CorpusEmbeddings
    vectors: Callable[[NDArray[np.floating]], Vectors]  # of raw embeddings
    queries: Vectors  # (q, k)
    scores: Scores  # (q, 10) of the neighbours, −∞ where there are fewer
    rows: Rows  # (q, 10) their row numbers, −1 likewise

    @classmethod
    def among(
        cls, dataset: Dataset, vectors: Callable[[NDArray[np.floating]], Vectors], watcher: Progress
    ) -> "Truth":
        """Search all vectors of the corpus by numpy."""
        queries = vectors(dataset.queries)

        def counted(raw: NDArray[np.floating]) -> Vectors:
            watcher.advance(len(raw))
            return vectors(raw)

        near = exact_neighbours(map(counted, dataset.embeddings.blocks()), queries, TOP_K)
        return cls(dataset.embeddings, vectors, queries, *near)

    def shares(self, found: Rows) -> NDArray[np.float64]:
        """Return the share (q,) of each query's neighbours among the rows found (q, 10).

        A row that scores as the last neighbour counts as one: of equal rows, such as copies of a
        text, an index may give any.
        """
        there = np.isfinite(self.scores)
        least = np.where(there, self.scores, np.inf).min(axis=1) - rounding(self.scores)[:, 0]
        right = (found[:, :, None] == self.rows[:, None, :]).any(axis=2) & (found >= 0)
        query, place = np.nonzero(~right & (found >= 0))
        for some in blocks(range(len(query)), _ROWS_AT_ONCE):
            ask, at = query[some.start : some.stop], place[some.start : some.stop]
            rows, of = np.unique(found[ask, at], return_inverse=True)
            vectors = self.vectors(self.embeddings.at(rows))[of]
            right[ask, at] = np.einsum("nk,nk->n", self.queries[ask], vectors) >= least[ask]
        wanted = there.sum(axis=1)
        shares: NDArray[np.float64] = np.minimum(right.sum(axis=1), wanted) / np.maximum(wanted, 1)
        return shares


@dataclass(frozen=True, eq=False)
class Space:
    """Vectors of the corpus under one transform."""

    whitening: Whitening
    truth: Truth
    pieces: float | None = None  # score by pieces of the texts, where ``auto`` has them cut


def open_space(config: SweepConfig, dataset: Dataset, point: Point, stages: Stages) -> Space:
    """Fit the transform of a point and find the exact neighbours among its vectors, by numpy."""
    wanted = replace(_transform(config, dataset, point, stages), similarity=dataset.similarity)
    whitening = Whitening.fit(dataset.moments, wanted)

    def vectors(raw: NDArray[np.floating]) -> Vectors:
        return whitening.vectors(raw).astype(np.float32)

    with stages.stage("exact neighbours", dataset.rows) as watcher:
        truth = Truth.among(dataset, vectors, watcher)
    if dataset.judged is not None or AUTO not in config.transforms:
        return Space(whitening, truth)
    encoded, build = replace(dataset.encoded, stages=stages), config.build
    sample = sample_pieces(encoded, build.choose_sample, build.seed)
    if isinstance(sample, str):
        return Space(whitening, truth)
    score = mean_score(piece_evidence(encoded, sample).trials, whitening.vectors)
    return Space(whitening, truth, score)


def _transform(
    config: SweepConfig, dataset: Dataset, point: Point, stages: Stages
) -> WhiteningConfig:
    if point.family in (RAW, FAISS):
        return WhiteningConfig(kind=Kind.NONE)
    name, exponent = parse_transform(point.transform)
    if name != AUTO:
        return WhiteningConfig(kind=Kind(name), k=point.k, exponent=exponent)
    build = replace(config.build, k=point.k, similarity=dataset.similarity)
    chosen = fit_whitening(build, replace(dataset.encoded, stages=stages), None).whitening
    # The choice may see the rows held out; the basis must not, so it is fitted again.
    return WhiteningConfig(
        kind=chosen.kind, k=point.k, exponent=chosen.exponent, center=chosen.center
    )


@dataclass(eq=False)
class Made:
    """An index on disk and its figures."""

    point: Point
    space: Space
    folder: Path
    record: dict[str, Any]
    ndcg: NDArray[np.float64] | None = None  # of each query


def measure_points(
    config: SweepConfig,
    dataset: Dataset,
    points: Sequence[Point],
    done: Collection[str],
    folder: Path,
    stages: Stages,
) -> Iterator[dict[str, Any]]:
    """Yield the record of each point that is not done, those over the same vectors together.

    The record of a point that cannot be measured says why.
    """
    missing: dict[tuple[str, str, int], list[Point]] = {}
    for point in points:
        if point.key not in done:
            missing.setdefault(point.space, []).append(point)
    if not missing:
        return
    exact = Point(RAW, NONE, dataset.dim, FP32, "flat")
    raw = open_space(config, dataset, exact, stages)
    trial = Trial(config, dataset, raw.truth, folder)
    reference: Made | None = None
    with contextlib.suppress(ConfigError, MemoryError):
        # If it cannot be made, its point is skipped below with the reason.
        reference = trial.make(exact, raw) if exact in points else None
    last, whole = 0, sum(map(len, missing.values()))
    for some in missing.values():
        first, last = last + 1, last + len(some)
        part = f"{first} to {last} of {whole}"
        try:
            fitted = some[0].family not in (RAW, FAISS)
            space = open_space(config, dataset, some[0], stages) if fitted else raw
        except WhiteningError as error:
            yield from (skipped_record(point, str(error)) for point in some)
            continue
        made = list[Made]()
        with stages.stage("make indexes", len(some), part=part) as watcher:
            for point in some:
                try:
                    known = reference if point == exact else None
                    made.append(known or trial.make(point, space, reference))
                except (ConfigError, MemoryError) as error:
                    yield skipped_record(point, str(error) or "the memory does not hold it")
                watcher.advance(1)
        with stages.stage("measure", len(made), part=part) as watcher:
            trial.time(made, reference)
            for each in made:
                yield {"type": "point", "key": each.point.key, **each.record}
                watcher.advance(1)
        for each in made:
            if each is not reference:
                discard(each.folder)


def skipped_record(point: Point, why: str) -> dict[str, Any]:
    """Return the record of a point that cannot be measured."""
    return {"type": "skipped", "key": point.key, **point.setting(), "why": why}


@dataclass(frozen=True, eq=False)
class Trial:
    """Maker of the indexes of a sweep, and their measurement."""

    config: SweepConfig
    dataset: Dataset
    raw_truth: Truth
    folder: Path

    def time(self, group: Sequence[Made], reference: Made | None) -> None:
        """Time the searches of several indexes by turns, and write the figures to their records.

        Another load on the machine then slows all of them alike, and shows between the rounds.
        """
        others = [made for made in group if made is not reference]
        turns = others if reference is None else [reference, *others]
        rounds = [[self._time_once(self.search_of(made)) for made in turns] for _ in range(_ROUNDS)]
        for turn, made in enumerate(turns):
            single, speeds = zip(*(each[turn] for each in rounds), strict=True)
            made.record["latency_ms"] = {
                **latency(single),
                "rounds": _ROUNDS,
                "threads": self.config.search_threads,
            }
            made.record["throughput"] = {
                "queries_per_second": float(np.median(speeds)),
                "batch": len(self.dataset.queries[:_BATCH]),
                "threads": self.config.search_threads,
            }

    def _time_once(self, search: Search) -> tuple[NDArray[np.float64], float]:
        """Return the milliseconds of single queries, and queries per second of a batch."""
        queries, single = self.dataset.queries, list[float]()
        for row in range(_WARM):
            search(queries[row : row + 1], TOP_K)
        began = time.perf_counter()
        for row in range(min(len(queries), _SINGLE)):
            started = time.perf_counter()
            search(queries[row : row + 1], TOP_K)
            ended = time.perf_counter()
            single.append(1000 * (ended - started))
            if ended - began > _SINGLE_SECONDS and len(single) >= _LEAST_SINGLE:
                break
        batch = queries[:_BATCH]
        started = time.perf_counter()
        search(batch, TOP_K)
        return np.array(single), len(batch) / (time.perf_counter() - started)

    def make(self, point: Point, space: Space, reference: Made | None = None) -> Made:
        """Make an index as a build does, and measure it, its nDCG@10 also against a reference."""
        dataset, build = self.dataset, self.config.build
        factory, k = point.factory(dataset.rows), space.whitening.k
        if dataset.similarity == "dot":
            factory = factory.replace(",L2norm", "")
        folder = self.folder / point.key.replace("/", "-")
        discard(folder)
        with writing(folder):
            folder.mkdir()
        stages, by_faiss = Stages(Progress()), point.family == FAISS
        parameters, device = dict[str, int](), "cpu"
        truth = space.truth
        if by_faiss:
            size, truth = self._fill_peer(factory, folder, stages)
        else:
            plan = choose_factory(
                factory,
                rows=dataset.rows,
                dim=dataset.dim,
                k=k,
                target_recall=build.target_recall,
                seed=build.seed,
                device=build.index_device if runs_on_gpu(inner_index(factory, k)) else "cpu",
            )
            made = build_faiss_index(dataset.embeddings, space.whitening, plan, stages, folder)
            size, parameters, device = made.sizes, made.tuned.parameters, made.device
        setting = point.setting()
        if setting["rerank"]:
            setting["rerank"]["bytes_per_row"] = dataset.facts["stored_bytes_per_row"]
        spent = stages.seconds
        seconds = {
            "train": spent.get("train", 0.0),
            "add": spent["project and add"],
            "tune": spent.get("exact neighbours", 0) + spent.get("tune", 0),
        }
        record = {
            **setting,
            "exponent": None if by_faiss else space.whitening.exponent,
            "center": None if by_faiss else space.whitening.center,
            "pieces": None if by_faiss else space.pieces,
            "factory": factory,
            "parameters": parameters,
            "device": device,
            "bytes": {
                **size.to_json(), "per_row": size.per_row_total / dataset.rows, "fixed": size.fixed,
            },
            "seconds": {**seconds, "total": sum(seconds.values())},
        }  # fmt: skip
        this = Made(point, space, folder, record)
        found, this.ndcg = judge(
            dataset, self.search_of(this), truth=truth, raw_truth=self.raw_truth,
            reference=None if reference is None else reference.ndcg,
        )  # fmt: skip
        record.update(found)
        return this

    def _fill_peer(self, factory: str, folder: Path, stages: Stages) -> tuple[IndexBytes, Truth]:
        """Make an index with FAISS's own transforms of raw rows.

        Return its size, and the exact neighbours among the vectors that it holds.
        """
        dataset = self.dataset
        index = peer_index(factory, dataset.dim)
        rng = np.random.default_rng(self.config.build.seed)
        # Their order is what FAISS draws its first centroids by.
        sample = rng.permutation(dataset.rows)[:_PEER_ROWS]
        with stages.stage("train", len(sample)):
            train(index, dataset.embeddings.at(sample).astype(np.float32), factory)
        with stages.stage("project and add", dataset.rows):
            for block in dataset.embeddings.blocks():
                index.add(np.ascontiguousarray(block, dtype=np.float32))
        write_index(index, folder / INDEX)
        transforms = Transforms(index)

        def vectors(raw: NDArray[np.floating]) -> Vectors:
            return transforms(np.ascontiguousarray(raw, dtype=np.float32))

        return measured_bytes(index), Truth.among(dataset, vectors, Progress())

    def search_of(self, made: Made) -> Search:
        """Return the search of a point: as of an index, or for FAISS's own transforms by FAISS."""
        dataset, index = self.dataset, load_faiss().read_index(str(made.folder / INDEX))
        if made.point.family == FAISS:
            return cast(Search, index.search)
        inner, device = inner_of(index), "cpu" if made.record["device"] == "cpu" else "auto"
        placed = DeviceIndex.place(inner, device, to_search=True)
        copy = None if placed.device == "cpu" else placed
        vectors = flat_vectors(inner) if copy is None else None
        if vectors is not None and (gathering := use_large_pages(vectors)) is not None:
            gathering.join()
        whitening, missing = made.space.whitening, cast(Any, None)
        # Without its files, as only rows are searched.
        bundle = Bundle(missing, whitening, index, Transforms(index), missing, copy)
        encoded, again = dataset.encoded, None
        if most := made.point.rerank:
            again = Reranker(
                encoded.store, encoded.record, whitening, candidates=most, subset=dataset.subset
            )
        return lambda queries, top_k: bundle.search(queries, top_k, rescorer=again, by_row=True)


def latency(runs: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    """Return percentiles of milliseconds, and the ratio of the medians of several runs."""
    medians = [float(np.median(some)) for some in runs]
    found = np.percentile(np.concatenate(runs), (50, 95, 99)).tolist()
    named = dict(zip(("p50", "p95", "p99"), found, strict=True))
    return {**named, "spread": max(medians) / min(medians), "queries": sum(map(len, runs))}


def judge(
    dataset: Dataset,
    search: Search,
    *,
    truth: Truth,
    raw_truth: Truth,
    reference: NDArray[np.float64] | None,
    metrics: Mapping[int, Sequence[str]] = _METRICS,
) -> tuple[dict[str, Any], NDArray[np.float64] | None]:
    """Return the figures of a search, and the nDCG@10 of each judged query.

    ``truth`` and ``raw_truth`` are the exact neighbours among the same vectors and among the raw
    embeddings, ``reference`` (q,) the nDCG@10 to compare with, ``metrics`` those to
    measure by the number of hits.
    """
    # A deeper search also improves its first ten hits, so each depth is searched apart.
    first = search(dataset.queries, TOP_K)
    same, near = raw_truth.shares(first[1]), truth.shares(first[1])
    each = _scores(dataset, search, metrics, first)
    figures = {AGREEMENT: same, **{f"quality.{name}": scores for name, scores in each.items()}}
    ndcg = each.get("ndcg@10")
    if ndcg is not None and reference is not None:
        figures[INTERVAL] = ndcg - reference
    found = {
        "index_recall@10": float(near.mean()),
        "agreement@10": float(same.mean()),
        "quality": {name: float(scores.mean()) for name, scores in each.items()} or None,
        "intervals": {name: mean_interval(values) for name, values in figures.items()},
    }
    return found, ndcg


def _scores(
    dataset: Dataset,
    search: Search,
    metrics: Mapping[int, Sequence[str]],
    first: tuple[Scores, Rows],
) -> dict[str, NDArray[np.float64]]:
    """Return each metric of each query, of hits as a bundle gives them, each document once.

    ``first`` are scores and rows of the first ``TOP_K`` hits.
    """
    judged, names = dataset.judged, dataset.documents
    values = dict[str, NDArray[np.float64]]()
    if judged is None or names is None:
        return values
    numbers = dataset.document_numbers
    passages = len(numbers) > numbers.max() + 1
    for depth, some in metrics.items():
        if passages:
            scores, rows = search_documents(
                search, numbers.__getitem__, dataset.queries, top_k=depth, rows=len(numbers)
            )
        else:
            scores, rows = first if depth == TOP_K else search(dataset.queries, depth)
        run = {
            query: dict(zip(names[near[near >= 0]], best[near >= 0].tolist(), strict=True))
            for query, near, best in zip(judged.texts, rows, scores, strict=True)
        }
        for metric in some:
            values[metric] = np.array(list(evaluate_each(judged.qrels, run, metric).values()))
    return values
