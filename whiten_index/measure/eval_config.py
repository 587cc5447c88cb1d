"""What an evaluation is asked: which embeddings, which transforms, fitted on what."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import exists
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError
from whiten_index.paths import require_folder, require_no_secret
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

TARGET, DISTINCT, SCORED = "target", "target-distinct", "target-scored"
# Fits on the sentences of the task itself.
OF_TASKS = (TARGET, DISTINCT, SCORED)
# Options of an encoder that say how that of an index is opened.
OF_OPENING = ("model", "trust_remote_code", "device", "threads")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """The embeddings to evaluate and their transforms.

    Attributes:
        encoder: the Transformer. Of an ``index`` it says only where the index's own encoder is and
            runs, and whether that may run code of its own.
        index: folder of a published index, whose encoder and transform are evaluated.
        store: folder that keeps embeddings for later runs; None keeps none.
        transforms: one a setting; empty for the embeddings as they are.
        fit: what transforms are fitted on: ``target`` (all texts of the task, without labels, as
            often as they occur), ``target-distinct`` (each once), ``target-scored`` (those of
            the pairs that are scored), or a Parquet corpus of sentences.
        fit_columns: text columns of that file, each a sentence of its own; None for those known.
        seed: of everything drawn.

    Example:
        >>> EvalConfig(transforms=(WhiteningConfig(k=128),)).fit
        'target'
    """

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    index: str | None = None
    store: str | None = None
    transforms: tuple[WhiteningConfig, ...] = ()
    fit: str = TARGET
    fit_columns: tuple[str, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_no_secret(vars(self), what="an option of an evaluation")
        paths = ("index", "store", "fit")
        if empty := [name for name in paths if getattr(self, name) == ""]:
            raise ConfigError(f"--{empty[0].replace('_', '-')} is empty; name a file or folder")
        self._require_one_source()
        self._require_used()

    @property
    def opening(self) -> dict[str, Any]:
        """How the encoder of ``index`` is opened, as options of ``open_index``."""
        return {name: getattr(self.encoder, name) for name in OF_OPENING}

    def _require_one_source(self) -> None:
        """Refuse options of an encoder with an index, which has its own."""
        require_folder(self.index or "", what="an evaluation")
        if self.index is None:
            return
        default = EncoderConfig()
        # An index's encoder still runs somewhere, and the user allows what it may do.
        encoder = [
            f"--{f.name.replace('_', '-')}"
            for f in fields(EncoderConfig)
            if f.name not in OF_OPENING
            and getattr(self.encoder, f.name) != getattr(default, f.name)
        ]
        if encoder:
            raise ConfigError(
                f"{' and '.join(['--index', *encoder])} each say what to evaluate; give one of them"
            )

    def _require_used(self) -> None:
        """Refuse options that nothing would look at."""
        fitted = bool(self.transforms)
        unused = {
            "an index has its own transform; leave out --whiten and --k, or evaluate its model "
            "with --model": self.index and fitted,
            f"--fit {self.fit} fits a transform, and none is asked for; add --whiten whitening": (
                self.fit != TARGET and not fitted
            ),
            "--fit-column names columns of a file to fit on; add --fit FILE": self.fit_columns
            and self.fit in OF_TASKS,
        }
        for message, found in unused.items():
            if found:
                raise ConfigError(message)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EvalConfig:
        """Read the options of the command line, by their names."""
        encoder = {f.name: options[f.name] for f in fields(EncoderConfig) if f.name in options}
        own = {f.name for f in fields(cls)} - {"encoder", "transforms"}
        rest = {name: options[name] for name in own if name in options}
        columns = rest.get("fit_columns")
        rest["fit_columns"] = tuple(columns) if columns else None
        return cls(encoder=EncoderConfig(**encoder), transforms=transforms_of(options), **rest)


def transforms_of(options: Mapping[str, Any]) -> tuple[WhiteningConfig, ...]:
    """Return one transform for each ``--k`` asked for, of the kind and options given.

    ``--k`` alone means whitening.
    """
    widths = tuple(dict.fromkeys(options.get("k") or ()))
    kind = options.get("whiten")
    names = {f.name for f in fields(WhiteningConfig)} - {"kind", "k"}
    given = {name: options[name] for name in names if options.get(name) is not None}
    if kind is None:
        default = WhiteningConfig()
        shaped = [name for name in given if given[name] != getattr(default, name)]
        if not widths and set(shaped) <= {"seed"}:
            return ()
        kind = Kind.WHITENING.value
    config = WhiteningConfig(kind=Kind(kind), **given)
    if config.kind is Kind.NONE:
        if widths:
            raise ConfigError("--whiten none keeps every embedding as it is; leave out --k")
        return ()
    return tuple(replace(config, k=k) for k in widths) or (config,)


VARIABLE = "WHITEN_INDEX_DATA"


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
