"""Checks of paths and values given by users, and their form in errors."""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from whiten_index.errors import ConfigError, hide_secrets, remedy_for, scheme_of, secret_in

_ADDRESS_VARIABLES = (
    "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT",
    "RAY_ADDRESS", "HF_ENDPOINT",
)  # fmt: skip
_MOST_SHOWN = 80
# C0 and C1 with DEL, the separators of lines, and what changes the direction of text.
_CONTROL = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
_OBJECTS = ("s3", "gs", "az")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def require_no_secret(given: object, *, what: str) -> None:
    """Refuse an address with a secret in it, also inside of lists and mappings.

    It would be stored and printed. The error names ``what`` has it, and the proper place for it.
    """
    if isinstance(given, Mapping):
        for name, each in given.items():
            require_no_secret(each, what=f"{what}: {name}")
    elif isinstance(given, list | tuple):
        for number, each in enumerate(given, 1):
            require_no_secret(each, what=f"{what} {number}")
    elif isinstance(given, str | Path) and (secret := secret_in(text := str(given))):
        scheme = scheme_of(text)
        raise ConfigError(
            f"{what} ({scheme}{'://' * bool(scheme)}…) has {secret}, which is, or may be, a secret "
            f"and would be stored and shown; leave it out, and {remedy_for(text, what=what)}"
        )


def require_plain_environment() -> None:
    """Refuse an address with a secret in the environment's variables."""
    for name in _ADDRESS_VARIABLES:
        require_no_secret(os.environ.get(name), what=name)


def require_path(path: str, *, what: str) -> None:
    """Refuse a path or URI that is empty, has a NUL character, or holds a secret."""
    require_no_secret(path, what=what)
    if not path:
        raise ConfigError(f"an empty path was given for {what}; name a folder or file")
    if "\0" in path:
        raise ConfigError(
            f"{what} has a NUL character, which no path has ({shown(path)}); check how it is made"
        )


def is_uri(place: Path | str) -> bool:
    """Return whether a place is named by a URI, not by a path."""
    return isinstance(place, str) and _SCHEME.match(place) is not None


def as_place(given: Path | str, *, what: str) -> Path | str:
    """Return the folder of a store or an index, or its URI in an object store."""
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"{what} is a path or a URI; {shown(given)} was given")
    text = str(given)
    require_path(text, what=what)
    require_text(text, what)  # of other names FAISS and Arrow read no file
    match = _SCHEME.match(text)
    if match is None:
        return Path(text)
    if match[1] in _OBJECTS:
        return text
    raise ConfigError(
        f"{what} cannot be at {shown(text)}; use the path of a folder, or an object store by "
        f"{', '.join(f'{each}://BUCKET/PREFIX' for each in _OBJECTS)}"
    )


def absolute(place: Path | str) -> Path | str:
    """Return a place that does not depend on the working folder: an absolute path, or a URI."""
    found = as_place(place, what="the place")
    return found.absolute() if isinstance(found, Path) else found


def without_controls(text: str) -> str:
    r"""Return text with its control characters, but for newlines, as escapes such as ``\x1b``.

    Ids, columns and file names come from users' data. Control characters in them could change the
    terminal's title, hide text or turn it round.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cell(value: object) -> str:
    """Return a value as text on one line, with control characters as escapes."""
    return without_controls(str(value)).replace("\n", "\\n")


def plain_json(text: str) -> str:
    """Return JSON with control characters, but for newlines, as JSON's own escapes."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def plain_markdown(text: str) -> str:
    """Return one line of text in which nothing is markup, a cell's end or a mention."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$&])", r"\\\1", " ".join(text.split()))


def at_home(path: str) -> Path:
    """Return a path with a user's folder in place of ``~``; of an unknown user it stays."""
    # ``./~`` is a folder of that name, and a ``Path`` has lost the dot.
    if path.startswith("~"):
        with contextlib.suppress(RuntimeError, ValueError):
            return Path(path).expanduser()
    return Path(path)


def shown(value: object) -> str:
    """Return a value as errors name it, cut short where it is long."""
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to write integers of more than some thousand digits.
        return "a number of thousands of digits"
    return cut(hide_secrets(text))


def require_text(text: str, what: str) -> None:
    """Refuse a text that UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is no UTF-8 text ({shown(text)}); check it") from error


def cut(text: str, *, most: int = _MOST_SHOWN) -> str:
    """Return a text of so many characters at most, and dots where there were more."""
    return text if len(text) <= most else f"{text[:most]}..."
