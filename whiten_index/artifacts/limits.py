"""Limits on what a file may make the program hold, and the functions that read within them."""

import json
from typing import Any

#: Deeper JSON is no configuration and no record: Python's own parser gives up near 1,000 levels,
#: and code that walks a value should not have to care.
JSON_LEVELS = 100


def load_json(data: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is not JSON, or nests more than `JSON_LEVELS` levels.
    """
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(f"it nests more than {JSON_LEVELS} levels") from None
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
    raise ValueError(f"it nests more than {JSON_LEVELS} levels")
