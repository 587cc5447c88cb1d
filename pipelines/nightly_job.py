"""The job file of the nightly update: options of the update, and what is done beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.config import read_toml
from whiten_index.errors import ConfigError
from whiten_index.given import require_path, shown

_OWN: dict[str, tuple[type, str]] = {
    "keep_versions": (int, "a number of versions"),
    "gc": (bool, "true or false"),
    "compact": (bool, "true or false"),
    "metrics": (str, "a path"),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a job file says; its paths are relative to the folder that the job runs in.

    Attributes:
        index: folder of the index.
        update: options of the update, by the names of ``UpdateConfig``, ``index`` among them.
        keep_versions: sound versions that stay, None for all.
        gc: whether shards that no kept version needs are dropped once versions were.
        compact: whether small shards of the store are joined.
        metrics: file for node_exporter, None for none.
    """

    index: Path
    update: Mapping[str, Any]
    keep_versions: int | None = None
    gc: bool = True
    compact: bool = False
    metrics: Path | None = None

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job file.

        Raises:
            ConfigError: it cannot be read, is not TOML, or sets what is unknown or of no use.
        """
        from whiten_index.update import UpdateConfig

        update = _values(path)
        own = {name: update.pop(name) for name in _OWN if name in update}
        known = {*UpdateConfig.__dataclass_fields__, *_OWN}
        if odd := [name for name in update if name not in known]:
            raise ConfigError(
                f"job file {path} sets {_options(odd)}, which is unknown; known are "
                f"{_options(sorted(known))}"
            )
        index = update.get("index")
        if not isinstance(index, str) or not index:
            raise ConfigError(f'job file {path} does not say which index: index = "DIR"')
        for name, given in own.items():
            kind, what = _OWN[name]
            if type(given) is not kind:
                raise ConfigError(
                    f"job file {path}: {_options([name])} takes {what}; {shown(given)} was given"
                )
        if own.get("keep_versions", 1) < 1:
            raise ConfigError(
                f"job file {path}: keep-versions takes 1 or more, since the published version "
                f"always stays; {shown(own['keep_versions'])} was given"
            )
        if "metrics" in own:
            require_path(own["metrics"], what="metrics")
            own["metrics"] = Path(own["metrics"])
        return cls(index=Path(index), update=update, **own)


def _values(path: Path) -> dict[str, Any]:
    named = read_toml(path)
    if isinstance(named.get("corpus"), str):
        named["corpus"] = [named["corpus"]]
    if named.get("corpus") == []:
        raise ConfigError(
            f"job file {path} names an empty corpus; leave the line out to take the corpus that "
            "the index was built from"
        )
    return named


def _options(names: list[str]) -> str:
    return ", ".join(name.replace("_", "-") for name in names)
