"""Configuration of evaluations: the embeddings, the transforms, their fit, the sets to search."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from whiten_index.artifacts.files import resolved
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError
from whiten_index.evaluation.metrics import parse_metric
from whiten_index.measure.measure_options import (
    DISTINCT,
    SCORED,
    TARGET,
    EvalOptions,
    RetrievalOptions,
)
from whiten_index.options import changed, schema
from whiten_index.paths import as_place
from whiten_index.versions.published import Version, read_published
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

# Fits on the sentences of the task itself.
OF_TASKS = (TARGET, DISTINCT, SCORED)
# Options of an encoder that say how that of an index is opened.
_OF_BUILDS = ("store", "seed", "factory", "similarity", "runner", "address", "workers")
OF_OPENING = ("model", "trust_remote_code", "device", "backend", "threads", "base_url")


@schema
class EvalConfig(EvalOptions):
    """The embeddings to evaluate and their transforms, with the options of ``EvalOptions``.

    Attributes:
        encoder: the Transformer; of an ``index``, only how the index's own encoder is opened.
        transforms: one a setting; empty for the embeddings as they are.

    Examples:
        >>> EvalConfig(transforms=(WhiteningConfig(k=128),)).fit
        'target'
    """

    encoder: EncoderConfig = EncoderConfig()
    transforms: tuple[WhiteningConfig, ...] = ()

    def __post_init__(self) -> None:
        if self.index is not None:
            as_place(self.index, what="the index")
        # An index's encoder still runs somewhere, and the user allows what it may do.
        encoder = changed(self.encoder, without=OF_OPENING)
        if self.index and encoder:
            raise ConfigError(
                f"{' and '.join(['--index', *encoder])} each say what to evaluate; give one of them"
            )
        if self.index and self.transforms:
            raise ConfigError(
                "an index has its own transform; leave out --whiten and --k, or evaluate its "
                "model with --model"
            )
        if self.fit != TARGET and not self.transforms:
            raise ConfigError(
                f"--fit {self.fit} fits a transform, and none is asked for; add --whiten whitening"
            )

    @cached_property
    def published(self) -> Version | None:
        """The version of ``index`` that is evaluated, read once."""
        return None if self.index is None else read_published(self.index)

    @property
    def opening(self) -> dict[str, Any]:
        """Options of ``open_index`` that open the encoder of ``index``."""
        return {name: getattr(self.encoder, name) for name in OF_OPENING}

    @property
    def fit_source(self) -> str | None:
        """The corpus that transforms are fitted on, None for the task itself."""
        return self.fit if self.transforms and self.fit not in OF_TASKS else None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Read the options of the command line, by their names."""
        own, encoder = (
            {f.name: options[f.name] for f in fields(made) if options.get(f.name) is not None}
            for made in (cls, EncoderConfig)
        )
        transforms = _transforms(options)
        return cls(**{**own, "encoder": EncoderConfig(**encoder), "transforms": transforms})


def _transforms(options: Mapping[str, Any]) -> tuple[WhiteningConfig, ...]:
    """Return a transform for each ``--k``, of the kind and options given; whitening by default."""
    widths = tuple(dict.fromkeys(options.get("k") or ()))
    defaults = vars(WhiteningConfig())
    given = {
        name: options[name]
        for name in defaults.keys() - {"kind", "k", "similarity"}
        if options.get(name) is not None
    }
    shaped = any(value != defaults[name] for name, value in given.items())
    kind = options.get("whiten") or (Kind.WHITENING if widths or shaped else Kind.NONE)
    config = WhiteningConfig(kind=Kind(kind), **given)
    if config.kind is Kind.NONE:
        if widths:
            raise ConfigError("--whiten none keeps every embedding as it is; leave out --k")
        return ()
    return tuple(replace(config, k=k) for k in widths) or (config,)


@schema
class RetrievalConfig(RetrievalOptions, EvalConfig):
    """The sets to search, what searches them, and how it is judged, by ``RetrievalOptions``.

    Transforms are fitted on the corpus of each set.
    """

    sets: tuple[str, ...] = ()  # folders in BEIR form

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.depth
        self._require_source()
        if self.fit != TARGET:
            raise ConfigError("--fit is for pairs of sentences, not for retrieval; leave it out")
        self._require_used()

    @property
    def depth(self) -> int:
        """Hits a query that the metrics need."""
        return max(parse_metric(metric)[1] for metric in self.metrics)

    @property
    def builds(self) -> bool:
        """True if indexes are built; False if a published index or a run is judged."""
        return self.run is None and self.index is None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sets: their folders', or that of a file of judgements."""
        if self.sets:
            return tuple(resolved(each).name for each in self.sets)
        file = resolved(str(self.qrels))
        folder = file.parent.parent if file.parent.name == "qrels" else file.parent
        return (folder.name or Path(str(self.qrels)).stem,)

    def run_path(self, name: str, transform: WhiteningConfig | None) -> Path | None:
        """Return where a ranking goes, None where it goes nowhere."""
        if self.run_out is None:
            return None
        kind = "index" if self.index is not None else "raw"
        if transform is not None:
            kind = transform.kind.value + ("" if transform.k is None else f"-k{transform.k}")
        return Path(self.run_out) / f"{name}.{kind}.trec"

    def _require_source(self) -> None:
        """Refuse what does not say one thing to search and one thing to judge it by."""
        if len(several := changed(self, only=("run", "index"))) > 1:
            raise ConfigError(
                f"{' and '.join(several)} each say what is searched; give one of them"
            )
        given = changed(self, only=("queries", "qrels"))
        if self.sets and given:
            raise ConfigError(
                f"{' and '.join(given)} names the files of a set, and a folder of one is named "
                "too; give one of the two"
            )
        needed = {"--qrels"} if self.run is not None else {"--queries", "--qrels"}
        if not self.sets and (self.builds or not needed <= set(given)):
            raise ConfigError(
                "no set is named: name its folder (corpus, queries and qrels), or judge an --index "
                "by --queries and --qrels, or a --run by --qrels"
            )
        if len(set(self.names)) < len(self.names) or (not self.builds and len(self.names) > 1):
            raise ConfigError(
                f"the sets {', '.join(self.names)} are named; each needs another name, and an "
                "index or a run is of one"
            )

    def _require_used(self) -> None:
        """Refuse options of a build or a search that does not happen."""
        if self.builds:
            return
        unused = ["--whiten or --k"] if self.transforms else []
        unused += changed(self, only=_OF_BUILDS)
        if self.run is not None:
            unused += changed(self, only=("queries", "run_out")) + changed(self.encoder)
        if unused:
            what = "an index" if self.run is None else "a run"
            raise ConfigError(
                f"{' and '.join(unused)} cannot apply, since {what} that is there is judged; "
                "leave it out"
            )
