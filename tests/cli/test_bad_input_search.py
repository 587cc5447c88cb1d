"""Bad input of a search: questions that cannot be answered, and encoders that do not fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import bad_input
from tests.helpers.bad_input import CORPUS, DISK, ENCODER, OPTIONS, assert_one_error, run, table

place = bad_input.place

QUERIES = ("--queries", "q.parquet", "--embedding-column", "e", "--run")
SEARCHES: dict[str, tuple[tuple[Any, ...], int, str]] = {
    "nothing asked": ((), OPTIONS, "missing: --queries or --like or TEXT"),
    "two things asked": (("text", "--like", "d1"), OPTIONS, "one of"),
    "text without an encoder": (("text",), OPTIONS, "built from an embedding column"),
    "empty text without an encoder": (("",), OPTIONS, ""),
    "run without queries": (("--like", "d1", "--run", "r.trec"), OPTIONS, "--run needs --queries"),
    "run of no format": ((*QUERIES, "r.csv"), OPTIONS, "r.csv names no run format"),
    "run in no folder": ((*QUERIES, "gone/r.trec"), DISK, "cannot write .*gone"),
    "run onto a folder": ((*QUERIES, "folder.trec"), DISK, "cannot write .*folder.trec"),
    "run onto the queries": (
        (*QUERIES, "./q.parquet"),
        OPTIONS,
        "is the file of the queries; name",
    ),
    "no column": (("--queries", "q.parquet", "--run", "r.trec"), OPTIONS, "--embedding-column"),
    "ids twice": ((*QUERIES, "r.trec", "--id-column", "same"), CORPUS, "more than once"),
}


@pytest.mark.parametrize("name", list(SEARCHES))
def test_a_search_that_cannot_be_answered(
    place: bad_input.Place, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options, status, match = SEARCHES[name]
    queries = pa.table({"e": list(bad_input.numbers(3, rows=2)), "same": ["q", "q"]})
    pq.write_table(queries, place.root / "q.parquet")
    (place.root / "folder.trec").mkdir()
    monkeypatch.chdir(place.root)
    bad_input.assert_refused(place, ("search", place.out, *options), status, match)
    assert not list(place.root.glob("r.*"))


@pytest.fixture(scope="module")
def text_index(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    root = tmp_path_factory.mktemp("texts")
    pq.write_table(table(), root / "c.parquet")
    arguments = ("--text-column", "text", "--model", tiny_model, "--k", 3, "--out", root / "out")
    assert run("build", root / "c.parquet", *arguments)[0] == 0
    return root / "out"


def test_another_encoder_than_the_one_of_the_index(
    tmp_path: Path, text_index: Path, tiny_model: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    status, _, stderr = run("search", text_index, "the cat", "--model", other)
    assert status == ENCODER
    assert_one_error(stderr, match="built with .*gives other embeddings")
    assert run("search", text_index, "the cat", "--model", tiny_model)[0] == 0


def test_a_blank_query(text_index: Path) -> None:
    status, _, stderr = run("search", text_index, "  ")
    assert status == OPTIONS
    assert_one_error(stderr, match="a query is blank")
