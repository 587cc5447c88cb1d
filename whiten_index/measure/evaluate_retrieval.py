"""Retrieval judged: indexes built of sets and searched, an index that is there, or a run file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import remove_path, scratch_folder
from whiten_index.artifacts.files import writing
from whiten_index.encoding.spec import recorded_spec, resolve_encoder
from whiten_index.errors import CorpusError
from whiten_index.evaluation.judgements import qrels_splits, read_qrels, some
from whiten_index.evaluation.metrics import Qrels, Run, evaluate, require_evaluator
from whiten_index.evaluation.trec_run import check_place, read_run, write_run
from whiten_index.index.library import load_faiss
from whiten_index.measure.evaluate_sts import report_of
from whiten_index.measure.retrieval_config import (
    RetrievalConfig,
    RetrievalSet,
    judgements,
    naming,
    read_sets,
)
from whiten_index.measure.spaces import name_of
from whiten_index.measure.text_embedder import encoder_facts
from whiten_index.pipeline.build import build_index
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.search.search_index import Ranking, SearchIndex, open_index
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig


def evaluate_retrieval(
    config: RetrievalConfig, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Search the judged queries of each set under each transform, and judge what is found.

    Indexes are built as ``build_index`` builds them, of one store, so that every text is encoded
    once; they are removed when they have been searched. A run or an index that is there is judged
    as it is.

    Returns:
        JSON values: encoder, setting and datasets of the first run, ``runs`` of all of them where
        there are several; figures times 100, ``counts`` beside.

    Raises:
        WhitenIndexError: model, transform, corpus, queries, judgements, index or run cannot be
            used, or do not fit together, or the rankings cannot be written.
    """
    require_evaluator()
    stages = Stages(progress or Silent())
    if config.run is not None:
        return _judge_file(config, stages)
    _check_places(config)
    load_faiss()
    with scratch_folder() as folder:
        sets = read_sets(config, folder / "corpora")
        for each in sets:
            _note_splits(each.judged.splits, stages)
        if config.base.transforms:
            dim = resolve_encoder(config.base.encoder)[0].dim
            for transform in config.base.transforms:
                transform.require_dim(dim)
        return _search_all(config, sets, folder, stages)


def _check_places(config: RetrievalConfig) -> None:
    """Refuse places that no ranking can be written to, before any work."""
    for name in config.names:
        for transform in config.base.transforms or (None,):
            path = config.run_path(name, transform)
            if path is not None:
                check_place(path)


def _judge_file(config: RetrievalConfig, stages: Stages) -> dict[str, Any]:
    source = str(config.run)
    path, split = judgements(config)
    qrels = read_qrels(path, split=split)
    _note_splits(qrels_splits(path) if split is None else (), stages)
    run = read_run(source)
    deepest = max(map(len, run.values()), default=0)
    if deepest < config.depth:
        stages.watcher.note(
            f"note: {source} holds {deepest} hits a query at most, and {config.depth} are asked "
            "for; deeper metrics count what is there"
        )
    with stages.stage("judge", len(qrels)) as watcher:
        names = (source, str(path))
        found = evaluate_run(run, qrels, config.metrics, drop_self=config.drop_self, names=names)
        watcher.advance(len(qrels))
    dropped = {"drop_self": drops_self(config.drop_self, qrels)}
    datasets = {config.names[0]: {**found.to_json(), **dropped}}
    run_of = {"name": source, "setting": {"run": source, **dropped}, "datasets": datasets}
    return report_of({}, [run_of], stages)


def _note_splits(splits: tuple[str, ...], stages: Stages) -> None:
    if len(splits) > 1:
        stages.watcher.note(
            f"note: the judgements' splits {', '.join(splits)} are used together; --qrels-split "
            "picks one"
        )


def _search_all(
    config: RetrievalConfig, sets: list[RetrievalSet], work: Path, stages: Stages
) -> dict[str, Any]:
    encoder: dict[str, Any] = {}
    runs: dict[WhiteningConfig | None, dict[str, Any]] = {}
    for each in sets:
        for transform in config.base.transforms or (None,):
            index = work / "index"
            opened, store = _open(each, transform, work, index, stages)
            embeddings = each.embeddings(opened, store, stages)
            encoder = encoder or _encoder_of(opened)
            fresh = {**_named(opened, each, transform), "datasets": {}}
            run = runs.setdefault(transform, fresh)
            path = config.run_path(each.name, transform)
            run["datasets"][each.name] = _judge(each, opened, embeddings, path, stages)
            # Room for the next one; the store stays.
            remove_path(index)
    if len(sets) > 1:
        for run in runs.values():
            run["average"] = {
                metric: float(np.mean([one[metric] for one in run["datasets"].values()]))
                for metric in config.metrics
            }
    return report_of(encoder, list(runs.values()), stages)


