"""Schemas of the options of a build and an encode. Importing them loads nothing heavy."""

from typing import Literal

from whiten_index.corpus.corpus_options import CorpusColumns
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError
from whiten_index.options import CORPUS, INDEX, OUTPUT, RESOURCES, TRANSFORM, option, schema
from whiten_index.whitening.whitening_config import SimilarityOption, TransformShape

JUDGEMENTS = "Judgements"
_STORE = "Folder or URI of the raw embeddings; several corpora may share it."
TransformName = Literal[
    "auto", "none", "pca", "whitening", "all-but-the-top", "truncate"
]  # fmt: skip


@schema
class _Transform:
    whiten: TransformName = option(
        "The transform; auto chooses k, exponent and centring by the corpus, or by labels.",
        TRANSFORM,
        default="auto",
    )
    k: str | int | float | None = option(
        "Width kept: a number, full, or a share of variance such as 0.95.",
        TRANSFORM,
        default=None,
        shown="auto chooses it; else a third of the embedding's width, at most 256",
    )


@schema
class JudgementOptions:
    """Options of judged queries."""

    queries: str | None = option(
        "File of judged queries: .parquet or .jsonl, id and text.", JUDGEMENTS, default=None
    )
    qrels: str | None = option(
        "Judgements of the queries: .parquet, .tsv, or TREC's .qrels, .txt.",
        JUDGEMENTS,
        default=None,
    )
    qrels_split: str | None = option(
        "Split of the judgements, where the file has a column split.", JUDGEMENTS, default=None
    )

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
class RunnerOptions:
    """Options of the machines that do the work."""

    runner: Literal["local", "ray"] = option(
        "This machine, or workers on a Ray cluster.", RESOURCES, default="local"
    )
    address: str | None = option(
        "Head of the cluster, host:port; auto for the one on this machine, local to start one.",
        RESOURCES,
        default=None,
        shown="RAY_ADDRESS, else one that runs here, else one started here",
    )
    workers: int | None = option(
        "Workers on the cluster.",
        RESOURCES,
        default=None,
        ge=1,
        shown="one for each GPU, or for each machine without GPUs",
    )


@schema
class EncodeOptions(RunnerOptions, CorpusColumns, EncoderConfig):
    """Options of an encode."""

    corpus: tuple[str, ...] = ()
    passage_tokens: int | None = option(
        "Cut long texts into passages of N tokens at most; search then shows each document "
        "once, with its best passage.",
        CORPUS,
        default=None,
        ge=1,
    )
    overlap: int | None = option(
        "Tokens that neighbouring passages share, half a passage at most.",
        CORPUS,
        default=None,
        ge=0,
        shown="0",
    )
    store: str | None = option(_STORE, OUTPUT, default=None, needed=())
    store_dtype: Literal["float16", "float32", "own"] | None = option(
        "Type of the stored embeddings.",
        OUTPUT,
        default=None,
        shown="float16; own for an embedding column",
    )


@schema
class BuildOptions(TransformShape, SimilarityOption, _Transform, JudgementOptions, EncodeOptions):
    """Options of a build; with ``whiten="auto"``, those given of the transform are not chosen."""

    choose_sample: int = option(
        "Documents that auto chooses on at most, without labels.",
        TRANSFORM,
        default=1_000,
        ge=50,
        le=10_000,
    )
    factory: str = option(
        "FAISS factory string; auto: exact search up to 200,000 rows, then lists (IVF), or a "
        "graph (HNSW) for a --target-recall of 0.99 or more if it fits --memory-budget; in the "
        "most precise codec that fits the budget, float32 without one.",
        INDEX,
        default="auto",
    )
    target_recall: float = option(
        "Share of the exact neighbours that a search is set to find.",
        INDEX,
        default=0.95,
        gt=0,
        le=1,
    )
    max_latency: str | None = option(
        "Time that 95 % of searches may take at that recall, such as 5ms.", INDEX, default=None
    )
    memory_budget: str | int | None = option(
        "Memory of the index during a build, on top of the Python process, such as 512MB or "
        "4GiB; a larger index is built on disk and mapped.",
        RESOURCES,
        default=None,
        shown="unlimited",
    )
    index_device: Literal["auto", "cpu", "gpu"] = option(
        "Device that trains and fills the index; auto: a GPU that FAISS sees.",
        RESOURCES,
        default="auto",
    )
    out: str | None = option(
        "Folder or URI of the index: s3://BUCKET/PREFIX.", OUTPUT, default=None, needed=()
    )
    store: str | None = option(_STORE, OUTPUT, default=None, shown="OUT/store", needed=("corpus",))
    force: bool = option(
        "Publish though a fifth or more of the rows before are gone.", OUTPUT, default=False
    )
    seed: int = option("Seed of every random sample.", INDEX, default=0)
