"""Small indexes with every kind of file that there is, of an embedding column and of texts."""

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from tests.vectordb.memory_writer import MemoryWriter, Server

DIM = 6
LIKE = "r235"
GATE = 9
_WORDS = (
    "the", "cat", "sat", "on", "mat", "dog", "ran", "to", "small", "river", "sang", "king",
    "queen", "walks", "writes", "book", "cold",
)  # fmt: skip
# Rows of a night's corpus: some change, some go, some come. The third loses too many for a gate.
_NIGHTS = {
    "column": (range(240), range(4, 250), range(200, 250)),
    "text": (range(180, 240), range(182, 246), range(226, 246)),
}
_OPTIONS = {
    "column": ["--embedding-column", "embedding", "--shard-rows", "48", "--k", "4"],
    "text": ["--text-column", "text", "--shard-rows", "16", "--k", "3"],
}


class RefusedError(Exception):
    """A command that ended with a status other than 0."""

    def __init__(self, status: int, stderr: str) -> None:
        super().__init__(status, stderr)
        self.status, self.stderr = status, stderr


def run(*arguments: Any) -> str:
    """Return what a command prints.

    Raises:
        RefusedError: it ended with another status than 0.
    """
    from whiten_index.cli import cli

    result = CliRunner().invoke(cli, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code:
        raise RefusedError(result.exit_code, result.stderr)
    return result.stdout


def write_corpus(root: Path, kind: str, night: int) -> None:
    """Write the corpus of a night, in two files."""
    numbers = list(_NIGHTS[kind][night])
    for name, some in (("a", numbers[::2]), ("b", numbers[1::2])):
        fresh = [np.random.default_rng([n, night * (n % 10 == 4)]) for n in some]
        columns: dict[str, Any] = {"id": [f"r{n}" for n in some], "year": [2000 + n for n in some]}
        if kind == "text":
            columns["text"] = [" ".join(rng.choice(_WORDS, 7)) for rng in fresh]
        else:
            rows = [rng.standard_normal(DIM).astype(np.float32) for rng in fresh]
            columns["embedding"] = pa.array([r.tolist() for r in rows], pa.list_(pa.float32()))
        (root / "corpus").mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), root / "corpus" / f"{name}.parquet")


def prepare(root: Path, kind: str) -> None:
    """Make two versions, a pack, a candidate that a gate kept back, exports and a push."""
    model = []
    if kind == "text":
        from tests.helpers import tiny_models

        model = ["--model", tiny_models.bert(root / "model"), "--device", "cpu"]
    write_corpus(root, kind, 0)
    (root / "build.json").write_text(json.dumps(list(map(str, [*_OPTIONS[kind], *model]))))
    build(root)
    push(root, "memory")
    write_corpus(root, kind, 1)
    # A file's time says whether it changed.
    run("update", root / "index", "--refit", "never", "--read-all", "--json")
    run("compact", root / "index/store")
    write_corpus(root, kind, 2)
    with pytest.raises(RefusedError) as refused:
        run("update", root / "index", "--max-shrink", "0.1", "--read-all")
    assert refused.value.status == GATE, refused.value.stderr
    for form, name in (("query", "query"), ("matrix", "matrix.safetensors")):
        run("export", root / "index", root / "exports" / name, "--as", form)
    for name in ("rows.parquet", "rows.npy"):
        push(root, name)


def build(root: Path) -> None:
    """Build an index of the corpus."""
    options = json.loads((root / "build.json").read_text())
    given = ["--id-column", "id", "--keep", "year", "--threads", "1", "--whiten", "whitening"]
    # The third night has far fewer rows.
    given.append("--force")
    run("build", root / "corpus", "--out", root / "index", *given, *options)


def push(root: Path, name: str) -> dict[str, Any]:
    """Push to a file, or to a database in memory that is what it was; return its rows by id."""
    if name != "memory":
        run("push", root / "index", "--to", root / name)
        described = root / name.replace(".npy", ".documents.parquet")
        rows = {row["id"]: row for row in pq.read_table(described).to_pylist()}
        if name.endswith(".npy"):
            vectors = np.load(root / name)
            for row, vector in zip(rows.values(), vectors.tolist(), strict=True):
                row["vector"] = vector
        return rows
    state = root / "server.pickle"
    server: Server = pickle.loads(state.read_bytes()) if state.exists() else Server()
    connect = lambda *_, **__: MemoryWriter(server)  # noqa: E731
    with mock.patch("whiten_index.vectordb.push.open_writer", connect):
        run("push", root / "index", "--to", "postgresql://me@here/db", "--table", "docs")
    if not state.exists():
        state.write_bytes(pickle.dumps(server))
    assert server.published is not None
    return {row["id"]: row for row in server.published.rows.values()}


