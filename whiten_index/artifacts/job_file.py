"""Job files: TOML whose keys are the options of a command."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import read_bounded, reading
from whiten_index.artifacts.limits import load_toml
from whiten_index.errors import ConfigError
from whiten_index.options import unknown
from whiten_index.paths import require_no_secret


def read_toml(path: Path) -> dict[str, Any]:
    """Read a job file, and refuse it if a value may be a secret."""
    try:
        with reading(path):
            values = load_toml(read_bounded(path))
    except OSError as error:
        raise ConfigError(f"job file {path} cannot be read ({error}); check the path") from error
    except ValueError as error:
        raise ConfigError(f"job file {path} is not TOML in UTF-8 ({error}); mend it") from error
    require_no_secret(values, what=f"job file {path}")
    return values


def read_job(path: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """Read a job file of known keys; see ``read_toml`` and ``rename_keys``."""
    return rename_keys(read_toml(path), names, where=f"job file {path}")


def rename_keys(
    values: Mapping[str, Any], names: Mapping[str, str], *, where: str
) -> dict[str, Any]:
    """Return a table of a job file by the names of fields, of which one may have several keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = names.get(key.replace("-", "_"))
        if name is None:
            known = [each.replace("_", "-") for each in names]  # as they are documented
            raise ConfigError(f"{where}: {unknown(key, known)}")
        if name in found:
            raise ConfigError(f"{where} sets {name} twice, once as {key}; leave one out")
        found[name] = value
    return found
