"""Runs commands in forks, each with a fault at one file operation, and prints what came of it.

``python -m tests.faults.child FOLDER PART PARTS SHARE [FLOW ...]`` tries a share of the points of
some flows, and of these every ``PARTS``-th from ``PART``. It must be started with the library of
``interpose.c`` preloaded. It prints a JSON object for each point; ``problems`` should be empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
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

import numpy as np

from tests.faults.place import (
    COLUMNS,
    DIM,
    Place,
    Tree,
    damages_of,
    digest_of,
    embeddings,
    in_fork,
    names_of,
    vectors_of,
    versions_of,
)
from whiten_index.artifacts.manifest import Schema

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


# Commands that write nothing: they end with a status or print the same as ever.
READERS = ("search", "verify", "versions", "inspect")


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


class Flow:
    """A command: the disk before it, after it, and each operation between."""

    def __init__(self, place: Place, name: str, before: Tree, operations: Operations) -> None:
        self.place, self.name, self.before = place, name, before
        self.command, self._operations = flows(place)[name], operations
        # Many faults leave the disk as it was; what a next run does there is known after the first.
        self._next_runs: dict[str, list[str]] = {}
        self.status, seen, modules = self._undisturbed()
        self.after, self.output = place.tree(), place.said()
        for module in modules:
            # Later forks need not import it again.
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        for schema in [each for each in gc.get_objects() if isinstance(each, Schema)]:
            with contextlib.suppress(ValueError):
                schema.check(None)
        # Forks share the pages of what is here, and copy none to collect garbage.
        gc.freeze()
        self.seen = {
            name: [line for line in seen if line.partition(" ")[0] in fault.kinds]
            for name, fault in FAULTS.items()
        }
        kept = versions_of(self.after, "index")
        self.kept = {v: files for v, files in versions_of(before, "index").items() if v in kept}

    def _undisturbed(self) -> tuple[int, list[str], list[str]]:
        """Return the exit status, the operations and the modules imported."""
        lines = self.place.root / "operations"

        def work() -> list[object]:
            log = os.open(lines, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
            self._operations.arm(self.place, Fault(KINDS, 0), 0, log)
            status = self.place.run(*self.command)
            self._operations.disarm()
            return [status, sorted(sys.modules)]

        self.place.put(self.before)
        ended, found = in_fork(self.place, work)
        assert ended == 0, self.place.said()
        assert found[0] == (GATE if "kept back" in self.name else 0), self.place.said()
        return found[0], lines.read_text().splitlines(), found[1]

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

        def disturbed() -> int:
            self._operations.arm(place, FAULTS[fault], number)
            status = place.run(*self.command)
            self._operations.disarm()
            return status

        place.put(self.before)
        status, _ = in_fork(place, disturbed)
        output = place.said()
        left = place.tree()
        expected = {-signal.SIGKILL} if fault == "kill" else {self.status, SYSTEM}
        if status not in expected or "Traceback" in output:
            problems.append(f"status {status}: {output[-3000:]}")
        # The state of a migration says what could not be read.
        told = self.name == "inspect" and re.search("cannot (read|list)", output)
        if status == self.status and self.name in READERS and output != self.output and not told:
            problems.append(f"another answer: {output[:1000]}")
        if number == 1 and fault in _REFUSED:
            if left != self.before:
                problems.append("the disk refuses every change and is another one")
            if status == SYSTEM and f": {_REFUSED[fault]}; " not in output:
                problems.append(f"no reason is given: {output[-1000:]}")
        published = self._published(left, problems)
        if status == self.status == 0 and published == "old" and self._publishes:
            problems.append("the command ended with 0 and its version is not published")
        problems += self._lost(left)
        problems += self._next_run(left)
        return {
            "flow": self.name,
            "fault": fault,
            "number": number,
            "of": len(self.seen[fault]),
            "operation": self._shown(self.seen[fault][number - 1]),
            "status": status,
            "published": published,
            "problems": problems,
        }

    def _shown(self, operation: str) -> str:
        return re.sub(r"[0-9a-f]{12,}", "*", operation.replace(f"{self.place.disk}/", ""))

    @property
    def _publishes(self) -> bool:
        return vectors_of(self.before, "index") != vectors_of(self.after, "index")

    def _published(self, left: Tree, problems: list[str]) -> str | None:
        """Return which version is published; note whatever is neither the old nor the new one."""
        first = ["new"] if "new/CURRENT" in left else []
        problems += [
            damage for index in ("index", "other", *first) for damage in damages_of(left, index)
        ]
        if vectors_of(left, "other") != vectors_of(self.before, "other"):
            problems.append("another version of the other index is published")
        found = vectors_of(left, "index")
        for which, tree in (("new", self.after), ("old", self.before)):
            if found == vectors_of(tree, "index"):
                return which
        problems.append("a version is published that is neither the old nor the new one")
        return None

    def _lost(self, left: Tree) -> list[str]:
        """Return the files of versions to be kept that are gone or changed."""
        there = versions_of(left, "index")
        return [
            f"{version}/{name} is gone or changed"
            for version, files in self.kept.items()
            for name, digest in files.items()
            if there.get(version, {}).get(name) != digest
        ]

    def _next_run(self, left: Tree) -> list[str]:
        key = digest_of(left)
        if key not in self._next_runs:
            _, found = in_fork(self.place, self._again)
            if found is None:
                found = [f"the next run: {self.place.said()[-3000:]}"]
            self._next_runs[key] = found
        return self._next_runs[key]

    def _again(self) -> list[str]:
        place, problems = self.place, list[str]()
        if self.name == "rollback" and place.published(place.index) != self._published_before:
            # A second rollback would go back one version further.
            assert place.run("rollback", place.index, "--to", self._published_before) == 0
        status = place.run(*self.command)
        if status != self.status:
            problems.append(f"the next run ended with {status}")
        left = place.tree()
        if vectors_of(left, "index") != vectors_of(self.after, "index"):
            problems.append("after the next run another version is published")
        if self.name not in READERS:
            there, wanted = names_of(left), names_of(self.after)
            problems += [f"left over: {name}" for name in sorted(there - wanted)]
            problems += [f"missing: {name}" for name in sorted(wanted - there)]
        if self.name.startswith("push"):
            files = [name for name in self.after if name.startswith("out/pushed")]
            problems += [f"differs: {n}" for n in files if left.get(n) != self.after[n]]
        if place.run("verify", place.index, place.other) != 0:
            problems.append("verify finds damage")
        for version in self.kept:
            problems += self._unreadable(version)
        return problems

    @property
    def _published_before(self) -> str:
        return str(json.loads(self.before["index/CURRENT"] or b"")["version"])

    def _unreadable(self, version: str) -> list[str]:
        """Compare cosines from the store with those of the corpus that a version was built from."""
        from whiten_index import open_index

        place = self.place
        back = ("rollback", place.index, "--to", version)
        if place.published(place.index) != version and place.run(*back) != 0:
            return [f"{version} can no longer be published"]
        rows = embeddings(place.night_of[version])
        query = np.random.default_rng(1).normal(size=DIM).astype(np.float32)
        opened = open_index(place.index, rerank=len(rows), rerank_by="embeddings")
        (hits,) = opened.search_embeddings(query[None], top_k=len(rows))
        found: dict[Any, float] = {hit.id: hit.score for hit in hits}
        # Lists that were not searched hold the others.
        if len(found) < len(rows) // 4 or not set(found) <= set(rows):
            return [f"{version} has other rows: {len(found)}"]
        cosines = {
            i: float(rows[i] @ query / np.linalg.norm(rows[i]) / np.linalg.norm(query))
            for i in found
        }
        wrong = [i for i in found if abs(found[i] - cosines[i]) > 1e-4]
        return [f"{version}: embeddings of {wrong[:5]} differ"] if wrong else []


def main(folder: str, part: str, parts: str, share: str, *only: str) -> int:
    """Try a part of the points of some flows, or of all."""
    operations = Operations(ctypes.CDLL(None))
    import faiss

    for name in ("cli", "search.search_index", "pipeline.update", "versions.gc", "vectordb.push"):
        importlib.import_module(f"whiten_index.{name}")
    # Threads do not live on in a fork.
    faiss.omp_set_num_threads(1)
    place = Place(Path(folder, part))
    place.root.mkdir(parents=True)

    def prepared() -> dict[str, int]:
        place.prepare()
        return place.night_of

    status, place.night_of = in_fork(place, prepared)
    assert status == 0, place.said()
    before = place.tree()
    for name in only or flows(place):
        flow = Flow(place, name, before, operations)
        counts = {fault: len(seen) for fault, seen in flow.seen.items()}
        print(json.dumps({"flow": name, "operations": counts}), flush=True)
        for fault, number in flow.points(float(share))[int(part) :: int(parts)]:
            print(json.dumps(flow.try_out(fault, number)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
