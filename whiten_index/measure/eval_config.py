"""Evaluation's configuration: the embeddings, the transforms, and their fit."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import exists
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError
from whiten_index.measure.measure_options import DISTINCT, SCORED, TARGET, EvalOptions
from whiten_index.options import options_of, schema
from whiten_index.paths import require_folder, shown
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

# Fits on the sentences of the task itself.
OF_TASKS = (TARGET, DISTINCT, SCORED)
# Options of an encoder that say how that of an index is opened.
OF_OPENING = ("model", "trust_remote_code", "device", "threads")
VARIABLE = "WHITEN_INDEX_DATA"


@schema
class EvalConfig(EvalOptions):
    """The embeddings to evaluate and their transforms.

    Attributes:
        encoder: the Transformer. Of an ``index`` it says only where the index's own encoder is and
            runs, and whether that may run the model's code.
        index: folder of a published index, whose encoder and transform are evaluated.
        store: folder that keeps embeddings for later runs; None keeps none.
        transforms: one a setting; empty for the embeddings as they are.
        fit: what transforms are fitted on: ``target`` (all texts of the task, without labels, as
            often as they occur), ``target-distinct`` (each once), ``target-scored`` (those of
            the pairs that are scored), or a Parquet corpus of sentences.
        fit_columns: text columns of that file, each a sentence; empty for those known.
        seed: of everything drawn.

    Example:
        >>> EvalConfig(transforms=(WhiteningConfig(k=128),)).fit
        'target'
    """

    encoder: EncoderConfig = EncoderConfig()
    transforms: tuple[WhiteningConfig, ...] = ()

    def __post_init__(self) -> None:
        require_folder(self.index or "", what="an evaluation")
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
        if self.fit_columns and self.fit in OF_TASKS:
            raise ConfigError("--fit-column names columns of a file to fit on; add --fit FILE")

    @property
    def opening(self) -> dict[str, Any]:
        """Options of ``open_index`` that open the encoder of ``index``."""
        return {name: getattr(self.encoder, name) for name in OF_OPENING}

    @property
    def fit_source(self) -> str | None:
        """The corpus that transforms are fitted on, None for the task itself."""
        return self.fit if self.transforms and self.fit not in OF_TASKS else None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EvalConfig:
        """Read the options of the command line, by their names."""
        return cls(
            encoder=EncoderConfig(**_own(EncoderConfig, options)),
            transforms=_transforms(options),
            **_own(EvalOptions, options),
        )


def _own(made: type, options: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: options[f.name] for f in fields(made) if f.name in options}


def changed(given: Any, *, without: Collection[str] = (), only: Collection[str] = ()) -> list[str]:
    """Return the flags of the options of a schema's instance that are not at their defaults."""
    return [
        each.flag
        for each in options_of(type(given))
        if each.name not in without
        and (not only or each.name in only)
        and getattr(given, each.name) != each.default
    ]


def _transforms(options: Mapping[str, Any]) -> tuple[WhiteningConfig, ...]:
    """Return a transform for each ``--k``, of the kind and options given; whitening by default."""
    wanted = options.get("k") or ()
    # A job file may name a single width, as for a build.
    widths = tuple(dict.fromkeys(wanted if isinstance(wanted, list | tuple) else (wanted,)))
    kind = options.get("whiten")
    names = {f.name for f in fields(WhiteningConfig)} - {"kind", "k"}
    given = {name: options[name] for name in names if options.get(name) is not None}
    if kind is None:
        default = WhiteningConfig()
        shaped = [name for name in given if given[name] != getattr(default, name)]
        if not widths and set(shaped) <= {"seed"}:
            return ()
        kind = Kind.WHITENING.value
    if kind not in [each.value for each in Kind]:
        raise ConfigError(
            f"--whiten {shown(kind)} is no transform to evaluate; use one of "
            f"{', '.join(each.value for each in Kind)}"
        )
    config = WhiteningConfig(kind=Kind(kind), **given)
    if config.kind is Kind.NONE:
        if widths:
            raise ConfigError("--whiten none keeps every embedding as it is; leave out --k")
        return ()
    return tuple(replace(config, k=k) for k in widths) or (config,)


def data_path(name: str) -> Path:
    """Return the path of a public file or folder, such as ``sts/sts_raw.parquet``."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise ConfigError(
            f"no data is named and {VARIABLE} is not set; name the files, or set it to the folder "
            f"that holds {name}"
        )
    path = Path(folder) / name
    if not exists(path):
        raise ConfigError(f"{VARIABLE} is {folder}, which has no {name}; name the files instead")
    return path
