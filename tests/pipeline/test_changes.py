"""What became of the documents of a corpus, against dictionaries."""

import datetime
import hashlib
import itertools
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whiten_index.pipeline import changes as changes_of_documents
from whiten_index.pipeline.changes import Changes, Documents, document_rows

quick = settings(max_examples=80, deadline=None, derandomize=True, database=None)
Document = tuple[str, Any]
KINDS = ("new", "changed", "document", "deleted")


def digests(texts: list[str]) -> np.ndarray:
    joined = b"".join(hashlib.blake2b(t.encode(), digest_size=16).digest() for t in texts)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, 16)


def table(documents: dict[Any, Document]) -> Documents:
    """Documents with one kept column."""
    kept = pa.array([extra for _, extra in documents.values()], pa.int64())
    return document_rows(
        pa.table({"id": list(documents), "kept": kept}), digests([t for t, _ in documents.values()])
    )


@dataclass
class Held:
    """Documents as a store gives them: table by table, and the ids of one table again."""

    tables: list[Documents]
    read_again: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[Documents]:
        yield from self.tables

    def ids(self, number: int) -> pa.Array:
        self.read_again.append(number)
        return self.tables[number].ids


def compare(before: list[Documents], now: list[Documents], **options: Any) -> Changes:
    return changes_of_documents.compare(Held(before), iter(now), **options)  # type: ignore[arg-type]


def truth(before: dict[Any, Document], now: dict[Any, Document]) -> dict[str, set[Any]]:
    both = before.keys() & now.keys()
    changed = {i for i in both if before[i][0] != now[i][0]}
    return {
        "new": now.keys() - before.keys(),
        "changed": changed,
        "document": {i for i in both - changed if before[i][1] != now[i][1]},
        "deleted": before.keys() - now.keys(),
    }


def found_kinds(changes: Any) -> dict[str, set[Any]]:
    rows = changes.table.to_pylist()
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    found: dict[str, set[Any]] = {kind: set() for kind in KINDS}
    for row in rows:
        assert row["id"] not in found[row["kind"]]
        found[row["kind"]].add(row["id"])
    return found


def assert_found(changes: Any, before: dict[Any, Document], now: dict[Any, Document]) -> None:
    expected = truth(before, now)
    assert found_kinds(changes) == expected
    counts = {kind: len(ids) for kind, ids in expected.items()}
    as_they_were = len(now) - counts["new"] - counts["changed"] - counts["document"]
    assert changes.to_json() == {"total": len(now), **counts, "unchanged": as_they_were}


ids = st.integers(-3, 12) | st.integers(0, 2**62)
words = st.sampled_from(["ant", "bee", "cat"])
documents = st.dictionaries(ids, st.tuples(words, st.integers(0, 2)), max_size=12)


def pieces(documents: dict[Any, Document], cuts: list[int]) -> list[Documents]:
    """The same documents as parts of a corpus."""
    items, places = list(documents.items()), [0, *sorted(cuts), None]
    parts = [items[start:end] for start, end in itertools.pairwise(places)]
    return [table(dict(part)) for part in parts if part]


cuts = st.lists(st.integers(0, 12), max_size=3)


@quick
@given(before=documents, now=documents, cuts_before=cuts, cuts_now=cuts)
def test_documents_are_told_apart_by_id(
    before: dict[int, Document], now: dict[int, Document], cuts_before: list[int], cuts_now: Any
) -> None:
    changes = compare(pieces(before, cuts_before), pieces(now, cuts_now), same=0)
    assert_found(changes, before, now)


class Synthetic:
    """Documents made when they are asked for; a few of each part differ from seed to seed."""

    parts, rows = 15, 4_000

    def __init__(self, seed: int, watched: list[int]) -> None:
        self.seed, self.watched = seed, watched

    def __iter__(self) -> Iterator[Documents]:
        for number in range(self.parts):
            self.watched.append(pa.total_allocated_bytes())
            texts = np.random.default_rng(number).integers(0, 256, (self.rows, 16), np.uint8)
            texts[:10] = self.seed
            yield document_rows(pa.table([self.ids(number)], names=["id"]), texts)

    def ids(self, number: int) -> pa.Array:
        rows = pa.array(range(number * self.rows, (number + 1) * self.rows)).cast(pa.string())
        return pc.binary_join_element_wise("a-rather-long-name.parquet#0", rows, ":")


def test_what_is_as_it_was_takes_little_memory() -> None:
    """An id and two digests take about 70 bytes, and there are two states."""
    watched: list[int] = []
    before, now = Synthetic(1, watched), Synthetic(2, watched)
    # What is imported when it is first used is not meant.
    compare([table({1: ("ant", 0)})], [table({2: ("ant", 0)})], same=0)
    next(iter(before))
    held = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        changes = changes_of_documents.compare(before, now, same=0)  # type: ignore[arg-type]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert changes.table.num_rows == 10 * Synthetic.parts
    rows, of_a_part = Synthetic.parts * Synthetic.rows, 300 * Synthetic.rows
    assert most <= 64 * rows + of_a_part
    assert max(watched) - held <= of_a_part


