"""A built index and a database in memory, the same again for each test of a push."""

import shutil
from pathlib import Path

import pytest

from tests.vectordb.push_world import World


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpus and its index, and a copy of it beside."""
    root = tmp_path_factory.mktemp("made") / "work"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        World(root, patch).build()
    shutil.copytree(root, root.with_name("kept"))
    return root


@pytest.fixture
def world(made: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    shutil.rmtree(made)
    shutil.copytree(made.with_name("kept"), made)
    return World(made, monkeypatch)
