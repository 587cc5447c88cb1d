"""A migration is killed at file operations of each of its runs: searches answer, nothing is lost.

``python -m tests.pipeline.test_migrate_killed FOLDER SHARE [RUN ...]`` kills runs in forks, right
before a share of their file operations, and prints a JSON object for each; ``problems`` should be
empty. The library of ``tests/faults/interpose.c`` must be preloaded.
"""

import contextlib
import ctypes
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults import place as faults_place
from tests.faults.child import FAULTS, Operations
from tests.faults.place import in_fork
from tests.faults.run import ROOT, compiled, environment
from tests.helpers import tiny_models

FILES, ROWS, NEW = 3, 700, 40  # rows of a file; new ones of the second night
WORDS = ("the", "cat", "sat", "on", "mat", "dog", "ran", "to", "small", "river", "sang", "king")
RUNS = ("first", "second", "last", "update")


class Place(faults_place.Place):
    """A corpus of texts, an index of it by an old model, and the runs of a migration."""

    def prepare(self) -> None:
        self.disk.mkdir()
        tiny_models.bert(self.root / "model")
        self.write_texts(0)
        options = ("--text-column", "text", "--id-column", "id", "--whiten", "pca", "--k", 8)
        files = ("--factory", "Flat", "--store", self.store, "--out", self.index)
        self.must("build", self.root / "texts", *options, *files, *self.model)

    def write_texts(self, night: int) -> None:
        """Write the corpus, in which rows come and go in the second night."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        (self.root / "texts").mkdir(exist_ok=True)
        rng = np.random.default_rng(0)
        rows = [f"{' '.join(rng.choice(WORDS, 6))} {row}" for row in range(FILES * ROWS + NEW)]
        for number in range(FILES):
            there = [*range(number * ROWS, (number + 1) * ROWS)]
            if night and not number:
                there = [*there[NEW:], *range(FILES * ROWS, FILES * ROWS + NEW)]
            table = {"id": [f"d{row}" for row in there], "text": [rows[row] for row in there]}
            pq.write_table(pa.table(table), path := self.root / f"texts/{number}.parquet")
            os.utime(path, (1_700_000_000 + night,) * 2)

    @property
    def model(self) -> tuple[object, ...]:
        return "--model", self.root / "model", "--pooling", "mean", "--device", "cpu"

    def bridged(self) -> list[str]:
        """Return the folders of the rows of bridged versions."""
        return list(map(str, Path(self.store).glob("bridged-*")))

    def start(self, run: str) -> int:
        """Run a command in this process; return its status."""
        if run == "update":
            return self.run("update", self.index, "--device", "cpu")
        part = () if run == "last" else ("--rows", ROWS // 2, "--bridge")
        new = (*self.model, "--layers", 1, "--store", self.store)
        return self.run("migrate", self.index, *new, *part)

    def answer(self) -> list[Any]:
        """Return what a new process finds, its status first."""
        asked = ("search", self.index, "the cat sat on the small river", "--device", "cpu")
        status, _ = in_fork(self, lambda: self.run(*asked, "--json"))
        return [status, self.said() if status else json.loads(self.said())["results"]]


def count_encoded(file: int) -> None:
    """Let each window that is encoded write its number of rows to a file."""
    from whiten_index.pipeline.shard_encoding import ShardWork

    run = ShardWork.run

    def counted(work: Any, state: Any, advance: Any) -> Any:
        os.write(file, f"{sum(shard.rows_to_encode for shard in state.shards)}\n".encode())
        return run(work, state, advance)

    ShardWork.run = counted  # type: ignore[method-assign]


def try_run(place: Place, run: str, operations: Operations, share: float) -> None:
    """Kill a run at a share of its operations; print what came of each."""
    encoded, before = place.root / "encoded", place.tree()
    if run == "update":
        place.write_texts(1)
    old = place.answer()

    def started(number: int) -> int:
        seen = os.open(place.root / "seen", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
        count_encoded(os.open(encoded, os.O_CREAT | os.O_WRONLY | os.O_APPEND))
        operations.arm(place, FAULTS["kill"], number, seen)
        status = place.start(run)
        operations.disarm()
        return status

    def ended() -> list[int]:
        count_encoded(os.open(encoded, os.O_CREAT | os.O_WRONLY | os.O_APPEND))
        again = ["update"] if run == "update" else []
        # The last removes the rows of a bridged version, which readers may have had open.
        found = [place.start(each) for each in (*again, "last", "last")]
        return [*found, place.run("verify", place.index)]

    had = encoded.read_text() if encoded.exists() else ""
    status, _ = in_fork(place, lambda: started(0))
    assert status == 0, place.said()
    seen, new = (place.root / "seen").read_text().splitlines(), place.answer()
    status, found = in_fork(place, ended)
    assert found == [0] * len(found), place.said()
    final = place.answer()
    print(json.dumps({"run": run, "operations": len(seen)}), flush=True)
    points = np.random.default_rng(0).permutation(len(seen))[: max(round(share * len(seen)), 1)]
    for number in sorted((points + 1).tolist()):
        place.put(before)
        encoded.write_text(had)
        problems = list[str]()
        status, _ = in_fork(place, lambda number=number: started(number))  # type: ignore[misc]
        if status != -9:
            problems.append(f"status {status}: {place.said()[-2000:]}")
        if (answer := place.answer()) not in (old, new):
            problems.append(f"another answer: {answer}")
        _, found = in_fork(place, ended)
        if not found or any(found):
            problems.append(f"the next runs ended with {found}: {place.said()[-2000:]}")
        if place.answer() != final:
            problems.append("another answer in the end")
        rows = [int(line) for line in encoded.read_text().split()]
        if sum(rows) > FILES * ROWS + NEW * (run == "update") + max(rows):
            problems.append(f"{sum(rows)} rows were encoded, in windows of {rows}")
        left = [name for name in place.tree() if ".tmp-" in name] + place.bridged()
        problems += [f"left over: {name}" for name in left]
        print(json.dumps({"run": run, "number": number, "operation": seen[number - 1],
                          "rows": sum(rows), "new": answer == new, "problems": problems}),
              flush=True)  # fmt: skip
    place.write_texts(0)
    place.put(before)
    encoded.write_text(had)


def main(folder: str, share: str, *only: str) -> None:
    place, operations = Place(Path(folder)), Operations(ctypes.CDLL(None))

    def tried(*runs: str) -> list[str]:
        count_encoded(os.open(place.root / "encoded", os.O_CREAT | os.O_WRONLY | os.O_APPEND))
        place.prepare() if not runs else None
        for run in runs:
            assert place.start(run) == 0
        return sorted(sys.modules)

    # Forks have imported all, and no threads run here.
    status, modules = in_fork(place, tried)
    assert status == 0, place.said()
    (place.root / "encoded").write_text("")
    commands = ("migrate", "update", "build")
    for module in (*modules, *(f"whiten_index.pipeline.{name}" for name in commands)):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    for run in only or RUNS:
        if run != "first" and not place.bridged():
            status, _ = in_fork(place, lambda: tried("first"))
            assert status == 0, place.said()
        try_run(place, run, operations, float(share))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", RUNS)
def test_a_killed_run(run: str, tmp_path: Path) -> None:
    prepared = {**environment(tmp_path, compiled(tmp_path)), "TOKENIZERS_PARALLELISM": "false"}
    (tmp_path / "place").mkdir()
    module = f"tests.pipeline.{Path(__file__).stem}"
    done = subprocess.run(
        [sys.executable, "-m", module, tmp_path / "place", "0.02", run],
        env=prepared, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    points = [json.loads(line) for line in done.stdout.splitlines()[1:]]
    assert len(points) > 1
    assert [point for point in points if point["problems"]] == []


if __name__ == "__main__":
    main(*sys.argv[1:])
