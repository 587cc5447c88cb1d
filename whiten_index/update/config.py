"""What an update is asked to do: one frozen configuration, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from whiten_index.errors import ConfigError
from whiten_index.gates import GateConfig
from whiten_index.index import DEVICES
from whiten_index.whitening import DRIFT_THRESHOLD, Refit


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """Everything an update can be told; all else is as the published version was built.

    Attributes:
        index: folder of the index.
        corpus: Parquet files, folders, globs or URIs; empty for those that it was built from.
        store: folder of the raw embeddings, where it is no longer where it was.
        model: where the encoder is now, if no longer where it was; it must be the same one.
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
        named: Any = self.corpus
        given = (named,) if isinstance(named, str | Path) else named
        object.__setattr__(self, "corpus", tuple(map(str, given)))
        object.__setattr__(self, "index", str(self.index))
        for name, expected in get_type_hints(UpdateConfig).items():
            if name != "corpus":
                _require_type(name, getattr(self, name), expected)
        if "" in (self.index, self.store, *self.corpus):
            raise ConfigError("an empty path was given; name a folder or file")
        if self.index_device not in DEVICES:
            raise ConfigError(
                f"--index-device {self.index_device!r} is unknown; use {', '.join(DEVICES)}"
            )
        order = Refit.parse(self.refit)
        if self.choose_again and order is Refit.NEVER:
            raise ConfigError(
                "--choose-again fits the transform again, and --refit never keeps it; leave one out"
            )
        if not 0 <= self.drift_threshold < math.inf:
            raise ConfigError(
                f"--drift-threshold takes nats per dimension, 0 or more; {self.drift_threshold} "
                "was given"
            )
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


def _require_type(name: str, value: object, expected: Any) -> None:
    """Refuse a value that a job file or a caller gave in another type than the field's."""
    kinds = get_args(expected) or (expected,)
    fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
    if not fits or (isinstance(value, bool) and bool not in kinds):
        shown = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise ConfigError(f"--{name.replace('_', '-')} takes {shown}; {value!r} was given")
