"""Runs commands in forks, each with a fault at one file operation, and prints what came of it.

``python -m tests.faults.child FOLDER PART PARTS SHARE [FLOW ...]`` tries a share of the points of
some flows, and of these every ``PARTS``-th from ``PART``. It must be started with the library of
``interpose.c`` preloaded. It prints a JSON object for each point; ``problems`` should be empty.
"""

import ctypes
import errno
import json
import math
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.flow import READERS, Flow, prepared
from tests.faults.place import COLUMNS, Place, Tree, in_fork

KINDS = ("open", "create", "list", "look", "read", "write", "fsync", "rename", "unlink", "mkdir",
         "link", "lock", "map", "seek", "close")  # fmt: skip
GROWS = ("create", "write", "fsync", "rename", "mkdir", "link")
CHANGES = (*GROWS, "unlink")
ONCE, STAYS, KILL = range(3)


@dataclass(frozen=True)
class Fault:
    """The operations that may fail, the error, and whether it happens once, stays or kills."""

    kinds: Sequence[str]
    error: int
    mode: int = ONCE


FAULTS = {
    "kill": Fault(CHANGES, 0, KILL),
    "disk full": Fault(GROWS, errno.ENOSPC),
    "disk stays full": Fault(GROWS, errno.ENOSPC, STAYS),
    "input/output error": Fault([k for k in KINDS if k not in ("lock", "map")], errno.EIO),
    "too many open files": Fault(("open", "create", "list"), errno.EMFILE),
    "permission denied": Fault(("open", "create", "list", "look", *CHANGES[2:]), errno.EACCES),
    "out of memory": Fault(("map",), errno.ENOMEM),
    "read-only": Fault(CHANGES, errno.EROFS, STAYS),
    "forbidden": Fault(CHANGES, errno.EACCES, STAYS),
}
# Those that refuse every change, and what is said then.
_REFUSED = {"read-only": "the file system is read-only", "forbidden": "permission is denied"}
SYSTEM, GATE = 7, 9
# Kills are few, and tell the most.
_AT_LEAST = {"kill": 8_000}


def flows(place: Place) -> dict[str, list[object]]:
    """Return flow -> the command to run."""
    index, out, store = place.index, place.out, place.store
    stored = ["--store", store, "--shard-rows", 40, "--store-dtype", "float32"]
    build = ["build", place.corpus, *COLUMNS, *stored, "--whiten", "pca", "--k", 3,
             "--factory", "Flat", "--threads", 1]  # fmt: skip
    update = ["update", index, "--threads", 1]
    like = ["--like", 3, "--rerank", 20, "--rerank-by", "embeddings", "--json"]
    return {
        "encode": ["encode", place.corpus, *COLUMNS, *stored],
        "build": [*build, "--out", index],
        "build, first": [*build, "--out", place.disk / "new"],
        "update": [*update, "--refit", "never"],
        "update, refit": [*update, "--refit", "always"],
        "update, kept back": [*update, "--refit", "never", "--max-shrink", 0],
        "rollback": ["rollback", index],
        "prune": ["prune", index, "--keep", 1],
        "gc": ["gc", store, "--keep-days", 0],
        "compact": ["compact", store],
        "push, changes": ["push", index, "--to", out / "pushed.parquet"],
        "push, npy": ["push", index, "--to", out / "pushed.npy"],
        "export": ["export", index, out / "query", "--as", "query"],
        "search, run": ["search", index, "--queries", place.corpus / "a.parquet", *COLUMNS,
                        "--run", out / "run.trec", "--top-k", 5],
        "search": ["search", index, *like],
        "verify": ["verify", index, place.other, "--json"],
        "versions": ["versions", index, "--json"],
        "inspect": ["inspect", index, "--json"],
    }  # fmt: skip


