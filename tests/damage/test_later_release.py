"""What a later release wrote: commands say so, and neither replace it nor call it absent."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.damage.crafted import World, new_world
from tests.helpers.bad_input import ARTIFACT, run

_ROWS = ("--embedding-column", "embedding", "--id-column", "id", "--keep", "title")
_BUILD = ("--k", 6, "--whiten", "whitening", "--shard-rows", 20)
COMMANDS = {
    "gc": ("gc", "index/store"),
    "compact": ("compact", "index/store"),
    "verify": ("verify", "index/store"),
    "update": ("update", "index"),
    "update with its store named": ("update", "index", "--store", "index/store"),
    "push": ("push", "index", "--to", "pushed.parquet"),
    "sweep": ("sweep", "--store", "index/store", "--out", "sweep"),
    "encode": ("encode", "corpus", *_ROWS, "--shard-rows", 20, "--store", "index/store"),
    "build": ("build", "corpus", *_ROWS, *_BUILD, "--out", "index"),
    "build from a store": ("build", "--store", "index/store", "--k", 4, "--out", "other"),
    "search with re-ranking": ("search", "index", "--like", "3", "--rerank", 5),
}
KINDS = {
    "store": "index/store/*/manifest.json",
    "segment": "index/store/*/segments/*/manifest.json",
    "corpus": "index/store/*/corpora/*.json",
    "registered index": "index/store/*/indexes/*.json",
    "index id": "index/index.json",
    "record of a version": "index/versions/000002-*/corpus.json",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return new_world(tmp_path_factory.mktemp("later"))


def _later(world: World, kind: str, command: str, monkeypatch: Any) -> tuple[int, str]:
    """Return status and output of a command where a later release wrote the files of a kind."""
    world.restore()
    monkeypatch.chdir(world.root)
    files = list(Path().glob(KINDS[kind]))
    for path in files:
        world.write(str(path), {**json.loads(path.read_text()), "format_version": 99})
    before = {path: path.read_bytes() for path in files}
    status, *output = run(*COMMANDS[command])
    assert {path: path.read_bytes() for path in files} == before
    return status, "".join(output)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_that_a_store_is_of_a_later_release(
    world: World, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    status, said = _later(world, "store", command, monkeypatch)
    assert status == ARTIFACT
    assert "has store format 99, and this release reads up to 1" in said
    assert "upgrade whiten-index" in said


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"store"}))
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_replaces_or_denies_a_part_of_a_later_release(
    world: World, monkeypatch: pytest.MonkeyPatch, command: str, kind: str
) -> None:
    status, said = _later(world, kind, command, monkeypatch)
    assert status != ARTIFACT or "upgrade whiten-index" in said
