"""Options of an update, a certificate and a migration. Importing them loads nothing heavy."""

from pathlib import Path
from typing import Any, Literal

from whiten_index.encoding.encoder_config import ApiOptions, EncoderConfig, OpeningOptions
from whiten_index.errors import ConfigError
from whiten_index.options import (
    MODEL,
    OUTPUT,
    RESOURCES,
    TRANSFORM,
    flag_of,
    option,
    parse_bytes,
    schema,
)
from whiten_index.paths import as_place, require_path
from whiten_index.pipeline.build_options import JUDGEMENTS, JudgementOptions, RunnerOptions

GATES = "Gates"
# Of a certificate and each of its strata, and why a gate or a check does not go by it.
LEAST_QUESTIONS = 30
OTHER_JUDGEMENTS = (
    "the queries or judgements are not those of the certificate; certify the index by them with "
    "whiten-index certify"
)
# Each canary is compared with every row.
_MOST_CANARIES, _MOST_GROWTH = 1_000_000, 1e12


@schema
class GateConfig:
    """Options of the gates that a new version must pass."""

    canaries: int = option(
        "Sampled documents that must find themselves and their neighbours.",
        GATES,
        default=200,
        ge=0,
        le=_MOST_CANARIES,
    )
    canary_file: str | None = option("Parquet file with queries of your own.", GATES, default=None)
    canary_recall: float | None = option(
        "Least recall@10 against exact search.",
        GATES,
        default=None,
        ge=0,
        le=1,
        shown="the index's own, less 0.05",
    )
    max_shrink: float = option(
        "Share of the rows that may be gone.", GATES, default=0.2, ge=0, le=1
    )
    max_growth: float = option(
        "Rows that may be added, as a share of those before.",
        GATES,
        default=1.0,
        ge=0,
        le=_MOST_GROWTH,
    )
    max_bytes: str | int | None = option(
        "Bytes that a version may take on disk, such as 4GiB.", GATES, default=None
    )

    certify_gate: float | None = option(
        "Points of nDCG@10 that any part of the certificate's questions may lose.",
        GATES,
        default=None,
        ge=0,
        le=100,
        shown="no certificate",
    )

    def __post_init__(self) -> None:
        _ = self.most_bytes

    @property
    def most_bytes(self) -> int | None:
        """``max_bytes`` as a number."""
        given = self.max_bytes
        return None if given is None else parse_bytes(given, option="--max-bytes")


@schema
class PublishedOptions(OpeningOptions, ApiOptions):
    """Options of a command that works on a published version and its corpus."""

    index: str = option("Folder of the index.", OUTPUT)
    store: str | None = option(
        "Folder of the raw embeddings.", OUTPUT, default=None, shown="as in the published version"
    )

    def __post_init__(self) -> None:
        for name in ("index", "store"):
            if (place := getattr(self, name)) is not None:
                as_place(place, what="INDEX" if name == "index" else flag_of(name))
        if self.model is not None:
            require_path(self.model, what=flag_of("model"))


@schema
class UpdateConfig(RunnerOptions, GateConfig, PublishedOptions):
    """Options of an update; all others are those of the published version.

    Without ``corpus``, the files that the version was built from are read. ``model`` must be the
    same model at another place; a model named here may be fetched from the hub.

    Raises:
        ConfigError: a value is out of bounds, or options do not go together.

    Examples:
        >>> UpdateConfig(index="index", refit="never").max_shrink
        0.2
    """

    corpus: tuple[str, ...] = ()
    index_device: Literal["auto", "cpu", "gpu"] = option(
        "Device that trains a new index, if the old one is not kept.", RESOURCES, default="auto"
    )
    refit: Literal["auto", "always", "never"] = option(
        "Fit the transform again: auto (if it drifted), always or never.", TRANSFORM, default="auto"
    )
    drift_threshold: float = option(
        "Drift in nats per dimension from which auto fits again.", TRANSFORM, default=0.002, ge=0
    )
    choose_again: bool = option(
        "Choose k, exponent and centring again, and fit.", TRANSFORM, default=False
    )
    read_all: bool = option(
        "Read files too whose size, time and footer did not change.", OUTPUT, default=False
    )

    def __post_init__(self) -> None:
        GateConfig.__post_init__(self)
        PublishedOptions.__post_init__(self)
        if self.canary_file is not None:
            require_path(self.canary_file, what=flag_of("canary_file"))
        for path in self.corpus:
            require_path(path, what="the corpus")
        if self.choose_again and self.refit == "never":
            raise ConfigError(
                "--choose-again fits the transform again, and --refit never keeps it; leave one out"
            )

    @property
    def order(self) -> Literal["auto", "always", "never"]:
        """Order whether to fit the transform again; ``choose_again`` includes a fit."""
        return "always" if self.choose_again else self.refit


