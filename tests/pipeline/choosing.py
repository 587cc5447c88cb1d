"""What the tests of ``--whiten auto`` share: a corpus, builds, labels, scores by definition.

The model is random, so what is chosen says nothing; that it is what the scores say, and that the
scores are those of the definition, does.

A file whose tests take ``place`` says ``place = choosing.place``, since
the name imported would look redefined; ``chosen`` is in conftest.py.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from scipy.stats import rankdata

from tests.helpers import tiny_models
from whiten_index import BuildConfig, Moments, Whitening, WhiteningConfig, build_index
from whiten_index.pipeline.build import BuildReport

Array = NDArray[np.float64]
ROWS, DIM = 260, tiny_models.DIM


def sentence(rng: np.random.Generator, topic: NDArray[np.str_]) -> str:
    return " ".join(rng.choice(topic, size=rng.integers(6, 9))) + "."


def document(rng: np.random.Generator, sentences: int = 4) -> str:
    """Return some sentences of a few words that recur, so that they resemble each other."""
    topic = rng.choice(tiny_models._WORDS, 6, replace=False)
    return " ".join(sentence(rng, topic) for _ in range(sentences))


def documents(rows: int = ROWS, seed: int = 0, sentences: int = 4) -> list[str]:
    rng = np.random.default_rng(seed)
    return [document(rng, sentences) for _ in range(rows)]


def parquet(path: Path, **columns: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return str(path)


@dataclass(frozen=True)
class Place:
    """A corpus and a model; its store is filled, and the transform chosen once."""

    root: Path
    model: Path
    texts: list[str]

    @property
    def corpus(self) -> str:
        return str(self.root / "c.parquet")

    @property
    def store(self) -> Path:
        return self.root / "store"

    def build(self, out: str | Path, **options: Any) -> BuildReport:
        given = {
            "corpus": (self.corpus,), "out": str(self.root / out), "store": str(self.store),
            "model": str(self.model), "text_columns": ("text",), "id_column": "id",
            "shard_rows": 100, **options,
        }  # fmt: skip
        return build_index(BuildConfig(**given))

    def arguments(self, *more: Any) -> list[Any]:
        columns = ("--text-column", "text", "--id-column", "id")
        places = ("--store", self.store, "--out", self.root / "told", "--model", self.model)
        return ["build", self.corpus, *columns, *places, "--shard-rows", 100, *more]

    def forget(self) -> None:
        """Take what was chosen, and what it was chosen on, out of the store."""
        for kind in ("choices", "samples"):
            for path in self.store.glob(f"*/{kind}"):
                shutil.rmtree(path)


@pytest.fixture
def place(tmp_path: Path, chosen: tuple[Place, BuildReport]) -> Place:
    """A copy to write to; its corpus is at another path, so that only texts tell it is the same."""
    shutil.copytree(chosen[0].root, tmp_path / "place")
    return Place(tmp_path / "place", chosen[0].model, chosen[0].texts)


def stages(report: BuildReport) -> set[str]:
    return set(report.encoded.stages.seconds)


def choice(report: BuildReport) -> dict[str, Any]:
    found = report.manifest["choice"]
    assert isinstance(found, dict)
    return found


def setting_of(row: dict[str, Any]) -> tuple[int, float, bool]:
    return row["k"], row["exponent"], row["center"]


def assert_applied(report: BuildReport) -> None:
    """The transform of the index is the one that was chosen."""
    assert setting_of(report.manifest["whitening"]) == setting_of(choice(report)["chosen"])
    folder = report.out / "versions" / report.version
    whitening = Whitening.load(folder / "whitening.safetensors")
    assert (whitening.k, whitening.exponent, whitening.center) == setting_of(
        choice(report)["chosen"]
    )


def assert_same_choice(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Pieces encoded again may differ by float16's last bit, and ranks of near ties with it."""
    assert {**found, "candidates": []} == {**expected, "candidates": []}
    ours, theirs = found["candidates"], expected["candidates"]
    assert [setting_of(row) for row in ours] == [setting_of(row) for row in theirs]
    for name in ("score", "error"):
        assert [r[name] for r in ours] == pytest.approx([r[name] for r in theirs], abs=1e-3)


