"""Errors about damage name the file that is damaged, and the way to mend it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.bad_input import run
from tests.helpers.updates import Place, some_rows, version_of
from whiten_index import open_index
from whiten_index.errors import ArtifactError
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.versions.compaction import compact_store

ARTIFACT = 5


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place.new(tmp_path, rows=200)
    place.build()
    return place


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x21
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["index.faiss", "manifest.json", "documents.arrow"])
def test_a_damaged_version_is_sent_to_verify_which_knows_the_cheaper_way(
    place: Place, damage: object, name: str
) -> None:
    first = version_of(place.out)
    place.change()
    place.update()
    damage(version_of(place.out) / name)  # type: ignore[operator]
    for command in (("update", "--index", place.out), ("inspect", place.out)):
        status, _, stderr = run(*command)
        assert status == ARTIFACT
        assert f"whiten-index verify {place.out} says how to mend it" in stderr
    with pytest.raises(ArtifactError, match=f"whiten-index verify {place.out} says"):
        open_index(place.out)
    stdout = run("verify", place.out)[1]
    assert f"whiten-index rollback {place.out} --to {first.name}" in stdout
    assert run("rollback", place.out, "--to", first.name)[0] == 0
    assert run("update", "--index", place.out)[0] == 0


def derived_shard(place: Place) -> tuple[EmbeddingStore, str, str]:
    """Return a shard that picks rows from another, and that other."""
    rows = dict(place.files["a.parquet"])
    place.files = {**place.files, "a.parquet": {**rows, 3: some_rows([3], seed=5)[3]}}
    place.write()
    place.update()
    store = EmbeddingStore.open(place.out / "store")
    for name in store.corpus().shards:
        others = [each for each, _ in store.row_refs(name).sources if each != name]
        if others:
            (source,) = others
            return EmbeddingStore.open(store.root), name, source
    raise AssertionError("no shard is derived")


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_shard_that_lost_what_it_picks_from_names_that(place: Place, damage: object) -> None:
    store, name, source = derived_shard(place)
    path = store.shards_folder / source / "embeddings.safetensors"
    damage(path)  # type: ignore[operator]
    with pytest.raises(ArtifactError, match=f"shard {name} .*: {path} is missing or damaged"):
        store.require(name)
    if damage is not flip:
        with pytest.raises(ArtifactError, match=f"{path} is missing or damaged"):
            store.embeddings(name)
    with pytest.raises(ArtifactError, match=f"{path} is missing or damaged"):
        open_index(place.out, rerank=200).search_embeddings(np.ones((1, 8), dtype=np.float32))


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("file", ["embeddings.safetensors", "manifest.json"])
def test_a_shard_whose_pack_is_damaged_names_the_pack(
    place: Place, damage: object, file: str
) -> None:
    root = place.out / "store"
    compact_store(root)
    store = EmbeddingStore.open(root)
    (pack,) = store.packs.folder.iterdir()
    name = next(shard for shard in store.corpus().shards if store.packs.find(
        shard, verify=False
    ))  # fmt: skip
    shutil.rmtree(store.shards_folder / name, ignore_errors=True)
    damage(pack / file)  # type: ignore[operator]
    again = EmbeddingStore.open(root)
    for use in (again.require, again.embeddings, again.moments):
        if damage is flip and file != "manifest.json" and use != again.require:
            # It is only read, and not checked.
            continue
        with pytest.raises(ArtifactError, match=f"{pack / file} is missing or damaged; run the"):
            use(name)
