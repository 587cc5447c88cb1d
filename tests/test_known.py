"""Rows looked up by their digests, against a dictionary."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.build_helpers import column_facts
from whiten_index.artifacts import manifest
from whiten_index.errors import ArtifactError
from whiten_index.moments import Moments
from whiten_index.store import OWN, EmbeddingStore, KnownRows, Picks, StoreDtype

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


def test_nothing_is_found_in_nothing() -> None:
    assert not KnownRows([]).find(digests_of([(1, 2)])).known.any()
    assert len(KnownRows([("s", digests_of([(1, 2)]))]).find(digests_of([])).shard) == 0


def test_many_random_rows_are_found() -> None:
    rng = np.random.default_rng(0)
    every = rng.integers(0, 256, (20_000, 16), dtype=np.uint8)
    known = KnownRows([("a", every[:7_000]), ("b", every[7_000:15_000])])
    order = rng.permutation(len(every))
    found = known.find(every[order])
    place = np.where(found.shard == 0, found.row, 7_000 + found.row)
    assert np.array_equal(found.known, order < 15_000)
    assert np.array_equal(place[found.known], order[order < 15_000])


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


@quick
@given(data=st.data())
def test_a_change_says_which_rows_left_and_which_joined(tmp_path_factory, data) -> None:
    store = EmbeddingStore.create(tmp_path_factory.mktemp("store"), column_facts(4), NAME)
    values = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    first = write(store, values)
    now = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    known = store.shards.known_rows([first], dtypes=["float32"])
    found = known.find(digests_of([(value, 0) for value in now]))
    picks = store.shards.picks_of(known, found)
    change = store.shards.change(first, picks)
    left, joined = [values[i] for i in change.left], [now[i] for i in change.joined]
    # As sums of rows, nothing is lost and nothing comes of nothing.
    assert sorted(values + joined) == sorted(now + left)
    assert len(set(change.left.tolist())) == len(change.left)
    assert len(set(change.joined.tolist())) == len(change.joined)
    assert {value for value in now if value > 6 or value not in values} <= set(joined)


def test_a_shard_that_all_is_picked_for_holds_nothing_itself(store) -> None:
    first = write(store, [1, 2, 3])
    second = derived(store, [3, 1], of=[first])
    assert held(store, second) == [3, 1]
    assert OWN not in store.shards.picks(second).sources
    assert len(store.shards.places.held_by((second, _digest(store, second)))) == 0


def test_moments_of_few_derived_rows_are_those_of_the_rows_picked(store) -> None:
    first = write(store, [1, 2, 3])
    second = derived(store, [3, 9, 1], of=[first])
    assert not list(store.root.rglob("moments.safetensors"))
    rows = np.repeat(np.array([[3.0], [9.0], [1.0]]), 4, axis=1)
    found, truth = store.moments(second), Moments.of(rows)
    np.testing.assert_array_equal(found.scatter, truth.scatter)
    assert found.quartic == truth.quartic


def test_a_source_made_anew_with_its_rows_elsewhere_is_not_picked_from(store) -> None:
    """It is told apart by the digest of what it holds, not by its name."""
    other, first = write(store, [3, 4, 30, 40]), write(store, [1, 2, 3, 4])
    second = derived(store, [4, 3, 2, 1], of=[first])
    shutil.rmtree(store.shards.folder / first)
    again = EmbeddingStore.open(store.root)
    assert again.find(second) is None
    assert derived(again, [1, 2, 3, 4], of=[other]) == first
    after = EmbeddingStore.open(store.root)
    assert held(after, first) == [1, 2, 3, 4]
    assert after.find(second) is None
    assert after.shards.places.is_there(second)
    with pytest.raises(ArtifactError, match="missing or damaged"):
        after.mapped_embeddings(second)
    # It is made anew from what is there.
    assert derived(after, [4, 3, 2, 1], of=[other, first]) == second
    assert held(EmbeddingStore.open(store.root), second) == [4, 3, 2, 1]


def test_a_source_made_anew_as_it_was_is_picked_from_again(store) -> None:
    first = write(store, [1, 2, 3, 4])
    second = derived(store, [4, 3, 2, 1], of=[first])
    shutil.rmtree(store.shards.folder / first)
    assert EmbeddingStore.open(store.root).find(second) is None
    write(EmbeddingStore.open(store.root), [1, 2, 3, 4])
    again = EmbeddingStore.open(store.root)
    assert again.find(second) is not None
    assert held(again, second) == [4, 3, 2, 1]


def test_only_what_a_row_is_picked_from_is_a_source(store) -> None:
    """Whatever the shard before picked from: each source must stay for as long as the shard."""
    first, other = write(store, [1, 2, 3, 4]), write(store, [5, 6, 7, 8])
    second = derived(store, [1, 5, 9], of=[first, other])
    assert {name for name, _ in store.shards.picks(second).sources} == {"", first, other}
    third = derived(store, [9, 1, 1], of=[second])
    assert {name for name, _ in store.shards.picks(third).sources} == {second, first}
    assert held(store, third) == [9, 1, 1]
    shutil.rmtree(store.shards.folder / other)
    again = EmbeddingStore.open(store.root)
    assert again.find(second) is None
    assert held(again, third) == [9, 1, 1]
    assert again.find(third) is not None
