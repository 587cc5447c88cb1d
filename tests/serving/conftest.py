"""A small index of texts, and servers of it in separate processes."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.builds import build_texts
from whiten_index import MigrateConfig, migrate_index

ROWS, K = 300, 8
HOSTILE = "<img src=x onerror=alert(1)>"
COMMAND = [sys.executable, "-c", "from whiten_index.cli import main; main()", "serve"]


@dataclass
class Server:
    """A server that runs."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def until(self, holds: Callable[[httpx.Client], Any], seconds: float = 60) -> Any:
        """Return what holds in the end."""
        with self.client() as client:
            end = time.monotonic() + seconds
            while not (found := holds(client)) and time.monotonic() < end:
                time.sleep(0.05)
            return found


Serve = Callable[..., Server]
Make = Callable[..., Path]


def corpus(
    folder: Path, words: tuple[str, ...], *, seed: int = 0, rows: int = ROWS, **columns: Any
) -> Path:
    """Write texts of random words with other columns."""
    random = np.random.default_rng(seed)
    texts = [" ".join(random.choice(words, size=n)) for n in random.integers(3, 12, rows)]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "corpus.parquet"
    table = {
        "id": [f"d{i}" for i in range(rows)],
        "text": texts,
        "lang": ["en", "de", HOSTILE] * (rows // 3),
        **columns,
    }
    pq.write_table(pa.table(table), path)
    return path


def build(out: Path, source: Path, model: Path, **options: Any) -> Path:
    given: dict[str, Any] = {"k": K, "keep": ("text", "lang"), "id_column": "id", **options}
    return build_texts(out, source, model, **given).out


@pytest.fixture(scope="session")
def make(tiny_model: Path, tiny_words: tuple[str, ...]) -> Make:
    """Return ``make(out, seed=0, columns={}, **options)``, of a corpus next to ``out``."""

    def made(out: Path, seed: int = 0, columns: Any = None, **options: Any) -> Path:
        source = corpus(out.with_name(f"c{out.name}"), tiny_words, seed=seed, **(columns or {}))
        return build(out, source, tiny_model, **options)

    return made


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory, make: Make) -> Path:
    """An index of texts. Do not write to it."""
    return make(tmp_path_factory.mktemp("served") / "docs")


@pytest.fixture(scope="session")
def migrated(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_words: tuple[str, ...]
) -> Path:
    """An index that went from one model to another, to which queries were compared."""
    folder = tmp_path_factory.mktemp("migrated")
    source = corpus(folder / "c", tiny_words)
    out = build(folder / "docs", source, tiny_model)
    texts = pq.read_table(source)["text"].to_pylist()[:60]
    asked = [{"id": f"q{row}", "text": text} for row, text in enumerate(texts)]
    pq.write_table(pa.Table.from_pylist(asked), folder / "queries.parquet")
    (folder / "qrels.tsv").write_text("".join(f"q{row}\t0\td{row}\t1\n" for row in range(60)))
    given = {"queries": str(folder / "queries.parquet"), "qrels": str(folder / "qrels.tsv")}
    # The prompt is most of what a text of eight tokens has room for.
    other: dict[str, Any] = {"document_prompt": "the cat sat on ", "max_length": 8}
    report = migrate_index(MigrateConfig(index=str(out), model=str(tiny_model), **other, **given))
    assert report.finished
    return out


@contextlib.contextmanager
def started(
    folder: Path, *arguments: str, variables: dict[str, str] | None = None
) -> Iterator[Server]:
    log = folder / "serve.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*COMMAND, "--port", "0", *arguments],
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
        )
        try:
            end = time.monotonic() + 120
            while "http://" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            url = next(word for word in log.read_text().split() if word.startswith("http://"))
            yield Server(url, process, log)
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Return ``serve(*arguments, variables=None) -> Server``; all of them end with the session."""
    with contextlib.ExitStack() as running:

        def start(*arguments: Any, variables: dict[str, str] | None = None) -> Server:
            folder = tmp_path_factory.mktemp("server")
            given = [*map(str, arguments)]
            return running.enter_context(started(folder, *given, variables=variables))

        yield start


@pytest.fixture(scope="session")
def server(serve: Serve, index: Path) -> Server:
    """A server of one index under two names."""
    return serve(f"docs={index}", f"other={index}", "--max-texts", 40, "--max-hits", 2000)
