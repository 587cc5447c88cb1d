"""gc: what nothing needs goes, what anything needs stays, and dying on the way does no harm."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.bad_input import ARTIFACT, run, succeed
from tests.helpers.builds import build, column_facts, random_rows, write_rows
from tests.versions.upkeep import DIM, World, assert_reads, killed_anywhere, new_world
from whiten_index.artifacts.atomic import make_folder, remove_folder
from whiten_index.errors import ArtifactError, ConfigError, StorageError
from whiten_index.store.dtypes import StoreDtype
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.versions.compaction import compact_store
from whiten_index.versions.gc import gc_store
from whiten_index.versions.verify import verify_index, verify_store


def nights(world: World, count: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        world.change(rng, share=0.3)
        world.encode()


def test_versions_that_are_kept_read_as_when_they_were_made(tmp_path):
    rng = np.random.default_rng(0)
    world = new_world(tmp_path, 100, 45, 7)
    index, kept = tmp_path / "index", {}
    for night in range(1, 11):
        world.change(rng, share=float(rng.choice([0.02, 0.2, 0.6])))
        if rng.random() < 0.2:
            world.corpora["news"].append(world.numbers(int(rng.integers(1, 30))))
        world.encode()
        record, truth = world.records[-1]
        kept[world.add_version(index, record, night)] = record, truth
        while len(kept) > 3:
            gone = next(iter(kept))
            del kept[gone]
            remove_folder(gone)
        if rng.random() < 0.4:
            rows = int(rng.choice([20, 40, 100]))
            compact_store(world.place, segment_rows=rows)
            assert compact_store(world.place, segment_rows=rows).written == 0
        if rng.random() < 0.6:
            gc_store(world.place, keep_days=0)
        world.assert_intact()
        for record, truth in kept.values():
            assert_reads(world.store, record, truth)
    assert world.encode().counts.encoded == 0
    assert verify_store(world.place).damages == ()


def test_a_damaged_version_stops_it(tmp_path):
    world = new_world(tmp_path, 100)
    index = tmp_path / "index"
    folder = world.add_version(index, world.records[0][0], 1)
    world.corpora["news"] = [world.numbers(100)]
    world.encode()
    world.add_version(index, world.records[-1][0], 2)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(ArtifactError, match="is damaged and does not say which rows"):
        gc_store(world.place, keep_days=0)


def test_needed_rows_in_a_damaged_segment_stop_it(tmp_path):
    world = new_world(tmp_path, 40)
    (before,) = world.segment_folders()
    world.corpora["news"][0][3] = world.numbers(1)[0]
    world.encode()
    path = world.store.segments_folder / before / "manifest.json"
    path.write_text("{}")
    why = f"{path} is damaged or missing: 39 of 40 needed rows.*whiten-index verify"
    with pytest.raises(ArtifactError, match=why):
        gc_store(world.place, keep_days=0)
    assert len(world.segment_folders()) == 2


def test_what_it_does_not_know_stays(tmp_path):
    world = new_world(tmp_path, 100)
    folder = world.store.folder
    mine = [folder / "notes.txt", folder / "shards" / "README", world.place / "mine" / "x"]
    for kind, name in (("samples", "README"), ("choices", "mine.json"), ("rows", "dump.zst")):
        mine.append(folder / kind / name)
    mine.append(tmp_path / "elsewhere" / ("a" * 32 + ".json"))
    (folder / "unfinished").symlink_to(tmp_path / "elsewhere")
    for path in mine:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("mine")
    leftover = folder / "shards" / ".tmp-0123~5bce98f7-33124ff378ad"
    leftover.mkdir()
    assert gc_store(world.place, keep_days=0).leftovers == 1
    assert all(path.exists() for path in mine)
    assert not leftover.exists()
    world.assert_intact()


def test_it_may_die_anywhere(tmp_path, monkeypatch):
    world = new_world(tmp_path / "a", 60, 30)
    nights(world, 3)
    compact_store(world.place, segment_rows=60)
    nights(world, 2, seed=1)
    wanted = gc_store(world.place, keep_days=0, dry_run=True)
    assert wanted.segments
    assert wanted.parts > 3
    ends, job = set(), functools.partial(gc_store, keep_days=0)
    for other in killed_anywhere(world, tmp_path, monkeypatch, job):
        other.assert_intact()
        # Whatever is left reads, or is not found at all.
        store = other.store
        for name in other.segment_folders():
            if not name.startswith("."):
                assert store.segment(name) is not None
        gc_store(other.place, keep_days=0)
        assert not list(other.place.rglob(".tmp-*"))
        ends.add(frozenset(other.segment_folders()))
        other.assert_intact()
    assert len(ends) == 1, "wherever it died, the next one comes to the same"


def test_a_record_that_is_damaged_stops_it(tmp_path):
    world = new_world(tmp_path, 100)
    (path,) = (world.store.folder / "corpora").iterdir()
    CorpusRecord.load(path)
    path.write_text("{}")
    with pytest.raises(ArtifactError):
        gc_store(world.place, keep_days=0)
    assert len(world.segment_folders()) == 3


def registered(world):
    """Return the places of the indexes that the store knows."""
    return [Path(each.place) for each in world.store.indexes.registered()]


def two_states(tmp_path):
    """Return a world and an index, whose version 1 needs what no corpus has any more."""
    world = new_world(tmp_path, 100)
    index = tmp_path / "i"
    world.add_version(index, world.records[0][0], 1)
    world.corpora["news"] = [world.numbers(100)]
    world.encode()
    world.add_version(index, world.records[-1][0], 2)
    return world, index


@pytest.mark.parametrize("copied_id", [False, True])
def test_another_index_at_the_place_of_one_that_is_not_mounted_stops_it(tmp_path, copied_id):
    world, index = two_states(tmp_path)
    index.rename(tmp_path / "unmounted")
    # A build on the empty mount point, or after the folder was moved away.
    world.add_version(index, world.records[-1][0], 1)
    if copied_id:
        (index / "index.json").unlink()
    before = world.segment_folders()
    why = "index.json" if copied_id else f"{index}, an index .*another index is, built later"
    for dry_run in (False, True):
        with pytest.raises(ArtifactError, match=why):
            gc_store(world.place, keep_days=0, dry_run=dry_run)
    with pytest.raises(ArtifactError, match=why):
        compact_store(world.place)
    assert world.segment_folders() == before
    if copied_id:
        return
    named = ("--index", tmp_path / "unmounted")
    assert run("gc", world.place, "--keep-days", 0, *named)[0] == ARTIFACT
    # It is known from now on.
    assert tmp_path / "unmounted" in registered(world)
    named = (*named, "--forget", index)
    report = json.loads(succeed("gc", world.place, "--keep-days", 0, *named, "--json"))
    assert report["segments"] == 0
    assert sorted(registered(world)) == [index, tmp_path / "unmounted"]
    with pytest.raises(ConfigError, match=f"index {index} is there"):
        gc_store(world.place, forget=[index])
    # One that is named and forgotten stays known.
    gc_store(world.place, indexes=[index], forget=[index], keep_days=0)
    assert index in registered(world)
    assert world.segment_folders() == before


def test_no_build_is_published_while_the_disk_of_versions_is_away(tmp_path):
    corpus = write_rows(tmp_path / "c.parquet", random_rows(0, rows=40))
    index = tmp_path / "i"
    build(index, corpus)
    (index / "versions").rename(tmp_path / "away")
    write_rows(tmp_path / "c.parquet", random_rows(1, rows=40))
    assert "mount its disk; or, if it is gone for good, remove" in str(verify_index(index).damages)
    with pytest.raises(ArtifactError, match=r"missing: mount the disk of .*versions"):
        build(index, corpus)
    (tmp_path / "away").rename(index / "versions")
    build(index, corpus)
    assert gc_store(index / "store", keep_days=0).segments == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [("indexes", "is missing, so that it is not known"), ("corpora", "has no record of a corpus")],
)
def test_a_store_without_its_registry_or_its_records_is_not_collected(tmp_path, name, why):
    world, index = two_states(tmp_path)
    before, folder = world.segment_folders(), world.store.folder / name
    folder.rename(tmp_path / "away")
    if name == "corpora":
        folder.mkdir()
    else:
        # Nobody makes the folder again, so that the next gc would find no index.
        with pytest.raises(ArtifactError, match="indexes is missing"):
            EmbeddingStore.create(world.place, world.store.encoder, world.store.fingerprint)
        with pytest.raises(ArtifactError, match="indexes is missing"):
            world.store.indexes.register(tmp_path / "another", None)
    named = functools.partial(gc_store, indexes=[index], keep_days=0)
    for upkeep in (gc_store, compact_store, named):
        with pytest.raises(ArtifactError, match=f"{name} {why}"):
            upkeep(world.place)
    assert world.segment_folders() == before


@pytest.mark.parametrize("emptied", ["indexes", "registered"])
def test_an_index_is_known_by_either_of_its_files(tmp_path, emptied):
    world, index = two_states(tmp_path)
    before = world.segment_folders()
    for path in (world.store.folder / emptied).glob("*.json"):
        path.unlink()
    assert gc_store(world.place, keep_days=0).segments == 0
    assert (world.segment_folders(), registered(world)) == (before, [index])
    index.rename(tmp_path / "away")
    with pytest.raises(ArtifactError, match=f"{index}, an index .* is not there"):
        gc_store(world.place, keep_days=0)
    # What is to be forgotten is known until all was looked at.
    folders = [world.store.segments_folder / name for name in before]
    for folder in folders:
        folder.rename(tmp_path / folder.name)
    with pytest.raises(ArtifactError, match="needed rows are in no segment"):
        gc_store(world.place, keep_days=0, forget=[index])
    for folder in folders:
        (tmp_path / folder.name).rename(folder)
    assert gc_store(world.place, keep_days=0, forget=[index]).segments
    assert registered(world) == []


@pytest.mark.parametrize("name", ["corpora", "digests", "manifest.json"])
def test_what_is_behind_a_link_to_nothing_is_not_absent(tmp_path, name):
    """Its disk may not be mounted."""
    world, _ = two_states(tmp_path)
    before, path = world.segment_folders(), world.store.folder / name
    path.rename(tmp_path / "away")
    path.symlink_to(tmp_path / "gone")
    said = f"{name} is a link to {tmp_path}/gone, which is not"
    for command in ("gc", "compact", "verify"):
        status, *output = run(command, world.place)
        assert (status, said in "".join(output)) == (7, True), (command, output)
    if name != "manifest.json":
        # One that cannot be listed does not hide what else is wrong.
        damaged = next(world.store.segments_folder.glob("*/moments.safetensors"))
        damaged.write_bytes(damaged.read_bytes()[:-1])
        status, *output = run("verify", world.place)
        assert (status, said in "".join(output)) == (5, True)
        assert str(damaged.parent) in "".join(output)
    assert world.segment_folders() == before


def test_a_store_whose_making_was_killed_stops_nothing(tmp_path, monkeypatch):
    world, _ = two_states(tmp_path)
    made = list[Path]()

    def die(path: Path) -> None:
        make_folder(path)
        made.append(path)
        if len(made) == count:
            raise KeyboardInterrupt

    for count in range(1, 6):
        made.clear()
        with monkeypatch.context() as patched:
            patched.setattr("whiten_index.store.embedding_store.make_folder", die)
            with pytest.raises(KeyboardInterrupt):
                EmbeddingStore.create(world.place, column_facts(8, "new"), f"{count}" * 32)
        for command in ("gc", "compact", "verify"):
            succeed(command, world.place)
    assert list(world.place.iterdir()) == [world.store.folder]


def test_a_first_encode_that_was_interrupted_stops_not_the_other_encoders(tmp_path):
    world, _ = two_states(tmp_path)
    store = world.store
    other = EmbeddingStore.create(world.place, column_facts(8, "new"), "0" * 32)
    rng = np.random.default_rng(0)
    digests = rng.integers(0, 256, (20, 16), dtype=np.uint8)
    other.write(digests, rng.normal(size=(20, 8)), dtype=StoreDtype.FLOAT32)
    unneeded = rng.integers(0, 256, (20, 16), dtype=np.uint8)
    store.write(unneeded, rng.normal(size=(20, DIM)), dtype=StoreDtype.FLOAT32)
    assert compact_store(world.place)
    report = gc_store(world.place, keep_days=0)
    assert report.segments > 0
    assert report.left_alone == (str(other.folder),)
    assert len(other.segment_names()) == 1


def test_a_version_behind_a_link_stops_it_and_so_does_a_link_to_nothing(tmp_path):
    world, index = two_states(tmp_path)
    versions = index / "versions"
    for target in ("000006-cccccccccccc", "/nonexistent"):
        (versions / "000006-cccccccccccc").symlink_to(target)
        with pytest.raises(StorageError, match="000006-cccccccccccc is a link to"):
            gc_store(world.place, keep_days=0)
        (versions / "000006-cccccccccccc").unlink()
    first = versions / "000001-0123456789ab"
    first.rename(tmp_path / "away")
    first.symlink_to(tmp_path / "away")
    with pytest.raises(ArtifactError, match=f"{first} is a link to a version"):
        gc_store(world.place, keep_days=0)
    assert len(world.segment_folders()) == 6


def test_an_index_of_another_store_is_not_registered(tmp_path):
    for number in range(2):
        corpus = write_rows(tmp_path / f"{number}.parquet", random_rows(number, rows=80))
        build(tmp_path / str(number), corpus)
    store, other = tmp_path / "0" / "store", tmp_path / "1"
    with pytest.raises(ArtifactError, match=r"1 is not registered: .* lacks 80 rows"):
        gc_store(store, indexes=[other], keep_days=0)
    assert gc_store(store, keep_days=0).indexes == (str(tmp_path / "0"),)
    assert verify_store(store).damages == ()
