"""Where an index is made, with a FAISS that records what is asked of it; a real GPU: test_gpu."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from fake_gpu import FakeGpu

from whiten_index import BuildConfig, build_index, open_index
from whiten_index.cli import cli
from whiten_index.errors import ConfigError
from whiten_index.index import gpu, inner_index, place
from whiten_index.plan import plan_build


def rows() -> Any:
    return np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)


@pytest.mark.parametrize("device", ["auto", "gpu"])
@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "IVF4,SQ8", "IVF4,PQ4x4"])
def test_an_index_goes_to_the_gpu_and_comes_back_filled(
    monkeypatch: pytest.MonkeyPatch, factory: str, device: str
) -> None:
    fake = FakeGpu(monkeypatch)
    notes: list[str] = []
    inner = inner_index(factory, 8)
    placed = place(inner, device, note=notes.append)
    assert placed.device == "gpu"
    assert placed.resources == "resources"
    placed.index.train(rows())
    placed.index.add(rows())
    assert inner.ntotal == 0
    back = placed.on_cpu()
    assert back.ntotal == 200
    done = [("to gpu", ("resources", 0)), ("train", 200), ("add", 200), ("to cpu", None)]
    assert fake.calls == done
    assert notes == []


@pytest.mark.parametrize("factory", ["HNSW16", "SQ8", "IVF4,PQ4x4fs", "RaBitQ", "Flat,RFlat"])
def test_what_no_gpu_takes_stays_on_the_cpu_with_a_note_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, factory: str
) -> None:
    fake = FakeGpu(monkeypatch)
    inner, notes = inner_index(factory, 8), []
    placed = place(inner, "auto", note=notes.append)
    assert placed.device == "cpu"
    assert placed.index is placed.on_cpu() is inner
    assert fake.calls == []
    assert notes
    assert notes[0].startswith("note: the index is made on the CPU: Index")
    with pytest.raises(ConfigError, match=r"--index-device gpu: Index\w+ is not known .*use cpu"):
        place(inner, "gpu", note=notes.append)


def test_what_this_gpu_refuses_is_told_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, refuses=True)
    notes: list[str] = []
    assert place(inner_index("IVF4,Flat", 8), "auto", note=notes.append).device == "cpu"
    assert "does not take IndexIVFFlat (no such code size)" in notes[0]


def test_without_a_gpu_auto_is_silent_and_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, gpus=0)
    notes: list[str] = []
    inner = inner_index("Flat", 8)
    assert place(inner, "auto", note=notes.append).device == "cpu"
    assert notes == []
    with pytest.raises(ConfigError, match="--index-device gpu: FAISS sees no GPU; use cpu or auto"):
        place(inner, "gpu", note=notes.append)


def test_a_build_says_so_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, gpus=0)
    given = options(tmp_path, index_device="gpu")
    for work in (build_index, plan_build):
        with pytest.raises(ConfigError, match="--index-device gpu: FAISS sees no GPU"):
            work(given)
    assert not (tmp_path / "out" / "store").exists()


def test_cpu_does_not_look_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpu(monkeypatch)
    assert place(inner_index("Flat", 8), "cpu", note=print).device == "cpu"
    assert fake.calls == []


def test_faiss_for_cpus_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "load_faiss", lambda: SimpleNamespace(get_num_gpus=lambda: 0))
    with pytest.raises(ConfigError, match=r"built for CPUs alone .*whiten-index\[gpu\]"):
        place(inner_index("Flat", 8), "gpu", note=print)


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="--index-device 'tpu' is unknown; use auto, cpu, gpu"):
        place(inner_index("Flat", 8), "tpu", note=print)


@pytest.mark.parametrize(
    ("visible", "asked"), [(None, "0"), ("1,0", "1"), ("GPU-5f3,GPU-8", "GPU-5f3")]
)
def test_the_gpu_named_is_the_first_that_is_seen(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: str
) -> None:
    assert gpu.gpu_name() is None
    FakeGpu(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(stdout="NVIDIA H200\n")

    monkeypatch.setattr(gpu.subprocess, "run", run)
    assert gpu.gpu_name() == "NVIDIA H200"
    assert f"--id={asked}" in commands[0]


# ------------------------------------------------------------------- memory of a GPU that runs out

TOLD_BY_FAISS = (
    "Error in virtual void* faiss::gpu::StandardGpuResourcesImpl::allocMemory: alloc fail "
    "type IVFLists dev 0 space Device stream 0x0 size 9 bytes (cudaMalloc error out of memory [2])"
)
TOLD_BY_RMM = "std::bad_alloc: out_of_memory: CUDA error at: cuda_memory_resource.hpp"


def options(tmp_path: Path, **more: Any) -> BuildConfig:
    # More than are added at once.
    made = np.random.default_rng(0).standard_normal((20_000, 8)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(made.ravel(), 8)
    even = np.arange(len(made)) % 2 == 0
    pq.write_table(
        pa.table({"id": np.arange(len(made)), "e": column, "even": even}), tmp_path / "c.parquet"
    )
    settled = {"factory": "IVF8,Flat", "whiten": "none", "index_device": "auto", "keep": "even"}
    settled["out"] = str(tmp_path / "out")
    return BuildConfig(
        corpus=(str(tmp_path / "c.parquet"),), embedding_column="e", id_column="id",
        **{**settled, **more},
    )  # fmt: skip


class Notes:
    """Keeps what a build notes."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def start(self, stage: str, total: int) -> None: ...

    def advance(self, rows: int) -> None: ...

    def finish(self, stage: str, seconds: float) -> None: ...

    def note(self, message: str) -> None:
        self.heard.append(message)


