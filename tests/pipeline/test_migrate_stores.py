"""The stores that a migration fills and makes: what gc removes of them, and when."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.bad_input import fails, run, succeed
from tests.pipeline.migrating import Migration
from whiten_index import PushConfig, UpdateConfig, open_index, push_index, update_index
from whiten_index.errors import ArtifactError, ConfigError, StorageError
from whiten_index.store.notes import ResultCache
from whiten_index.versions import gc
from whiten_index.versions.gc import gc_store
from whiten_index.versions.published import ensure_index_id
from whiten_index.versions.retention import rollback


def assert_lost_records_are_told(migration: Migration, **options: Any) -> None:
    """Without its records of corpora, gc removes nothing that the new model encoded."""
    (new,) = {path.parent.parent for path in migration.store.glob("*/migrations/*")}
    for path in new.glob("corpora/*"):
        path.unlink()
    report = gc_store(migration.store, keep_days=0, **options)
    assert report.left_alone == (str(new),)
    assert list(new.glob("segments/*"))


def test_stores_of_others_are_left_alone(migration: Migration) -> None:
    other = migration.folder / "other"
    migration.build(out=other)
    mine = migration.folder / "store.bridged-by-hand"
    mine.mkdir()
    for index in (migration.index, other):
        migration.run(index=index, rows=500, bridge=True)
    for _ in range(2):
        assert migration.run().finished
    assert mine.exists()
    assert len(migration.bridged()) == 2
    push_index(PushConfig(index=str(other), to=str(migration.folder / "p.parquet")))


def test_the_store_of_a_bridged_version_stays_while_a_copy_has_it_published(
    migration: Migration,
) -> None:
    migration.run(rows=500, bridge=True)
    copy = shutil.copytree(migration.index, migration.folder / "copy")
    gc_store(migration.store, indexes=[copy])
    stores = migration.bridged()
    for _ in range(2):
        assert migration.run().finished
    assert migration.bridged() == stores
    open_index(copy, rerank=10).search("the cat", top_k=1)
    assert migration.run(index=copy).finished
    for _ in range(2):
        migration.run()
    assert not migration.bridged()


def test_the_name_of_a_store_is_no_pattern(migration: Migration) -> None:
    store, alike = migration.folder / "st[ao]re*\n", migration.folder / "stare*\n"
    for place in (store, alike):
        shutil.copytree(migration.store, place)
    migration.run(store=alike, rows=500, bridge=True)
    (others,) = migration.folder.glob("stare*\n.bridged-*")
    for _ in range(2):
        migration.run(store=store, rows=500, bridge=True)
    for _ in range(2):
        assert migration.run(store=store).finished
    assert [path for path in migration.folder.iterdir() if ".bridged-" in path.name] == [others]


def test_bridged_stores_are_next_to_the_folder_that_a_link_names(
    migration: Migration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(migration.folder)
    Path("disk").mkdir()
    Path("link").symlink_to(Path("store").rename("disk/store"))
    migration.build(store="link", out="other")
    migration.run(index="other", store=None, rows=500, bridge=True)
    migration.run(index="other", store=None)
    assert run("prune", "other", "--keep", 1)[0] == 0
    assert list(migration.folder.rglob("*.bridged-*"))
    assert run("gc", "other")[0] == 0
    assert not list(migration.folder.rglob("*.bridged-*"))


@pytest.mark.parametrize("column", [False, True])
def test_a_store_of_a_name_that_bridged_ones_have_is_refused(
    migration: Migration, column: bool
) -> None:
    """gc would take it for one that can be made again."""
    store = migration.folder / "store.bridged-0123456789abcdef"
    options: dict[str, Any] = {"store": store, "out": migration.folder / "other"}
    if column:
        corpus = migration.folder / "e.parquet"
        rows = pa.array(np.eye(70, 8).tolist(), pa.list_(pa.float32()))
        pq.write_table(pa.table({"id": list(map(str, range(70))), "e": rows}), corpus)
        options |= {"corpus": corpus, "text_columns": (), "model": None}
        options |= {"embedding_column": "e", "pooling": None, "k": 4}
    with pytest.raises(ConfigError, match=r"has a name of the stores of bridged.*; give it"):
        migration.build(**options)
    assert not store.exists()


def test_gc_leaves_what_a_migration_encoded_until_it_is_finished(migration: Migration) -> None:
    # Another index of the store has the new model already.
    migration.write(migration.table().slice(0, 70))
    migration.build(out=migration.folder / "other", layers=(1,))
    encoded = migration.run(rows=1).encoded
    left_alone = gc_store(migration.store, keep_days=0)
    notes = migration.store.glob("*/migrations/*")
    (note,) = (each for each in notes if b"since" in each.read_bytes())
    whole = note.read_bytes()
    note.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    for command in (("gc", migration.store, "--keep-days", 0), ("compact", migration.store)):
        fails(5, f"{note} is damaged; remove it", *command)
    facts = json.loads(run("inspect", migration.index, "--json")[1])["migration"]
    assert f"{note} is damaged" in facts["unread"]
    with pytest.raises(ArtifactError, match="run again, before any gc, the migrations that fill"):
        migration.run(rows=1)
    note.write_bytes(whole)
    assert migration.run(rows=1).encoded > encoded
    assert migration.run().finished
    found = gc_store(migration.store, keep_days=0)
    assert found.kept["segments"] > left_alone.kept["segments"]


def test_a_migration_that_is_given_up_holds_gc_off_no_longer(migration: Migration) -> None:
    index, answers = migration.index, migration.neighbours(migration.index, migration.texts()[:20])
    (old,) = migration.versions()
    migration.run(rows=500)
    assert gc_store(migration.store, keep_days=0).segments == 0
    migration.run(rows=500, bridge=True)
    out = succeed("migrate", index, "--store", migration.store, "--give-up")
    assert f"version {old} answers\nto remove what was encoded: whiten-index gc {index}" in out
    assert migration.neighbours(index, migration.texts()[:20]) == answers
    assert update_index(UpdateConfig(index=str(index), store=str(migration.store))).up_to_date
    found = gc_store(migration.store, keep_days=0)
    assert found.segments > 1
    with pytest.raises(ConfigError, match="no migration under way"):
        migration.run(model=None, give_up=True)
    # All is encoded once more.
    assert migration.run().finished


def test_the_store_of_a_bridged_version_stays_where_another_store_is_made(
    migration: Migration,
) -> None:
    """As on an empty mount point: what the bridged store itself says of indexes counts."""
    migration.run(rows=500, bridge=True)
    (bridged,) = migration.bridged()
    migration.store.rename(migration.folder / "away")
    migration.build(out=migration.folder / "other", corpus=migration.less(70))
    for _ in range(2):
        assert gc_store(migration.store, keep_days=0).bridged == 0
        # The index may be on another disk.
        migration.index.rename(migration.folder / "moved")
        assert gc_store(migration.store, keep_days=0).bridged == 0
        (migration.folder / "moved").rename(migration.index)
    assert migration.bridged() == [bridged]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_migration_that_is_given_up_withdraws_all_its_versions(
    migration: Migration, by_hand: bool
) -> None:
    (old,) = migration.versions()
    update = UpdateConfig(index=str(migration.index), corpus=(migration.less(2_900),))
    migration.run(rows=500, bridge=True)
    update_index(update)
    if by_hand:
        rollback(migration.index, to=old)
    assert migration.run(model=None, give_up=True).given_up
    # The corpus of a bridged version is not at fault.
    update_index(update)
    assert rollback(migration.index).to == old


def test_a_note_that_a_disk_refused_is_written_by_the_next_run(
    migration: Migration, monkeypatch: pytest.MonkeyPatch
) -> None:
    migration.build(out=migration.folder / "other", corpus=migration.less(70), layers=(1,))
    real = ResultCache.save_migration

    def fail(self: ResultCache, index: str, note: Any) -> None:
        if not index:
            raise StorageError("the disk is full")
        real(self, index, note)

    with monkeypatch.context() as patched:
        patched.setattr(ResultCache, "save_migration", fail)
        with pytest.raises(StorageError, match="the disk is full"):
            migration.run(rows=1)
    migration.run(rows=1)
    migration.run(model=None, give_up=True)
    assert_lost_records_are_told(migration)


def test_a_migration_that_was_given_up_excuses_no_lost_records(migration: Migration) -> None:
    migration.build(out=migration.folder / "other", corpus=migration.less(70), layers=(1,))
    migration.run(rows=1)
    assert run("migrate", migration.index, "--store", migration.store, "--give-up")[0] == 0
    assert_lost_records_are_told(migration)


def test_a_migration_of_an_index_that_is_gone_does_not_hold_gc_off(
    migration: Migration, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, moved = migration.folder / "other", migration.folder / "moved"
    migration.build(out=other)
    migration.run(index=other, rows=500)
    assert gc_store(migration.store, keep_days=0).segments == 0
    # Every model of the store is filled, as by two migrations in opposite directions.
    with monkeypatch.context() as patched:
        patched.setattr(gc, "is_being_filled", lambda *_: True)
        assert gc_store(migration.store, keep_days=0).segments == 0
    # One that moved needs what was encoded, under its new place.
    other.rename(moved)
    for options in ({"indexes": [moved], "forget": [other]}, {}):
        assert gc_store(migration.store, **options, keep_days=0).segments == 0
    # So does one that moved back, or has another id at the same place.
    moved.rename(other)
    assert gc_store(migration.store, indexes=[other], forget=[moved], keep_days=0).segments == 0
    (other / "index.json").unlink()
    ensure_index_id(other)
    for options in ({"indexes": [other], "forget": [other]}, {}):
        assert gc_store(migration.store, **options, keep_days=0).segments == 0
    other.rename(moved)
    assert gc_store(migration.store, indexes=[moved], forget=[other], keep_days=0).segments == 0
    shutil.rmtree(moved)
    assert gc_store(migration.store, forget=[moved], keep_days=0).segments > 0


def test_of_two_indexes_that_move_at_once_one_is_still_migrated(migration: Migration) -> None:
    store = migration.store
    gone, moved = ([migration.folder / f"{new}{name}" for name in "ab"] for new in ("", "new "))
    for each in gone:
        migration.build(out=each)
    migration.run(index=gone[0], rows=500)
    assert migration.run(index=gone[1]).finished
    for each, to in zip(gone, moved, strict=True):
        each.rename(to)
    assert gc_store(store, indexes=moved, forget=gone, keep_days=0).segments == 0
    # Nor does a migration that was finished count as given up where its index is gone.
    for each in moved:
        shutil.rmtree(each)
    assert_lost_records_are_told(migration, forget=[*moved, gone[1]])
    assert_lost_records_are_told(migration)


def test_gc_removes_the_stores_of_bridged_versions_that_were_pruned(migration: Migration) -> None:
    before, index = migration.folder / "other", migration.folder / "moved"
    migration.build(out=before)
    migration.run(index=before, rows=500, bridge=True)
    before.rename(index)
    moved: dict[str, Any] = {"indexes": [index], "forget": [before], "keep_days": 0}
    migration.run(index=index, rows=500, bridge=True)
    # Until the migration is finished, the stores of all of its versions stay.
    assert gc_store(migration.store, **moved).bridged == 0
    migration.run(index=index)
    # As a compaction leaves one that is killed.
    (segments, *_) = migration.bridged()[0].glob("*/segments")
    leftover = segments / ".tmp-0123~00000000-000000000000"
    leftover.mkdir()
    os.utime(leftover, (0, 0))
    assert gc_store(migration.store, keep_days=0).bridged == 0
    assert not leftover.exists()
    assert list(segments.iterdir())
    assert run("prune", index, "--keep", 2)[0] == 0
    # The version before is a bridged one.
    assert gc_store(migration.store, dry_run=True).bridged == 1
    assert gc_store(migration.store).bridged == 1
    assert len(migration.bridged()) == 1
    assert run("prune", index, "--keep", 1)[0] == 0
    assert gc_store(migration.store).bridged == 1
    assert not migration.bridged()


def test_gc_sees_the_stores_of_bridged_versions_before_it_removes_anything(
    migration: Migration, monkeypatch: pytest.MonkeyPatch
) -> None:
    migration.run(rows=500, bridge=True)
    run("migrate", migration.index, "--give-up")
    mine = migration.folder / "store.bridged-0123456789abcdef"
    mine.mkdir()
    (mine / "notes").write_text("")
    (mine.parent / "store.bridged-fedcba9876543210").write_text("")
    segments, scan = set(migration.store.glob("*/segments/*")), os.scandir

    def refused(path: Any) -> Any:
        if ".bridged-" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refused)
        with pytest.raises(StorageError, match="cannot list"):
            gc_store(migration.store, keep_days=0)
    assert set(migration.store.glob("*/segments/*")) == segments
    assert run("prune", migration.index, "--keep", 1)[0] == 0
    collected = gc_store(migration.store, keep_days=0)
    assert (collected.segments > 0, collected.bridged) == (True, 1)
    # What the user keeps by such a name stays.
    assert len(migration.bridged()) == 2
    assert (mine / "notes").exists()
