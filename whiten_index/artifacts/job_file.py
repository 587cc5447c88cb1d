"""Job files: TOML whose keys are the options of a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whiten_index.artifacts.files import reading
from whiten_index.artifacts.limits import load_toml, read_bounded
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


def read_job(path: Path, names: dict[str, str]) -> dict[str, Any]:
    """Read a job file of known keys.

    Args:
        path: the file.
        names: key with underscores -> name of the field. A field may have several keys.
    """
    job: dict[str, Any] = {}
    for key, value in read_toml(path).items():
        if key not in names:
            known = ", ".join(sorted(names))
            raise ConfigError(f"job file {path} sets {key!r}, which is unknown; known are {known}")
        name = names[key]
        if name in job:
            raise ConfigError(f"job file {path} sets {name} twice, once as {key}; leave one out")
        job[name] = value
    return job
