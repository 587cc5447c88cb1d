"""Retrieval judged: indexes built of sets and searched, a published index, or a run file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import remove_path, scratch_folder
from whiten_index.artifacts.files import writing
from whiten_index.artifacts.lock import only_writer
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.corpus.sources import canonical
from whiten_index.encoding.load_encoder import resolve_encoder
from whiten_index.encoding.spec import recorded_spec
from whiten_index.errors import CorpusError
from whiten_index.evaluation.judgements import (
    JudgedQueries,
    corpus_file,
    id_column,
    parquet_corpus,
    qrels_file,
    queries_file,
    read_judged,
    read_qrels,
    some,
    text_columns,
)
from whiten_index.evaluation.metrics import (
    Qrels,
    Run,
    evaluate_each,
    mean_interval,
    require_evaluator,
    with_answers,
)
from whiten_index.evaluation.trec_run import Ranking, check_place, read_run, write_run
from whiten_index.index.library import load_faiss
from whiten_index.measure.eval_config import RetrievalConfig
from whiten_index.measure.spaces import Scores, Space, encoder_facts, name_of, report_of, runs_of
from whiten_index.pipeline.build import build_index
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.build_options import RunnerOptions
from whiten_index.pipeline.encode import encode_corpus
from whiten_index.progress import Progress, Stages
from whiten_index.search.query_encoder import query_embeddings
from whiten_index.search.search_index import SearchIndex, open_index
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

_HERE = RunnerOptions()


@dataclass(frozen=True, eq=False)
class _Set:
    """A set whose queries and judgements were read, and whose corpus is Parquet."""

    name: str
    judged: JudgedQueries
    config: RetrievalConfig
    drops_self: bool
    corpus: Path = Path("corpus.parquet")
    source: Path = corpus  # the user's file that it is or was made of

    def build(self, transform: WhiteningConfig | None, out: str | None, store: str) -> BuildConfig:
        """Return the build of an index under one transform, None for none."""
        shape: dict[str, Any] = {"whiten": "none", "seed": self.config.seed}
        if transform is not None:
            shape = asdict(transform)
            shape["whiten"] = shape.pop("kind").value
        shape["similarity"] = self.config.similarity
        return BuildConfig(
            corpus=(str(self.corpus),),
            text_columns=tuple(text_columns(self.corpus)) or ("text",),
            id_column=id_column(self.corpus),
            out=out,
            store=store,
            factory=self.config.factory,
            **vars(self.config.encoder),
            **{name: getattr(self.config, name) for name in vars(_HERE)},
            **shape,
        )


def evaluate_retrieval(
    config: RetrievalConfig, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Search the judged queries of each set under each transform, and judge what is found.

    Indexes are built by ``build_index`` of one store, so that every text is encoded once, and are
    removed afterwards. A run or a published index is judged as it is.

    Returns:
        JSON values: encoder, setting and datasets of the first run, and ``runs``, all of them;
        figures times 100, with their ``counts`` and 95 % ``intervals`` (bootstrap over queries).
    """
    require_evaluator()
    stages = Stages(progress or Progress())
    if config.run is not None:
        return _judge_file(config, config.run, stages)
    for name in config.names:
        for transform in config.transforms or (None,):
            if (path := config.run_path(name, transform)) is not None:
                check_place(path)
    load_faiss()
    with scratch_folder() as work:
        sets = [_read_set(config, i, work / str(i)) for i in range(len(config.names))]
        if (version := config.published) is not None:
            spec = recorded_spec(version.fields["encoder"])
        else:
            spec = resolve_encoder(config.encoder)[0]
            for transform in config.transforms:
                transform.require_dim(spec.dim)
        scored = [(each.name, list(_scores(each, work, stages))) for each in sets]

    def average(datasets: Mapping[str, Any]) -> dict[str, float]:
        return {
            metric: float(np.mean([one[metric] for one in datasets.values()]))
            for metric in config.metrics
        }

    # A prompt of queries changes what is found, and not the fingerprint of documents.
    facts = {} if spec is None else {**encoder_facts(spec), "query_prompt": spec.query_prompt}
    return report_of(facts, runs_of(scored, average if len(sets) > 1 else None), stages)