def queries() -> Any:
    return np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)


@pytest.mark.parametrize("message", [TOLD_BY_FAISS, TOLD_BY_RMM])
@pytest.mark.parametrize("step", ["train", "add"])
def test_the_cpu_takes_over_where_the_memory_of_a_gpu_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, message: str
) -> None:
    faiss.omp_set_num_threads(1)
    fake = FakeGpu(monkeypatch)
    fake.fails[step] = message
    watcher = Notes()
    report = build_index(options(tmp_path), progress=watcher)
    told = "note: the index is made on the CPU: the GPU's memory ran out"
    assert watcher.heard.count(told) == 1
    assert report.manifest["factory"]["device"] == "cpu"
    assert [name for name, _ in fake.calls if name == step]
    monkeypatch.undo()
    plain = build_index(options(tmp_path, out=str(tmp_path / "cpu"), index_device="cpu"))
    both = [open_index(made.out) for made in (report, plain)]
    assert len(both[0]) == 20_000
    found = [opened.search_embeddings(queries()) for opened in both]
    assert found[0] == found[1]


@pytest.mark.parametrize("step", ["train", "add"])
def test_a_gpu_that_was_asked_for_and_has_no_memory_left_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    FakeGpu(monkeypatch).fails[step] = TOLD_BY_FAISS
    told = "--index-device gpu: the GPU's memory ran out; use cpu or auto"
    with pytest.raises(ConfigError, match=told):
        build_index(options(tmp_path, index_device="gpu"))
    assert not (tmp_path / "out" / "CURRENT").exists()


def test_other_errors_of_a_gpu_are_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeGpu(monkeypatch).fails["add"] = "Error in x: illegal address"
    with pytest.raises(RuntimeError, match="illegal address"):
        build_index(options(tmp_path))


# ---------------------------------------------------------------------------------------- searching


