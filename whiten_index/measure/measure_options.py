"""Schemas of the options of evaluations and sweeps. Importing them loads nothing heavy."""

from typing import Literal

from whiten_index.options import INDEX, MODEL, OUTPUT, RESOURCES, TRANSFORM, option, schema
from whiten_index.pipeline.build_options import JUDGEMENTS, JudgementOptions, RunnerOptions
from whiten_index.vectordb.push_config import DATABASE
from whiten_index.whitening.whitening_config import SimilarityOption

GRID = "Grid"
METRICS = ("ndcg@10", "recall@100", "mrr@10", "map@100")
TARGET, DISTINCT, SCORED = "target", "target-distinct", "target-scored"


@schema
class EvalOptions:
    """Options of every evaluation."""

    index: str | None = option(
        "Evaluate the encoder and the transform of a published index.",
        MODEL,
        default=None,
        min_length=1,
    )
    store: str | None = option(
        "Folder that keeps embeddings for later runs.",
        RESOURCES,
        default=None,
        min_length=1,
        shown="none kept",
    )
    fit: str = option(
        "What transforms are fitted on: target (all texts of the task, as often as they "
        "occur), target-distinct (each once), target-scored (those of the pairs that are "
        "scored), or a Parquet file of sentences: premise and hypothesis, sentence1 and "
        "sentence2, sentence, or text.",
        TRANSFORM,
        default=TARGET,
        min_length=1,
    )
    seed: int = option("Seed of every random draw.", TRANSFORM, default=0, shown="0")


@schema
class RetrievalOptions(RunnerOptions, JudgementOptions, SimilarityOption):
    """Options of an evaluation of retrieval."""

    factory: str = option("FAISS factory string.", INDEX, default="Flat")
    run: str | None = option(
        "Judge this run: .trec, .run, .txt, .parquet or .jsonl.", JUDGEMENTS, default=None
    )
    run_out: str | None = option(
        "Folder for the rankings, a TREC run of each set and setting.", OUTPUT, default=None
    )
    metrics: tuple[str, ...] = option(
        "ndcg@N, recall@N, mrr@N or map@N; may be repeated.",
        JUDGEMENTS,
        default=METRICS,
        min_length=1,
        flag="--metric",
    )


@schema
class SweepOptions(JudgementOptions, SimilarityOption):
    """Options that a sweep has and a build has not, or has with another default."""

    out: str | None = option(
        "Folder or URI of results.jsonl and the report.", OUTPUT, default=None, needed=()
    )
    store: str | None = option(
        "Raw embeddings, shared by builds.",
        OUTPUT,
        default=None,
        shown="OUT/store",
        needed=("corpus",),
    )
    widths: tuple[str | int, ...] = option(
        "Widths, separated by commas; this and the next three may be repeated.",
        GRID,
        default=("32", "64", "128", "256"),
        flag="--k",
    )
    transforms: tuple[str, ...] = option(
        "Also all-but-the-top, and whitening with an exponent: whitening:0.25.",
        GRID,
        default=("auto", "pca", "whitening", "truncate"),
    )
    codecs: tuple[str, ...] | None = option(
        "Also sq6, sq4, pqfs, rabitq, rabitq2, rabitq4, pqN for N bytes a vector, and FAISS's "
        "own names such as EDEN4, SQtqmse4 and PRQ16x3x8; with --in those of the database.",
        GRID,
        default=None,
        shown="fp32,fp16,sq8,pq; with --in all",
    )
    indexes: tuple[str, ...] = option(
        "Structures; a graph is built of the first codec at the two middle widths only.",
        GRID,
        default=("flat", "ivf", "hnsw"),
    )
    databases: tuple[str, ...] = option(
        "Measure inside this database, such as postgresql://me@db/test or lancedb:///folder, in a "
        "table that is removed afterwards; may be repeated.",
        DATABASE,
        default=(),
        flag="--in",
    )
    memory_price: float | None = option(
        "Price of a GB of memory and month, for $/month.", DATABASE, default=None, ge=0
    )
    disk_price: float | None = option(
        "Price of a GB of disk and month, for $/month.", DATABASE, default=None, ge=0
    )
    baselines: bool = option(
        "Also measure raw embeddings and FAISS's own PCA and whitening.", GRID, default=True
    )
    rerank: int = option(
        "Candidates per query that coarse codecs rank again; 0: none.", INDEX, default=100, ge=0
    )
    target_recall: float = option(
        "Index recall that lists and graphs are tuned for.", INDEX, default=0.95
    )
    choose_sample: int = option(
        "Documents that the transform auto is chosen on at most.", GRID, default=1_000
    )
    sample: int = option(
        "Rows held out as queries, if there are no judged ones.", JUDGEMENTS, default=500, ge=30
    )
    index_device: Literal["cpu", "gpu", "auto"] = option(
        "Device of filling and searching; kinds that no GPU takes stay on the CPU.",
        RESOURCES,
        default="cpu",
    )
    seed: int = option("Seed of every random sample.", INDEX, default=0)
    name: str | None = option(
        "Name of the corpus in the report.", OUTPUT, default=None, shown="its file or folder"
    )