def _judgements(config: RetrievalConfig, number: int) -> tuple[Path, str | None]:
    """Return the judgements of a set, and which of their rows: None for all of them."""
    if config.sets:
        return qrels_file(Path(config.sets[number]), config.qrels_split)
    return Path(str(config.qrels)), config.qrels_split


def _read_set(config: RetrievalConfig, number: int, work: Path) -> _Set:
    """Read queries and judgements of a set, before the corpus of any is encoded."""
    name, folder = config.names[number], Path(config.sets[number]) if config.sets else None
    queries = queries_file(folder) if folder else Path(str(config.queries))
    qrels, split = _judgements(config, number)
    judged = read_judged(queries, qrels, split=split)
    drops = drops_self(judged.qrels)
    if not config.builds or folder is None:
        return _Set(name, judged, config, drops)
    source = corpus_file(folder)
    found = _Set(name, judged, config, drops, parquet_corpus(source, work), source)
    corpus = ParquetCorpus.open(found.build(None, "index", "store").corpus_config())
    judged.missing(map(str, corpus.ids()))
    return found


def _scores(each: _Set, work: Path, stages: Stages) -> Scores:
    """Yield the figures of a set under each transform, or of the published index."""
    embeddings: NDArray[np.float32] | None = None
    if each.config.runner != _HERE.runner:
        build = each.build(None, str(work / "index"), each.config.store or str(work / "store"))
        encoded = encode_corpus(build, progress=stages.watcher)
        stages.add(encoded.stages.seconds, encoded.stages.rows)
    for transform in each.config.transforms or (None,):
        opened, store = _open(each, transform, work, stages)
        if embeddings is None:
            texts = list(each.judged.texts.values())
            embeddings = query_embeddings(store, texts, opened.encode, stages)
        path = each.config.run_path(each.name, transform)
        yield _space(opened, each, transform), _search(each, opened, embeddings, path, stages)
        # Room for the next one; the store stays.
        remove_path(work / "index")


def _open(
    each: _Set, transform: WhiteningConfig | None, work: Path, stages: Stages
) -> tuple[SearchIndex, EmbeddingStore | None]:
    """Return the published index, or build one of a set, and its store."""
    config, out = each.config, work / "index"
    if config.index is not None:
        return open_index(config.index, **config.opening), None
    build = each.build(transform, str(out), config.store or str(work / "store"))
    build = replace(build, **vars(_HERE))
    encoded = build_index(build, progress=stages.watcher, registered=False).encoded
    stages.add(encoded.stages.seconds, encoded.stages.rows)
    store, record = encoded.store, encoded.record
    if each.source != each.corpus:
        # What was made of it has another place in each run.
        lasting = {**record.source, "sources": [canonical(str(each.source))]}
        with only_writer(store.folder, what="store"):
            store.save_corpus(replace(record, source=lasting))
            store.forget_corpus(record.source, index=out)
    return open_index(out, **{**config.opening, "model": None}), store


def _search(
    each: _Set,
    opened: SearchIndex,
    embeddings: NDArray[np.float32],
    path: Path | None,
    stages: Stages,
) -> dict[str, Any]:
    judged, documents, depth = each.judged, opened.bundle.documents, each.config.depth
    names = [str(name) for name in documents.ids(range(len(documents)))]
    missing = judged.missing(names)
    queries, rankings, run = list(judged.texts), list[Ranking](), dict[str, dict[str, float]]()
    dropped = 0
    with stages.whole("search", len(queries)):
        # One more, since a query that is a document finds itself.
        for found in opened.rank_embeddings(queries, embeddings, top_k=depth + each.drops_self):
            hits = zip(found.ids, found.scores, strict=True)
            kept = [hit for hit in hits if not each.drops_self or str(hit[0]) != found.query_id]
            dropped += len(found.ids) - len(kept)
            ids, scores = [hit[0] for hit in kept[:depth]], [hit[1] for hit in kept[:depth]]
            rankings.append(Ranking(found.query_id, ids, scores))
            run[str(found.query_id)] = dict(zip(map(str, ids), scores, strict=True))
    if path is not None:
        with writing(path.parent, kept=""):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_run(path, rankings)
    counts = {
        "documents": len(set(names)),
        "rows_skipped": sum(opened.bundle.manifest["counts"]["skipped"].values()),
        "relevant_documents_missing": missing,
        "queries_without_text": judged.left_out,
        "hits_of_self": dropped,
    }
    # What a wish such as full, or the rule for hits of oneself, came to with this set.
    facts = {"k": opened.bundle.whitening.k, "drop_self": each.drops_self}
    return {**_judged(run, judged.qrels, each.config.metrics, counts), **facts}


