"""Options of a sweep. Importing them loads nothing heavy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from whiten_index.options import INDEX, OUTPUT, RESOURCES, Option, schema

JUDGEMENTS, GRID = "Judgements", "Grid"


@schema
class SweepOptions:
    """Options that a sweep has and a build has not, or has with another default."""

    out: Annotated[
        str | None, Option("Folder of results.jsonl and report.html, .md and .json.", OUTPUT)
    ] = None
    store: Annotated[
        str | None,
        Option("Folder of raw embeddings, shared by builds.", OUTPUT, default="OUT/store"),
    ] = None
    queries: Annotated[
        str | None,
        Option("File of judged queries: .parquet or .jsonl, id and text.", JUDGEMENTS),
    ] = None
    qrels: Annotated[
        str | None,
        Option("Judgements of the queries: .parquet, .tsv, or TREC's .qrels, .txt.", JUDGEMENTS),
    ] = None
    qrels_split: Annotated[
        str | None,
        Option("Split of the judgements, where the file has a column split.", JUDGEMENTS),
    ] = None
    widths: Annotated[
        tuple[str, ...],
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
