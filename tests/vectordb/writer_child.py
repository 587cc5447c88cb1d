"""What a test kills: ``writer_child.py push|change ADDRESS NAME FILE``; FILE counts what it did."""

import sys
import time
from pathlib import Path

from tests.vectordb import pushed_rows
from whiten_index.vectordb.database_writer import DatabaseWriter
from whiten_index.vectordb.registry import open_writer


def main() -> None:
    does, address, name, marker = sys.argv[1:]
    with open_writer(address, name) as writer:
        {"push": push, "change": change}[does](writer, Path(marker))
        # The killer comes; what it kills is not to have ended.
        time.sleep(600)


def tell(marker: Path, event: int) -> None:
    """Write a number in one step: who reads it meanwhile would see digits of two."""
    new = marker.with_suffix(".new")
    new.write_text(str(event))
    new.replace(marker)


def push(writer: DatabaseWriter, marker: Path) -> None:
    rows = pushed_rows.pushed_by_child()
    writer.begin(rows.pushed, rows.layout)
    for number, batch in enumerate(rows.batches(100), start=1):
        writer.append(batch)
        tell(marker, number)
    tell(marker, pushed_rows.FINISHING)
    writer.finish()
    tell(marker, pushed_rows.SWAPPING)
    writer.swap()
    tell(marker, pushed_rows.SWAPPED)


def change(writer: DatabaseWriter, marker: Path) -> None:
    rows = pushed_rows.changed_by_child()
    with writer.changing(rows.pushed, rows.layout) as changing:
        for number, batch in enumerate(rows.batches(100), start=1):
            changing.upsert(batch)
            tell(marker, number)
        tell(marker, pushed_rows.DELETING)
        changing.delete(pushed_rows.GONE)
    tell(marker, pushed_rows.CHANGED)


if __name__ == "__main__":
    main()
