"""What the tests of upkeep share: corpora that change from night to night, and their truth.

A corpus is files of rows with given embeddings. Each embedding is given by its number alone, so
that what any part must hold is known without the store.
"""

import contextlib
import functools
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.builds import build, random_rows, write_rows
from whiten_index import BuildConfig, EmbeddingStore, encode_corpus
from whiten_index.artifacts import manifest
from whiten_index.artifacts.files import sha256_file
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.store.records import CorpusRecord
from whiten_index.versions import published

DIM, SHARD = 6, 40


_TABLE = np.random.default_rng(7).standard_normal((20_000, DIM)).astype(np.float32)


def reseal(path: Path) -> None:
    """Give a changed file of the published version its checksum, as whoever made it could."""
    listed, current = path.with_name(manifest.MANIFEST), path.parents[2] / "CURRENT"
    fields = json.loads(listed.read_text())
    fields["files"][path.name] = manifest.describe_file(path)
    manifest.write_manifest(listed, fields)
    published_now = {**json.loads(current.read_text()), "manifest_sha256": sha256_file(listed)}
    manifest.write_manifest(current, published_now)


def vectors(numbers: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the embeddings (n, d) that these numbers stand for."""
    return _TABLE[np.asarray(numbers, dtype=np.int64)].reshape(-1, DIM)


@dataclass
class World:
    """A store, and corpora that are encoded into it.

    Attributes:
        root: folder of everything.
        corpora: name -> files -> numbers of their rows.
        records: corpora as they were encoded, with the embeddings they must give.
    """

    root: Path
    corpora: dict[str, list[list[int]]] = field(default_factory=dict)
    records: list[tuple[CorpusRecord, np.ndarray[Any, Any]]] = field(default_factory=list)
    fresh: int = 0

    @property
    def place(self) -> Path:
        return self.root / "store"

    @property
    def store(self) -> EmbeddingStore:
        """The store as a process sees it that opens it now."""
        return EmbeddingStore.open(self.place)

    def numbers(self, count: int) -> list[int]:
        """Return numbers that no row had so far."""
        self.fresh += count
        return list(range(self.fresh - count, self.fresh))

    def write(self, name: str) -> Path:
        folder = self.root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for position, numbers in enumerate(self.corpora[name]):
            rows = {"id": list(map(str, numbers)), "embedding": list(vectors(numbers))}
            schema = pa.schema([("id", pa.string()), ("embedding", pa.list_(pa.float32()))])
            pq.write_table(pa.table(rows, schema=schema), folder / f"{position:03d}.parquet")
        return folder

    def config(self, name: str, **options: Any) -> BuildConfig:
        return BuildConfig(
            corpus=(str(self.write(name)),),
            embedding_column="embedding",
            id_column="id",
            shard_rows=SHARD,
            **{"store": str(self.place), **options},
        )

    def encode(self, name: str = "news") -> EncodeReport:
        """Encode a corpus as it is now, and note what it must be read back as."""
        report = encode_corpus(self.config(name))
        truth = vectors([number for file in self.corpora[name] for number in file])
        self.records.append((report.record, truth))
        return report

    def change(self, rng: np.random.Generator, name: str = "news", *, share: float = 0.1) -> None:
        """Let a night pass: some rows change, some go, some come."""
        files = []
        for file in self.corpora[name]:
            kept = [n for n in file if rng.random() >= share / 2]
            fresh = [self.numbers(1)[0] if rng.random() < share else n for n in kept]
            files.append(fresh + self.numbers(int(rng.integers(0, 3))))
        self.corpora[name] = files

    def assert_intact(self, *, last: int = 1) -> None:
        """The corpora encoded last read as they must, to the bit, whole and row by row."""
        for record, truth in self.records[-last:]:
            assert_reads(self.store, record, truth)

    def segment_folders(self) -> set[str]:
        return {path.name for path in self.place.glob("*/segments/*")}

    def add_version(self, index: Path, record: CorpusRecord, number: int) -> Path:
        """Publish a version of an index of this store, as far as upkeep looks at one: no FAISS.

        Args:
            index: its folder.
            record: what it was built from.
            number: of the version.
        """
        version = f"{number:06d}-0123456789ab"
        index.mkdir(parents=True, exist_ok=True)
        self.store.indexes.register(index, published.ensure_index_id(index))
        with published.new_version(index, version) as (folder, fields):
            record.save(folder / published.RECORD)
            fields |= {
                **built_manifest(),
                "version": version,
                "config": {
                    **built_manifest()["config"], "store": str(self.place), "out": str(index)
                },
                "store": str(self.place.resolve()),
                "encoder_fingerprint": self.store.fingerprint,
                "corpus": {"fingerprint": record.fingerprint, "source": dict(record.source)},
            }  # fmt: skip
        published.set_current(index, version)
        return index / published.VERSIONS / version


def assert_reads(store: EmbeddingStore, record: CorpusRecord, truth: np.ndarray[Any, Any]) -> None:
    start = 0
    for part in record.parts:
        expected = truth[start : start + part.rows]
        start += part.rows
        if not part.rows:
            continue
        assert store.has(part)
        assert part.bytes == 4 * DIM * part.rows
        found = store.embeddings(part)
        assert (len(found), found.dtype) == (part.rows, np.float32)
        np.testing.assert_array_equal(found[:], expected)
        np.testing.assert_array_equal(found[np.arange(part.rows)[::-1]], expected[::-1])
        assert len(store.digests(part)) == part.rows
        moments, exact = store.moments(part), expected.astype(np.float64)
        centred = exact - exact.mean(axis=0)
        assert moments.count == part.rows
        np.testing.assert_allclose(moments.mean, exact.mean(axis=0), atol=1e-12)
        np.testing.assert_allclose(moments.scatter, centred.T @ centred, atol=1e-11)
    assert start == len(truth)


def new_world(root: Path, *files: int, name: str = "news") -> World:
    """Return a world with one corpus, encoded, of files with so many rows."""
    world = World(root)
    world.corpora[name] = [world.numbers(count) for count in files]
    world.encode(name)
    return world


@functools.cache
def built_manifest() -> dict[str, Any]:
    """Return the manifest of a small index."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_rows(Path(folder) / "corpus.parquet", random_rows(rows=40, dim=4))
        return dict(build(Path(folder) / "index", corpus, k=2).manifest)


class Crash(BaseException):
    """Stands for a process that is killed: nothing in the library catches it."""


CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir", "link")


def dying_at(
    monkeypatch: pytest.MonkeyPatch, step: int, *, of: Any = os, names: Sequence[str] = CHANGES
) -> list[str]:
    """Let the process die right before its step-th change; return the steps taken.

    A change is what a file system does in one go: a rename, a file or a folder removed or made; or
    it is a request to a bucket.
    """
    taken: list[str] = []

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*given: Any, **options: Any) -> Any:
            if len(taken) >= step:
                raise Crash(name)
            taken.append(name)
            return real(*given, **options)

        return change

    for name in names:
        monkeypatch.setattr(of, name, dying(name, getattr(of, name)))
    return taken


def killed_anywhere(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, job: Callable[[Path], object]
) -> Iterator[World]:
    """Yield copies of a world in which a job on its store died before each change, and then none.

    What the copy is used for after the yield does not die.
    """
    for step in itertools.count():
        other = World(folder / str(step), dict(world.corpora), list(world.records))
        shutil.copytree(world.root, other.root)
        done = False
        with monkeypatch.context() as patch, contextlib.suppress(Crash):
            dying_at(patch, step)
            job(other.place)
            done = True
        yield other
        shutil.rmtree(other.root)
        if done:
            assert step > 20
            return
