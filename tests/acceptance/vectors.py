"""Corpora of random embeddings, indexes of them, and the rankings that searches give and write."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.acceptance.commands import done
from tests.acceptance.truth import nearest, unit, whitening

DIM, K = 16, 8
LANGUAGES = ("en", "de", "fr")
COLUMNS = ("--embedding-column", "embedding", "--id-column", "id")
OPTIONS = (*COLUMNS, "--keep", "title", "--whiten", "whitening", "--k", K, "--factory", "Flat")


def version_folder(index: Path) -> Path:
    """Return the folder of the published version, by ``CURRENT`` as the README has it."""
    return index / "versions" / str(json.loads((index / "CURRENT").read_text())["version"])


@dataclass(frozen=True)
class Place:
    """A folder with a corpus of two files, and the index that was built from its rows."""

    work: Path
    rows: Vectors

    @property
    def corpus(self) -> Path:
        return self.work / "corpus"

    @property
    def index(self) -> Path:
        return self.work / "index"

    @property
    def version(self) -> Path:
        """Folder of the published version."""
        return version_folder(self.index)

    def made(self) -> Self:
        """Write the corpus and build the index."""
        write_corpus(self.corpus, self.rows)
        build(self.corpus, self.index)
        return self

    def published(self) -> str:
        return self.version.name

    def write(self, rows: Vectors) -> None:
        """Let the corpus have these rows."""
        write_corpus(self.corpus, rows)

    def change(self) -> Vectors:
        """Change 5 of 400 rows, remove 10 and add 12; return all rows in their new order."""
        one = self.rows[:150] + self.rows[160:165].moved() + self.rows[165:200]
        two = self.rows[200:] + some(12, "new")
        one.write(self.corpus / "a.parquet")
        two.write(self.corpus / "b.parquet")
        return one + two

    def search(
        self, queries: np.ndarray, *options: object, top_k: int = 10
    ) -> list[list[tuple[str, float]]]:
        """Return ids and scores for raw embeddings, best first."""
        return search(self.index, queries, self.work, *options, top_k=top_k)

    def assert_searches(
        self, rows: Vectors, *, fitted: Vectors | None = None, index: Path | None = None
    ) -> None:
        """Compare searches with brute force over all rows, whitened by those that were fitted."""
        asked = some(20, "query")
        fitted = fitted or rows
        vectors, queries = whitened(rows, fitted), whitened(asked, fitted)
        _, best = nearest(vectors, queries, 10)
        cosines = queries @ vectors.T
        place = {each: number for number, each in enumerate(rows.ids)}
        for number, hits in enumerate(search(index or self.index, asked.rows, self.work)):
            scores = [score for _, score in hits]
            np.testing.assert_allclose(scores, best[number], atol=1e-4)
            found = [cosines[number, place[each]] for each, _ in hits]
            np.testing.assert_allclose(found, scores, atol=1e-4)
            assert len({each for each, _ in hits}) == 10

    def put_back(self) -> Self:
        """Put the folder back as it was at the first call, at its path, which indexes know."""
        kept = self.work.with_name("kept")
        if kept.exists():
            shutil.rmtree(self.work)
            shutil.copytree(kept, self.work)
        else:
            shutil.copytree(self.work, kept)
        return self


@dataclass(frozen=True)
class Vectors:
    """Rows of a corpus: their ids and their raw embeddings in float32."""

    ids: list[str]
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Vectors:
        return Vectors(self.ids[part], self.rows[part])

    def __add__(self, other: Vectors) -> Vectors:
        return Vectors(self.ids + other.ids, np.concatenate([self.rows, other.rows]))

    def moved(self, by: float = 1.0) -> Vectors:
        """Return rows of the same ids with other embeddings."""
        return Vectors(self.ids, (self.rows + by).astype(np.float32))

    def titles(self) -> list[str]:
        return [f"title of {each}" for each in self.ids]

    def write(self, path: Path, **columns: Any) -> Path:
        """Write a Parquet file, whose other columns are titles unless others are given."""
        path.parent.mkdir(parents=True, exist_ok=True)
        values = pa.array(self.rows.astype(np.float32).ravel())
        table = pa.table(
            {
                "id": self.ids,
                **(columns or {"title": self.titles()}),
                "embedding": pa.FixedSizeListArray.from_arrays(values, self.rows.shape[1]),
            }
        )
        pq.write_table(table, path)
        return path


def some(count: int, prefix: str = "d", *, dim: int = DIM, seed: int = 0) -> Vectors:
    """Return random rows around a mean, wider in some directions than in others."""
    rng = np.random.default_rng([seed, *prefix.encode()])
    mixing = np.linalg.qr(np.random.default_rng(1).normal(size=(dim, dim)))[0]
    rows = (rng.normal(size=(count, dim)) * np.linspace(2, 0.4, dim)) @ mixing + 1
    return Vectors([f"{prefix}{i}" for i in range(count)], rows.astype(np.float32))


def write_corpus(folder: Path, rows: Vectors) -> Path:
    """Write rows into two files of a folder."""
    half = len(rows) // 2
    rows[:half].write(folder / "a.parquet")
    rows[half:].write(folder / "b.parquet")
    return folder


def build(corpus: Path | str, out: Path | str, *options: object) -> None:
    done("build", corpus, *OPTIONS, *options, "--out", out)


def search(
    index: Path | str, queries: np.ndarray, work: Path, *options: object, top_k: int = 10
) -> list[list[tuple[str, float]]]:
    """Return ids and scores for raw embeddings, best first."""
    asked = Vectors([f"q{i}" for i in range(len(queries))], queries)
    run = work / "run.parquet"
    asked.write(work / "queries.parquet")
    done(
        "search", index, "--queries", work / "queries.parquet", *COLUMNS, "--top-k", top_k,
        "--run", run, *options,
    )  # fmt: skip
    found: dict[str, list[tuple[str, float]]] = {each: [] for each in asked.ids}
    for row in pq.read_table(run).sort_by("rank").to_pylist():
        found[row["query_id"]].append((row["doc_id"], row["score"]))
    return list(found.values())


def whitened(rows: Vectors, fitted: Vectors, k: int = K) -> np.ndarray:
    """Return unit vectors of rows by the whitening of others, up to the signs of directions."""
    mean, matrix = whitening(fitted.rows.astype(np.float64), k)
    return unit((rows.rows.astype(np.float64) - mean) @ matrix)


def checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder, but those of locks, which hold nothing."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def count_files(folder: Path) -> int:
    """Count the files below a folder that another process writes to."""
    return sum(len(files) for _, _, files in os.walk(folder))


@dataclass(frozen=True)
class RandomCorpus:
    """A corpus of embeddings with ids, years and languages, and queries of the same kind."""

    folder: Path
    rows: np.ndarray
    questions: np.ndarray

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus.parquet"

    @property
    def ids(self) -> list[str]:
        return [f"d{i}" for i in range(len(self.rows))]

    @property
    def years(self) -> np.ndarray:
        return 1990 + np.arange(len(self.rows)) % 30

    @property
    def languages(self) -> np.ndarray:
        return np.array([LANGUAGES[i % 3] for i in range(len(self.rows))])


def make_corpus(
    folder: Path, count: int, dim: int, *, seed: int = 0, asked: int = 40
) -> RandomCorpus:
    """Write rows of uneven directions around a mean, as encoders give them, and queries."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    rows = rng.normal(size=(count + asked, dim)) * np.geomspace(3, 0.3, dim) @ turn
    rows = (rows + rng.normal(size=dim)).astype(np.float32)
    made = RandomCorpus(folder, rows[:count], rows[count:])
    Vectors(made.ids, made.rows).write(made.corpus, year=made.years, lang=made.languages)
    return made


def read_trec(run: Path) -> dict[str, list[tuple[str, float]]]:
    """Return the hits of each query, ids and scores, of a file in TREC's format."""
    found: dict[str, list[tuple[str, float]]] = {}
    for line in run.read_text().splitlines():
        query, _, document, rank, score, _ = line.split()
        found.setdefault(query, []).append((document, float(score)))
        assert int(rank) == len(found[query])
    return found


def search_queries(
    index: Path, corpus: RandomCorpus, *options: object, top_k: int = 10
) -> list[list[tuple[str, float]]]:
    """Search for the queries by the command line, and return the hits of each."""
    return search(index, corpus.questions, index.parent, *options, top_k=top_k)


def recall(
    found: Sequence[Sequence[tuple[str, float]]],
    rows: np.ndarray,
    queries: np.ndarray,
    top_k: int = 10,
) -> float:
    """Return the share of the nearest rows by brute force that are among the hits."""
    expected, _ = nearest(rows, queries, top_k)
    pairs = zip(found, expected, strict=True)
    kept = [len({hit for hit, _ in hits} & {f"d{row}" for row in near}) for hits, near in pairs]
    return sum(kept) / (top_k * len(kept))
