"""What the tests of updates share: a corpus that changes, its index, and what they must equal.

A file whose tests take ``place`` says ``indexed, place = updates.indexed,
updates.place``, since names imported would look redefined.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from tests.helpers.builds import random_rows
from whiten_index import BuildConfig, Moments, Whitening, build_index, open_index
from whiten_index.pipeline.build import BuildReport
from whiten_index.pipeline.update import UpdateReport, update_index
from whiten_index.pipeline.update_config import UpdateConfig

DIM, ROWS, SHARD_ROWS = 8, 300, 40
# Older than what may be written again under the same time.
LONG_AGO = 1000.0

Rows = dict[int, tuple[NDArray[Any], int]]
OPTIONS: dict[str, Any] = {
    "embedding_column": "embedding", "id_column": "id", "keep": ("x",), "whiten": "whitening",
    "k": 4, "shard_rows": SHARD_ROWS, "threads": 1,
}  # fmt: skip


def some_rows(numbers: Any, seed: int = 0) -> Rows:
    """Rows named by numbers; the same name and seed give the same row."""
    found = {}
    mixing = random_rows(0, rows=DIM, dim=DIM)
    for number in map(int, numbers):
        rng = np.random.default_rng([seed, number])
        row = (rng.standard_normal(DIM) * np.linspace(0.5, 2, DIM)) @ mixing
        found[number] = row.astype(np.float32), number % 5 + 1
    return found


@dataclass
class Place:
    """A folder with a corpus of two files, whose rows are known, and maybe its index.

    Attributes:
        root: the folder.
        files: name -> rows of the file, by id and in order.
        options: of every build.
    """

    root: Path
    files: dict[str, Rows]
    options: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Rows] = field(default_factory=dict)
    fresh_builds: int = 0

    @classmethod
    def new(cls, root: Path, *, rows: int = ROWS, **options: Any) -> Place:
        half = rows // 2
        files = {"a.parquet": some_rows(range(half)), "b.parquet": some_rows(range(half, rows))}
        place = cls(root, files, options)
        place.write()
        return place

    @property
    def corpus(self) -> Path:
        return self.root / "corpus"

    @property
    def out(self) -> Path:
        return self.root / "index"

    @property
    def rows(self) -> Rows:
        """All rows in the order of the corpus."""
        return {i: row for name in sorted(self.files) for i, row in self.files[name].items()}

    def write(self, *, age: float = LONG_AGO) -> None:
        """Write the files that changed."""
        self.corpus.mkdir(parents=True, exist_ok=True)
        for name in self.written.keys() - self.files.keys():
            (self.corpus / name).unlink()
        for name, rows in self.files.items():
            if self.written.get(name) is not rows:
                self.write_file(name, rows, age=age)
        self.written = dict(self.files)

    def write_file(self, name: str, rows: Rows, *, age: float = LONG_AGO) -> Path:
        path = self.corpus / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table_of(rows), path)
        moment = time.time() - age
        os.utime(path, (moment, moment))
        return path

    def config(self, **options: Any) -> BuildConfig:
        given = {"corpus": (str(self.corpus),), "out": str(self.out), **OPTIONS, **self.options}
        return BuildConfig(**{**given, **options})

    def build(self, **options: Any) -> BuildReport:
        return build_index(self.config(**options))

    def update(self, *corpus: Any, **options: Any) -> UpdateReport:
        given = {"index": str(self.out), "corpus": tuple(map(str, corpus)), "threads": 1}
        return update_index(UpdateConfig(**{**given, **options}))

    def fresh(self, **options: Any) -> BuildReport:
        """Build the corpus as it is now, with a store of its own."""
        self.fresh_builds += 1
        out = self.root / f"fresh{self.fresh_builds}"
        return self.build(**{"out": str(out), "store": None, **options})

    def change(self, seed: int = 1, *, new: int = 4, changed: int = 5, gone: int = 6) -> None:
        """Change, delete, insert and move rows, and change what is kept beside some."""
        rng = np.random.default_rng(seed)
        files = {name: dict(rows) for name, rows in self.files.items()}
        ids = rng.permutation(sorted(self.rows)).tolist()
        home = {i: name for name, rows in files.items() for i in rows}
        for i in ids[:gone]:
            del files[home[i]][i]
        edited = ids[gone : gone + changed]
        for i, row in some_rows(edited, seed=seed).items():
            files[home[i]][i] = row
        for i in ids[gone + changed : gone + changed + 3]:
            files[home[i]][i] = files[home[i]][i][0], 9
        for i in ids[gone + changed + 3 : gone + changed + 5]:
            row = files[home[i]].pop(i)
            files[str(rng.choice(sorted(files)))][i] = row
        for i, row in some_rows(range(100_000 * seed, 100_000 * seed + new), seed=seed).items():
            name = str(rng.choice(sorted(files)))
            items = list(files[name].items())
            items.insert(int(rng.integers(len(items))), (i, row))
            files[name] = dict(items)
        self.files = {
            name: self.files[name] if same_rows(rows, self.files[name]) else rows
            for name, rows in files.items()
        }
        self.write()


def same_rows(some: Rows, others: Rows) -> bool:
    return list(some) == list(others) and all(some[i] is others[i] for i in some)


def table_of(rows: Rows) -> pa.Table:
    kind = pa.list_(pa.float32())
    return pa.table(
        {
            "id": pa.array(list(rows), pa.int64()),
            "x": pa.array([x for _, x in rows.values()], pa.int64()),
            "embedding": pa.array([row for row, _ in rows.values()], kind),
        }
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def version_of(out: Path) -> Path:
    return Path(open_index(out).bundle.folder)


def ids_of(out: Path) -> list[Any]:
    documents = open_index(out).bundle.documents
    return documents.id_column(0, len(documents)).to_pylist()


def inner_of(out: Path) -> Any:
    whole = faiss.read_index(str(version_of(out) / "index.faiss"), faiss.IO_FLAG_ONDISK_SAME_DIR)
    inner = faiss.downcast_index(whole.index)
    # It is the whole one that owns it.
    inner.referenced_objects = [whole]
    return inner


def codes_of(out: Path) -> dict[int, bytes]:
    """Row -> the bytes that the index keeps of it, the number of its list among them."""
    inner = inner_of(out)
    graph = inner
    if isinstance(graph, faiss.IndexHNSW):
        inner = faiss.downcast_index(graph.storage)
    if isinstance(inner, faiss.IndexIVF):
        found, lists = {}, inner.invlists
        for number in range(inner.nlist):
            size = lists.list_size(number)
            ids = faiss.rev_swig_ptr(lists.get_ids(number), size).tolist()
            width = lists.code_size
            codes = faiss.rev_swig_ptr(lists.get_codes(number), size * width).tobytes()
            for place, row in enumerate(ids):
                found[row] = bytes([number]) + codes[place * width : (place + 1) * width]
        return found
    codes = faiss.vector_to_array(inner.codes).reshape(inner.ntotal, -1)
    return {row: code.tobytes() for row, code in enumerate(codes)}


def vectors_of(out: Path) -> NDArray[Any]:
    """The vectors (n, k) that the index can give back."""
    inner = inner_of(out)
    if isinstance(inner, faiss.IndexIVF):
        inner.make_direct_map()
    return np.asarray(inner.reconstruct_n(0, inner.ntotal))


def codes_by_id(out: Path) -> dict[Any, bytes]:
    codes = codes_of(out)
    return {name: codes[row] for row, name in enumerate(ids_of(out))}


def assert_equals_fresh(out: Path, fresh: Path, *, within: float = 1e-9) -> None:
    """Two indexes hold the same rows in the same order, mapped by the same transform.

    ``within`` bounds what moments differ by, relative: texts that are encoded beside others differ
    in the last bits of float16.
    """
    assert ids_of(out) == ids_of(fresh)
    ours, theirs = (version_of(each) for each in (out, fresh))
    transforms = [Whitening.load(each / "whitening.safetensors") for each in (ours, theirs)]
    assert transforms[0].describe() == _about(transforms[1].describe(), within=1e3 * within)
    moments = [Moments.load(each / "moments.safetensors") for each in (ours, theirs)]
    assert moments[0].count == moments[1].count
    for some, others in (
        (moments[0].mean, moments[1].mean),
        (moments[0].scatter, moments[1].scatter),
    ):
        assert np.linalg.norm(some - others) <= within * np.linalg.norm(others)
    some, others = vectors_of(out), vectors_of(fresh)
    cosines = (some * others).sum(1) / np.linalg.norm(some, axis=1)
    cosines /= np.linalg.norm(others, axis=1)
    assert cosines.min() > 1 - 1e-4
    documents = [open_index(each).bundle.documents for each in (out, fresh)]
    assert [d.get(row) for d in documents[:1] for row in range(len(d))] == [
        d.get(row) for d in documents[1:] for row in range(len(d))
    ]


def _about(value: Any, *, within: float) -> Any:
    """Floats nearly as they are."""
    if isinstance(value, Mapping):
        return {name: _about(each, within=within) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_about(each, within=within) for each in value)
    return pytest.approx(value, rel=within) if isinstance(value, float) else value


def assert_holds(place: Place) -> None:
    """The index holds the rows of the corpus as its own transform maps them."""
    rows = place.rows
    assert ids_of(place.out) == list(rows)
    transform = open_index(place.out).bundle.whitening
    vectors = transform.apply(np.array([row for row, _ in rows.values()], dtype=np.float64))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors_of(place.out), vectors, atol=1e-5)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place with an index of its corpus. Do not write to it; ``place`` is a copy."""
    place = Place.new(tmp_path_factory.mktemp("indexed"))
    place.build()
    return place


@pytest.fixture
def place(tmp_path: Path, indexed: Place) -> Place:
    """A copy whose index was built from its own corpus."""
    copy = Place(tmp_path, dict(indexed.files), dict(indexed.options))
    copy.write()
    shutil.copytree(indexed.out / "store", copy.out / "store")
    copy.build()
    return copy