def found(root: Path, *options: str) -> dict[str, Any]:
    """Return the documents that a search finds, with their scores."""
    text = run("search", root / "index", "--like", LIKE, "--top-k", "30", "--json", *options)
    (result,) = json.loads(text)["results"]
    return {hit["id"]: [hit["score"], hit["columns"]] for hit in result["hits"]}


def described(root: Path) -> dict[str, Any]:
    """Return what ``inspect`` says."""
    fields = json.loads(run("inspect", root / "index", "--json"))
    return {name: fields[name] for name in ("version", "rows", "spectrum", "whitening", "counts")}


def listed(root: Path) -> dict[str, Any]:
    """Return the versions that are called sound, by name."""
    rows = json.loads(run("versions", root / "index", "--verify", "full", "--json"))["versions"]
    return {row["name"]: row for row in rows if not row["sound"]}


def verified(root: Path) -> str:
    """Return that ``verify`` finds nothing damaged."""
    run("verify", root / "index", root / "index/store")
    return "sound"


def exported(root: Path, form: str, name: str) -> list[list[float]]:
    """Return what a transform gives that is exported now."""
    run("export", root / "index", root / name, "--as", form)
    return loaded(root, name)


def loaded(root: Path, name: str) -> list[list[float]]:
    """Return what an exported transform gives."""
    from whiten_index import QueryTransform

    if name.endswith(".safetensors"):
        made = load_file(root / name)
        rows = np.random.default_rng(0).standard_normal((3, len(made["matrix"])))
        return (rows @ made["matrix"] + made["bias"]).tolist()
    transform = QueryTransform.load(root / name)
    rows = np.random.default_rng(0).standard_normal((3, transform.dim))
    return transform.reduce(rows).tolist()


def after(root: Path, *command: Any) -> dict[str, float]:
    """Return what is found after a command that writes."""
    run(*(root / each if isinstance(each, Path) else each for each in command))
    return found(root, "--rerank", "300", "--rerank-by", "embeddings")


def after_build(root: Path) -> dict[str, float]:
    """Return what is found after another build."""
    build(root)
    return found(root)


def opened(root: Path) -> list[list[float]]:
    """Return what the Python library finds."""
    from whiten_index import open_index

    index = open_index(root / "index", mapped=True, rerank=300)
    queries = np.random.default_rng(3).standard_normal((4, index.dim)).astype(np.float32)
    return [sorted(hit.score for hit in hits) for hits in index.search_embeddings(queries)]


_INDEX, _STORE = Path("index"), Path("index/store")
READERS: Mapping[str, Callable[[Path], Any]] = {
    "search": found,
    "search --rerank": lambda root: found(root, "--rerank", "300"),
    "search --mapped": lambda root: found(root, "--mapped"),
    "open_index": opened,
    "inspect": described,
    "versions": listed,
    "verify": verified,
    "export query": lambda root: exported(root, "query", "again"),
    "export matrix": lambda root: exported(root, "matrix", "again.safetensors"),
    "load query": lambda root: loaded(root, "exports/query"),
    "push memory": lambda root: push(root, "memory"),
    "push parquet": lambda root: push(root, "rows.parquet"),
    "push npy": lambda root: push(root, "rows.npy"),
}
WRITERS: Mapping[str, Callable[[Path], Any]] = {
    "update": lambda root: after(root, "update", _INDEX, "--max-shrink", "1", "--refit", "never"),
    "build": after_build,
    "rollback": lambda root: after(root, "rollback", _INDEX),
    "prune": lambda root: after(root, "prune", _INDEX, "--keep", "2"),
    "gc": lambda root: after(root, "gc", _STORE, "--keep-days", "0"),
    "compact": lambda root: after(root, "compact", _STORE),
}
