"""A FAISS that has a GPU, which is a clone on the CPU that records what is asked of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import faiss
import pytest

from whiten_index.index import gpu


class FakeGpu:
    """What faiss-gpu adds to faiss; the copy on the GPU is a clone on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, gpus: int = 1, refuses: bool = False):
        self.calls: list[tuple[str, Any]] = []
        self.refuses = refuses
        self.fails: dict[str, str] = {}
        module = SimpleNamespace(
            downcast_index=faiss.downcast_index,
            StandardGpuResources=lambda: "resources",
            get_num_gpus=lambda: gpus,
            index_cpu_to_gpu=self.to_gpu,
            index_gpu_to_cpu=self.to_cpu,
        )
        monkeypatch.setattr(gpu, "load_faiss", lambda: module)

    def to_gpu(self, resources: str, device: int, index: Any) -> Any:
        if self.refuses:
            raise RuntimeError("Error in x at y: Error: 'm' failed: no such code size")
        self.calls.append(("to gpu", (resources, device)))
        return OnGpu(self, faiss.clone_index(index))

    def to_cpu(self, index: Any) -> Any:
        self.calls.append(("to cpu", None))
        return faiss.clone_index(index.real)


class OnGpu:
    """An index that records what it is asked for, and fails where the test says so."""

    def __init__(self, fake: FakeGpu, real: Any) -> None:
        self.__dict__.update(fake=fake, real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.real, name, value)

    def train(self, vectors: Any) -> None:
        self.do("train", len(vectors))
        self.real.train(vectors)

    def add(self, vectors: Any) -> None:
        self.do("add", len(vectors))
        self.real.add(vectors)

    def search(self, vectors: Any, top_k: int) -> Any:
        self.do("search", (len(vectors), top_k))
        return self.real.search(vectors, top_k)

    def do(self, what: str, how: Any) -> None:
        self.fake.calls.append((what, how))
        # Some rows are there already when it fails, if there are more.
        before = sum(name == what for name, _ in self.fake.calls)
        if what in self.fake.fails and (before > (what == "add") or how < 16_384):
            raise RuntimeError(self.fake.fails[what])
