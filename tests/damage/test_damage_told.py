"""Errors about damage name the file that is damaged, and the way to mend it."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.bad_input import fails, run
from tests.helpers.builds import build, random_rows, write_rows
from tests.helpers.flipped import flip
from tests.helpers.updates import Place, some_rows, version_of
from whiten_index import EmbeddingStore, open_index
from whiten_index.distributed.executors import SerialExecutor
from whiten_index.errors import ArtifactError
from whiten_index.store.records import CorpusPart
from whiten_index.versions.compaction import compact_store

ARTIFACT = 5


def new_place(factory: pytest.TempPathFactory) -> Place:
    place = Place.new(factory.mktemp("place"), rows=200)
    place.build()
    return place


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of two versions. Do not write to it."""
    place = new_place(tmp_path_factory)
    place.change()
    place.update()
    return place.out


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "joined"])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, CorpusPart, str]:
    """An index, a part of its corpus, and the segment of another name with most of its rows.

    Do not write to it.
    """
    place = new_place(tmp_path_factory)
    if request.param:
        compact_store(place.out / "store")
    part, name = shared_segment(place)
    return place.out, part, name


def change(path: Path) -> None:
    # In the middle of some manifests is the number of their format.
    flip(path, path.stat().st_size // 3, 0x21)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("damage", [change, cut, Path.unlink])
@pytest.mark.parametrize("name", ["index.faiss", "manifest.json", "documents.arrow"])
def test_a_damaged_version_is_sent_to_verify_which_knows_the_cheaper_way(
    changed: Path, tmp_path: Path, damage: object, name: str
) -> None:
    out = Path(shutil.copytree(changed, tmp_path / "index"))
    first, _ = sorted(path.name for path in (out / "versions").iterdir())
    damage(version_of(out) / name)  # type: ignore[operator]
    for command in (("update", out), ("inspect", out)):
        fails(ARTIFACT, f"whiten-index verify {out} says how to mend it", *command)
    with pytest.raises(ArtifactError, match=f"whiten-index verify {out} says"):
        open_index(out)
    stdout = run("verify", out)[1]
    assert f"whiten-index rollback {out} --to {first}" in stdout
    assert run("rollback", out, "--to", first)[0] == 0
    assert run("update", out)[0] == 0


def shared_segment(place: Place) -> tuple[CorpusPart, str]:
    rows = dict(place.files["a.parquet"])
    place.files = {**place.files, "a.parquet": {**rows, 3: some_rows([3], seed=5)[3]}}
    place.write()
    place.update()
    store = EmbeddingStore.open(place.out / "store")
    part = next(p for p in store.corpus().parts if store.segment(p.digests) is None)
    places = store.index(verify=False).find(store.digests(part))
    return part, places.names[np.argmax(np.bincount(places.segment))]


@pytest.mark.parametrize("damage", [change, cut, Path.unlink])
@pytest.mark.parametrize("file", ["embeddings.safetensors", "manifest.json"])
def test_rows_of_a_damaged_segment_name_it(
    shared: tuple[Path, CorpusPart, str], tmp_path: Path, damage: object, file: str
) -> None:
    out, part, name = shared
    out = Path(shutil.copytree(out, tmp_path / "index"))
    store = EmbeddingStore.open(out / "store")
    damaged = store.segments_folder / name / file
    damage(damaged)  # type: ignore[operator]
    why = f"{damaged} is missing or damaged"
    for use in (store.embeddings, store.moments):
        with pytest.raises(
            ArtifactError, match=f"rows of the store .* cannot be read: {why}; run the same"
        ):
            use(part)
    assert not store.has(part)
    with pytest.raises(ArtifactError, match=why):
        open_index(out, rerank=200).search_embeddings(np.ones((1, 8), dtype=np.float32))


@pytest.mark.parametrize("command", ["build", "encode", "sweep"])
def test_embeddings_that_are_written_again_are_told(tmp_path: Path, command: str) -> None:
    place = Place.new(tmp_path, rows=200)
    out = ("--store" if command == "encode" else "--out", tmp_path / "o")
    columns = ("--embedding-column", "embedding", "--id-column", "id")
    widths = () if command == "encode" else ("--k", 2)
    if command == "sweep":
        widths += ("--transforms", "pca", "--codecs", "fp32", "--indexes", "flat")
    given = (command, place.corpus, *columns, *out, *widths)
    status, _, stderr = run(*given)
    assert (status, "damaged" in stderr) == (0, False), stderr
    change(next((tmp_path / "o").rglob("embeddings.safetensors")))
    status, _, stderr = run(*given)
    assert status == 0
    assert "segments of embeddings in" in stderr
    assert "were damaged, and were written again" in stderr


@pytest.mark.parametrize("name", ["trained.faiss", "000000000000.npz"])
def test_a_part_of_an_index_that_changed_between_workers_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def spoil(_: SerialExecutor, function: Callable[[Any], Any], items: Iterable[Any]) -> Any:
        done = list(map(function, items))
        for part in tmp_path.rglob(name):
            flip(part)
        return iter(done)

    monkeypatch.setattr(SerialExecutor, "remote", True)
    monkeypatch.setattr(SerialExecutor, "map", spoil)
    corpus = write_rows(tmp_path / "c.parquet", random_rows())
    with pytest.raises(ArtifactError, match=f"{name} is damaged; check its disk"):
        build(tmp_path / "index", corpus, factory="IVF4,Flat")
    assert not list((tmp_path / "index" / "versions").iterdir())


def test_rows_that_are_gone_are_told_beside_other_damage(changed: Path, tmp_path: Path) -> None:
    store = EmbeddingStore.open(shutil.copytree(changed, tmp_path / "index") / "store")
    shutil.rmtree(store.segments_folder)
    store.segments_folder.mkdir()
    change(next(store.indexes.folder.glob("*.json")))
    assert "needed rows" in run("verify", store.place)[1]
