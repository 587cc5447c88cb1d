"""Rows looked up by their digests, against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.build_helpers import column_facts
from whiten_index.artifacts import manifest
from whiten_index.store import EmbeddingStore, KnownRows, Picks, StoreDtype
from whiten_index.whitening.moments import Moments

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
NAME = "0123456789abcdef" * 2


def digests_of(values: list[tuple[int, int]]) -> np.ndarray:
    """Digests (n, 16) whose halves are given, so that halves meet as often as a test wants."""
    return np.array(values, dtype=np.uint64).reshape(-1, 2).view(np.uint8).reshape(-1, 16)


halves = st.tuples(st.integers(0, 3), st.integers(0, 3))
rows = st.lists(halves, max_size=12)


@quick
@given(st.lists(rows, max_size=5), st.lists(halves, max_size=20))
def test_rows_are_found_where_they_first_are(
    shards: list[list[tuple[int, int]]], wanted: list[tuple[int, int]]
) -> None:
    known = KnownRows((f"s{i}", digests_of(each)) for i, each in enumerate(shards))
    truth: dict[tuple[int, int], tuple[int, int]] = {}
    for number, each in enumerate(shards):
        for row, digest in enumerate(each):
            truth.setdefault(digest, (number, row))
    found = known.find(digests_of(wanted))
    assert known.shards == tuple(f"s{i}" for i in range(len(shards)))
    assert len(known) == sum(map(len, shards))
    assert found.known.tolist() == [digest in truth for digest in wanted]
    for at, digest in enumerate(wanted):
        if digest in truth:
            assert (found.shard[at], found.row[at]) == truth[digest]
        else:
            assert found.shard[at] == -1


# What is picked from where


@pytest.fixture
def store(tmp_path):
    return EmbeddingStore.create(tmp_path / "store", column_facts(4), NAME)


def write(store, values: list[int]) -> str:
    """Keep a shard whose row for i is (i, i, i, i), whatever else is in it."""
    rows = np.repeat(np.array(values, dtype=np.float32)[:, None], 4, axis=1)
    digests = digests_of([(value, 0) for value in values])
    name = store.shard_fingerprint(digests, StoreDtype.FLOAT32)
    store.write(name, digests, rows, dtype=StoreDtype.FLOAT32)
    return name


def derived(store, values: list[int], *, of: list[str]) -> str:
    """Keep a shard by reference to others, as the work on a shard does."""
    digests = digests_of([(value, 0) for value in values])
    known = store.shards.known_rows(of, dtypes=["float32"])
    found = known.find(digests)
    picks = store.shards.picks_of(known, found)
    own = np.repeat(np.array(values, dtype=np.float32)[~found.known, None], 4, axis=1)
    rows = store.shards.picked(picks, own)[np.arange(len(values))]
    name = store.shard_fingerprint(digests, StoreDtype.FLOAT32)
    store.shards.derive(
        name, digests, picks, own, truncated=np.zeros(len(values), dtype=bool),
        moments=Moments.of(rows), dtype="float32",
    )  # fmt: skip
    return name


def held(store, name: str) -> list[int]:
    return store.embeddings(name)[:, 0].astype(int).tolist()


def test_a_shard_derived_of_derived_ones_picks_from_those_that_hold_the_rows(store) -> None:
    first = write(store, [1, 2, 3, 4])
    second = derived(store, [2, 3, 9, 4], of=[first])
    third = derived(store, [9, 8, 2, 2, 4], of=[second])
    assert held(store, second) == [2, 3, 9, 4]
    assert held(store, third) == [9, 8, 2, 2, 4]
    picks = store.shards.picks(third)
    assert isinstance(picks, Picks)
    assert {name for name, _ in picks.sources} == {"", first, second}
    assert store.shards.picks(first) is None
    # None of its rows lies in a shard that does not hold it itself.
    for (name, _), row in zip([picks.sources[i] for i in picks.source], picks.row, strict=True):
        holder = name or third
        own = np.asarray(store.shards.places.held_by((holder, _digest(store, holder))))
        assert row < len(own)


def _digest(store, name: str) -> str:
    fields = manifest.read_json(store.shards.folder / name / manifest.MANIFEST, what="a shard")
    return str(fields["files"]["embeddings.safetensors"]["sha256"])


def test_moments_of_few_derived_rows_are_those_of_the_rows_picked(store) -> None:
    first = write(store, [1, 2, 3])
    second = derived(store, [3, 9, 1], of=[first])
    assert not list(store.root.rglob("moments.safetensors"))
    rows = np.repeat(np.array([[3.0], [9.0], [1.0]]), 4, axis=1)
    found, truth = store.moments(second), Moments.of(rows)
    np.testing.assert_array_equal(found.scatter, truth.scatter)
    assert found.quartic == truth.quartic
