"""``whiten-index push``: what it takes, prints and ends with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bad_input import run
from tests.helpers.builds import build, random_rows, write_rows
from tests.vectordb.memory_writer import MemoryWriter, Server

SECRET = "hunter2"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("command")
    build(root / "index", write_rows(root / "c.parquet", random_rows(rows=120)))
    return root / "index"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()

    def connect(address: str, name: str, *, options: Mapping[str, str], **_: Any) -> MemoryWriter:
        return MemoryWriter(made)

    monkeypatch.setattr("whiten_index.vectordb.push.open_writer", connect)
    return made


def push(index: Path, *more: str) -> tuple[int, str, str]:
    return run("push", index, "--to", "postgresql://me@here/db", "--table", "docs", *more)


def test_json(index: Path, server: Server) -> None:
    status, out, _ = push(index, "--json", "--k", "3", "--dtype", "float16", "--check", "5")
    assert status == 0
    seen = json.loads(out)
    assert (seen["mode"], seen["k"], seen["dtype"], seen["notes"]) == ("all", 3, "float16", [])
    assert seen["check"]["compared"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--option", SECRET), "takes NAME=VALUE"),
        (("--option", f"={SECRET}"), "takes NAME=VALUE"),
        (("--option", "m=1", "--option", f"m={SECRET}"), "m was given twice"),
    ],
)
def test_options_that_cannot_be_read(
    index: Path, server: Server, options: tuple[str, ...], message: str
) -> None:
    status, out, error = push(index, *options)
    assert status == 2
    assert message in error
    assert SECRET not in out + error
    assert server.published is server.pending is None
