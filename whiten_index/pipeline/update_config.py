"""Options of an update and of its gates. Importing them loads nothing heavy."""

from typing import Annotated, Literal

from pydantic import Field

from whiten_index.errors import ConfigError
from whiten_index.options import MODEL, OUTPUT, RESOURCES, TRANSFORM, Option, flag_of, schema
from whiten_index.paths import as_place, require_path
from whiten_index.pipeline.build_options import RunnerOptions

GATES = "Gates"
# Each canary is compared with every row.
_MOST_CANARIES, _MOST_GROWTH = 1_000_000, 1e12


@schema
class GateConfig:
    """Options of the gates that a new version must pass."""

    canaries: Annotated[
        int,
        Field(ge=0, le=_MOST_CANARIES),
        Option("Sampled documents that must find themselves and their neighbours.", GATES),
    ] = 200
    canary_file: Annotated[str | None, Option("Parquet file with queries of your own.", GATES)] = (
        None
    )
    canary_recall: Annotated[
        float | None,
        Field(ge=0, le=1),
        Option(
            "Least recall@10 against exact search.", GATES, default="the index's own, less 0.05"
        ),
    ] = None
    max_shrink: Annotated[
        float, Field(ge=0, le=1), Option("Share of the rows that may be gone.", GATES)
    ] = 0.2
    max_growth: Annotated[
        float,
        Field(ge=0, le=_MOST_GROWTH),
        Option("Rows that may be added, as a share of those before.", GATES),
    ] = 1.0
    max_bytes: Annotated[
        str | int | None, Option("Bytes that a version may take on disk, such as 4GiB.", GATES)
    ] = None

    def __post_init__(self) -> None:
        _ = self.most_bytes

    @property
    def most_bytes(self) -> int | None:
        """``max_bytes`` as a number."""
        from whiten_index.index.choice import parse_bytes

        if self.max_bytes is None:
            return None
        return parse_bytes(self.max_bytes, option="--max-bytes")


@schema
class UpdateConfig(RunnerOptions, GateConfig):
    """Options of an update; all others are those of the published version.

    Without ``corpus``, the files that the version was built from are read. ``model`` must be the
    same model at another place; a model named here may be fetched from the hub.

    Raises:
        ConfigError: a value is out of bounds, or options do not go together.

    Examples:
        >>> UpdateConfig(index="index", refit="never").max_shrink
        0.2
    """

    index: Annotated[str, Option("Folder of the index to bring up to date.", OUTPUT)]
    corpus: tuple[str, ...] = ()
    store: Annotated[
        str | None,
        Option("Folder of the raw embeddings.", OUTPUT, default="as in the published version"),
    ] = None
    model: Annotated[
        str | None,
        Option("Place of the same encoder.", MODEL, default="as in the published version"),
    ] = None
    trust_remote_code: Annotated[
        bool, Option("Run Python code that comes with the model.", MODEL)
    ] = False
    device: Annotated[str, Option("Device of the encoder.", RESOURCES)] = "auto"
    threads: Annotated[
        int | None, Field(ge=1, le=1024), Option("CPU threads of encoder and FAISS.", RESOURCES)
    ] = None
    index_device: Annotated[
        Literal["auto", "cpu", "gpu"],
        Option("Device that trains a new index, if the old one is not kept.", RESOURCES),
    ] = "auto"
    refit: Annotated[
        Literal["auto", "always", "never"],
        Option("Fit the transform again: auto (if it drifted), always or never.", TRANSFORM),
    ] = "auto"
    drift_threshold: Annotated[
        float,
        Field(ge=0),
        Option("Drift in nats per dimension from which auto fits again.", TRANSFORM),
    ] = 0.002
    choose_again: Annotated[
        bool, Option("Choose k, exponent and centring again, and fit.", TRANSFORM)
    ] = False
    read_all: Annotated[
        bool, Option("Read files too whose size, time and footer did not change.", OUTPUT)
    ] = False

    def __post_init__(self) -> None:
        GateConfig.__post_init__(self)
        for name in ("model", "canary_file"):
            if (path := getattr(self, name)) is not None:
                require_path(path, what=flag_of(name))
        for name in ("index", "store"):
            if (place := getattr(self, name)) is not None:
                as_place(place, what="INDEX" if name == "index" else flag_of(name))
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
