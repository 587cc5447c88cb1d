"""Limits on what a file may make the program hold, and the functions that read within them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from whiten_index.artifacts.files import read_up_to

# Deeper JSON is no configuration and no record: Python's own parser gives up near 1,000 levels,
# and code that walks a value should not have to care.
JSON_LEVELS = 100
# A job file or a model's configuration that is read whole has some kilobytes.
FILE_BYTES = 16 << 20
# One text, or one query with all its hits. The longest lines of published sets have about 1 MiB.
LINE_BYTES = 16 << 20
# Text and vectors are packed to a half or a tenth of their size, never to a hundredth.
EXPANSION, EXPANDED_BYTES = 100, 1 << 30


class LimitError(ValueError):
    """What a file holds is beyond a limit; the message says which."""


def read_bounded(path: Path, most: int = FILE_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        ValueError: it has more than ``most`` bytes.
    """
    with path.open("rb") as file:
        return read_up_to(file, most)


def iterate_lines(file: IO[bytes], *, packed: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file, each with its newline.

    Args:
        file: open.
        packed: size of a packed file that ``file`` unpacks.

    Raises:
        LimitError: a line has more than ``LINE_BYTES``, or unpacking gives too much.
    """
    number = total = 0
    while line := file.readline(LINE_BYTES + 1):
        number, total = number + 1, total + len(line)
        if len(line) > LINE_BYTES:
            raise LimitError(f"line {number} has more than {LINE_BYTES:,} bytes")
        check_expanded(total, packed)
        yield line


def check_expanded(size: int, packed: int | None) -> None:
    """Refuse a packed file that grows like no text and no vectors do.

    Args:
        size: bytes unpacked so far.
        packed: size of the packed file, None of one that is not packed.

    Raises:
        LimitError: it grows more.
    """
    if packed is not None and size > max(EXPANDED_BYTES, EXPANSION * packed):
        raise LimitError(
            f"it unpacks to more than {EXPANDED_BYTES:,} bytes and {EXPANSION} times its size"
        )


def load_json(data: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or nests more than ``JSON_LEVELS`` levels.
    """
    try:
        value = json.loads(data)
    except RecursionError:
        raise LimitError(f"it nests more than {JSON_LEVELS} levels") from None
    level = [value]
    for _ in range(JSON_LEVELS + 1):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return value
    raise LimitError(f"it nests more than {JSON_LEVELS} levels")