def shards(folder: Path) -> list[Path]:
    return list(folder.rglob("segments/*/*"))


def names_of(report: BuildReport) -> list[str]:
    """Return the id of each row of the corpus."""
    store, parts = report.encoded.store, report.encoded.record.parts
    tables = [store.documents(part) for part in parts if part.rows]
    return [str(name) for table in tables for name in table["id"].to_pylist()]


def raw_embeddings(report: BuildReport) -> Array:
    store = report.encoded.store
    parts = [part for part in report.encoded.record.parts if part.rows]
    return np.concatenate([store.embeddings(part)[:] for part in parts]).astype(np.float64)


def vectors_of(fitted_on: Moments, row: dict[str, Any], *matrices: Array, **options: Any) -> Any:
    k, exponent, center = setting_of(row)
    config = WhiteningConfig(k=k, exponent=exponent, center=center, **options)
    whitening = Whitening.fit(fitted_on, config)
    for matrix in matrices:
        vectors = whitening.apply(matrix)
        yield vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def reciprocal_ranks(queries: Array, candidates: Array) -> Array:
    """1/rank of row i for query i."""
    ranks = rankdata(-(queries @ candidates.T), axis=1, method="average")
    return 1 / ranks[np.arange(len(queries)), np.arange(len(queries))]


def kept_sample(place: Place) -> dict[str, Array]:
    (path,) = place.store.glob("*/samples/*.safetensors")
    return load_file(path)


def assert_scored_by_pieces(
    report: BuildReport, sample: dict[str, Array], fitted_on: Moments, **options: Any
) -> None:
    """Each candidate's score is that of its own whitening, by brute force and in float64."""
    raw = raw_embeddings(report)
    around = raw[sample["candidates"]]
    for row in choice(report)["candidates"]:
        matrices = (sample[name] for name in ("sentences", "others", "windows"))
        sentences, others, windows, whole = vectors_of(fitted_on, row, *matrices, around, **options)
        each = (2 * reciprocal_ranks(sentences, others) + reciprocal_ranks(windows, whole)) / 3
        assert row["score"] == pytest.approx(each.mean(), abs=1e-3), row


def embedded(path: Path, rows: int = 150, dim: int = 12) -> dict[str, Any]:
    embeddings = np.random.default_rng(0).normal(size=(rows, dim)) * np.geomspace(1, 0.1, dim) + 1
    corpus = parquet(path, id=list(range(rows)), e=list(embeddings.astype(np.float32)))
    return {"corpus": (corpus,), "embedding_column": "e", "id_column": "id"}


@dataclass(frozen=True)
class Judged:
    """Queries in files, and what they are in memory."""

    queries: str
    qrels: str
    texts: dict[str, str]
    grades: dict[str, dict[str, int]]

    def options(self) -> dict[str, str]:
        return {"queries": self.queries, "qrels": self.qrels}


def judged(folder: Path, texts: list[str], *, count: int = 40, prefix: str = "d") -> Judged:
    """Queries of some words of a document each, which is relevant, and a neighbour a little."""
    rng = np.random.default_rng(7)
    queries, grades = {}, {}
    for i, row in enumerate(rng.choice(len(texts) - 1, count, replace=False).tolist()):
        words = texts[row].replace(".", "").split()
        queries[f"q{i}"] = " ".join(rng.choice(words, 6))
        grades[f"q{i}"] = {f"{prefix}{row}": 2, f"{prefix}{row + 1}": 1, "not-in-corpus": 0}
    rows = [(q, d, grade) for q, each in grades.items() for d, grade in each.items()]
    query_ids, doc_ids, relevance = (list(column) for column in zip(*rows, strict=True))
    return Judged(
        parquet(folder / "queries.parquet", id=list(queries), text=list(queries.values())),
        parquet(folder / "qrels.parquet", query_id=query_ids, doc_id=doc_ids, relevance=relevance),
        queries,
        grades,
    )
