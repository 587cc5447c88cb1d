"""What needs a CUDA device: run with ``pytest -m gpu``. The same embeddings as on a CPU, sooner."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from whiten_index import BuildConfig, SweepConfig, build_index, load_encoder, open_index, run_sweep

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def texts(tiny_words) -> list[str]:
    rng = np.random.default_rng(0)
    some = [" ".join(rng.choice(tiny_words, size=n)) for n in rng.integers(1, 40, 3000)]
    return some + some[:500]


@pytest.fixture(scope="module")
def on_cpu(tiny_model, texts) -> np.ndarray:
    return load_encoder(str(tiny_model), device="cpu").encode(texts)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


@pytest.fixture(autouse=True, scope="module")
def _exact_products():
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.parametrize("budget", [100, 20_000])
@pytest.mark.parametrize("layers", [None, (0, 1), (1,)])
def test_float32_is_the_same_as_on_a_cpu(tiny_model, texts, budget, layers):
    encoder = load_encoder(str(tiny_model), device="cuda", layers=layers)
    encoder.batch_tokens = budget
    expected = load_encoder(str(tiny_model), device="cpu", layers=layers).encode(texts)
    assert cosines(encoder.encode(texts), expected).min() >= 0.99999


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last"])
def test_half_precision_without_padding_is_close(tiny_model, texts, dtype, pooling):
    encoder = load_encoder(str(tiny_model), device="cuda", dtype=dtype, pooling=pooling)
    expected = load_encoder(str(tiny_model), device="cpu", pooling=pooling).encode(texts)
    assert cosines(encoder.encode(texts), expected).mean() >= 0.999


def test_memory_that_really_runs_out_halves_the_budget(tiny_model, texts, on_cpu):
    encoder = load_encoder(str(tiny_model), device="cuda")
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - (32 << 20), dtype=torch.uint8, device="cuda")
    try:
        encoder.batch_tokens = 10**8
        found = encoder.encode(texts * 20)
    finally:
        del ballast
        torch.cuda.empty_cache()
    assert encoder.batch_tokens < 10**8
    assert cosines(found[: len(texts)], on_cpu).min() >= 0.99999


def test_a_build_on_a_gpu_is_searched_on_a_cpu(tiny_model, texts, tmp_path: Path, write_parquet):
    corpus = write_parquet(tmp_path / "c.parquet", {"text": texts})
    common = {"corpus": (str(corpus),), "text_columns": ("text",), "model": str(tiny_model), "k": 8}
    one = build_index(BuildConfig(**common, device="cpu", out=str(tmp_path / "cpu")))
    two = build_index(BuildConfig(**common, device="cuda", out=str(tmp_path / "gpu")))
    assert two.encoded.store.fingerprint == one.encoded.store.fingerprint
    for part in one.encoded.record.parts:
        both = (r.encoded.store.embeddings(part)[:].astype(np.float32) for r in (one, two))
        assert cosines(*both).min() >= 0.99999


def test_every_gpu_takes_part(tiny_model, texts, tmp_path: Path, write_parquet):
    corpus = write_parquet(tmp_path / "c.parquet", {"text": texts})
    report = build_index(
        BuildConfig(
            corpus=(str(corpus),), text_columns=("text",), model=str(tiny_model), k=8,
            shard_rows=200, device="cuda:0,cuda:0", out=str(tmp_path / "out"),
        )
    )  # fmt: skip
    counts = report.encoded.counts
    # Texts that come again may be found by then.
    assert counts.encoded + counts.reused == len(texts)
    assert counts.encoded >= len(set(texts))


def _vectors_for_faiss(folder: Path) -> tuple[Any, np.ndarray, Path]:
    """Return FAISS for GPUs, rows (n, d) and the file that holds them."""
    faiss = pytest.importorskip("faiss")
    if not hasattr(faiss, "StandardGpuResources"):
        pytest.skip("this FAISS is built for CPUs alone")
    rows = np.random.default_rng(0).standard_normal((4000, 48)).astype(np.float32)
    path = folder / "c.parquet"
    pq.write_table(pa.table({"id": np.arange(len(rows)), "embedding": list(rows)}), path)
    return faiss, rows, path


@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat", "IVF16,SQ8", "IVF16,PQ8"])
def test_an_index_made_on_a_gpu_is_searched_on_a_cpu(factory: str, tmp_path: Path):
    faiss, rows, path = _vectors_for_faiss(tmp_path)
    found = {}
    for device in ("cpu", "gpu"):
        config = BuildConfig(
            corpus=(str(path),), embedding_column="embedding", id_column="id", whiten="pca", k=32,
            factory=factory, index_device=device, out=str(tmp_path / device),
        )  # fmt: skip
        fields = build_index(config).manifest
        assert fields["factory"]["device"] == device
        assert device == "cpu" or fields["factory"]["tuned"]["parameters"].keys() <= {"nprobe"}
        index = faiss.read_index(
            str(tmp_path / device / "versions" / fields["version"] / "index.faiss")
        )
        assert index.ntotal == len(rows)
        found[device] = index.search(rows[:100], 10)[1]
    shared = [len({*a} & {*b}) / 10 for a, b in zip(found["cpu"], found["gpu"], strict=True)]
    # Clusters differ, so that lists do; exact search agrees.
    assert np.mean(shared) > (0.999 if factory == "Flat" else 0.8)


@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat", "IVF16,SQ8", "IVF16,PQ8"])
def test_an_index_is_searched_on_a_gpu_as_on_a_cpu(factory: str, tmp_path: Path):
    _, _, path = _vectors_for_faiss(tmp_path)
    config = BuildConfig(
        corpus=(str(path),), embedding_column="embedding", id_column="id", whiten="pca", k=32,
        factory=factory, index_device="cpu", out=str(tmp_path / "o"),
    )  # fmt: skip
    build_index(config)
    on_cpu, on_gpu = (open_index(tmp_path / "o", index_device=name) for name in ("cpu", "gpu"))
    assert on_gpu.bundle.placed is not None
    queries = np.random.default_rng(1).standard_normal((50, 48)).astype(np.float32)
    for top_k in (10, 2_000, 4_000):
        pairs = (index.bundle.search(queries, top_k) for index in (on_cpu, on_gpu))
        (scores, found), (scores_too, found_too) = pairs
        assert (found_too >= 0).all()
        np.testing.assert_allclose(scores_too[:, :10], scores[:, :10], atol=1e-3)
        shared = [len({*a} & {*b}) / top_k for a, b in zip(found, found_too, strict=True)]
        assert np.mean(shared) > 0.98
    assert on_gpu.search_like(3) == on_cpu.search_like(3)


def test_a_sweep_on_a_gpu_finds_what_one_on_a_cpu_finds(tmp_path: Path):
    _, _, path = _vectors_for_faiss(tmp_path)
    found = {}
    for device in ("cpu", "gpu"):
        options = {
            "corpus": [str(path)], "embedding_column": "embedding", "id_column": "id",
            "widths": "16,32", "transforms": "pca", "index_device": device,
            "out": str(tmp_path / device),
        }  # fmt: skip
        report = run_sweep(SweepConfig(**options))
        records = map(json.loads, report.results.read_text().splitlines())
        found[device] = {each["key"]: each for each in records if each["type"] == "point"}
    assert found["cpu"].keys() == found["gpu"].keys()
    gpus = {key for key, each in found["gpu"].items() if each["device"] == "gpu"}
    assert {"ours/pca/k16/fp32/flat", "ours/pca/k32/sq8/ivf", "ours/pca/k32/pq/ivf"} <= gpus
    for key in gpus:
        on_cpu, on_gpu = found["cpu"][key], found["gpu"][key]
        # Clusters differ, so that lists do; exact search agrees.
        tolerance = 0.002 if key.endswith("flat") else 0.06
        assert abs(on_gpu["index_recall@10"] - on_cpu["index_recall@10"]) < tolerance, key