@pytest.mark.parametrize("device", ["auto", "gpu"])
@pytest.mark.parametrize("factory", ["Flat", "IVF8,Flat", "IVF8,SQ8"])
def test_a_copy_on_the_gpu_searches_all_rows_and_the_cpu_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str, device: str
) -> None:
    faiss.omp_set_num_threads(1)
    out = build_index(options(tmp_path, factory=factory, index_device="cpu")).out
    plain, fake = open_index(out), FakeGpu(monkeypatch)
    opened = open_index(out, index_device=device)
    assert fake.calls == [("to gpu", ("resources", 0))]
    for found, right in zip(
        opened.search_embeddings(queries()), plain.search_embeddings(queries()), strict=True
    ):
        assert [hit.row for hit in found] == [hit.row for hit in right]
        np.testing.assert_allclose([h.score for h in found], [h.score for h in right], atol=1e-5)
    assert fake.calls[1:] == [("search", (5, 10))]
    # Neither filters nor neighbours of a document, nor more hits than its kernels take.
    for ask in (
        lambda index: index.search_embeddings(queries(), row_filter="even"),
        lambda index: [index.search_like(3)],
        lambda index: index.search_embeddings(queries(), top_k=2_049),
    ):
        assert ask(opened) == ask(plain)
    assert len(fake.calls) == 2
    assert opened.search_embeddings(queries()[:0]) == []


def test_what_the_gpu_finds_too_few_rows_of_is_searched_by_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = build_index(options(tmp_path, factory="IVF256,Flat", target_recall=0.01)).out
    fake = FakeGpu(monkeypatch)
    opened = open_index(out, index_device="gpu")
    found = opened.search_embeddings(queries(), top_k=2_000)
    assert fake.calls[1:] == [("search", (5, 2_000))]
    assert [len(hits) for hits in found] == [2_000] * 5


def test_candidates_of_a_rerank_are_found_by_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = build_index(options(tmp_path, index_device="cpu")).out
    fake = FakeGpu(monkeypatch)
    opened = open_index(out, index_device="gpu", rerank=50)
    opened.search_embeddings(queries())
    assert fake.calls[1:] == [("search", (5, 50))]


def test_kinds_and_settings_no_gpu_takes_are_searched_by_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = build_index(options(tmp_path, factory="SQ8", index_device="cpu")).out
    fake = FakeGpu(monkeypatch)
    assert len(open_index(out, index_device="auto").search_embeddings(queries())) == 5
    assert fake.calls == []
    with pytest.raises(ConfigError, match=r"--index-device gpu: IndexScalarQuantizer is not known"):
        open_index(out, index_device="gpu")
    inner = inner_index("IVF4,Flat", 8)
    inner.nprobe, notes = 2_049, list[str]()
    assert place(inner, "auto", note=notes.append, to_search=True).device == "cpu"
    assert "is searched on the CPU: a query looks into 2049 lists" in notes[0]
    assert place(inner, "auto", note=notes.append).device == "gpu"


def test_a_mapped_index_is_not_copied_to_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = build_index(options(tmp_path, factory="Flat", index_device="cpu")).out
    fake = FakeGpu(monkeypatch)
    told = r"--index-device gpu holds all of .*\(--mapped, or too large .*use cpu"
    with pytest.raises(ConfigError, match=told):
        open_index(out, index_device="gpu", mapped=True)
    assert open_index(out, index_device="auto", mapped=True).bundle.placed is None
    assert open_index(out).bundle.placed is None
    assert fake.calls == []
    with pytest.raises(ConfigError, match="--index-device 'tpu' is unknown"):
        open_index(out, index_device="tpu")


def test_the_command_takes_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = build_index(options(tmp_path, factory="Flat", index_device="cpu")).out
    pq.write_table(pa.table({"qid": range(5), "e": list(queries())}), tmp_path / "q.parquet")
    fake = FakeGpu(monkeypatch)
    command = [
        "search", str(out), "--queries", str(tmp_path / "q.parquet"), "--embedding-column", "e",
        "--id-column", "qid", "--run", str(tmp_path / "r.jsonl"), "--index-device",
    ]  # fmt: skip
    for device, calls in (("cpu", 0), ("gpu", 2)):
        done = CliRunner().invoke(cli, [*command, device])
        assert done.exit_code == 0, done.output
        assert len(fake.calls) == calls
