"""Nights of a small index whose disk loses its power.

``python -m tests.faults.power_cuts FOLDER PART PARTS EVERY`` does its part of the points, every
``EVERY``-th of them, and prints a JSON object for each, whose ``problems`` should be empty.

A point is a flow, a number, and a state in which a power cut before the operation of that number
may leave the disk. Flows: ``keep``, an update that keeps its transform and lists; ``night``, the
nightly job, which fits again, removes versions and shards and packs others.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.disk_model import Disk
from tests.faults.file_operations import Operation, Tap
from tests.faults.flow import Flow, prepared
from tests.faults.place import Place, Tree, digest_of

FLOWS = ("keep", "night")


@dataclass(frozen=True)
class Point:
    """Where the power is cut, which of the states that this may leave it is, and that state."""

    number: int
    kind: str
    left: Tree = field(repr=False, compare=False)


class CutFlow(Flow):
    """A command during which the power is cut."""

    operations: list[Operation]

    def recorded(self) -> list[Operation]:
        done = list[Operation]()
        Tap(self.place.disk, after=done.append).install()
        assert self.run() == self.status
        return done

    def replayed(self) -> Tree:
        """Return the disk as the operations seen make it of what was on it before."""
        self.place.put(self.before)
        disk = Disk(self.place.disk)
        for operation in self.operations:
            disk.apply(operation)
        return disk.now()

    def points(self) -> Iterator[Point]:
        self.place.put(self.before)
        disk, seen = Disk(self.place.disk), set[str]()
        for number in range(1, len(self.operations) + 2):
            for kind, left in disk.after_power_cuts(number):
                digest = digest_of(left)
                if digest not in seen:
                    seen.add(digest)
                    yield Point(number, kind, left)
            if number <= len(self.operations):
                disk.apply(self.operations[number - 1])

    def try_out(self, point: Point) -> dict[str, Any]:
        """Put there what the power cut left, look, run again, and look again."""
        place = self.place
        over = point.number > len(self.operations)
        operation = None if over else self.operations[point.number - 1]
        place.put(point.left)
        published, problems = self.looked(point.left, self.status if over else None)
        return {
            "flow": self.name,
            "number": point.number,
            "kind": point.kind,
            "operation": operation and operation.name,
            "path": operation and operation.path.removeprefix(f"{place.disk}/"),
            "published": published,
            "problems": problems,
        }


def flows(place: Place) -> dict[str, list[object]]:
    """Return flow -> the command to run; write what the nightly job reads."""
    job, metrics = place.root / "job.toml", place.disk / "metrics"
    metrics.mkdir()
    job.write_text(
        f'index = "{place.index}"\nrefit = "always"\nthreads = 1\nkeep-versions = 2\n'
        f'compact = true\nmetrics = "{metrics}/index.prom"\n'
    )
    update = ["update", place.index, "--refit", "never", "--threads", 1]
    return dict(zip(FLOWS, (update, ["nightly", job]), strict=True))


def main(folder: str, part: str, parts: str, every: str) -> int:
    """Do a part of the points."""
    place = prepared(Path(folder, part))
    commands = flows(place)
    before = place.tree()
    for name, command in commands.items():
        flow = CutFlow(place, name, command, before)
        replayed, after = flow.replayed(), flow.after
        escaped = sorted(
            path
            for path in {*replayed, *after}
            if replayed.get(path, "missing") != after.get(path, "missing")
        )
        counts = {"flow": name, "operations": len(flow.operations), "escaped": escaped}
        print(json.dumps(counts), flush=True)
        some = itertools.islice(flow.points(), 0, None, int(every))
        for point in itertools.islice(some, int(part), None, int(parts)):
            print(json.dumps(flow.try_out(point)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
