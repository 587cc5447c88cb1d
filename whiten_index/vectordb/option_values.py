"""What ``--option NAME=VALUE`` gave, read; and what may be shown of what an engine says."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from whiten_index.address import hide_secrets
from whiten_index.errors import ConfigError

# Of a sentence of an engine, so much is shown.
_SHOWN = 500
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def require_known(given: Mapping[str, str], known: Collection[str], engine: str) -> None:
    """Refuse options that an engine does not have.

    Raises:
        ConfigError: a name is none of those known.
    """
    for name in given:
        if name not in known:
            raise ConfigError(
                f"--option {name[:60]} is unknown to {engine}; use one of {', '.join(known)}"
            )


def whole_number(name: str, text: str, *, least: int = 1, most: int = 999_999_999) -> int:
    """Return the value of an option that is a whole number.

    Raises:
        ConfigError: it is none, or out of its bounds.
    """
    # int() takes signs, blanks, underscores and the digits of every script too.
    if text.isascii() and text.isdigit() and len(text) < 19 and least <= int(text) <= most:
        return int(text)
    raise ConfigError(
        f"--option {name} takes a whole number from {least} to {most}; {text[:60]!r} was given"
    )


def real_number(name: str, text: str, *, least: float = 0.0, most: float = math.inf) -> float:
    """Return the value of an option that is a finite number.

    Raises:
        ConfigError: it is none, or out of its bounds.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if least <= value <= most and value < math.inf:
        return value
    told = f"of {least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
    raise ConfigError(f"--option {name} takes a number {told}; {text[:60]!r} was given")


def yes_or_no(name: str, text: str) -> bool:
    """Return the value of an option that is true or false.

    Raises:
        ConfigError: it is neither.
    """
    if text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    raise ConfigError(f"--option {name} takes true or false; {text[:60]!r} was given")


def one_of(name: str, text: str, known: Collection[str]) -> str:
    """Return the value of an option that is one of some words.

    Raises:
        ConfigError: it is none of them.
    """
    if text in known:
        return text
    raise ConfigError(f"--option {name}={text[:60]} is unknown; use one of {', '.join(known)}")


def first_line(told: object) -> str:
    """Return the first line of what an engine says, without secrets, not too long.

    Args:
        told: a text, or an error, whose class is named where it says nothing.
    """
    # A secret may have a line's end in it.
    lines = hide_secrets(str(told)).strip().splitlines()
    return lines[0][:_SHOWN] if lines else type(told).__name__