def _space(opened: SearchIndex, each: _Set, transform: WhiteningConfig | None) -> Space:
    """Return what a run is called, by the width wished for, and how it was made."""
    manifest, whitening = opened.bundle.manifest, opened.bundle.whitening
    raw = whitening.kind is Kind.NONE
    setting = {
        "transform": {"kind": "none"} if raw else whitening.choices(),
        "similarity": whitening.similarity,
        "factory": manifest["factory"]["built"],
        "top_k": each.config.depth,
        "drop_self": each.drops_self,
    }
    wish = None if transform is None else transform.k
    return Space("raw" if raw else name_of(whitening, wish), setting)


def _judge_file(config: RetrievalConfig, source: str, stages: Stages) -> dict[str, Any]:
    path, split = _judgements(config, 0)
    qrels = read_qrels(path, split=split)
    run, relevant = read_run(source), with_answers(qrels)
    deepest = max(map(len, run.values()), default=0)
    if deepest < config.depth:
        stages.watcher.note(
            f"note: {source} holds {deepest} hits a query at most, and {config.depth} are asked "
            "for; deeper metrics count what is there"
        )
    _require_match(run, relevant, source, str(path))
    drop, dropped = drops_self(qrels), 0
    if drop:
        dropped = sum(query in found for query, found in run.items())
        run = {
            query: {document: score for document, score in found.items() if document != query}
            for query, found in run.items()
        }
    with stages.whole("judge", len(qrels)):
        found = _judged(run, relevant, config.metrics, {"hits_of_self": dropped})
    space = Space(source, {"run": source, "drop_self": drop})
    scored = [(config.names[0], [(space, {**found, "drop_self": drop})])]
    return report_of({}, runs_of(scored), stages)


def _judged(
    run: Run, relevant: Qrels, metrics: Sequence[str], counts: Mapping[str, int]
) -> dict[str, Any]:
    """Return each metric's mean over the judged queries, times 100, its interval, and counts."""
    # Queries that the run lacks count 0, hits that nobody judged as not relevant.
    hits = [(query, document) for query in relevant for document in run.get(query, ())]
    counts = {
        **counts,
        "queries": len(relevant),
        "queries_not_in_run": sum(query not in run for query in relevant),
        "run_queries_not_judged": sum(query not in relevant for query in run),
        "hits": len(hits),
        "hits_not_judged": sum(document not in relevant[query] for query, document in hits),
    }
    each = {
        metric: 100 * np.array(list(evaluate_each(relevant, run, metric).values()))
        for metric in metrics
    }
    return {
        **{metric: float(scores.mean()) for metric, scores in each.items()},
        "intervals": {metric: list(mean_interval(scores)) for metric, scores in each.items()},
        "counts": counts,
    }


def drops_self(qrels: Qrels) -> bool:
    """Return whether hits with the query's own id are left out.

    Where queries are documents (ArguAna, Quora) each finds itself first, and no judgement says so;
    BEIR's evaluation leaves such hits out of every set. A judgement that calls one relevant shows
    that ids of queries and documents have nothing to do with each other, as in Cranfield.
    """
    return not any(grades.get(query, 0) > 0 for query, grades in qrels.items())


def _require_match(run: Run, qrels: Qrels, source: str, judgements: str) -> None:
    """Refuse a run of another set, or of other ids, whose figures would all be 0."""
    found, judged = (
        dict.fromkeys(document for each in side.values() for document in each)
        for side in (run, qrels)
    )
    for what, ours, theirs in (("query", run, qrels), ("document", found, judged)):
        if ours.keys().isdisjoint(theirs):
            raise CorpusError(
                f"no {what} of {source} is in {judgements}: the run has ids such as "
                f"{some(ours) or 'none'}, the judgements {some(theirs)}; give files of one set, "
                "and check the split of the judgements and the id column that the run was made with"
            )
