"""Kept columns with unusual names come through a build, its filter, a search and its filter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.bad_input import run
from tests.helpers.builds import random_rows, write_rows

ROWS = 40
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
    status, stdout, stderr = run(*question)
    assert status == 0, stderr
    hits = json.loads(stdout)["results"][0]["hits"]
    assert sorted(hit["id"] for hit in hits) == [5, 6, 8]
    assert [hit["columns"] for hit in hits] == [{name: hit["id"]} for hit in hits]


@pytest.mark.parametrize("name", ["id", "passage", "passage_text"])
def test_a_name_that_documents_use_is_refused(tmp_path: Path, name: str) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(rows=ROWS), **{name: np.arange(ROWS)})
    options = ("--embedding-column", "embedding", "--keep", name, "--out", tmp_path / "i")
    status, _, stderr = run("build", corpus, *options)
    assert status == 2
    assert f"a kept column cannot be called '{name}'" in stderr
