"""A small corpus, a store, two indexes and what was exported from them, on one folder.

``Place.prepare`` builds it with the command line alone. Every expected value is independent of the
package: the embeddings that the corpus was written from, and checksums taken before the fault.
"""

import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROWS, DIM, ROWS_A_SHARD = 160, 8, 40
COLUMNS = ["--embedding-column", "embedding", "--id-column", "id"]
_SECONDS = 120
# A version's number depends on how often a command was run, and the name of a registered index on
# its id, which is drawn.
_CHANGING = re.compile(r"(?<=/indexes/)[^/]+|(?<=/registered/)[^/]+|(?<=s/)\d{6}(?=-)")

Tree = dict[str, bytes | None]  # path -> content, None for a folder


def embeddings(night: int) -> dict[int, np.ndarray]:
    """Return id -> embedding of the corpus of a night: rows change, come and go each night."""
    random = np.random.default_rng(7 if night < 9 else 8)
    rows = random.normal(size=(ROWS + 40, DIM)).astype(np.float32) * np.linspace(1, 2, DIM)
    rows = rows.astype(np.float32)
    rows[ROWS - 30 : ROWS - 30 + night] += 1
    there = np.delete(np.arange(ROWS + 3 * night), np.arange(85, 85 + 4 * night))
    return {int(i): rows[i] for i in there}


class Place:
    """A folder with everything that the commands read and write.

    Attributes:
        disk: the folder in which operations may fail.
        log: output of the last command.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.disk, self.log = root, root / "disk", root / "log"
        self.corpus, self.store = self.disk / "corpus", self.disk / "store"
        self.index, self.other = self.disk / "index", self.disk / "other"
        self.out = self.disk / "out"
        self.night_of: dict[str, int] = {}
        self.ticks = 0

    def prepare(self) -> None:
        """Publish versions of two indexes from one store, and change the corpus for the next."""
        for folder in (self.disk, self.corpus, self.out):
            folder.mkdir()
        stored = ["--store", self.store, "--store-dtype", "float32", "--shard-rows", ROWS_A_SHARD]
        common = [*COLUMNS, *stored, "--whiten", "whitening", "--threads", 1, "--keep", "year"]
        for night in range(4):
            self.write_corpus(night)
            if night == 0:
                self.must("build", self.corpus, *common, "--k", 4, "--factory", "IVF2,Flat",
                          "--out", self.index)  # fmt: skip
            elif night < 3:
                self.must("update", self.index, "--refit", "always", "--threads", 1)
            self.night_of.setdefault(self.published(self.index), min(night, 2))
            if night == 1:
                for name in ("pushed.parquet", "pushed.npy"):
                    self.must("push", self.index, "--to", self.out / name)
        self.must("prune", self.index, "--keep", 2)
        # All rows of the other index are replaced, so that the store has embeddings to remove.
        file = self.disk / "other.parquet"
        for night in (9, 0):
            self.write(file, embeddings(night))
            if night:
                self.must(
                    "build", file, *common, "--k", 2, "--factory", "Flat", "--out", self.other
                )
            else:
                self.must("update", self.other, "--refit", "always", "--threads", 1)
        self.must("prune", self.other, "--keep", 1)

    def write_corpus(self, night: int) -> None:
        """Write the corpus of a night as two Parquet files, of which the second changes."""
        rows = embeddings(night)
        if night == 0:
            self.write(self.corpus / "a.parquet", {i: row for i, row in rows.items() if i < 80})
        self.write(self.corpus / "b.parquet", {i: row for i, row in rows.items() if i >= 80})

    def write(self, path: Path, rows: dict[int, np.ndarray]) -> None:
        """Write rows to a Parquet file that looks old."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        ids = list(rows)
        pq.write_table(pa.table({"id": ids, "year": ids, "embedding": list(rows.values())}), path)
        # A file that was just written is read again, as it may change within a clock tick.
        self.ticks += 1
        os.utime(path, (1_700_000_000 + self.ticks,) * 2)

    def run(self, *arguments: object) -> int:
        """Run a command in this process; return its exit status."""
        from whiten_index.cli import cli

        try:
            cli.main([str(each) for each in arguments])
        except SystemExit as ended:
            return int(ended.code or 0)
        raise AssertionError("the command line ends the process")

    def must(self, *arguments: object) -> None:
        """Run a command that has to succeed."""
        assert self.run(*arguments) == 0, arguments

    def published(self, index: Path) -> str:
        """Return the name of the published version."""
        return str(json.loads((index / "CURRENT").read_bytes())["version"])

    def put(self, tree: Tree) -> None:
        """Make the disk hold exactly this, all of it from long ago."""
        shutil.rmtree(self.disk, ignore_errors=True)
        write_tree(self.disk, tree)
        for path in self.disk.rglob("*"):
            os.utime(path, (1_700_000_000,) * 2)

    def tree(self) -> Tree:
        """Return what is on the disk."""
        return read_tree(self.disk)

    def said(self) -> str:
        """Return the output of the last fork."""
        return self.log.read_text(errors="replace")