@dataclass(frozen=True)
class Operations:
    """The library that is preloaded."""

    library: Any

    def arm(self, place: Place, fault: Fault, number: int, log: int = -1) -> None:
        """Let the operations below the disk count, and one of them fail."""
        kinds = sum(1 << KINDS.index(kind) for kind in fault.kinds)
        folder = str(place.disk).encode()
        self.library.fault_arm(folder, kinds, ctypes.c_long(number), fault.error, fault.mode, log)

    def disarm(self) -> None:
        """Let every operation pass."""
        self.library.fault_arm(b"", 0, ctypes.c_long(0), 0, 0, -1)


class DisturbedFlow(Flow):
    """A command at whose operations faults happen."""

    def __init__(self, place: Place, name: str, before: Tree, operations: Operations) -> None:
        self._operations = operations
        status = GATE if "kept back" in name else 0
        super().__init__(place, name, flows(place)[name], before, status)
        self.seen = {
            name: [line for line in self.operations if line.partition(" ")[0] in fault.kinds]
            for name, fault in FAULTS.items()
        }

    def recorded(self) -> list[str]:
        lines = self.place.root / "operations"
        log = os.open(lines, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
        assert self._run(Fault(KINDS, 0), 0, log) == self.status
        return lines.read_text().splitlines()

    def _run(self, fault: Fault, number: int, log: int = -1) -> int:
        self._operations.arm(self.place, fault, number, log)
        status = self.run()
        self._operations.disarm()
        return status

    def points(self, share: float) -> list[tuple[str, int]]:
        """Return a share of the faults and operations, the same ones each time.

        Of a fault that has few operations, such as a kill, the share is larger. One that stays is
        also there from the start.
        """
        random, found = Random(0), list[tuple[str, int]]()
        for fault, seen in self.seen.items():
            numbers = range(1, len(seen) + 1)
            most = max(len(seen), _AT_LEAST.get(fault, 500))
            many = min(len(seen), math.ceil(share * most))
            some = set(random.sample(numbers, many))
            if FAULTS[fault].mode == STAYS:
                some |= {*numbers[:1]}
            found += [(fault, number) for number in sorted(some)]
        return found

    def try_out(self, fault: str, number: int) -> dict[str, Any]:
        """Let the fault happen, look at the disk, run the command again, and look again."""
        place, problems = self.place, list[str]()

        place.put(self.before)
        status, _ = in_fork(place, lambda: self._run(FAULTS[fault], number))
        output = place.said()
        left = place.tree()
        expected = {-signal.SIGKILL} if fault == "kill" else {self.status, SYSTEM}
        if status not in expected or "Traceback" in output:
            problems.append(f"status {status}: {output[-3000:]}")
        # The state of a migration says what could not be read.
        said = self.name == "inspect" and re.search("cannot (read|list)", output)
        if status == self.status and self.name in READERS and output != self.output and not said:
            problems.append(f"another answer: {output[:1000]}")
        if number == 1 and fault in _REFUSED:
            if left != self.before:
                problems.append("the disk refuses every change and is another one")
            if status == SYSTEM and f": {_REFUSED[fault]}; " not in output:
                problems.append(f"no reason is given: {output[-1000:]}")
        published, found = self.looked(left, status)
        return {
            "flow": self.name,
            "fault": fault,
            "number": number,
            "of": len(self.seen[fault]),
            "operation": self._shown(self.seen[fault][number - 1]),
            "status": status,
            "published": published,
            "problems": [*problems, *found],
        }

    def _shown(self, operation: str) -> str:
        return re.sub(r"[0-9a-f]{12,}", "*", operation.replace(f"{self.place.disk}/", ""))


def main(folder: str, part: str, parts: str, share: str, *only: str) -> int:
    """Try a part of the points of some flows, or of all."""
    operations = Operations(ctypes.CDLL(None))
    place = prepared(Path(folder, part))
    before = place.tree()
    for name in only or flows(place):
        flow = DisturbedFlow(place, name, before, operations)
        counts = {fault: len(seen) for fault, seen in flow.seen.items()}
        print(json.dumps({"flow": name, "operations": counts}), flush=True)
        for fault, number in flow.points(float(share))[int(part) :: int(parts)]:
            print(json.dumps(flow.try_out(fault, number)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
