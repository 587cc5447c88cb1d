"""The index that is migrated."""

import shutil
from pathlib import Path

import pytest

from tests.pipeline.migrating import Migration


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, an index of it, its store, and a model. Do not write to it."""
    folder = tmp_path_factory.mktemp("migrate")
    Migration(folder, folder).prepare()
    return folder


@pytest.fixture
def migration(built: Path, tmp_path: Path) -> Migration:
    """A copy of the index and its store, whose corpus and model stay where they are."""
    for name in ("index", "store"):
        shutil.copytree(built / name, tmp_path / name)
    return Migration(tmp_path, built)
