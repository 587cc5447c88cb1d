"""Search against brute force, and run files against search."""

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from tests.helpers.builds import build_of
from whiten_index import CorpusConfig, open_index
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.evaluation.trec_run import write_run
from whiten_index.versions import bundle

ROWS, DIM, K = 150, 8, 5


@pytest.fixture(scope="module")
def rows() -> NDArray[np.float32]:
    random = np.random.default_rng(0)
    return (random.standard_normal((ROWS, DIM)) * np.linspace(1, 2, DIM) + 1).astype(np.float32)


@pytest.fixture(scope="module")
def queries() -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((7, DIM)).astype(np.float32) + 1


def build(folder: Path, rows: NDArray[Any], **options: Any) -> Path:
    ids = np.arange(len(rows)) * 10
    kept = {"name": [f"n{i}" for i in ids], "far": 2**64 - 1 - ids.astype(np.uint64)}
    settled = {"whiten": "whitening", "k": K, "keep": list(kept), "shard_rows": 40}
    table = pa.table({"id": ids, "e": list(rows), **kept})
    return build_of(table, folder, **{**settled, **options})


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, rows: NDArray[np.float32]) -> Path:
    """A published index; do not write to it."""
    return build(tmp_path_factory.mktemp("index"), rows)


ONES = np.ones((3, DIM))


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        *((np.insert(ONES, 1, value, axis=0), "query 1 holds NaN or infinity")
          for value in (np.nan, np.inf, -np.inf, 1e300, 3e38)),
        (ONES + 1j, r"\(n, 8\) numbers, and these are of type complex128; convert them"),
        (np.ma.masked_less(ONES, 2), "these are masked"),
        (ONES.astype(object), "these are of type object"),
        ([[1.0] * DIM, [1.0]], r"raw embeddings are \(n, 8\) numbers \("),
        (ONES[:, 1:], r"takes \(n, 8\) raw embeddings, one .* these have shape \(3, 7\)"),
    ],
)  # fmt: skip
def test_what_is_no_query_is_refused(index: Path, queries: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_index(index).search_embeddings(queries)


@pytest.mark.parametrize("top_k", [2.5, None, True, 0, "3"])
def test_options_of_another_type_are_refused(index: Path, top_k: Any) -> None:
    opened = open_index(index)
    with pytest.raises(ConfigError, match=f"--top-k takes a whole number from 1; {top_k!r} was"):
        opened.search_embeddings(ONES, top_k=top_k)
    with pytest.raises(ConfigError, match="--top-k takes a whole number from 1"):
        opened.search_like(0, top_k=top_k)
    with pytest.raises(ConfigError, match="a row filter is a text; 3 was given"):
        opened.search_embeddings(ONES, row_filter=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="1 ids were given for 3 embeddings"):
        next(opened.rank_embeddings(["a"], ONES, top_k=2))
    with pytest.raises(ConfigError, match="the place is a path or a URI; 3 was given"):
        open_index(3)  # type: ignore[arg-type]


def queries_file(folder: Path, queries: NDArray[Any], **columns: Any) -> str:
    columns.setdefault("qid", [f"q{i}" for i in range(len(queries))])
    pq.write_table(pa.table({**columns, "e": list(queries)}), folder / "queries.parquet")
    return str(folder / "queries.parquet")


@pytest.mark.parametrize("name", ["q 1", "q1\n", "q\x001"])
def test_an_id_with_blanks_cannot_stand_in_a_trec_run_and_leaves_no_file(
    tmp_path: Path, index: Path, queries: NDArray[np.float32], name: str
) -> None:
    source = queries_file(tmp_path, queries, qid=["q0", name, *"bcdef"])
    config = CorpusConfig(sources=(source,), embedding_column="e", id_column="qid")
    with pytest.raises(ConfigError, match=r"'q.*1.*' has blanks.*parquet or .jsonl"):
        write_run(tmp_path / "run.trec", open_index(index).rank(config, top_k=3))
    assert [path.name for path in tmp_path.iterdir()] == ["queries.parquet"]


def test_runs_lose_no_kept_column_and_are_json(tmp_path: Path, rows: NDArray[np.float32]) -> None:
    kept = {"score": [np.nan] * ROWS, "kept_score": ["k"] * ROWS, "raw": [b"\xff\xfe"] * ROWS}
    table = pa.table({"id": range(ROWS), "e": list(rows), **kept})
    folder = build_of(table, tmp_path, whiten="whitening", k=K, keep=list(kept))
    queries = queries_file(tmp_path, rows[:2], qid=["q0", "q1"])
    config = CorpusConfig(sources=(queries,), embedding_column="e", id_column="qid")
    write_run(tmp_path / "run.jsonl", open_index(folder).rank(config, top_k=1))
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    columns = [json.loads(line, parse_constant=pytest.fail)["hits"][0]["columns"] for line in lines]
    assert columns == [{"score": None, "kept_score": "k", "raw": "//4="}] * 2
    with pytest.raises(ConfigError, match="columns score and kept_score are both kept"):
        write_run(tmp_path / "run.parquet", open_index(folder).rank(config, top_k=1))
    assert not (tmp_path / "run.parquet").exists()


def test_hits_as_a_table(index: Path, queries: NDArray[np.float32]) -> None:
    kept = pq.read_table(index.parent / "c.parquet").drop_columns("e")
    for chosen in (None, "far < 0"):
        hits = open_index(index).search_embeddings(queries, top_k=9, row_filter=chosen)[0]
        wanted = kept.take(pa.array([hit.row for hit in hits], pa.int64()))
        assert hits.to_arrow().drop_columns("score") == wanted


def path_of(out: Path, name: str) -> Path:
    return next((out / "versions").glob(f"*/{name}"))


def test_threads_ask_at_once_for_the_neighbours_of_documents(
    tmp_path: Path, rows: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAISS makes the map from rows to places once, and a map half made has no such place."""
    opened = open_index(build(tmp_path, rows, factory="IVF4,Flat"))
    expected = open_index(build(tmp_path / "flat", rows, factory="Flat")).search_like(30)[0].id
    real, within = faiss.IndexIVF.make_direct_map, list[int]()

    def slow(index: Any, *made: bool) -> None:
        within.append(1)
        assert len(within) == 1
        time.sleep(0.05)
        real(index, *made)
        within.pop()

    monkeypatch.setattr(faiss.IndexIVF, "make_direct_map", slow)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(opened.search_like, [30] * 4))
    assert {hits[0].id for hits in found} == {expected}


def test_files_of_another_index_do_not_pass(tmp_path: Path, index: Path) -> None:
    other = build(tmp_path, np.random.default_rng(6).standard_normal((ROWS, DIM)))
    for name in ("index.faiss", "whitening.safetensors", "moments.safetensors", "manifest.json"):
        copy = tmp_path / f"copy-{name}"
        shutil.copytree(index, copy, ignore=shutil.ignore_patterns("store"))
        shutil.copyfile(path_of(other, name), path_of(copy, name))
        with pytest.raises(ArtifactError, match="damaged"):
            open_index(copy)


@pytest.mark.parametrize("how", ["renamed", "rewritten"])
def test_an_index_that_is_replaced_between_its_check_and_its_reading(tmp_path, monkeypatch, how):
    """FAISS opens the file by its name, after the check."""
    rng, versions = np.random.default_rng(0), []
    for name in ("one", "two"):
        table = pa.table({"id": range(50), "e": list(rng.normal(size=(50, 8)).astype("f4"))})
        out = build_of(table, tmp_path / name, whiten="pca", k=4)
        versions.append(next((out / "versions").iterdir()) / "index.faiss")
    mine, other = versions
    read = bundle.read_index

    def replaced(*given, **options):
        before = mine.stat()
        if how == "renamed":
            other.rename(mine)
        else:
            mine.write_bytes(other.read_bytes())
        os.utime(mine, ns=(before.st_atime_ns, before.st_mtime_ns))
        return read(*given, **options)

    monkeypatch.setattr(bundle, "read_index", replaced)
    with pytest.raises(ArtifactError, match=r"index\.faiss.* is damaged"):
        open_index(tmp_path / "one" / "o")