def passages(documents: dict[str, tuple[list[str], int]]) -> Documents:
    rows = [
        {"id": name, "year": year, "passage": number, "passage_start": 0, "passage_end": len(text),
         "passage_text": text}
        for name, (texts, year) in documents.items()
        for number, text in enumerate(texts)
    ]  # fmt: skip
    schema = pa.schema(
        [("id", pa.string()), ("year", pa.int64()), ("passage", pa.int32()),
         ("passage_start", pa.int32()), ("passage_end", pa.int32()),
         ("passage_text", pa.large_string())]
    )  # fmt: skip
    return document_rows(
        pa.Table.from_pylist(rows, schema), digests([row["passage_text"] for row in rows])
    )


several = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(st.lists(words, min_size=1, max_size=3), st.integers(0, 1)),
    max_size=5,
)


@quick
@given(before=several, now=several)
def test_a_document_in_passages_is_one_document(before: Any, now: Any) -> None:
    tables = ([passages(each)] if each else [] for each in (before, now))
    changes = compare(*tables, same=0)

    def whole(documents: Any) -> dict[str, Document]:
        return {name: ("|".join(texts), year) for name, (texts, year) in documents.items()}

    assert_found(changes, whole(before), whole(now))


DAY = 86_400_000
EVERY_TYPE: dict[str, tuple[pa.DataType, Any, Any]] = {
    "bool": (pa.bool_(), True, False),
    "int8": (pa.int8(), -1, 1),
    "uint64": (pa.uint64(), 2**64 - 1, 2**64 - 2),
    "float16": (pa.float16(), 1.5, 1.25),
    "float32": (pa.float32(), 1e-30, 2e-30),
    "float64": (pa.float64(), 0.1, 0.1 + 2**-55),
    "string": (pa.string(), "é", "e\u0301"),
    "large_string": (pa.large_string(), "", " "),
    "string_view": (pa.string_view(), "a", "b"),
    "binary": (pa.binary(), b"\xff", b"\xfe"),
    "fixed_binary": (pa.binary(2), b"ab", b"ba"),
    "decimal": (pa.decimal128(20, 2), Decimal("1.10"), Decimal("1.11")),
    "decimal256": (pa.decimal256(50, 2), Decimal("1.10"), Decimal("1.11")),
    "date32": (pa.date32(), datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)),
    "date64": (pa.date64(), DAY, 2 * DAY),
    "time32": (pa.time32("ms"), 1, 2),
    "time64": (pa.time64("ns"), 1, 2),
    "timestamp_s": (pa.timestamp("s"), 0, 1),
    "timestamp_ns": (pa.timestamp("ns"), 2**62, 2**62 + 1),
    "timestamp_tz": (pa.timestamp("us", "Europe/Paris"), 1, 2),
    "timestamp_of_no_known_zone": (pa.timestamp("us", "Mars/Phobos"), 1, 2),
    "timestamp_far": (pa.timestamp("s"), 2**50, 2**50 + 1),
    "date_far": (pa.date32(), 2**30, 2**30 + 1),
    "duration_ns": (pa.duration("ns"), 2**62, 2**62 + 1),
    "duration_far": (pa.duration("s"), 2**60, 2**60 + 1),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), "a", "b"),
    "list": (pa.list_(pa.string()), ["a", "b"], ["a", "b", None]),
    "list_of_nothing": (pa.list_(pa.int64()), [], [None]),
    "large_list": (pa.large_list(pa.float32()), [1.0], [2.0]),
    "fixed_list": (pa.list_(pa.int32(), 2), [1, 2], [2, 1]),
    "struct": (
        pa.struct([("a", pa.int32()), ("b", pa.string())]), {"a": 1, "b": None}, {"a": 1, "b": ""},
    ),
    "map": (pa.map_(pa.string(), pa.int32()), [("a", 1), ("b", 2)], [("b", 2), ("a", 1)]),
    "deep": (
        pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.list_(pa.timestamp("ns"))))])),
        [{"m": [("k", [2**62])]}], [{"m": [("k", [2**62 + 1])]}],
    ),
}  # fmt: skip


def array(kind: pa.DataType, values: list[Any]) -> pa.Array:
    if pa.types.is_date32(kind) and isinstance(values[0], int):
        return pa.array(values, pa.int32()).cast(kind)
    return pa.array(values, kind)


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_a_kept_column_may_be_of_any_type(name: str) -> None:
    kind, one, other = EVERY_TYPE[name]
    missing = [] if name == "list_of_nothing" else [None]

    def rows(*values: Any) -> Documents:
        documents = pa.table({"id": range(len(values)), "kept": array(kind, list(values))})
        return document_rows(documents, digests(["ant"] * len(values)))

    before = rows(one, one, other, *missing, *missing)
    same = compare([before], [rows(one, one, other, *missing, *missing)], same=0)
    assert same.to_json()["unchanged"] == same.total == 3 + 2 * len(missing)
    swapped = rows(one, other, one, *missing, *[one for _ in missing])
    changes = compare([before], [swapped], same=0)
    assert found_kinds(changes)["document"] == {1, 2, 4} - (set() if missing else {4})
