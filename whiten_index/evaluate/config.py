"""What an evaluation is asked: which embeddings, which transforms, fitted on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from whiten_index.encoding import EncoderConfig
from whiten_index.errors import ConfigError
from whiten_index.whitening import Kind, WhiteningConfig

TARGET, DISTINCT, SCORED, NLI = "target", "target-distinct", "target-scored", "nli"
_OF_WORDS = ("word_counts", "sif_weight", "cased")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """The embeddings to evaluate and their transforms.

    Attributes:
        encoder: the Transformer; not used with ``word_vectors`` or ``index``.
        word_vectors: file of word vectors, whose average takes the place of the encoder.
        word_counts: file of words and their counts: the average is SIF's, weighted by rarity.
        sif_weight: a of SIF's weight a/(a + p).
        cased: look words up as they are written first, then in lower case.
        index: folder of a published index, whose encoder and transform are evaluated.
        store: folder that keeps embeddings for later runs; None keeps none.
        transforms: one a setting; empty for the embeddings as they are.
        fit: what transforms are fitted on: ``target`` (all texts of the task, without labels, as
            often as they occur), ``target-distinct`` (each once), ``target-scored`` (those of
            the pairs that are scored), ``nli``, or a Parquet file.
        fit_columns: text columns of that file, each a sentence of its own; None for those known.
        nli: Parquet file or folder of NLI sentences, what ``nli`` stands for.
        remove_common: take SIF's common component off, that of the texts of the task.
        seed: of everything drawn.
    """

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    word_vectors: str | None = None
    word_counts: str | None = None
    sif_weight: float = 1e-3
    cased: bool = False
    index: str | None = None
    store: str | None = None
    transforms: tuple[WhiteningConfig, ...] = ()
    fit: str = TARGET
    fit_columns: tuple[str, ...] | None = None
    nli: str | None = None
    remove_common: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        sources = {"--word-vectors": self.word_vectors, "--index": self.index}
        given = [name for name, value in sources.items() if value is not None]
        if self.encoder.model is not None:
            given.append("--model")
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} each say what to evaluate; give one of them")
        if self.word_vectors is None and self.word_counts is not None:
            raise ConfigError("--word-counts weighs word vectors; add --word-vectors FILE")
        if self.index is not None and self.transforms:
            raise ConfigError(
                "an index has its own transform; leave out --whiten and --k, or evaluate its "
                "model with --model"
            )
        if not 0 < self.sif_weight < 1:
            raise ConfigError(f"--sif-weight {self.sif_weight:g} is outside 0 to 1; 0.001 is usual")
        if not self.transforms and self.fit != TARGET:
            raise ConfigError(
                f"--fit {self.fit} fits a transform, and none is asked for; add --whiten whitening"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EvalConfig:
        """Read the options of the command line, by their names.

        Raises:
            ConfigError: options that do not go together.
        """
        encoder = {f.name: options[f.name] for f in fields(EncoderConfig) if f.name in options}
        own = {f.name for f in fields(cls)} - {"encoder", "transforms"}
        rest = {name: options[name] for name in own if name in options}
        columns = rest.get("fit_columns")
        rest["fit_columns"] = tuple(columns) if columns else None
        return cls(encoder=EncoderConfig(**encoder), transforms=transforms_of(options), **rest)


def transforms_of(options: Mapping[str, Any]) -> tuple[WhiteningConfig, ...]:
    """Return one transform for each ``--k`` asked for, of the kind and options given.

    ``--k`` alone means whitening.

    Raises:
        ConfigError: options that the kind does not take.
    """
    widths = tuple(dict.fromkeys(options.get("k") or ()))
    kind = options.get("whiten")
    names = {f.name for f in fields(WhiteningConfig)} - {"kind", "k"}
    given = {name: options[name] for name in names if options.get(name) is not None}
    if kind is None:
        shaped = {name: value for name, value in given.items() if name != "seed" and value}
        if not widths and not shaped:
            return ()
        kind = Kind.WHITENING.value
    config = WhiteningConfig(kind=Kind(kind), **given)
    if config.kind is Kind.NONE:
        if widths:
            raise ConfigError("--whiten none keeps every embedding as it is; leave out --k")
        return ()
    return tuple(replace(config, k=k) for k in widths) or (config,)
