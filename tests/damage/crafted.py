"""A small index with its store, and manifests of it whose fields are wrong and digests right."""

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.helpers.bad_input import succeed
from tests.helpers.builds import build, random_rows, write_rows
from whiten_index.artifacts.files import MANIFEST
from whiten_index.artifacts.manifest import write_manifest

DELETED = object()
CRAFTS: dict[str, Any] = {
    "deleted": DELETED,
    "null": None,
    "number as text": "1",
    "flag": True,
    "fraction": 0.5,
    "negative": -1,
    "huge": 10**30,
    "wide": 2**53,
    "infinite": math.inf,
    "NaN": math.nan,
    "empty text": "",
    "long text": "x" * 5_000,
    "traversal": "../../../outside",
    "absolute": "/outside",
    "NUL": "a\0b",
    "surrogate": "\udc80",
    "empty list": [],
    "empty object": {},
    "nested list": [[[["deep"]]]],
    "wrong object": {"../../../outside": {"bytes": 1, "sha256": "0" * 64}},
}
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class World:
    """A folder with an index, its store and an exported transform, and a copy to restore it by."""

    root: Path
    kept: Path

    @property
    def index(self) -> Path:
        return self.root / "index"

    @property
    def store(self) -> Path:
        return self.index / "store"

    @property
    def current(self) -> Path:
        return self.index / "CURRENT"

    @property
    def published(self) -> Path:
        """Folder of the published version."""
        return self.index / "versions" / self.fields("index/CURRENT")["version"]

    @property
    def documents(self) -> Path:
        return self.published / "documents.arrow"

    def table(self) -> pa.Table:
        """Return the documents of the published version."""
        return pa.ipc.open_file(self.documents.read_bytes()).read_all()

    def fields(self, name: str) -> dict[str, Any]:
        """Return the fields of a JSON file, by its path in the world."""
        return json.loads((self.root / name).read_text())

    def manifests(self) -> list[str]:
        """Return every JSON file of the world, by its path in it."""
        found = [*self.root.rglob("*.json"), self.current, self.root / "exported" / MANIFEST]
        return sorted({path.relative_to(self.root).as_posix() for path in found})

    def content(self) -> dict[str, str]:
        """Return a digest of every file, locks left out."""
        return {
            path.relative_to(self.root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and not path.name.startswith(".lock")
        }

    def restore(self) -> None:
        shutil.rmtree(self.root)
        shutil.copytree(self.kept, self.root)

    def write(self, name: str, fields: dict[str, Any]) -> None:
        """Write a manifest so that every digest of it is right."""
        write_manifest(self.root / name, fields)
        self.seal(self.root / name)

    def seal(self, path: Path) -> None:
        """Make the digests of a file that was written again right."""
        listed = path.with_name(MANIFEST)
        if path != listed and listed.exists():
            data = path.read_bytes()
            facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            about = json.loads(listed.read_text())
            files = {**about["files"], path.name: facts}
            self.write(listed.relative_to(self.root).as_posix(), {**about, "files": files})
        published = json.loads(self.current.read_text()) if path != self.current else {}
        if path == listed and path.parent.name == published.get("version"):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            write_manifest(self.current, {**published, "manifest_sha256": digest})


def new_world(folder: Path) -> World:
    """Build an index twice, update it, join its first shards in a pack, and export its half."""
    root, corpus = folder / "world", folder / "world" / "corpus"
    for number in range(3):
        write_rows(corpus / f"{number}.parquet", random_rows(number, rows=20), **_columns(number))
    build(root / "index", str(corpus), keep=("title",), shard_rows=20)
    succeed("compact", root / "index" / "store")
    write_rows(corpus / "3.parquet", random_rows(3, rows=30), **_columns(3, 30))
    succeed("update", root / "index")
    succeed("export", root / "index", root / "exported", "--as", "query")
    shutil.copytree(root, folder / "kept")
    return World(root, folder / "kept")


def _columns(number: int, rows: int = 20) -> dict[str, Any]:
    ids = np.arange(100 * number, 100 * number + rows)
    return {"id": ids, "title": [f"title {each}" for each in ids]}


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Yield the place of every field of a JSON value; of lists the first and the last entry."""
    if isinstance(value, dict):
        for name, each in value.items():
            if (*at, name) != ("digest",):
                yield (*at, name)
                yield from places(each, (*at, name))
    elif isinstance(value, list) and value:
        for number in sorted({0, len(value) - 1}):
            yield (*at, number)
            yield from places(value[number], (*at, number))


def crafted(fields: dict[str, Any], place: Place, craft: str) -> dict[str, Any]:
    """Return fields of which the one at a place is replaced."""
    made = copy.deepcopy(fields)
    *above, last = place
    holder: Any = made
    for step in above:
        holder = holder[step]
    if CRAFTS[craft] is DELETED:
        del holder[last]
    else:
        holder[last] = CRAFTS[craft]
    return made
