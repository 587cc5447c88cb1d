"""What a test kills: ``sink_child.py push|change ADDRESS NAME FILE``; FILE counts what it did."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.sink_contract import (
    CHANGED,
    DELETING,
    FINISHING,
    GONE,
    SWAPPED,
    SWAPPING,
    changed_by_child,
    pushed_by_child,
)
from whiten_index.sinks import Sink, open_sink


def main() -> None:
    does, address, name, marker = sys.argv[1:]
    with open_sink(address, name) as sink:
        {"push": push, "change": change}[does](sink, Path(marker))
        # The killer comes; what it kills is not to have ended.
        time.sleep(600)


def push(sink: Sink, marker: Path) -> None:
    rows = pushed_by_child()
    sink.begin(rows.generation, rows.layout)
    for number, batch in enumerate(rows.batches(100), start=1):
        sink.append(batch)
        marker.write_text(str(number))
    marker.write_text(str(FINISHING))
    sink.finish(rows.layout)
    marker.write_text(str(SWAPPING))
    sink.swap()
    marker.write_text(str(SWAPPED))


def change(sink: Sink, marker: Path) -> None:
    rows = changed_by_child()
    with sink.changing(rows.generation, rows.layout) as changing:
        for number, batch in enumerate(rows.batches(100), start=1):
            changing.upsert(batch)
            marker.write_text(str(number))
        marker.write_text(str(DELETING))
        changing.delete(GONE)
    marker.write_text(str(CHANGED))


if __name__ == "__main__":
    main()
