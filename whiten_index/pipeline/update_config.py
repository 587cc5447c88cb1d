"""What an update is asked to do: one frozen configuration, checked when it is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from whiten_index.artifacts.paths import (
    is_finite,
    require_folder,
    require_no_secret,
    require_path,
    shown,
)
from whiten_index.encoding import EncoderConfig
from whiten_index.errors import ConfigError
from whiten_index.index import DEVICES
from whiten_index.pipeline.gates import GateConfig
from whiten_index.whitening import DRIFT_THRESHOLD, Refit


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """Everything an update can be told; all else is as the published version was built.

    Attributes:
        index: folder of the index.
        corpus: Parquet files, folders, globs or URIs; empty for those that it was built from.
        store: folder of the raw embeddings, where it is no longer where it was.
        model: where the encoder is now, if no longer where it was; it must be the same one. What
            is named here may be fetched from the hub.
        trust_remote_code: let the encoder run Python code that comes with its model.
        device: of the encoder.
        threads: CPU threads of the encoder and of FAISS.
        index_device: where an index is made that is trained anew: ``auto``, ``cpu`` or ``gpu``.
        refit: ``auto`` fits the transform again where it drifted, ``always``, or ``never``.
        drift_threshold: drift in nats per dimension from which on ``auto`` fits again.
        choose_again: choose k, exponent and centring again where the build chose them; it fits
            again, and the width of the vectors may change.
        read_all: read files too that are as they were by size, time and footer.
        canaries, canary_file, canary_recall, max_shrink, max_growth, max_bytes: see ``GateConfig``.
    """

    index: str
    corpus: tuple[str, ...] = ()
    store: str | None = None
    model: str | None = None
    trust_remote_code: bool = False
    device: str = "auto"
    threads: int | None = None
    index_device: str = "auto"
    refit: str = Refit.AUTO.value
    drift_threshold: float = DRIFT_THRESHOLD
    choose_again: bool = False
    read_all: bool = False
    canaries: int = GateConfig.canaries
    canary_file: str | None = None
    canary_recall: float | None = None
    max_shrink: float = GateConfig.max_shrink
    max_growth: float = GateConfig.max_growth
    max_bytes: str | int | None = None

    def __post_init__(self) -> None:
        require_no_secret(vars(self), what="an option of an update")
        object.__setattr__(self, "corpus", _paths(self.corpus))
        index: Any = self.index
        object.__setattr__(self, "index", str(index) if isinstance(index, Path) else index)
        for name, expected in get_type_hints(UpdateConfig).items():
            if name != "corpus":
                _require_type(name, getattr(self, name), expected)
        for name in ("index", "store", "model", "canary_file"):
            if (path := getattr(self, name)) is not None:
                require_path(path, what=f"--{name.replace('_', '-')}")
        for name in ("index", "store"):
            require_folder(getattr(self, name) or "", what="an update")
        for path in self.corpus:
            require_path(path, what="the corpus")
        if self.index_device not in DEVICES:
            raise ConfigError(
                f"--index-device {self.index_device!r} is unknown; use {', '.join(DEVICES)}"
            )
        order = Refit.parse(self.refit)
        if self.choose_again and order is Refit.NEVER:
            raise ConfigError(
                "--choose-again fits the transform again, and --refit never keeps it; leave one out"
            )
        if not (is_finite(self.drift_threshold) and self.drift_threshold >= 0):
            raise ConfigError(
                "--drift-threshold takes nats per dimension, 0 or more; "
                f"{shown(self.drift_threshold)} was given"
            )
        if self.threads is not None:
            EncoderConfig(threads=self.threads)
        self.gates()

    def gates(self) -> GateConfig:
        """Return what a new version must pass."""
        names = GateConfig.__dataclass_fields__
        return GateConfig(**{name: getattr(self, name) for name in names})

    @property
    def order(self) -> Refit:
        """Whether the transform is fitted again; choosing it again is fitting it again."""
        return Refit.ALWAYS if self.choose_again else Refit.parse(self.refit)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def _paths(given: object) -> tuple[str, ...]:
    """Return the corpus as paths, whether one was named or many."""
    listed = [given] if isinstance(given, str | Path) else given
    if not isinstance(listed, list | tuple) or not all(isinstance(p, str | Path) for p in listed):
        raise ConfigError(f"corpus takes a path, or a list of paths; {shown(given)} was given")
    return tuple(map(str, listed))


def _require_type(name: str, value: object, expected: Any) -> None:
    """Refuse a value that a job file or a caller gave in another type than the field's."""
    kinds = get_args(expected) or (expected,)
    fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
    if not fits or (isinstance(value, bool) and bool not in kinds):
        legal = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise ConfigError(f"--{name.replace('_', '-')} takes {legal}; {shown(value)} was given")
