"""Schemas of the options of evaluations and sweeps. Importing them loads nothing heavy."""

from typing import Annotated, Literal

from pydantic import Field

from whiten_index.options import INDEX, MODEL, OUTPUT, RESOURCES, TRANSFORM, Option, schema
from whiten_index.pipeline.build_options import JUDGEMENTS, JudgementOptions

GRID = "Grid"
METRICS = ("ndcg@10", "recall@100", "mrr@10", "map@100")
TARGET, DISTINCT, SCORED = "target", "target-distinct", "target-scored"


@schema
class EvalOptions:
    """Options of every evaluation."""

    index: Annotated[
        str | None,
        Field(min_length=1),
        Option("Evaluate the encoder and the transform of a published index.", MODEL),
    ] = None
    store: Annotated[
        str | None,
        Field(min_length=1),
        Option("Folder that keeps embeddings for later runs.", RESOURCES, default="none kept"),
    ] = None
    fit: Annotated[
        str,
        Field(min_length=1),
        Option(
            "What transforms are fitted on: target (all texts of the task, as often as they "
            "occur), target-distinct (each once), target-scored (those of the pairs that are "
            "scored), or a Parquet file of sentences: premise and hypothesis, sentence1 and "
            "sentence2, sentence, or text.",
            TRANSFORM,
        ),
    ] = TARGET
    seed: Annotated[int, Option("Seed of every random draw.", TRANSFORM, default="0")] = 0


@schema
class RetrievalOptions(JudgementOptions):
    """Options of an evaluation of retrieval."""

    factory: Annotated[str, Option("FAISS factory string.", INDEX)] = "Flat"
    run: Annotated[
        str | None, Option("Judge this run: .trec, .run, .txt, .parquet or .jsonl.", JUDGEMENTS)
    ] = None
    run_out: Annotated[
        str | None,
        Option("Write the rankings: a file as of --run, or a folder for several settings.", OUTPUT),
    ] = None
    metrics: Annotated[
        tuple[str, ...],
        Field(min_length=1),
        Option("ndcg@N, recall@N, mrr@N or map@N; may be repeated.", JUDGEMENTS, flag="--metric"),
    ] = METRICS
    drop_self: Annotated[
        bool | None,
        Option(
            "Leave out hits with the query's own id, as BEIR does.",
            JUDGEMENTS,
            default="yes, unless the judgements call such a hit relevant",
        ),
    ] = None


@schema
class SweepOptions(JudgementOptions):
    """Options that a sweep has and a build has not, or has with another default."""

    out: Annotated[
        str | None, Option("Folder of results.jsonl and of the report.", OUTPUT, needed=())
    ] = None
    store: Annotated[
        str | None,
        Option(
            "Raw embeddings, shared by builds.", OUTPUT, default="OUT/store", needed=("corpus",)
        ),
    ] = None
    widths: Annotated[
        tuple[str | int, ...],
        Option(
            "Widths, separated by commas; this and the next three may be repeated.",
            GRID,
            flag="--k",
        ),
    ] = ("32", "64", "128", "256")
    transforms: Annotated[
        tuple[str, ...],
        Option(
            "Also all-but-the-top, random, and whitening with an exponent: whitening:0.25.", GRID
        ),
    ] = ("auto", "pca", "whitening", "truncate")
    codecs: Annotated[
        tuple[str, ...],
        Option(
            "Also sq6, sq4, pqfs, rabitq, rabitq2, rabitq4, pqN for N bytes a vector, and FAISS's "
            "own names such as PRQ16x3x8.",
            GRID,
        ),
    ] = ("fp32", "fp16", "sq8", "pq")
    indexes: Annotated[
        tuple[str, ...],
        Option(
            "Structures; a graph is built of the first codec at the two middle widths only.", GRID
        ),
    ] = ("flat", "ivf", "hnsw")
    baselines: Annotated[
        bool, Option("Also measure raw embeddings and FAISS's own PCA and whitening.", GRID)
    ] = True
    rerank: Annotated[
        int,
        Field(ge=0),
        Option("Candidates per query that coarse codecs rank again; 0: none.", INDEX),
    ] = 100
    target_recall: Annotated[
        float, Option("Index recall that lists and graphs are tuned for.", INDEX)
    ] = 0.95
    choose_sample: Annotated[
        int, Option("Documents that the transform auto is chosen on at most.", GRID)
    ] = 1_000
    sample: Annotated[
        int,
        Field(ge=30),
        Option("Rows held out as queries, if there are no judged ones.", JUDGEMENTS),
    ] = 500
    index_device: Annotated[
        Literal["cpu", "gpu", "auto"],
        Option(
            "Device of filling and searching; kinds that no GPU takes stay on the CPU.", RESOURCES
        ),
    ] = "cpu"
    seed: Annotated[int, Option("Seed of every random sample.", INDEX)] = 0
    name: Annotated[
        str | None,
        Option("Name of the corpus in the report.", OUTPUT, default="its file or folder"),
    ] = None
