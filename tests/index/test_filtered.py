"""Filtered search against brute force among the rows that pass, for every kind of index."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pytest

from tests.helpers.builds import build_of
from whiten_index import open_index
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.index.vector_search import Selection, nearest

ROWS, K, LISTS = 2000, 16, 20
EXHAUSTIVE = ["Flat", "SQfp16", "SQ8", "SQ4", "RaBitQ", "PQ8x4", "PQ8x4fs", "RaBitQfs"]
EXHAUSTIVE += ["RQ2x4"]
LISTED = [
    f"IVF{LISTS},{code}" for code in ("Flat", "SQ8", "PQ8x4", "PQ8x4fs", "RaBitQ", "RaBitQfs")
]
LISTED += [f"IVF{LISTS},RQ2x4", f"IVF{LISTS},PRQ2x2x4fs", f"IVF{LISTS}(IVF4,Flat),Flat"]
LISTED += [f"IVF{LISTS}_HNSW8,Flat"]
GRAPHS = ["HNSW16", "HNSW16_SQ8"]
COUNTS = [0, 1, 40, 400, ROWS]


def unit(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return unit(np.random.default_rng(0).standard_normal((ROWS, K)))


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    return unit(np.random.default_rng(1).standard_normal((7, K)))


@pytest.fixture(scope="module")
def index_of(rows: np.ndarray) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def make(factory: str) -> Any:
        if factory not in made:
            index = faiss.index_factory(K, factory, faiss.METRIC_INNER_PRODUCT)
            index.train(rows[:400])
            index.add(rows)
            made[factory] = index
        return made[factory]

    return make


def drawn(count: int, seed: int = 5) -> np.ndarray:
    mask = np.zeros(ROWS, bool)
    mask[np.random.default_rng(seed).choice(ROWS, count, replace=False)] = True
    return mask


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("factory", EXHAUSTIVE + LISTED + GRAPHS)
def test_hits_pass_are_as_many_as_there_can_be_and_fall(
    index_of: Callable[[str], Any], queries: np.ndarray, factory: str, count: int
) -> None:
    mask = drawn(count)
    for top_k in (1, 10, ROWS):
        scores, found = nearest(index_of(factory), queries, top_k, Selection.of(mask))
        assert found.shape == scores.shape == (7, min(top_k, count))
        assert mask[found].all()
        assert all(len(set(each)) == len(each) for each in found.tolist())
        assert (np.diff(scores, axis=1) <= 1e-6).all()


LANGUAGES = ["en", "de", None, "zürich 日本", 'it\'s "quoted"']


def corpus_table(rows: np.ndarray) -> pa.Table:
    numbers = np.arange(len(rows))
    return pa.table(
        {
            "key": [f"doc-{i}" for i in numbers],
            "e": list(rows),
            "lang": [LANGUAGES[i % len(LANGUAGES)] for i in numbers],
            "year": pa.array([None if i % 7 == 0 else 1990 + i % 40 for i in numbers], pa.int32()),
            "price": (numbers / 3).astype(np.float32),
            "nothing": pa.nulls(len(rows), pa.string()),
            "flag": [bool(i % 2) for i in numbers],
            "day": pa.array(numbers.tolist(), pa.date32()),
            "kind": pa.array([["a", "b"][i % 2] for i in numbers]).dictionary_encode(),
            "other": numbers,
        }
    )


KEPT = ("lang", "year", "price", "nothing", "flag", "day", "kind")


def build(folder: Path, rows: np.ndarray, **options: Any) -> Path:
    settled = {"whiten": "none", "id_column": "key", "keep": KEPT, "shard_rows": 130, **options}
    return build_of(corpus_table(rows), folder, **settled)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, rows: np.ndarray) -> Path:
    return build(tmp_path_factory.mktemp("filter"), rows[:500])


def of(number: int, name: str) -> Any:
    return {
        "lang": LANGUAGES[number % len(LANGUAGES)],
        "year": None if number % 7 == 0 else 1990 + number % 40,
    }[name]


FILTERS: list[tuple[str, Callable[[int], bool]]] = [
    ("lang == 'en'", lambda i: of(i, "lang") == "en"),
    ("lang != 'en'", lambda i: of(i, "lang") not in ("en", None)),
    ("lang is None", lambda i: of(i, "lang") is None),
    ("lang is not None and not flag == True", lambda i: i % 5 != 2 and i % 2 == 0),
    ('lang in [\'zürich 日本\', "it\'s \\"quoted\\""]', lambda i: i % 5 in (3, 4)),
    ("year >= 2020 or price < 3.5", lambda i: (of(i, "year") or 0) >= 2020 or i / 3 < 3.5),
    ("year not in [1991, 1992]", lambda i: of(i, "year") not in (1991, 1992, None)),
    ("nothing == 'x'", lambda i: False),
    ("nothing is None", lambda i: True),
    ("nothing != 'x'", lambda i: False),
    ("id == 'doc-17'", lambda i: i == 17),
    ("id in []", lambda i: False),
    ("flag", lambda i: i % 2 == 1),
    ("kind == 'a'", lambda i: i % 2 == 0),
]


@pytest.mark.parametrize(("text", "passes"), FILTERS, ids=[text for text, _ in FILTERS])
def test_a_filter_means_what_it_says(
    index: Path, rows: np.ndarray, queries: np.ndarray, text: str, passes: Callable[[int], bool]
) -> None:
    opened = open_index(index)
    allowed = [number for number in range(500) if passes(number)]
    assert opened.matches(text) == len(allowed)
    cosines = queries @ rows[allowed].T
    for hits, row in zip(
        opened.search_embeddings(queries, top_k=10, row_filter=text), cosines, strict=True
    ):
        best = np.argsort(-row)[:10]
        assert [hit.row for hit in hits] == [allowed[i] for i in best]
        np.testing.assert_allclose([hit.score for hit in hits], row[best], atol=1e-5)
    like = opened.search_like("doc-17", top_k=10, row_filter=text)
    truth = [i for i in np.argsort(-(rows[:500] @ rows[17])) if i != 17 and passes(i)][:10]
    assert [hit.row for hit in like] == truth


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("other == 3", ConfigError, r"reads other, which this index does not keep; its columns"),
        ("key == 'doc-1'", ConfigError, r"its columns are id, lang, year.*--keep"),
        ("", ConfigError, "not understood"),
        ("lang", CorpusError, "does not fit the columns"),
        ("__import__('os')", ConfigError, "not understood"),
        ("lang > 3", CorpusError, "does not fit the columns"),
        ("year == 'x'", CorpusError, "does not fit the columns"),
    ],
)
def test_a_filter_that_cannot_be_used_is_refused_before_anything_is_searched(
    index: Path, queries: np.ndarray, text: str, error: type[Exception], message: str
) -> None:
    opened = open_index(index)
    for use in (
        lambda: opened.search_embeddings(queries, row_filter=text),
        lambda: opened.search(["no encoder is here"], row_filter=text),
        lambda: opened.search_like("doc-1", row_filter=text),
    ):
        with pytest.raises(error, match=message):
            use()