def read_tree(root: Path) -> Tree:
    """Return what is below a folder."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


def write_tree(root: Path, tree: Tree) -> None:
    """Make a folder that holds what ``read_tree`` returned."""
    root.mkdir()
    for name, content in tree.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


def digest_of(tree: Tree) -> str:
    """Return a checksum of the paths and contents of a tree."""
    digest = hashlib.sha256()
    for name, content in sorted(tree.items()):
        digest.update(f"{name}\0{-1 if content is None else len(content)}\0".encode())
        digest.update(content or b"")
    return digest.hexdigest()


def names_of(tree: Tree) -> set[str]:
    """Return the paths of a tree, without the parts that depend on the number of tries."""
    return {_CHANGING.sub("*", f"/{name}") for name in tree}


def versions_of(tree: Tree, index: str) -> dict[str, dict[str, str]]:
    """Return version -> file -> SHA-256 of the versions of an index."""
    found: dict[str, dict[str, str]] = {}
    for name, content in tree.items():
        if content is not None and (match := re.fullmatch(rf"{index}/versions/([^/]+)/(.+)", name)):
            found.setdefault(match[1], {})[match[2]] = hashlib.sha256(content).hexdigest()
    return found


def damages_of(tree: Tree, index: str) -> list[str]:
    """Return what is not whole in the published version, by its checksums alone."""
    current = tree.get(f"{index}/CURRENT")
    if current is None:
        return [f"{index} has no CURRENT"]
    fields = json.loads(current)
    files = versions_of(tree, index).get(fields["version"], {})
    if files.get("manifest.json") != fields["manifest_sha256"]:
        return [f"{index}: the manifest is not the one that CURRENT names"]
    manifest = tree[f"{index}/versions/{fields['version']}/manifest.json"]
    assert manifest is not None
    expected = {name: entry["sha256"] for name, entry in json.loads(manifest)["files"].items()}
    return [
        f"{index}: {name} of the published version is not whole"
        for name, digest in expected.items()
        if files.get(name) != digest
    ]


def published_facts(tree: Tree, index: str) -> dict[str, Any]:
    """Return what the published version holds, but for when and under which number it was made."""
    current = tree.get(f"{index}/CURRENT")
    if current is None:
        return {}
    version = json.loads(current)["version"]
    fields = json.loads(tree.get(f"{index}/versions/{version}/manifest.json") or b"{}")
    update = fields.get("update") or {}
    decision = update.get("decision") or {}
    files = versions_of(tree, index).get(version, {})
    names = ("index.faiss", "documents.arrow", "whitening.safetensors", "moments.safetensors")
    return {
        "identity": version.partition("-")[2],
        **{name: files.get(name) for name in names},
        **{name: fields.get(name) for name in ("rows", "corpus")},
        "changes": update.get("rows"),
        "decision": [decision.get("whitening"), decision.get("index")],
        "gates": [[gate["name"], gate["passed"]] for gate in fields.get("gates") or ()],
        "sizes": {name: size["bytes"] for name, size in fields.get("files", {}).items()},
    }


def in_fork(place: Any, work: Callable[[], Any]) -> tuple[int, Any]:
    """Return the exit status of a fork and what its work returned; what it prints goes to a log."""
    answer = place.root / "answer"
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    if pid := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return status, pickle.loads(answer.read_bytes()) if answer.exists() else None
    status = 1
    try:
        signal.alarm(_SECONDS)
        output = os.open(place.log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        found = work()
        status = found if isinstance(found, int) else 0
        answer.write_bytes(pickle.dumps(found))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
