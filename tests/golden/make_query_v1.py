"""Make the golden query transform of format 1; run once when the format is new, never after.

Run ``python -m tests.golden.make_query_v1`` from the root of the project. It is that of the index
of v1, whose closed form ``tests/test_golden.py`` holds.
"""

from __future__ import annotations

import sys
from pathlib import Path

from whiten_index import QueryTransform

FOLDER = Path(__file__).parent
FINAL = FOLDER / "query-v1"


def main() -> None:
    """Save the query half of the golden index."""
    if FINAL.exists():
        sys.exit(f"{FINAL} exists: golden artifacts are never made anew")
    QueryTransform.of(FOLDER / "v1" / "index").save(FINAL)


if __name__ == "__main__":
    main()
