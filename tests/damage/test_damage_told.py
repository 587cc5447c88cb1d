"""Errors about damage name the file that is damaged, and the way to mend it."""

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.bad_input import run
from tests.helpers.updates import Place, some_rows, version_of
from whiten_index import open_index
from whiten_index.errors import ArtifactError
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusPart
from whiten_index.versions.compaction import compact_store

ARTIFACT = 5


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place.new(tmp_path, rows=200)
    place.build()
    return place


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    # In the middle of some manifests is the number of their format.
    data[len(data) // 3] ^= 0x21
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
    for command in (("update", place.out), ("inspect", place.out)):
        status, _, stderr = run(*command)
        assert status == ARTIFACT
        assert f"whiten-index verify {place.out} says how to mend it" in stderr
    with pytest.raises(ArtifactError, match=f"whiten-index verify {place.out} says"):
        open_index(place.out)
    stdout = run("verify", place.out)[1]
    assert f"whiten-index rollback {place.out} --to {first.name}" in stdout
    assert run("rollback", place.out, "--to", first.name)[0] == 0
    assert run("update", place.out)[0] == 0


def shared_segment(place: Place) -> tuple[CorpusPart, Path]:
    """Return a part of the corpus and the segment of another name that most of its rows are in."""
    rows = dict(place.files["a.parquet"])
    place.files = {**place.files, "a.parquet": {**rows, 3: some_rows([3], seed=5)[3]}}
    place.write()
    place.update()
    store = EmbeddingStore.open(place.out / "store")
    part = next(p for p in store.corpus().parts if store.segment(p.digests) is None)
    places = store.index(verify=False).find(store.digests(part))
    name = places.names[np.argmax(np.bincount(places.segment))]
    return part, store.segments_folder / name


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("file", ["embeddings.safetensors", "manifest.json"])
@pytest.mark.parametrize("joined", [False, True])
def test_rows_of_a_damaged_segment_name_it(
    place: Place, damage: object, file: str, *, joined: bool
) -> None:
    if joined:
        compact_store(place.out / "store")
    part, segment = shared_segment(place)
    damage(segment / file)  # type: ignore[operator]
    store, why = EmbeddingStore.open(place.out / "store"), f"{segment / file} is missing or damaged"
    for use in (store.embeddings, store.moments):
        with pytest.raises(
            ArtifactError, match=f"rows of the store .* cannot be read: {why}; run the same"
        ):
            use(part)
    assert not store.has(part)
    with pytest.raises(ArtifactError, match=why):
        open_index(place.out, rerank=200).search_embeddings(np.ones((1, 8), dtype=np.float32))


@pytest.mark.parametrize("command", ["build", "encode", "sweep"])
def test_embeddings_that_are_written_again_are_told(tmp_path: Path, command: str) -> None:
    place = Place.new(tmp_path, rows=200)
    out = ("--store" if command == "encode" else "--out", tmp_path / "o")
    columns = ("--embedding-column", "embedding", "--id-column", "id")
    widths = () if command == "encode" else ("--k", 2)
    given = (command, place.corpus, *columns, *out, *widths)
    status, _, stderr = run(*given)
    assert (status, "damaged" in stderr) == (0, False), stderr
    flip(next((tmp_path / "o").rglob("embeddings.safetensors")))
    status, _, stderr = run(*given)
    assert status == 0
    assert "segments of embeddings in" in stderr
    assert "were damaged, and were written again" in stderr
