"""Corpora of random embeddings with other columns beside, and the rankings that searches write."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.acceptance.truth import nearest
from tests.acceptance.vectors import Vectors, search

LANGUAGES = ("en", "de", "fr")


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
