"""Exact search over vectors in memory against sorting every score; ties, blocks, few and many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whiten_index.index import exact
from whiten_index.index.exact import exact_search, flat_vectors, largest


def by_sorting(scores: np.ndarray, count: int) -> np.ndarray:
    return np.lexsort((np.arange(len(scores)), -scores))[:count]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    rows=st.integers(1, 9000),
    count=st.integers(1, 9000),
    values=st.sampled_from([1, 2, 5, 1_000_000]),
    seed=st.integers(0, 9),
)
def test_the_largest_are_those_of_a_full_sort_ties_by_position(
    rows: int, count: int, values: int, seed: int
) -> None:
    scores = np.random.default_rng(seed).integers(0, values, rows).astype(np.float32)
    assert np.array_equal(largest(scores, count), by_sorting(scores, count))


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    # Products of small integers have no rounding, so that the truth has the same ties.
    return np.random.default_rng(0).integers(-3, 4, (3000, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    return np.random.default_rng(1).integers(-3, 4, (9, 6)).astype(np.float32)


@pytest.mark.parametrize("held", [1 << 24, 4000, 100, 1])
@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("among", [None, "few", "one", "half", "a run", "every"])
def test_exact_search_is_a_full_sort(
    monkeypatch: pytest.MonkeyPatch,
    vectors: np.ndarray,
    queries: np.ndarray,
    among: str | None,
    count: int,
    held: int,
) -> None:
    if held == 1:
        vectors = vectors[:60]
    monkeypatch.setattr(exact, "_HELD", held)
    every = np.arange(len(vectors))
    rows = {
        None: every,
        "every": every,
        "few": every[3::13],
        "one": every[41:42],
        "half": every[::2],
        "a run": every[7:29],
    }[among]
    scores, found = exact_search(
        vectors, queries[:count], 50, among=None if among is None else rows
    )
    for query, mine, numbers in zip(queries, scores, found, strict=False):
        truth = vectors[rows] @ query
        best = by_sorting(truth, 50)
        assert numbers.tolist() == rows[best].tolist()
        assert mine.tolist() == truth[best].tolist()


def test_only_plain_vectors_by_inner_product_are_looked_at_directly(tmp_path: Path) -> None:
    rows = np.random.default_rng(3).standard_normal((20, 4)).astype(np.float32)
    plain = faiss.IndexFlatIP(4)
    plain.add(rows)
    assert np.array_equal(flat_vectors(plain), rows)
    assert flat_vectors(faiss.IndexFlatIP(4)).shape == (0, 4)
    for other in (faiss.IndexFlatL2(4), faiss.index_factory(4, "SQfp16"), faiss.IndexFlat(4)):
        other.train(rows)
        other.add(rows)
        assert flat_vectors(other) is None
    faiss.write_index(plain, str(tmp_path / "i"))
    mapped = faiss.read_index(str(tmp_path / "i"), faiss.IO_FLAG_MMAP_IFC)
    assert np.array_equal(flat_vectors(faiss.downcast_index(mapped)), rows)


@pytest.mark.parametrize("policy", [None, "active"])
def test_the_threads_of_faiss_rest_unless_the_user_says_otherwise(policy: str | None) -> None:
    # OpenMP prints what it was told when it is loaded.
    program = (
        "import os; from whiten_index.index import load_faiss; load_faiss(); "
        "print(os.environ.get('OMP_WAIT_POLICY'))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    told = {} if policy is None else {"OMP_WAIT_POLICY": policy}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**environment, "OMP_DISPLAY_ENV": "TRUE", **told},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"OMP_WAIT_POLICY = '{(policy or 'passive').upper()}'" in done.stderr
    assert done.stdout.strip() == str(policy)