def _open(
    each: RetrievalSet, transform: WhiteningConfig | None, work: Path, out: Path, stages: Stages
) -> tuple[SearchIndex, EmbeddingStore | None]:
    """Return the index that is there, or build one of a set, and its store."""
    base = each.config.base
    if base.index is not None:
        return open_index(base.index, **base.opening), None
    build = each.config.build_config(
        transform, corpus=each.corpus, out=str(out), store=base.store or str(work / "store")
    )
    with naming(each.made_of):
        report = build_index(build, progress=stages.watcher)
    for name, seconds in report.encoded.stages.seconds.items():
        stages.seconds[name] = stages.seconds.get(name, 0.0) + seconds
    return open_index(out, **{**base.opening, "model": None}), report.encoded.store


def _judge(
    each: RetrievalSet,
    opened: SearchIndex,
    embeddings: NDArray[np.float32],
    path: Path | None,
    stages: Stages,
) -> dict[str, Any]:
    """Search the judged queries, write the rankings where a path is given, judge them."""
    judged, documents = each.judged, opened.bundle.documents
    names = [str(name) for name in documents.ids(range(len(documents)))]
    missing = judged.missing(names)
    rankings, dropped = _rank(each, opened, embeddings, stages)
    if path is not None:
        with writing(path.parent, kept=""):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_run(path, rankings)
    run = {
        str(ranking.query_id): dict(zip(map(str, ranking.ids), ranking.scores, strict=True))
        for ranking in rankings
    }
    counts = {
        "documents": len(set(names)),
        "rows_skipped": sum(opened.bundle.manifest["counts"]["skipped"].values()),
        "relevant_documents_missing": missing,
        "queries_without_text": judged.left_out,
        "hits_of_self": dropped,
    }
    figures = run_figures(run, judged.qrels, each.config.metrics).to_json(counts)
    # What a wish such as full, or the rule for hits of oneself, came to with this set.
    own = {"k": opened.bundle.whitening.k, "drop_self": _drops_self(each)}
    return {**figures, **own}


def _rank(
    each: RetrievalSet, opened: SearchIndex, embeddings: NDArray[np.float32], stages: Stages
) -> tuple[list[Ranking], int]:
    """Return the best hits of every judged query, and how many of themselves were left out."""
    asked, depth = list(each.judged.texts), each.config.depth
    drop = _drops_self(each)
    with stages.stage("search", len(asked)) as watcher:
        # One more, since a query that is a document finds itself.
        found = opened.rank_embeddings(asked, embeddings, top_k=depth + drop)
        cut = [_cut(ranking, depth, drop=drop) for ranking in found]
        watcher.advance(len(asked))
    return [ranking for ranking, _ in cut], sum(dropped for _, dropped in cut)


def _drops_self(each: RetrievalSet) -> bool:
    return drops_self(each.config.drop_self, each.judged.qrels)


def _cut(ranking: Ranking, depth: int, *, drop: bool) -> tuple[Ranking, int]:
    """Return the best hits of a query, and how many of itself were left out."""
    hits = list(zip(ranking.ids, ranking.scores, strict=True))
    own = [hit for hit in hits if drop and str(hit[0]) == str(ranking.query_id)]
    kept = [hit for hit in hits if hit not in own][:depth]
    ids, scores = [name for name, _ in kept], [score for _, score in kept]
    return Ranking(ranking.query_id, ids, scores), len(own)


def _named(
    opened: SearchIndex, each: RetrievalSet, transform: WhiteningConfig | None
) -> dict[str, Any]:
    """Return what a run is called, by the width wished for, and how it was made."""
    manifest, whitening = opened.bundle.manifest, opened.bundle.whitening
    raw = whitening.kind is Kind.NONE
    setting = {
        "transform": {"kind": "none"} if raw else whitening.choices(),
        "factory": manifest["factory"]["built"],
        "top_k": each.config.depth,
        "drop_self": _drops_self(each),
    }
    wish = None if transform is None else transform.k
    return {"name": "raw" if raw else name_of(whitening, wish), "setting": setting}


