"""Kept columns of odd names and types come through a build, a search and their filters."""

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.bad_input import fails, run, succeed
from tests.helpers.builds import build_of, random_rows, write_rows
from whiten_index import BuildConfig, UpdateConfig, build_index, open_index, update_index
from whiten_index.errors import CorpusError

ROWS, DIM = 40, 8
MS = pa.timestamp("ms")
LATE = 253_402_300_799_000
ODD = {
    "string view": (pa.array(["a"] * ROWS, pa.string_view()), "a"),
    "views in a list": (pa.array([["a"]] * ROWS, pa.list_(pa.string_view())), ["a"]),
    "bytes view": (pa.array([b"a"] * ROWS, pa.binary_view()), b"a"),
    "a far year": (pa.array([10**16] * ROWS, MS), 10**16),
    "never": (pa.array([LATE] * ROWS, MS).cast(pa.timestamp("ms", "Asia/Tokyo")), LATE),
    "no zone": (pa.array([5] * ROWS, MS).cast(pa.timestamp("ms", "Mars/Olympus")), 5),
    "within": (
        pa.array([{"t": [10**16]}] * ROWS, pa.struct([("t", pa.list_(MS))])),
        {"t": [10**16]},
    ),
    "an id of another system": (pa.array([UUID(int=5).bytes] * ROWS, pa.uuid()), UUID(int=5)),
}


def table(kept: pa.Array, seed: int) -> pa.Table:
    rows = np.random.default_rng(seed).standard_normal((ROWS, DIM)).astype(np.float32)
    embeddings = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), DIM)
    return pa.table({"id": range(seed * ROWS, (seed + 1) * ROWS), "e": embeddings, "k": kept})


def test_categories_of_several_files_are_kept(tmp_path: Path) -> None:
    """The values of the column differ from file to file and from row group to row group."""
    for number in range(2):
        words = pa.array([f"word {row % 7} of {number}" for row in range(ROWS)])
        (tmp_path / "c").mkdir(exist_ok=True)
        path = tmp_path / "c" / f"{number}.parquet"
        pq.write_table(table(words.dictionary_encode(), seed=number), path, row_group_size=15)
    options: dict[str, Any] = {"embedding_column": "e", "id_column": "id", "keep": ("k",), "k": 4}
    out = tmp_path / "index"
    build_index(BuildConfig(corpus=(str(tmp_path / "c"),), out=str(out), **options))
    documents = open_index(out).bundle.documents
    assert documents.get(ROWS + 3) == {"id": ROWS + 3, "k": "word 3 of 1"}
    stdout = succeed("search", out, "--like", 3, "--filter", "k == 'word 3 of 1'", "--json")
    assert json.loads(stdout)["results"][0]["hits"]


@pytest.mark.parametrize("name", ODD)
def test_it_is_kept_found_and_updated(name: str, tmp_path: Path) -> None:
    kept, expected = ODD[name]
    out = build_of(table(kept, seed=0), tmp_path, keep=("k",), k=4)
    assert open_index(out).bundle.documents.get(7) == {"id": 7, "k": expected}
    assert open_index(out).bundle.documents.get(ROWS - 1) == {"id": ROWS - 1, "k": expected}
    changed = table(kept, seed=0).set_column(1, "e", table(kept, seed=1)["e"])
    pq.write_table(changed, tmp_path / "c.parquet")
    report = update_index(UpdateConfig(index=str(out)))
    assert report.to_json()["rows"]["changed"] == ROWS
    assert open_index(out).bundle.documents.get(7) == {"id": 7, "k": expected}


def nested(levels: int) -> pa.DataType:
    kind: pa.DataType = pa.int8()
    for _ in range(levels):
        kind = pa.struct([("a", kind)])
    return kind


WORDS = pa.dictionary(pa.int32(), pa.string())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.list_view(MS), [5]),
        (pa.list_(pa.large_list_view(MS)), [[5]]),
        (pa.list_(WORDS), ["a"]),
        (nested(60), {"a": None}),
        (pa.json_(), '"a"'),
        (pa.struct([("a", pa.map_(pa.string(), WORDS))]), {"a": [("b", "c")]}),
    ],
)
def test_a_type_whose_bytes_stand_for_any_number_of_values_is_not_kept(
    kind: pa.DataType, value: Any, tmp_path: Path
) -> None:
    rows = table(pa.array([value] * ROWS, kind), seed=0)
    with pytest.raises(CorpusError, match=r"'k' .* is .*, which no index has; rewrite it"):
        build_of(rows, tmp_path, keep=("k",))
    with pytest.raises(CorpusError, match=r"which no index has; rewrite it .* and --filter"):
        build_of(rows, tmp_path, row_filter="k != 'a'")


NAMES = (
    "__row__", "score", "row", "columns", "text", "query", "a.b", "a`b", 'a"b', "a b", "#", "é", "",
    "$x", "row#", ".a", "_distance", "None", "lambda",
)  # fmt: skip


def build(tmp_path: Path, names: tuple[str, ...], *options: Any) -> tuple[int, str, str]:
    columns = {name: np.arange(ROWS) + number for number, name in enumerate(names)}
    corpus = write_rows(tmp_path / "c.parquet", random_rows(rows=ROWS), **columns)
    kept = [part for name in names for part in ("--keep", name)]
    where = ("--embedding-column", "embedding", "--id-column", "id", "--out", tmp_path / "i")
    return run("build", corpus, *where, *kept, "--k", 4, "--whiten", "whitening", *options)


@pytest.mark.parametrize("name", NAMES)
def test_a_column_of_any_name_filters_rows_and_hits(tmp_path: Path, name: str) -> None:
    column = f"column({name!r})"
    status, _, stderr = build(tmp_path, (name,), "--filter", f"{column} >= 5")
    assert status == 0, stderr
    question = ("search", tmp_path / "i", "--like", 7, "--filter", f"{column} < 9", "--json")
    stdout = succeed(*question)
    hits = json.loads(stdout)["results"][0]["hits"]
    assert sorted(hit["id"] for hit in hits) == [5, 6, 8]
    assert [hit["columns"] for hit in hits] == [{name: hit["id"]} for hit in hits]


@pytest.mark.parametrize("name", ["id", "passage", "passage_text"])
def test_a_name_that_documents_use_is_refused(tmp_path: Path, name: str) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(rows=ROWS), **{name: np.arange(ROWS)})
    options = ("--embedding-column", "embedding", "--keep", name, "--out", tmp_path / "i")
    fails(2, f"a kept column cannot be called '{name}'", "build", corpus, *options)
