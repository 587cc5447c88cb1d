"""Limits on what a file may make the program hold, and the functions that read within them."""

import base64
import datetime
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import IO, Any, TypeVar

# Python's own parser gives up near 1,000 levels, and code that walks a value should not have to
# care.
_JSON_LEVELS = 100
# A dotted key makes a table of each part, and Python's reader keeps every beginning of it.
TOML_BYTES, _TOML_DOTS = 1 << 20, 200
# Python writes no such number out, as in an error.
_LONG_NUMBER = re.compile(r"\b0[box][0-9A-Fa-f_]{1000}")
_QUOTED = re.compile(r""""(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
# One text, or one query with all its hits. The longest lines of published sets have about 1 MiB.
LINE_BYTES = 16 << 20
# Text is packed to a half or a tenth of its size, never to a hundredth.
_EXPANSION, _EXPANDED_BYTES = 100, 1 << 30
_BLOCK = 1 << 16
# The covariance of wider embeddings would have more than 32 GiB.
VECTOR_NUMBERS = 1 << 16
# The largest is the record of a corpus, at 250 bytes a shard: enough for 250,000 shards.
MANIFEST_BYTES = 64 << 20
# Types of values that JSON has as they are.
_PLAIN = {str, int, bool, type(None)}

T = TypeVar("T")


class LimitError(ValueError):
    """Content of a file beyond a limit, which the message names."""


def read_up_to(file: IO[bytes], limit: int) -> bytes:
    """Return the rest of an open file; raise ``ValueError`` if it has more than ``limit`` bytes."""
    data = bytearray()
    # A single read would allocate the limit, however short the file is.
    while block := file.read(_BLOCK):
        data += block
        if len(data) > limit:
            raise ValueError(f"it has more than {limit:,} bytes")
    return bytes(data)


def iterate_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of an open file; raise ``LimitError`` for one beyond ``LINE_BYTES``."""
    number = 0
    while line := file.readline(LINE_BYTES + 1):
        number += 1
        if len(line) > LINE_BYTES:
            raise LimitError(f"line {number} has more than {LINE_BYTES:,} bytes")
        yield line


def most_expanded(packed: int) -> int:
    """Return the most bytes to which ``packed`` bytes of a file may unpack at once."""
    return max(_EXPANDED_BYTES, _EXPANSION * packed)


def check_expanded(size: float, packed: int) -> None:
    """Raise ``LimitError`` if ``packed`` bytes of a file unpack to a ``size`` that no text has."""
    if size > most_expanded(packed):
        raise LimitError(
            f"it unpacks to more than {_EXPANDED_BYTES:,} bytes and {_EXPANSION} times its size"
        )


def read_unpacked(file: IO[bytes], packed: int) -> bytes:
    """Return the rest of a file of ``packed`` bytes that unpacks it; raise as ``read_up_to``."""
    return read_up_to(file, most_expanded(packed))


def json_value(value: Any) -> Any:
    """Return a value as JSON has it, at any depth.

    Bytes are base64; NaN, infinity and NaT null; dates, times and durations ISO 8601, whole to the
    nanosecond.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        # Lists of thousands of numbers are looked at as a whole.
        kinds = {*map(type, value)}
        if kinds <= _PLAIN or (kinds == {float} and all(map(math.isfinite, value))):
            return list(value)
        return [json_value(each) for each in value]
    if isinstance(value, Mapping):
        return {name: json_value(each) for name, each in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.timedelta):
        return _duration(value)
    if isinstance(value, datetime.date | datetime.time):
        text = value.isoformat()
        return None if text == "NaT" else text
    return value


def _duration(value: datetime.timedelta) -> str:
    """Return a duration such as ``P1DT2.5S``; one of pandas has nanoseconds too."""
    micro = value // datetime.timedelta(microseconds=1)
    total = 1000 * micro + getattr(value, "nanoseconds", 0)
    seconds, part = divmod(abs(total), 10**9)
    days, seconds = divmod(seconds, 86_400)
    fraction = f".{part:09}".rstrip("0.")
    return f"{'-' * (total < 0)}P{f'{days}D' * (days > 0)}T{seconds}{fraction}S"


def load_toml(data: bytes) -> dict[str, Any]:
    """Return the values of a TOML text in UTF-8; raise ``ValueError`` if it cannot be used."""
    # Editors of Windows mark UTF-8 at the front.
    text = data.decode("utf-8-sig")
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") > _TOML_DOTS and _QUOTED.sub("", line).count(".") > _TOML_DOTS:
            raise LimitError(f"line {number} has more than {_TOML_DOTS} dots outside of texts")
        if _LONG_NUMBER.search(line) and _LONG_NUMBER.search(_QUOTED.sub("", line)):
            raise LimitError(f"line {number} has a number of more than 1,000 digits")
    try:
        return _require_shallow(tomllib.loads(text))
    except RecursionError:
        raise _too_deep() from None


def load_json(data: bytes | str) -> Any:
    """Return the value of a JSON text; raise ``ValueError`` if it is not JSON or too deep."""
    try:
        return _require_shallow(json.loads(data))
    except RecursionError:
        raise _too_deep() from None


def _require_shallow(value: T) -> T:
    level: list[Any] = [value]
    for _ in range(_JSON_LEVELS + 1):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return value
    raise _too_deep()


def _too_deep() -> LimitError:
    return LimitError(f"it nests more than {_JSON_LEVELS} levels")


def canonical_json(value: Any) -> str:
    """Return ``value`` as JSON with sorted keys and no spaces, so that equal values agree."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
