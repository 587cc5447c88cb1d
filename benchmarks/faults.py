"""Counts of the faults of the system that were tried, for the page of promises.

Run ``python -m benchmarks.faults [SHARE]``. All points take two hours on two cores.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks import results_file
from tests.faults.run import tried_faults


def main(share: str = "1") -> int:
    """Try a share of the points of every command; write how many there were and how they ended."""
    with tempfile.TemporaryDirectory() as folder:
        points = tried_faults(Path(folder), float(share))
    counts = Counter((point["flow"], point["fault"]) for point in points)
    there = {(point["flow"], point["fault"]): point["of"] for point in points}
    harmful = Counter((point["flow"], point["fault"]) for point in points if point["problems"])
    killed = Counter((p["flow"], p["fault"]) for p in points if p["status"] < 0)
    results_file.write(
        "faults",
        (
            {
                "flow": flow,
                "fault": fault,
                "points": points,
                "of": there[flow, fault],
                "killed": killed[flow, fault],
                "harmful": harmful[flow, fault],
            }
            for (flow, fault), points in sorted(counts.items())
        ),
    )
    return int(bool(harmful))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
