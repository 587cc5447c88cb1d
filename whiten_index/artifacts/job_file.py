"""Job files: TOML whose keys are the options of a command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import read_bounded, reading
from whiten_index.artifacts.limits import load_toml
from whiten_index.errors import ConfigError
from whiten_index.paths import require_no_secret


def read_toml(path: Path) -> dict[str, Any]:
    """Read a job file; dashes in its keys become underscores."""
    try:
        with reading(path):
            values = load_toml(read_bounded(path))
    except OSError as error:
        raise ConfigError(f"job file {path} cannot be read ({error}); check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"job file {path} is not UTF-8 ({error}); save it as UTF-8") from error
    except ValueError as error:
        raise ConfigError(f"job file {path} is not TOML ({error}); mend that line") from error
    require_no_secret(values, what=f"job file {path}")
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in found:
            twice = " and ".join(each for each in values if each.replace("-", "_") == name)
            raise ConfigError(f"job file {path} sets {twice}, which are the same; leave one out")
        found[name] = value
    return found


def read_job(path: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """Read a job file of known keys; see ``read_toml`` and ``rename_keys``."""
    return rename_keys(read_toml(path), names, where=f"job file {path}")


def rename_keys(
    values: Mapping[str, Any], names: Mapping[str, str], *, where: str
) -> dict[str, Any]:
    """Return a table of a job file by the names of fields.

    Args:
        values: the table; its keys may have dashes.
        names: key with underscores -> name of the field. A field may have several keys.
        where: the place of the table, for errors.

    Raises:
        ConfigError: a key is unknown, or sets a field a second time.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = names.get(key.replace("-", "_"))
        if name is None:
            known = ", ".join(sorted(names))
            raise ConfigError(f"{where} sets {key!r}, which is unknown; known are {known}")
        if name in found:
            raise ConfigError(f"{where} sets {name} twice, once as {key}; leave one out")
        found[name] = value
    return found
