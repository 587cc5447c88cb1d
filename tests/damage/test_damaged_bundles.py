"""Damage to an index with its lists on disk is refused with an error that says what to do."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.builds import build, put_lists_on_disk, random_rows, write_rows
from whiten_index import open_index
from whiten_index.errors import ArtifactError

PLACES, FLIPS = 20, 120


def files_of(out: Path) -> list[Path]:
    """Return ``CURRENT`` and the files of the published version, those without bytes left out."""
    version = json.loads((out / "CURRENT").read_text())["version"]
    files = [out / "CURRENT", *sorted((out / "versions" / version).iterdir())]
    return [path for path in files if path.stat().st_size]


def damages(out: Path) -> Iterator[tuple[Path, str, bytes]]:
    """Yield a file, its damage and its bytes: ``PLACES`` cuts, then ``FLIPS`` bits, files in turn.

    Each file is cut at its very end first. By their sizes alone the small files, which say what
    the others are, would hardly be hit.
    """
    files, random = files_of(out), np.random.default_rng(0)
    for number in range(PLACES):
        path = files[number % len(files)]
        whole = path.read_bytes()
        size = len(whole) - 1 if number < len(files) else int(random.integers(len(whole)))
        yield path, f"cut to {size}", whole[:size]
    for number in range(FLIPS):
        path = files[number % len(files)]
        data = bytearray(path.read_bytes())
        bit = int(random.integers(len(data) * 8))
        data[bit // 8] ^= 1 << bit % 8
        yield path, f"bit {bit}", bytes(data)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damaged")
    titles = [f"title {i}" for i in range(300)]
    corpus = write_rows(root / "c.parquet", random_rows(5, rows=300), title=titles)
    build(root / "out", corpus, factory="IVF4,PQ4x4", keep=("title",), k=8)
    put_lists_on_disk(root / "out")
    return root / "out"


def test_every_damage_is_refused(out: Path) -> None:
    """Sizes alone tell cuts and damage to the files that say what the others are."""
    tried = 0
    for path, damage, data in damages(out):
        whole = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(ArtifactError) as caught:
            open_index(out)
        message = str(caught.value)
        assert path.name in message, (damage, message)
        assert any(word in message for word in ("restore", "build", "rollback")), message
        if damage.startswith("cut") or path.name in ("CURRENT", "manifest.json"):
            with pytest.raises(ArtifactError):
                open_index(out, verify="manifest")
        path.write_bytes(whole)
        tried += 1
    assert tried == PLACES + FLIPS
    open_index(out, verify="full")
