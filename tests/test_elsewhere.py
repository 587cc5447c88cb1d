"""The steps of a build as workers elsewhere do them: pickled there and back, all is the same."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from whiten_index import BuildConfig
from whiten_index.pipeline.build import build_index
from whiten_index.pipeline.encode import encode_corpus

ROWS, DIM = 2_000, 16


class Elsewhere:
    """Calls as another process would, in this one: nothing is shared but what pickles."""

    elsewhere = True

    def map(self, function, items, *, advance=None):
        there = pickle.loads(pickle.dumps(function))
        for item in items:
            yield pickle.loads(pickle.dumps(there(pickle.loads(pickle.dumps(item)))))
            if advance is not None:
                advance(1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("elsewhere")
    rows = np.random.default_rng(0).standard_normal((ROWS, DIM)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(rows.ravel(), DIM)
    weight = np.random.default_rng(1).random(ROWS) + 0.5
    pq.write_table(pa.table({"e": column, "w": weight}), folder / "c.parquet")
    encode_corpus(
        BuildConfig(
            corpus=(str(folder / "c.parquet"),), embedding_column="e", shard_rows=150,
            keep=("w",), store=str(folder / "store"),
        )
    )  # fmt: skip
    return folder / "store"


def built(store: Path, out: Path, **options: Any) -> Path:
    options = {"whiten": "pca", "k": 8, **options}
    report = build_index(BuildConfig(store=str(store), out=str(out), **options))
    return report.out / "versions" / report.version


@pytest.mark.parametrize(
    "options",
    [
        {"factory": "Flat"},
        {"factory": "SQ8"},
        {"factory": "PQ4x4"},
        {"factory": "IVF8,Flat"},
        {"factory": "IVF8,SQ8", "memory_budget": "64MiB"},
        {"factory": "IVF8,PQ4x4fs"},
        {"factory": "HNSW8"},
        {"factory": "HNSW8_SQ8", "weight_column": "w"},
        {"factory": "Flat", "whiten": "auto", "k": None, "normalize_input": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_an_index_made_elsewhere_is_the_same_to_the_byte(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    from whiten_index.assemble import spread

    here = built(store, tmp_path / "here", **options)
    monkeypatch.setattr("whiten_index.pipeline.build.InThisProcess", Elsewhere)
    monkeypatch.setattr("whiten_index.workers.InThisProcess", Elsewhere)
    monkeypatch.setattr(spread, "_RANGE_ROWS", 400)
    there = built(store, tmp_path / "there", **options)
    names = sorted(path.name for path in here.iterdir())
    assert sorted(path.name for path in there.iterdir()) == names
    for name in names:
        if name != "manifest.json":
            assert (there / name).read_bytes() == (here / name).read_bytes(), name


class DeadError(Exception):
    """A worker died."""


class Mortal(Elsewhere):
    """A call during which the worker dies is made again, as on a cluster."""

    def map(self, function, items, *, advance=None):
        for item in items:
            try:
                yield from super().map(function, [item], advance=advance)
            except DeadError:
                yield from super().map(function, [item], advance=advance)


@pytest.mark.parametrize("factory", ["Flat", "IVF8,SQ8", "HNSW8"])
def test_a_worker_that_dies_at_joining_leaves_nothing_behind(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str
) -> None:
    from whiten_index.assemble import spread

    here = built(store, tmp_path / "here", factory=factory)
    monkeypatch.setattr("whiten_index.pipeline.build.InThisProcess", Mortal)
    monkeypatch.setattr("whiten_index.workers.InThisProcess", Mortal)
    real, died = spread._filled, []

    def filled(inner: Any, blocks: Any, job: Any, folder: Path) -> Any:
        opened = real(inner, blocks, job, folder)
        if died:
            return opened
        died.append(1)
        del opened
        (folder / "index.faiss").write_bytes(b"half of it")
        (folder / "index.ivfdata").write_bytes(b"half of it")
        raise DeadError

    monkeypatch.setattr(spread, "_filled", filled)
    there = built(store, tmp_path / "there", factory=factory)
    assert died
    assert (there / "index.faiss").read_bytes() == (here / "index.faiss").read_bytes()
    assert not (there / "index.ivfdata").exists()
