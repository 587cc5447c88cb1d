"""The job file of the nightly update: options of the update, and what is done beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiten_index.artifacts.paths import require_path, shown
from whiten_index.errors import ConfigError
from whiten_index.pipeline.build_config import read_toml

if TYPE_CHECKING:
    from whiten_index.vectordb.push_config import PushConfig

_OWN: dict[str, tuple[type, str]] = {
    "keep_versions": (int, "a number of versions"),
    "gc": (bool, "true or false"),
    "compact": (bool, "true or false"),
    "metrics": (str, "a path"),
}
# Of a [[push]]; what it does not say is as `whiten-index push` has it.
_OF_PUSH: dict[str, tuple[type, str]] = {
    "to": (str, "the URL of a database, or a file"),
    "table": (str, "a name"),
    "store": (str, "a path"),
    "k": (int, "a number of coordinates"),
    "dtype": (str, "float32 or float16"),
    "metric": (str, "cosine or ip"),
    "full": (bool, "true or false"),
    "check": (int, "a number of rows"),
    "batch_rows": (int, "a number of rows"),
    "max_shrink": (float, "a share from 0 to 1"),
    "options": (dict, "a table of options of the database"),
}
# Options that say, beside the address, where a table is.
PLACES = ("schema", "db")


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
        pushes: databases and files that are brought to the published version.
    """

    index: Path
    update: Mapping[str, Any]
    keep_versions: int | None = None
    gc: bool = True
    compact: bool = False
    metrics: Path | None = None
    pushes: tuple[PushConfig, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job file.

        Raises:
            ConfigError: it cannot be read, is not TOML, or sets what is unknown or of no use.
        """
        from whiten_index.pipeline.update_config import UpdateConfig

        update = _values(path)
        pushes = update.pop("push", [])
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
        if not isinstance(pushes, list):
            raise ConfigError(f"job file {path}: push takes tables; write [[push]]")
        made = [_push(f"job file {path}, push {n}", index, p) for n, p in enumerate(pushes, 1)]
        _require_apart(path, made)
        return cls(index=Path(index), update=update, pushes=tuple(made), **own)


def _push(where: str, index: str, table: Any) -> PushConfig:
    """Return what a ``[[push]]`` says; no client of a database is needed.

    Raises:
        ConfigError: it sets what is unknown, of another kind or of no use, or holds a password.
    """
    from whiten_index.vectordb.push_config import PushConfig
    from whiten_index.vectordb.registry import require_address, require_options
    from whiten_index.vectordb.secrets import require_no_secrets
    from whiten_index.vectordb.vector_files import is_file

    given = _given(where, table)
    address = given.get("to", "")
    if not address:
        raise ConfigError(f'{where} does not say where to: to = "URL"')
    options = {name: _as_text(where, name, v) for name, v in given.pop("options", {}).items()}
    try:
        if not is_file(address):
            require_address(address)
            require_no_secrets(address, options)
            require_options(address, options)
        config = PushConfig(index=index, options=options, **given)
        if is_file(address) or config.table:
            config.require_usable()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not is_file(address) and not config.table:
        raise ConfigError(f'{where} does not say which table users query: table = "NAME"')
    return config


def _given(where: str, table: Any) -> dict[str, Any]:
    """Return the values of a ``[[push]]`` by the names of ``PushConfig``."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is no table; write [[push]]")
    given = {key.replace("-", "_"): value for key, value in table.items()}
    if len(given) < len(table):
        twice = [key for key in table if "_" in key and key.replace("_", "-") in table]
        raise ConfigError(f"{where} sets {_options(twice)} twice, with - and with _; leave one out")
    if odd := [name for name in given if name not in _OF_PUSH]:
        raise ConfigError(
            f"{where} sets {_options(odd)}, which is unknown; known are {_options(list(_OF_PUSH))}"
        )
    for name, value in given.items():
        kind, what = _OF_PUSH[name]
        if kind is float and type(value) is int:
            given[name] = value = float(value)
        if type(value) is not kind:
            # It is not shown: it may hold a password.
            raise ConfigError(f"{where}: {_options([name])} takes {what}")
    return given


def _require_apart(path: Path, pushes: Sequence[PushConfig]) -> None:
    """Refuse two pushes of one place, of which each would undo the other's every night.

    Raises:
        ConfigError: with their numbers.
    """
    seen = dict[tuple[str, ...], int]()
    for number, config in enumerate(pushes, 1):
        for place in _places(config):
            before = seen.setdefault(place, number)
            if before != number:
                raise ConfigError(
                    f"job file {path}, push {number} goes where push {before} does; give it "
                    "another table or file, or leave one out"
                )


def _places(config: PushConfig) -> list[tuple[str, ...]]:
    """Return what a push writes: one table, or files."""
    from whiten_index.vectordb.vector_files import written_files

    if config.table is None:
        return [(os.path.realpath(each),) for each in written_files(Path(config.to))]
    scheme, _, rest = config.to.partition("://")
    scheme = scheme.lower().replace("postgresql", "postgres")
    more = (config.options.get(name, "") for name in PLACES)
    # A folder of this machine may be written in several ways.
    where = os.path.realpath(rest) if rest.startswith("/") else rest.rstrip("/")
    return [(scheme, where, config.table, *more)]


def _as_text(where: str, name: str, value: Any) -> str:
    """Return the value of an option as the command line has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (str, int, float)):
        raise ConfigError(f"{where}: the option {name} takes a text, a number, true or false")
    return str(value)


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
