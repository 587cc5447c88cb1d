"""A command of the command line, disturbed: what is published, lost and left over afterwards."""

import contextlib
import gc
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.place import (
    DIM,
    Place,
    Tree,
    damages_of,
    digest_of,
    embeddings,
    in_fork,
    names_of,
    published_facts,
    versions_of,
)
from whiten_index.artifacts.manifest import Schema

# Commands that write nothing: they end with a status or print the same as ever.
READERS = ("search", "verify", "versions", "inspect")
_IMPORTED = ("cli", "search.search_index", "pipeline.update", "versions.gc", "vectordb.push")


def prepared(folder: Path) -> Place:
    """Return a place with two indexes; every import that its commands need is done."""
    import faiss

    for name in _IMPORTED:
        importlib.import_module(f"whiten_index.{name}")
    # Threads do not live on in a fork.
    faiss.omp_set_num_threads(1)
    place = Place(folder)
    folder.mkdir(parents=True)

    def work() -> dict[str, int]:
        place.prepare()
        return place.night_of

    status, place.night_of = in_fork(place, work)
    assert status == 0, place.said()
    return place


class Flow:
    """A command: the disk before it, after it, and each operation between.

    Subclasses record the operations, and disturb them.
    """

    def __init__(
        self, place: Place, name: str, command: list[object], before: Tree, status: int = 0
    ) -> None:
        self.place, self.name, self.command, self.before = place, name, command, before
        self.status = status
        # Many faults leave the disk as it was; what a next run does there is known after the first.
        self._next_runs: dict[str, list[str]] = {}
        self.operations, modules = self._undisturbed()
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
        kept = versions_of(self.after, "index")
        self.kept = {v: files for v, files in versions_of(before, "index").items() if v in kept}

    def recorded(self) -> list[Any]:
        """Run the command; return its operations."""
        raise NotImplementedError

    def _undisturbed(self) -> tuple[list[Any], list[str]]:
        """Return the operations and the modules imported."""
        self.place.put(self.before)
        ended, found = in_fork(self.place, lambda: (self.recorded(), sorted(sys.modules)))
        assert ended == 0, self.place.said()
        return found  # type: ignore[no-any-return]

    def run(self) -> int:
        """Run the command; return its exit status."""
        return self.place.run(*self.command)

    def looked(self, left: Tree, status: int | None) -> tuple[str | None, list[str]]:
        """Return which version is published, and what is wrong now and after a next run.

        Args:
            left: what is on the disk.
            status: with which the command ended, if it did.
        """
        problems = list[str]()
        published = self._published(left, problems)
        publishes = published_facts(self.before, "index") != published_facts(self.after, "index")
        if status == self.status == 0 and published == "old" and publishes:
            problems.append("the command ended with 0 and its version is not published")
        return published, [*problems, *self._lost(left), *self._next_run(left)]

    def _published(self, left: Tree, problems: list[str]) -> str | None:
        """Return which version is published; note whatever is neither the old nor the new one."""
        first = ["new"] if "new/CURRENT" in left else []
        problems += [
            damage for index in ("index", "other", *first) for damage in damages_of(left, index)
        ]
        if published_facts(left, "other") != published_facts(self.before, "other"):
            problems.append("another version of the other index is published")
        found = published_facts(left, "index")
        for which, tree in (("new", self.after), ("old", self.before)):
            if found == published_facts(tree, "index"):
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
        if place.run("verify", place.index, place.other) != 0:
            problems.append("verify finds damage before the next run")
        if self.name == "rollback" and place.published(place.index) != self._published_before:
            # A second rollback would go back one version further.
            assert place.run("rollback", place.index, "--to", self._published_before) == 0
        status = self.run()
        if status != self.status:
            problems.append(f"the next run ended with {status}")
        left = place.tree()
        if published_facts(left, "index") != published_facts(self.after, "index"):
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
