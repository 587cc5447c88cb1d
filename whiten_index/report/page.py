"""Checks before a report is made."""

from __future__ import annotations

from importlib.util import find_spec

from whiten_index.errors import ConfigError

FIGURES = "figures"


def check_report() -> None:
    """Make sure that a report can be made, before the work.

    Raises:
        ConfigError: matplotlib or jinja2 is not installed.
    """
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a report needs {' and '.join(missing)}; pip install 'whiten-index[plot]'"
        )