def _encoder_of(opened: SearchIndex) -> dict[str, Any]:
    recorded: Mapping[str, Any] = opened.bundle.manifest["encoder"]
    spec = recorded_spec(recorded)
    if spec is None:
        return dict(recorded)
    # It does not change the embeddings of documents, nor their fingerprint, but what is found.
    return {**encoder_facts(spec), "query_prompt": spec.query_prompt}


@dataclass(frozen=True)
class RunFigures:
    """What a run is worth.

    Attributes:
        figures: metric -> its mean over the judged queries, in 0 … 1.
        counts: of queries and hits: ``queries`` judged, those of them ``queries_not_in_run``,
            which count 0, ``run_queries_not_judged`` (without a relevant document), which do not
            count, the ``hits`` of judged queries, those of them ``hits_not_judged``, which count
            as not relevant, and the ``hits_of_self`` that were left out.
    """

    figures: dict[str, float]
    counts: dict[str, int]

    def to_json(self, more: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return the figures times 100, and the counts, with ``more`` of them, beside."""
        figures = {metric: 100 * value for metric, value in self.figures.items()}
        return {**figures, "counts": {**(more or {}), **self.counts}}


def evaluate_run(
    run: Run,
    qrels: Qrels,
    metrics: Sequence[str],
    *,
    drop_self: bool | None = None,
    names: tuple[str, str] = ("the run", "the judgements"),
) -> RunFigures:
    """Judge a run that was read from a file."""
    relevant = _with_answers(qrels)
    _require_match(run, relevant, names)
    kept, dropped = without_self(run) if drops_self(drop_self, qrels) else (run, 0)
    found = run_figures(kept, relevant, metrics)
    return RunFigures(found.figures, {**found.counts, "hits_of_self": dropped})


def run_figures(run: Run, qrels: Qrels, metrics: Sequence[str]) -> RunFigures:
    """Judge a run whose ids are known to be those of the judgements; see ``evaluate_run``."""
    relevant = _with_answers(qrels)
    hits = [(query, document) for query in relevant for document in run.get(query, ())]
    counts = {
        "queries": len(relevant),
        "queries_not_in_run": sum(query not in run for query in relevant),
        "run_queries_not_judged": sum(query not in relevant for query in run),
        "hits": len(hits),
        "hits_not_judged": sum(document not in relevant[query] for query, document in hits),
    }
    return RunFigures(evaluate(relevant, run, metrics), counts)


def drops_self(asked: bool | None, qrels: Qrels) -> bool:
    """Tell whether hits with the query's own id are left out.

    Where queries are themselves documents (ArguAna, Quora) each finds itself first, and no
    judgement says so; BEIR's evaluation leaves such hits out of every set. A judgement that calls
    one relevant shows that the ids of queries and documents have nothing to do with each other, as
    in Cranfield, where both count from 1.
    """
    if asked is not None:
        return asked
    return not any(grades.get(query, 0) > 0 for query, grades in qrels.items())


def without_self(run: Run) -> tuple[dict[str, dict[str, float]], int]:
    """Return a run without the hits that have their query's id, and how many these were."""
    kept = {
        query: {document: score for document, score in found.items() if document != query}
        for query, found in run.items()
    }
    return kept, sum(query in found for query, found in run.items())


def _with_answers(qrels: Qrels) -> Qrels:
    return {
        query: grades
        for query, grades in qrels.items()
        if any(grade > 0 for grade in grades.values())
    }


def _require_match(run: Run, qrels: Qrels, names: tuple[str, str]) -> None:
    """Refuse a run of another set, or of other ids, whose figures would all be 0."""
    if not run.keys() & qrels.keys():
        raise _no_match("query", names, run, qrels, "the split of the judgements and the id column")
    found = dict.fromkeys(document for each in run.values() for document in each)
    judged = dict.fromkeys(document for grades in qrels.values() for document in grades)
    if not found.keys() & judged.keys():
        raise _no_match("document", names, found, judged, "the id column of the corpus")


def _no_match(
    what: str, names: tuple[str, str], ours: Iterable[str], theirs: Iterable[str], check: str
) -> CorpusError:
    run, qrels = names
    return CorpusError(
        f"no {what} of {run} is in {qrels}: the run has ids such as {some(ours) or 'none'}, the "
        f"judgements {some(theirs)}; give files of one set, and check {check} that the run was "
        "made with"
    )
