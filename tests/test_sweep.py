"""The sweep: its grid, its results file, and its figures against brute force."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from whiten_index.errors import (
    ArtifactError,
    ConfigError,
)
from whiten_index.progress import Silent
from whiten_index.report.records import line_of
from whiten_index.sweep import run_sweep, sweep_config
from whiten_index.sweep.grid import grid
from whiten_index.sweep.results import Results

ROWS, DIM, HELD = 700, 24, 60


@pytest.fixture(scope="module")
def embeddings() -> np.ndarray:
    """Return clustered rows whose mean is far from 0, as those of encoders."""
    rng = np.random.default_rng(3)
    centres = 2 * rng.normal(size=(12, DIM)) * np.linspace(2, 0.2, DIM)
    rows = centres[rng.integers(12, size=ROWS)] + rng.normal(size=(ROWS, DIM)) + 1
    return rows.astype(np.float32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, write_parquet, embeddings) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "vectors.parquet"
    column = pa.FixedSizeListArray.from_arrays(pa.array(embeddings.ravel()), DIM)
    return write_parquet(path, {"id": [f"d{i}" for i in range(ROWS)], "v": column})


def options(corpus: Path, out: Path, **more) -> dict:
    return {
        "corpus": [str(corpus)],
        "embedding_column": "v",
        "store_dtype": "float32",
        "id_column": "id",
        "out": str(out),
        "sample": HELD,
        "threads": 1,
        **more,
    }


def lines_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def points_of(out: Path) -> dict[str, dict]:
    return {line["key"]: line for line in lines_of(out) if line["type"] == "point"}


def config_of(**more):
    return sweep_config({"corpus": ["c.parquet"], "text_columns": ["t"], "out": "o", **more})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"transforms": "pca,zca"}, r"--transforms 'zca' is unknown; use auto, pca, whitening"),
        ({"transforms": "pca:0.5"}, r"'pca:0.5' is not understood; an exponent .* whitening:0.25"),
        ({"transforms": "whitening:x"}, r"'whitening:x' is not understood"),
        ({"transforms": ""}, r"--transforms is empty"),
        ({"codecs": "fp32,sq7"}, r"--codecs 'sq7' is unknown; use fp32, .* pqN for N bytes"),
        ({"codecs": "sq8,sq8"}, r"--codecs names something twice"),
        ({"indexes": "flat,tree"}, r"--indexes 'tree' is unknown; use flat, ivf, hnsw"),
        ({"widths": "64,x"}, r"--k 'x' is no width"),
        ({"widths": "0"}, r"--k 0 is no width"),
        ({"target_recall": 1.5}, r"--target-recall takes a share above 0.*1.5 was given"),
        ({"rerank": 5}, r"--rerank 5 is fewer than the 10 hits"),
        ({"queries": "q.parquet"}, r"--qrels is missing"),
        ({"qrels_split": "test"}, r"--qrels-split test needs --qrels"),
        ({"out": ""}, r"say where results and report go: --out DIR"),
        ({"wings": 2}, r"a sweep knows no wings"),
        ({"whiten": "pca"}, r"a sweep knows no whiten; leave it out"),
        ({"exponent": 0.5, "factory": "Flat"}, r"a sweep knows no exponent, factory"),
    ],
)
def test_a_wish_that_cannot_be_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**given)


def test_the_grid_holds_every_combination_once_and_graphs_at_the_middle_widths():
    found = grid(config_of(baselines=False), dim=384, rank=381, rows=100_000)
    keys = [point.key for point in found.points]
    assert len(keys) == len(set(keys))
    assert not found.skipped
    plain = [point for point in found.points if not point.rerank]
    # 4 widths × 4 transforms × 4 codecs × {flat, ivf}, and graphs of one codec at two widths.
    assert Counter(point.index for point in plain) == {"flat": 64, "ivf": 64, "hnsw": 8}
    assert {p.vectors.k for p in plain if p.index == "hnsw"} == {64, 128}
    again = [point for point in found.points if point.rerank]
    assert {(p.codec, p.index, p.rerank) for p in again} == {("pq", "flat", 100)}


def test_what_width_or_rank_forbids_is_skipped_with_the_reason():
    config = config_of(widths="30,50,60", transforms="pca,truncate", codecs="fp32,pq,pq16")
    found = grid(config, dim=56, rank=40, rows=10_000)
    why = {point.key: reason for point, reason in found.skipped}
    assert why["ours/pca/k50/fp32/flat"] == "k = 50 is above the 40 directions of the embeddings"
    assert why["truncate/truncate/k60/fp32/flat"] == "k = 60 is above the 56 dims of the embeddings"
    assert "does not divide" in why["ours/pca/k30/pq/flat"]
    assert "no multiple" in why["ours/pca/k30/pq16/flat"]
    measured = {point.key for point in found.points}
    assert {"ours/pca/k30/fp32/flat", "truncate/truncate/k50/fp32/ivf"} <= measured
    assert not measured & why.keys()


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def nearest(rows: np.ndarray, queries: np.ndarray) -> np.ndarray:
    return np.argsort(-(unit(queries) @ unit(rows).T), axis=1, kind="stable")[:, :10]


def shared_of(ours: np.ndarray, theirs: np.ndarray) -> float:
    return np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ours, theirs, strict=True)])


def test_figures_are_those_of_brute_force(tmp_path, corpus, embeddings):
    wishes = {"widths": "8,16", "transforms": "pca,whitening:0.5,truncate", "codecs": "fp32,sq8"}
    report = run_sweep(sweep_config(options(corpus, tmp_path, **wishes)))
    assert report.measured == len(points_of(tmp_path))
    assert not (tmp_path / ".sweep-work").exists()
    header = lines_of(tmp_path)[0]
    assert header["type"] == "sweep"
    assert header["run"] == report.run
    facts = header["dataset"]
    assert (facts["rows"], facts["dim"], facts["queries"]) == (ROWS - HELD, DIM, HELD)
    assert facts["raw_bytes_per_row"] == 4 * DIM
    held = np.sort(np.random.default_rng(0).choice(ROWS, HELD, replace=False))
    kept = np.delete(embeddings, held, axis=0).astype(np.float64)
    queries = embeddings[held].astype(np.float64)
    mean, (values, vectors) = kept.mean(axis=0), np.linalg.eigh(np.cov(kept.T))
    values, vectors = values[::-1], vectors[:, ::-1]
    np.testing.assert_allclose(header["spectrum"]["eigenvalues"], values, rtol=1e-9)
    raw, points = nearest(kept, queries), points_of(tmp_path)
    for k in (8, 16):
        maps = {
            "ours/pca": lambda x, k=k: (x - mean) @ vectors[:, :k],
            "ours/whitening:0.5": lambda x, k=k: (
                ((x - mean) @ vectors[:, :k]) * values[:k] ** -0.25
            ),
            "truncate/truncate": lambda x, k=k: x[:, :k],
        }
        for name, transform in maps.items():
            point = points[f"{name}/k{k}/fp32/flat"]
            found = nearest(transform(kept), transform(queries))
            assert point["agreement@10"] == pytest.approx(shared_of(found, raw), abs=0.004)
            assert point["index_recall@10"] == pytest.approx(1, abs=0.004)
            assert point["bytes"]["per_row"] == 4 * k
            assert points[f"{name}/k{k}/sq8/flat"]["bytes"]["per_row"] == k
            assert 0.9 < points[f"{name}/k{k}/sq8/flat"]["index_recall@10"] <= 1
            assert points[f"{name}/k{k}/fp32/ivf"]["index_recall@10"] > 0.85
            assert points[f"{name}/k{k}/fp32/ivf"]["parameters"]["nprobe"] >= 1
    base = points[f"raw/none/k{DIM}/fp32/flat"]
    assert base["agreement@10"] == base["index_recall@10"] == 1
    assert base["bytes"]["per_row"] == 4 * DIM
    # FAISS's PCA is the same map, but for its sample and its float32.
    assert points["faiss/faiss-pca/k16/fp32/flat"]["agreement@10"] == pytest.approx(
        points["ours/pca/k16/fp32/flat"]["agreement@10"], abs=0.02
    )
    for point in points.values():
        assert point["quality"] is None
        assert (
            point["latency_ms"]["p50"] <= point["latency_ms"]["p95"] <= point["latency_ms"]["p99"]
        )
        assert point["latency_ms"]["queries"] >= 30
        assert point["throughput"]["batch"] == HELD
        seconds = point["seconds"]
        parts = sum(seconds[part] for part in ("train", "add", "tune"))
        assert seconds["total"] == pytest.approx(parts)
        # Raw embeddings are searched in the same rounds as each point.
        assert point["latency_ms"]["raw_p50"] > 0
        assert point["latency_ms"]["spread"] >= 1


class _Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def test_more_points_join_their_run_and_other_settings_start_another(tmp_path, corpus):
    wishes = {"transforms": "pca", "codecs": "fp32", "indexes": "flat", "baselines": False}
    first = run_sweep(sweep_config(options(corpus, tmp_path, widths="8", **wishes)))
    more = run_sweep(sweep_config(options(corpus, tmp_path, widths="8,16", **wishes)))
    assert (more.run, more.measured, more.found) == (first.run, 1, 1)
    notes = _Notes()
    other = run_sweep(
        sweep_config(options(corpus, tmp_path, widths="8", **wishes, seed=1)), progress=notes
    )
    assert other.run != first.run
    assert (other.measured, other.found) == (1, 0)
    assert any("holds 1 other run" in note for note in notes.notes)
    runs = Counter(line["run"] for line in lines_of(tmp_path) if line["type"] == "point")
    assert runs == {first.run: 2, other.run: 1}


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "results.jsonl"
    line = line_of({"type": "sweep", "run": "a"})
    path.write_bytes(line + line[:20] + b"\n" + line)
    with pytest.raises(ArtifactError, match=r"line 2 of .* is damaged"):
        Results.open(path)
