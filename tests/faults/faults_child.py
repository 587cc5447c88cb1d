"""Nights of a small index whose disk loses its power.

``python tests/faults/faults_child.py FOLDER PART PARTS EVERY`` does its part of the points, every
``EVERY``-th of them, and prints a JSON object for each, whose ``problems`` should be empty.
``test_faults.py`` starts it. The processes that it forks have imported everything.

A point is a flow, a number, and a state in which a power cut before the operation of that number
may leave the disk. Flows: ``keep``, an update that keeps its transform and lists; ``night``, the
nightly job, which fits again, removes versions and shards and packs others. ``child.py`` has the
other faults.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import json
import os
import pickle
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.faults.disk_model import Disk, Tree, read_tree, write_tree
from tests.faults.file_operations import Operation, Tap
from tests.faults.place import in_fork

FLOWS = ("keep", "night")
ROWS, DIM, ROWS_A_FILE, ROWS_A_SHARD = 160, 8, 80, 40
_IMPORTED = (
    "whiten_index.cli",
    "whiten_index.cli.nightly_job",
    "whiten_index.search.search_index",
    "whiten_index.pipeline.update",
    "whiten_index.versions.gc",
)
_OLD = 30 * 86400


@dataclass(frozen=True)
class Point:
    """Where the power is cut, which of the states that this may leave it is, and that state."""

    flow: str
    number: int
    kind: str
    left: Tree = field(repr=False, compare=False)


@dataclass(frozen=True)
class Facts:
    """What is published, but for when and under which number it was made."""

    identity: str
    ids: list[Any]
    vectors: np.ndarray
    found: np.ndarray
    moments: tuple[Any, ...]
    fields: dict[str, Any]

    def differs_from(self, other: Facts) -> list[str]:
        """Return what is not as in another."""
        names = [
            name
            for name in ("identity", "ids", "fields")
            if getattr(self, name) != getattr(other, name)
        ]
        names += [
            name
            for name in ("vectors", "found")
            if not np.array_equal(getattr(self, name), getattr(other, name))
        ]
        same = all(map(np.array_equal, self.moments, other.moments))
        return names if same else [*names, "moments"]


class Place:
    """A folder with a corpus and a disk, on which are an index, its store and metrics."""

    def __init__(self, root: Path, flow: str) -> None:
        self.root, self.flow = root, flow
        self.disk, self.corpus, self.log = root / "disk", root / "corpus", root / "log"
        self.out, self.job = self.disk / "index", root / "job.toml"

    def prepare(self) -> None:
        """Publish two versions, and change the corpus for a third."""
        self.corpus.mkdir()
        (self.disk / "metrics").mkdir(parents=True)
        self.job.write_text(
            f'index = "{self.out}"\nrefit = "always"\nthreads = 1\nkeep-versions = 2\n'
            f'compact = true\nmetrics = "{self.disk}/metrics/index.prom"\n'
        )
        for night in range(3):
            if night == 1:
                self.build()
            elif night == 2:
                assert self.update("auto") == 0
            self.write_corpus(night)

    def write_corpus(self, night: int) -> None:
        """Write the corpus of a night: each changes, adds and deletes rows of the second file."""
        random = np.random.default_rng(7)
        rows = random.normal(size=(ROWS + 40, DIM)).astype(np.float32) * np.linspace(1, 2, DIM)
        ids, year = np.arange(len(rows)), np.full(len(rows), 2000)
        rows[ROWS - 30 : ROWS - 30 + night] += 1  # changed
        year[ROWS - 10 : ROWS - 10 + night] += 1  # kept columns alone
        there = np.arange(ROWS_A_FILE, ROWS + 3 * night)  # new ones at the end
        there = np.delete(there, np.arange(5, 5 + 4 * night))
        for name, which in (("a", np.arange(ROWS_A_FILE)), ("b", there)):
            path = self.corpus / f"{name}.parquet"
            if name == "b" or not path.exists():
                table = {"id": ids[which], "year": year[which], "embedding": list(rows[which])}
                pq.write_table(pa.table(table), path)
                # A file that was just written may change again within a tick of its clock.
                os.utime(path, (time.time() - 1000 + night,) * 2)

    def build(self) -> None:
        from whiten_index import BuildConfig, build_index

        build_index(
            BuildConfig(
                corpus=(str(self.corpus),),
                out=str(self.out),
                embedding_column="embedding",
                id_column="id",
                keep=("year",),
                shard_rows=ROWS_A_SHARD,
                k=4,
                whiten="whitening",
                factory="IVF2,Flat" if self.flow == "keep" else "Flat",
                threads=1,
            )
        )

    def update(self, refit: str) -> int:
        """Do as the command line does; return the exit status."""
        from whiten_index.cli import cli

        try:
            cli.main(["update", str(self.out), "--refit", refit, "--threads", "1"])
        except SystemExit as ended:
            return int(ended.code or 0)
        raise AssertionError("the command line ends the process")

    def run(self) -> int:
        """Do the work of a night; return the exit status."""
        if self.flow == "keep":
            return self.update("never")
        from whiten_index.cli.nightly_job import run_nightly

        return run_nightly(self.job)

    def put(self, tree: Tree) -> None:
        """Make the disk hold this, all of it from long ago."""
        shutil.rmtree(self.disk, ignore_errors=True)
        write_tree(self.disk, tree)
        then = time.time() - _OLD
        for path in self.disk.rglob("*"):
            os.utime(path, (then, then))


def facts_of(out: Path) -> Facts:
    """Open what is published, every checksum looked at, and return what it holds and answers."""
    import faiss

    from whiten_index.search.search_index import open_index
    from whiten_index.versions.published import MOMENTS, read_published
    from whiten_index.whitening.moments import Moments

    version = read_published(out).check()
    folder, fields = version.folder, version.fields
    opened = open_index(out, verify="full")
    bundle = opened.bundle
    assert bundle.version == folder.name
    inner = faiss.downcast_index(bundle.index.index)
    if isinstance(inner, faiss.IndexIVF):
        inner.make_direct_map()
    queries = np.random.default_rng(1).normal(size=(8, DIM)).astype(np.float32)
    moments = Moments.load(folder / MOMENTS)
    update = fields.get("update") or {}
    decision = update.get("decision") or {}
    return Facts(
        identity=folder.name.partition("-")[2],
        ids=bundle.documents.ids(range(len(bundle))),
        vectors=inner.reconstruct_n(0, len(bundle)),
        found=bundle.search(queries, 10)[1],
        moments=(moments.count, moments.mean, moments.scatter),
        fields={
            "rows": fields["rows"],
            "corpus": fields["corpus"],
            "changes": update.get("rows"),
            "decision": [decision.get("whitening"), decision.get("index")],
            "gates": [[gate["name"], gate["passed"]] for gate in fields.get("gates") or ()],
            "files": {name: size["bytes"] for name, size in fields["files"].items()},
        },
    )


def store_damages(out: Path) -> list[str]:
    """Return what is wrong with the index and with the rows of its published version."""
    from whiten_index.store.embedding_store import EmbeddingStore
    from whiten_index.store.records import CorpusRecord
    from whiten_index.versions.published import RECORD, read_published
    from whiten_index.versions.verify import verify_index

    version = read_published(out)
    folder, fields = version.folder, version.fields
    store = EmbeddingStore.open(out / "store", fingerprint=fields["encoder_fingerprint"])
    record = CorpusRecord.load(folder / RECORD)
    lost = [f"lost {part}" for part in record.parts if not store.has(part)]
    return lost + [f"{damage.path}: {damage.why}" for damage in verify_index(out).damages]


def garbage(place: Place, wanted: set[str]) -> list[str]:
    """Return what is on the disk and was not after an undisturbed night, and the reverse."""
    there = names_of(place.disk)
    return [f"left {name}" for name in sorted(there - wanted)] + [
        f"missing {name}" for name in sorted(wanted - there)
    ]


def names_of(disk: Path) -> set[str]:
    """Return the paths on a disk, without what chance or the number of tries decides in them."""
    changing = r"(?<=/segments/)[0-9a-f]{32}|(?<=s/)\d{6}(?=-)"
    return {re.sub(changing, "*", str(path.relative_to(disk))) for path in disk.rglob("*")}


class Setting:
    """A flow, undisturbed: what is on the disk before and after, and every operation between."""

    def __init__(self, root: Path, flow: str) -> None:
        root.mkdir()
        self.place = Place(root, flow)
        self._do(self.place.prepare)
        self.before = read_tree(self.place.disk)
        self.place.put(self.before)
        self.old: Facts = self._do(lambda: facts_of(self.place.out))
        self.done: list[Operation]
        self.done, modules = self._do(self._recorded)
        for name in modules:
            # What was imported on the way, so that no fork after this one does it again.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        self.after = read_tree(self.place.disk)
        self.new: Facts = self._do(lambda: facts_of(self.place.out))
        self.names = names_of(self.place.disk)
        assert not self._do(lambda: store_damages(self.place.out))

    def _do(self, work: Callable[[], Any]) -> Any:
        status, found = in_fork(self.place, work)
        assert status == 0, self.place.log.read_text()
        return found

    def _recorded(self) -> tuple[list[Operation], list[str]]:
        """Return the operations and the modules imported."""
        done = list[Operation]()
        Tap(self.place.disk, after=done.append).install()
        assert self.place.run() == 0
        return done, sorted(sys.modules)

    def replayed(self) -> Tree:
        """Return the disk as the operations seen make it of what was on it before."""
        self.place.put(self.before)
        disk = Disk(self.place.disk)
        for operation in self.done:
            disk.apply(operation)
        return disk.now()

    def points(self) -> Iterator[Point]:
        self.place.put(self.before)
        disk, seen = Disk(self.place.disk), set[bytes]()
        for number in range(1, len(self.done) + 2):
            for kind, left in disk.after_power_cuts(number):
                digest = hashlib.sha256(pickle.dumps(sorted(left.items()))).digest()
                if digest not in seen:
                    seen.add(digest)
                    yield Point(self.place.flow, number, kind, left)
            if number <= len(self.done):
                disk.apply(self.done[number - 1])

    def try_out(self, point: Point) -> dict[str, Any]:
        """Put there what the power cut left, look, run again, and look again."""
        place = self.place
        over = point.number > len(self.done)
        operation = None if over else self.done[point.number - 1]
        place.put(point.left)
        _, found = in_fork(place, lambda: self._looked(flushed=over))
        problems = [f"looking: {place.log.read_text()}"] if found is None else found[0]
        return {
            "flow": point.flow,
            "number": point.number,
            "kind": point.kind,
            "operation": operation and operation.name,
            "path": operation and operation.path.removeprefix(f"{place.disk}/"),
            "published": found and found[1],
            "problems": problems,
        }

    def _looked(self, *, flushed: bool) -> tuple[list[str], str | None]:
        place, problems = self.place, list[str]()
        found = facts_of(place.out)
        expected = {facts.identity: facts for facts in (self.old, self.new)}
        published = {self.old.identity: "old", self.new.identity: "new"}.get(found.identity)
        if published is None:
            problems.append(f"another version is published: {found.identity}")
        else:
            problems += [
                f"{what}: differs" for what in found.differs_from(expected[found.identity])
            ]
        if flushed and published != "new":
            problems.append("the job ended well, and its version is not published")
        problems += [f"before the next run: {each}" for each in store_damages(place.out)]
        again = place.run()
        if again != 0:
            problems.append(f"the next run ended with {again}: {place.log.read_text()}")
        problems += [f"again: {what}" for what in facts_of(place.out).differs_from(self.new)]
        problems += [f"again: {each}" for each in store_damages(place.out)]
        problems += [f"again: {each}" for each in garbage(place, self.names)]
        return problems, published


def main(folder: str, part: str, parts: str, every: str) -> int:
    """Do a part of the points."""
    import faiss

    for name in _IMPORTED:
        importlib.import_module(name)
    # Threads do not live on in a fork.
    faiss.omp_set_num_threads(1)
    for flow in FLOWS:
        setting = Setting(Path(folder, f"{flow}{part}"), flow)
        replayed, after = setting.replayed(), setting.after
        escaped = sorted(
            name
            for name in {*replayed, *after}
            if replayed.get(name, "missing") != after.get(name, "missing")
        )
        counts = {"flow": flow, "operations": len(setting.done), "escaped": escaped}
        print(json.dumps(counts), flush=True)
        some = itertools.islice(setting.points(), 0, None, int(every))
        for point in itertools.islice(some, int(part), None, int(parts)):
            print(json.dumps(setting.try_out(point)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