@schema
class CertifyConfig(JudgementOptions, PublishedOptions):
    """Options of a certificate. Without ``queries``, pieces of documents ask for their document.

    Raises:
        ConfigError: queries without judgements, or a value out of bounds.

    Examples:
        >>> CertifyConfig(index="index", queries="q.jsonl", qrels="qrels.tsv").by
        ()
    """

    by: tuple[str, ...] = option(
        "Kept column whose values, or thirds of them, are measured apart; may be repeated.",
        JUDGEMENTS,
        default=(),
    )
    gate: float | None = option(
        "Points of nDCG@10 that any part of the questions may lose; above it nothing is published.",
        JUDGEMENTS,
        default=None,
        ge=0,
        le=100,
    )

    def __post_init__(self) -> None:
        self.require_both()
        PublishedOptions.__post_init__(self)

    def inputs(self) -> dict[str, Any]:
        """Return what the questions are made of, as the manifest has it."""
        files = {name: getattr(self, name) for name in ("queries", "qrels")}
        files = {name: path and str(Path(path).absolute()) for name, path in files.items()}
        return {**files, "qrels_split": self.qrels_split, "by": list(self.by)}


@schema
class MigrateConfig(JudgementOptions, EncoderConfig):
    """Options of a migration; ``model`` and its options are those of the new model.

    Raises:
        ConfigError: no model is named, or a value is out of bounds.

    Examples:
        >>> MigrateConfig(index="index", model="intfloat/e5-small").rows is None
        True
    """

    index: str = option("Folder of the index.", OUTPUT, default="")
    store: str | None = option(
        "Folder of the raw embeddings.", OUTPUT, default=None, shown="as in the published version"
    )
    old_model: str | None = option(
        "Place of the old model.", MODEL, default=None, shown="as in the published version"
    )
    rows: int | None = option(
        "Rows to encode in this run, drawn at random, and up to 1,023 more.",
        OUTPUT,
        default=None,
        ge=1,
        shown="all",
    )
    first: str | None = option(
        "Condition on columns of the corpus: with --rows, such rows are encoded first.",
        OUTPUT,
        default=None,
    )
    bridge: bool = option(
        "Until all rows are encoded, publish a version that maps the others to the new space.",
        OUTPUT,
        default=False,
    )
    k: str | int | None = option(
        "Width of the new vectors.", TRANSFORM, default=None, shown="as in the published version"
    )
    force: bool = option(
        "Publish though a fifth or more of the rows before are gone.", OUTPUT, default=False
    )
    give_up: bool = option(
        "Publish the old model's version, and let gc remove what the new one encoded.",
        OUTPUT,
        default=False,
    )
    max_loss: float | None = option(
        "Points that the new model may lose: of nDCG@10 by --queries, else of MRR by sentences.",
        JUDGEMENTS,
        default=None,
        ge=0,
        le=100,
        shown="no gate",
    )

    def __post_init__(self) -> None:
        EncoderConfig.__post_init__(self)
        self.require_both()
        if self.model is None and not self.give_up:
            raise ConfigError("say to which model: --model NAME")
        if self.first is not None and self.rows is None:
            raise ConfigError("--first is for runs of --rows N; name how many")
