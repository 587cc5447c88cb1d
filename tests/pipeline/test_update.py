"""An update against a fresh build of the corpus as it is, and against the version before."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import updates
from tests.helpers.updates import Place
from whiten_index import BuildConfig, UpdateConfig, build_index, open_index, update_index
from whiten_index.errors import GateError
from whiten_index.pipeline.plan import plan_update

indexed, place = updates.indexed, updates.place


BUILDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "auto factory": {"factory": "auto", "exponent": 0.5},
    "pca without a centre in float16": {
        "whiten": "pca", "k": 3, "center": False, "store_dtype": "float16",
    },
    "none": {"whiten": "none", "k": None},
    "all but the top": {"whiten": "all-but-the-top", "k": None, "remove_top": 2},
    "shrunk unit vectors": {"shrinkage": "ledoit-wolf", "normalize_input": True},
    "lists without ids": {"id_column": None, "factory": "IVF4,Flat"},
    "graph of a filter": {"factory": "HNSW8", "row_filter": "x >= 2 and id != 17"},
    "lists within a budget": {"factory": "IVF4,SQ8", "memory_budget": "1MiB"},
}  # fmt: skip


@pytest.mark.parametrize("name", BUILDS)
def test_an_update_that_refits_equals_a_fresh_build(tmp_path: Path, name: str) -> None:
    place = Place.new(tmp_path, **BUILDS[name])
    place.build()
    place.change()
    report = place.update(refit="always")
    fresh = place.fresh()
    assert report.update["decision"]["whitening"] == "refit"
    assert report.version != report.base
    updates.assert_equals_fresh(place.out, fresh.out)
    assert report.manifest["identity"] == fresh.manifest["identity"]
    counts, theirs = report.encoded.counts, fresh.encoded.counts
    assert (counts.read, counts.skipped) == (theirs.read, theirs.skipped)
    assert 0 < counts.encoded < 20
    assert counts.encoded + counts.reused == theirs.encoded + theirs.reused
    assert all(gate["passed"] for gate in report.gates)
    # A build finds it done.
    again = place.build()
    assert again.up_to_date
    assert again.version == report.version


@pytest.mark.parametrize(
    ("factory", "budget"),
    [*((name, None) for name in ("Flat", "SQ8", "SQfp16", "PQ4", "IVF4,Flat", "IVF4,SQ8", "auto")),
     ("Flat", "1MiB"), ("IVF4,SQ8", "1MiB")],
)  # fmt: skip
def test_an_update_that_keeps_leaves_codes_and_transform_as_they_were(
    tmp_path: Path, factory: str, budget: str | None
) -> None:
    place = Place.new(tmp_path, factory=factory, memory_budget=budget)
    place.build()
    before, codes = updates.version_of(place.out), updates.codes_by_id(place.out)
    rows = place.rows
    place.change()
    report = place.update(refit="never")
    after = updates.version_of(place.out)
    decision = report.update["decision"]
    assert (decision["whitening"], decision["index"]) == ("keep", "keep")
    for name in ("whitening.safetensors", "moments.safetensors"):
        assert (after / name).read_bytes() == (before / name).read_bytes()
    now = place.rows
    assert updates.ids_of(place.out) == list(now)
    found = updates.codes_by_id(place.out)
    same = [i for i in rows.keys() & now.keys() if rows[i][0].tobytes() == now[i][0].tobytes()]
    assert len(same) > 280
    for i in same:
        assert found[i] == codes[i]
    # New ones are coded as the index codes the vectors of today.
    inner = updates.inner_of(place.out)
    transform = open_index(place.out).bundle.whitening
    new = [place_ for place_, i in enumerate(now) if i not in same]
    raw = np.array([row for row, _ in now.values()])[new]
    vectors = transform.apply(raw.astype(np.float64))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    kept = updates.vectors_of(place.out)[new]
    bound = 1e-5 if factory in ("Flat", "IVF4,Flat", "auto") else 0.1
    # Codes may be of vectors that are turned, which leaves their products as they are.
    assert np.abs(kept @ kept.T - vectors @ vectors.T).max() < bound
    assert inner.ntotal == len(now)


def test_an_index_of_another_kind_is_made_where_so_many_rows_need_it(tmp_path: Path) -> None:
    """The transform stays, codes of another kind cannot."""
    place = Place.new(tmp_path, rows=200, memory_budget="10KiB", factory="auto", k=8)
    first = place.build()
    place.files = {**place.files, "c.parquet": updates.some_rows(range(5000, 5190))}
    place.write()
    before = updates.version_of(place.out)
    report = place.update(refit="never")
    if report.manifest["factory"]["built"] == first.manifest["factory"]["built"]:
        pytest.fail(f"the budget suits both: {report.manifest['factory']}")
    decision = report.update["decision"]
    assert (decision["whitening"], decision["index"]) == ("keep", "train")
    assert "another index suits" in decision["index_why"]
    after = updates.version_of(place.out)
    assert (after / "whitening.safetensors").read_bytes() == (
        before / "whitening.safetensors"
    ).read_bytes()
    assert updates.ids_of(place.out) == list(place.rows)


def nightly(root: Path, files: list[np.ndarray[Any, Any]], **options: Any) -> UpdateConfig:
    """Write files of rows (n, d), and build their index where there is none."""
    (root / "corpus").mkdir(exist_ok=True)
    for number, rows in enumerate(files):
        ids = [f"document {number}/{row}" for row in range(len(rows))]
        table = pa.table({"id": ids, "embedding": list(rows)})
        pq.write_table(table, root / "corpus" / f"{number:03d}.parquet")
    if not (root / "index").exists():
        given = {"embedding_column": "embedding", "id_column": "id", "k": 8, **options}
        build_index(BuildConfig(corpus=(str(root / "corpus"),), out=str(root / "index"), **given))
    return UpdateConfig(index=str(root / "index"), refit="never", threads=1)


def foretold_and_taken(config: UpdateConfig) -> tuple[int, int]:
    """Return the bytes that a dry run says the store will take, and those that it takes."""
    store = Path(config.index) / "store"
    (said,) = (
        size for path, size in plan_update(config)["bytes"].items() if store in Path(path).parents
    )
    before = bytes_of(store)
    # What a gate keeps back was encoded all the same.
    with contextlib.suppress(GateError):
        update_index(config)
    return said, bytes_of(store) - before


def bytes_of(folder: Path) -> int:
    """Return what a store takes, but for the record of its corpus.

    That tells more of a file once it is not just written, so that it depends on the time.
    """
    files = (path for path in folder.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files if path.parent.name != "corpora")


@pytest.mark.parametrize(("dtype", "changed"), [("float16", 15), (None, 1)])
def test_a_dry_run_foretells_what_the_store_takes_for_many_small_files(
    tmp_path: Path, dtype: str | None, changed: int
) -> None:
    rng = np.random.default_rng(0)
    files = [rng.standard_normal((20, 384)).astype(np.float32) for _ in range(8)]
    nightly(tmp_path, files, store_dtype=dtype)
    for rows in files:
        rows[:changed] = rng.standard_normal((changed, 384))
    said, took = foretold_and_taken(nightly(tmp_path, files))
    assert took > 8 * changed * 384 * 2
    assert took / 2 <= said <= took * 2
    assert foretold_and_taken(nightly(tmp_path, files)) == (0, 0)


def test_texts_that_are_there_several_times(place: Place) -> None:
    """Each keeps a code of its own, whichever of them leaves."""
    rows = dict(place.files["a.parquet"])
    rows |= {7000 + i: rows[5] for i in range(20)}
    place.files = {**place.files, "a.parquet": rows, "c.parquet": {8000: rows[5]}}
    place.write()
    report = place.update(refit="never")
    assert (report.encoded.counts.encoded, report.changes.to_json()["new"]) == (0, 21)
    updates.assert_holds(place)
    place.files = {**place.files, "a.parquet": {i: row for i, row in rows.items() if i != 5}}
    place.write()
    report = place.update(refit="never")
    assert report.changes.to_json()["deleted"] == 1
    updates.assert_holds(place)
    place.update(refit="always")
    updates.assert_equals_fresh(place.out, place.fresh().out)
