"""What users gave: values that no number or path can be, and how errors name them."""

from __future__ import annotations

import math

from whiten_index.errors import ConfigError

_MOST_SHOWN = 80


def require_path(path: str, *, what: str) -> None:
    """Refuse what can name nothing, whatever there is.

    Args:
        path: a path or URI.
        what: how to call it in the error.

    Raises:
        ConfigError: it is empty, or has a NUL character.
    """
    if not path:
        raise ConfigError(f"an empty path was given for {what}; name a folder or file")
    if "\0" in path:
        raise ConfigError(
            f"{what} has a NUL character, which no path has ({shown(path)}); check how it is made"
        )


def is_finite(value: float) -> bool:
    """Tell whether a number is one that a float can hold: no NaN, no infinity, no huge integer."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def shown(value: object) -> str:
    """Return a value as errors name it, cut short where it is long."""
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to write integers of more than some thousand digits.
        return "a number of thousands of digits"
    return cut(text)


def cut(text: str, *, most: int = _MOST_SHOWN) -> str:
    """Return a text of so many characters at most, and dots where there were more."""
    return text if len(text) <= most else f"{text[:most]}..."
