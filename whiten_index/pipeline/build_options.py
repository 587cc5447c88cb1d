"""Schemas of the options of a build and an encode. Importing them loads nothing heavy."""

from typing import Annotated, Literal

from pydantic import Field

from whiten_index.corpus.corpus_options import CorpusColumns
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError
from whiten_index.options import CORPUS, INDEX, OUTPUT, RESOURCES, TRANSFORM, Option, schema
from whiten_index.whitening.transform_options import TransformShape

JUDGEMENTS = "Judgements"
_STORE = "Folder or URI of the raw embeddings; several corpora may share it."
TransformName = Literal[
    "auto", "none", "pca", "whitening", "zca", "zca-cor", "group", "all-but-the-top", "random",
    "truncate",
]  # fmt: skip


@schema
class CorpusOptions(CorpusColumns):
    """Options of reading a corpus."""

    passage_tokens: Annotated[
        int | None,
        Field(ge=1),
        Option(
            "Cut long texts into passages of N tokens at most; search then shows each document "
            "once, with its best passage.",
            CORPUS,
        ),
    ] = None
    overlap: Annotated[
        int | None,
        Field(ge=0),
        Option(
            "Tokens that neighbouring passages share, half a passage at most.", CORPUS, default="0"
        ),
    ] = None


@schema
class _Transform:
    """A transform by its name and width."""

    whiten: Annotated[
        TransformName,
        Option(
            "The transform; auto chooses k, exponent and centring by the corpus, or by labels.",
            TRANSFORM,
        ),
    ] = "auto"
    k: Annotated[
        str | int | float | None,
        Option(
            "Width kept: a number, full, or a share of variance such as 0.95.",
            TRANSFORM,
            default="auto chooses it; else a third of the embedding's width, at most 256",
        ),
    ] = None


@schema
class JudgementOptions:
    """Options of judged queries."""

    queries: Annotated[
        str | None, Option("File of judged queries: .parquet or .jsonl, id and text.", JUDGEMENTS)
    ] = None
    qrels: Annotated[
        str | None,
        Option("Judgements of the queries: .parquet, .tsv, or TREC's .qrels, .txt.", JUDGEMENTS),
    ] = None
    qrels_split: Annotated[
        str | None,
        Option("Split of the judgements, where the file has a column split.", JUDGEMENTS),
    ] = None

    def require_both(self) -> None:
        """Refuse queries without judgements, and judgements without queries."""
        if (self.queries is None) != (self.qrels is None):
            raise ConfigError(
                f"{'--queries' if self.queries is None else '--qrels'} is missing: --queries FILE "
                "holds the texts and --qrels FILE says which documents answer them"
            )
        if self.qrels is None and self.qrels_split is not None:
            raise ConfigError(f"--qrels-split {self.qrels_split} needs --qrels FILE")


@schema
class TransformOptions(TransformShape, _Transform, JudgementOptions):
    """Options of the transform; with ``whiten="auto"``, those given are not chosen."""

    pairs: Annotated[
        str | None,
        Option(
            "File of pairs of texts, scored or not, that auto chooses by, as by judged queries.",
            JUDGEMENTS,
        ),
    ] = None
    choose_sample: Annotated[
        int,
        Field(ge=50, le=10_000),
        Option("Documents that auto chooses on at most, without labels.", TRANSFORM),
    ] = 1_000


@schema
class IndexOptions:
    """Options of the FAISS index."""

    factory: Annotated[
        str,
        Option(
            "FAISS factory string; auto: exact search up to 200,000 rows, then lists (IVF), or a "
            "graph (HNSW) for a --target-recall of 0.99 or more if it fits --memory-budget; in the "
            "most precise codec that fits the budget, float32 without one.",
            INDEX,
        ),
    ] = "auto"
    target_recall: Annotated[
        float,
        Field(gt=0, le=1),
        Option("Share of the exact neighbours that a search is set to find.", INDEX),
    ] = 0.95
    memory_budget: Annotated[
        str | int | None,
        Option(
            "Memory of the index during a build, on top of the Python process, such as 512MB or "
            "4GiB; a larger index is built on disk and mapped.",
            RESOURCES,
            default="unlimited",
        ),
    ] = None
    index_device: Annotated[
        Literal["auto", "cpu", "gpu"],
        Option("Device that trains and fills the index; auto: a GPU that FAISS sees.", RESOURCES),
    ] = "auto"


@schema
class RunnerOptions:
    """Options of the machines that do the work."""

    runner: Annotated[
        Literal["local", "ray"], Option("This machine, or workers on a Ray cluster.", RESOURCES)
    ] = "local"
    address: Annotated[
        str | None,
        Option(
            "Head of the cluster, host:port; auto for the one on this machine, local to start one.",
            RESOURCES,
            default="RAY_ADDRESS, else one that runs here, else one started here",
        ),
    ] = None
    workers: Annotated[
        int | None,
        Field(ge=1),
        Option(
            "Workers on the cluster.",
            RESOURCES,
            default="one for each GPU, or for each machine without GPUs",
        ),
    ] = None


@schema
class EncodeOptions(RunnerOptions, CorpusOptions, EncoderConfig):
    """Options of an encode."""

    corpus: tuple[str, ...] = ()
    store: Annotated[str | None, Option(_STORE, OUTPUT, needed=())] = None
    store_dtype: Annotated[
        Literal["float16", "float32", "own"] | None,
        Option(
            "Type of the stored embeddings.", OUTPUT, default="float16; own for an embedding column"
        ),
    ] = None


@schema
class BuildOptions(IndexOptions, TransformOptions, EncodeOptions):
    """Options of a build."""

    out: Annotated[
        str | None, Option("Folder or URI of the index: s3://BUCKET/PREFIX.", OUTPUT, needed=())
    ] = None
    store: Annotated[
        str | None, Option(_STORE, OUTPUT, default="OUT/store", needed=("corpus",))
    ] = None
    force: Annotated[
        bool, Option("Publish though a fifth or more of the rows before are gone.", OUTPUT)
    ] = False
    seed: Annotated[int, Option("Seed of every random sample, direction and group.", INDEX)] = 0
