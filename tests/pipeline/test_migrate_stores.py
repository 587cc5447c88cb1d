"""The stores that a migration fills and makes: what gc removes of them, and when."""

import errno
import json
import os
import shutil
from typing import Any
from unittest.mock import patch

import pytest

from tests.helpers.bad_input import fails, run, succeed
from tests.pipeline.migrating import Migration
from whiten_index import (
    CertifyConfig,
    PushConfig,
    UpdateConfig,
    certify_index,
    open_index,
    push_index,
    update_index,
)
from whiten_index.errors import ArtifactError, ConfigError, GateError, StorageError
from whiten_index.store.notes import ResultCache
from whiten_index.versions import compaction, gc
from whiten_index.versions.gc import gc_store
from whiten_index.versions.migration import migration_status
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


def test_bridged_rows_of_others_are_left_alone(migration: Migration) -> None:
    other = migration.folder / "other"
    migration.build(out=other)
    for index in (migration.index, other):
        migration.run(index=index, rows=500, bridge=True)
    for _ in range(2):
        assert migration.run().finished
    assert len(migration.bridged()) == 1
    push_index(PushConfig(index=str(other), to=str(migration.folder / "p.parquet")))


def test_bridged_rows_stay_while_a_copy_has_their_version_published(migration: Migration) -> None:
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


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("clean", [gc_store, compaction.compact_store])
def test_a_copy_that_is_updated_keeps_the_rows_of_all_its_versions(
    migration: Migration, finished: bool, clean: Any
) -> None:
    """An update registers it, here one of a bridged version."""
    index, store, rows = migration.build_own(), migration.store, migration.table()
    own = UpdateConfig(index=str(index))
    migration.write(rows, *(f"the cat {row}" for row in range(60)))
    wide = update_index(own).version
    migration.write(rows, *(f"the cat {row}" for row in range(10)))
    update_index(own)
    migration.run(index=index, rows=500, bridge=True)
    copy = shutil.copytree(index, migration.folder / "copy")
    migration.write(rows.slice(70))
    assert update_index(UpdateConfig(index=str(copy))).changes is not None
    if finished:
        assert migration.run(index=index).finished
    assert run("prune", index, "--keep", 1)[0] == 0
    for _ in range(2):
        clean(store, **({"keep_days": 0} if clean is gc_store else {}))
    assert len(migration.bridged()) == 1
    open_index(copy, rerank=10).search("the cat", top_k=1)
    assert rollback(copy, to=wide).to == wide
    assert run("prune", copy, "--keep", 1)[0] == 0
    for _ in range(2):
        clean(store, **({"keep_days": 0} if clean is gc_store else {}))
    open_index(copy, rerank=10).search("the cat", top_k=1)


def test_bridged_rows_of_an_index_that_was_forgotten_go(migration: Migration) -> None:
    gone, other = migration.folder / "gone", migration.folder / "other"
    for index in (gone, other):
        migration.build(out=index)
    migration.run(index=gone, rows=500, bridge=True)
    migration.run(index=other, rows=500)
    assert migration.run(index=gone).finished
    shutil.rmtree(gone)
    assert gc_store(migration.store, forget=[gone], keep_days=0).bridged == 0
    assert migration.run(index=other).finished
    assert gc_store(migration.store, keep_days=0).bridged == 1
    assert not migration.bridged()


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


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_migration_that_is_given_up_withdraws_all_its_versions(
    migration: Migration, by_hand: bool
) -> None:
    (old,) = migration.versions()
    # Another model was tried before.
    migration.run(rows=500, bridge=True, layers=(0,))
    rollback(migration.index, to=old)
    update = UpdateConfig(index=str(migration.index), corpus=(migration.less(2_900),))
    migration.run(rows=500, bridge=True)
    update_index(update)
    if by_hand:
        rollback(migration.index, to=old)
    assert migration.run(model=None, give_up=True).given_up
    # The corpus of a bridged version is not at fault.
    update_index(update)
    assert rollback(migration.index).to == old


def test_a_corpus_that_was_rolled_back_is_not_updated_after_the_next_bridge(
    migration: Migration,
) -> None:
    migration.run(rows=500, bridge=True)
    update = UpdateConfig(index=str(migration.index), corpus=(migration.less(2_900),))
    update_index(update)
    rollback(migration.index)
    migration.run(rows=500, bridge=True)
    with pytest.raises(GateError, match="the corpus still is that of version"):
        update_index(update)


@pytest.mark.parametrize("content", ["{}", None])
def test_damage_of_bridged_rows_stops_nothing(migration: Migration, content: str | None) -> None:
    migration.run(rows=500, bridge=True)
    (bridged,) = migration.bridged()
    manifest = bridged / "manifest.json"
    manifest.unlink() if content is None else manifest.write_text(content)
    for command in ("gc", "compact"):
        succeed(command, migration.store)
    fails(5, "damage was found", "verify", migration.store)
    link = migration.store / f"bridged-{'0' * 32}"
    link.symlink_to(migration.folder)
    (old,) = (each for each in migration.store.iterdir() if list(each.glob("corpora/*")))
    whole = (old / "manifest.json").read_bytes()
    (old / "manifest.json").write_bytes(whole[:-9])
    fails(5, "cannot be read", "gc", migration.store)
    assert run("inspect", migration.index, "--json")[0] == 0
    (old / "manifest.json").write_bytes(whole)
    assert migration.run(model=None, give_up=True).given_up
    succeed("gc", migration.store)
    assert migration.bridged() == sorted([bridged, link])
    link.unlink()
    assert not (migration.folder / ".lock").exists()
    succeed("prune", migration.index, "--keep", 1)
    assert gc_store(migration.store).bridged == 1
    succeed("verify", migration.store)


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
        for room in (gc, compaction):
            patched.setattr(room, "is_being_filled", lambda *_: True)
        assert gc_store(migration.store, keep_days=0).segments == 0
        assert compaction.compact_store(migration.store).removed == 0
    # One that moved needs what was encoded, under its new place.
    away = migration.folder / "away"
    other.rename(away)
    update_index(UpdateConfig(index=str(away), corpus=(migration.less(2_900),)))
    away.rename(moved)
    with pytest.raises(ArtifactError, match=f"{away}, an index .* is not there"):
        gc_store(migration.store, forget=[other])
    moved.rename(away)
    assert gc_store(migration.store, forget=[other], keep_days=0).segments == 0
    away.rename(moved)
    options: dict[str, Any]
    for options in ({"indexes": [moved], "forget": [away]}, {}):
        assert gc_store(migration.store, **options, keep_days=0).segments == 0
    # So does one that moved back, or has another id at the same place.
    moved.rename(other)
    assert gc_store(migration.store, indexes=[other], forget=[moved], keep_days=0).segments == 0
    (other / "index.json").unlink()
    ensure_index_id(other)
    for options in ({"indexes": [other], "forget": [other]}, {}):
        assert gc_store(migration.store, **options, keep_days=0).segments == 0
    other.rename(moved)
    other.symlink_to(moved)
    assert gc_store(migration.store, indexes=[moved], forget=[other], keep_days=0).segments == 0
    shutil.rmtree(moved)
    assert gc_store(migration.store, forget=[moved], keep_days=0).segments > 0


def test_a_migration_goes_on_where_index_and_store_moved_together(migration: Migration) -> None:
    before, moved = migration.folder / "other", migration.folder / "moved"
    migration.build(out=before, store=None)
    encoded = migration.run(index=before, store=None, rows=1).encoded
    before.rename(moved)
    assert gc_store(moved / "store", forget=[before], keep_days=0).segments == 0
    assert migration.run(index=moved, store=None, rows=1).encoded > encoded


def test_a_migration_of_an_index_that_is_gone_is_no_other_index_s(migration: Migration) -> None:
    gone, other, moved = (migration.folder / name for name in ("gone", "other", "moved"))
    for each in (gone, other):
        migration.build(out=each)
    migration.run(index=gone, rows=500)
    shutil.rmtree(gone)
    other.rename(moved)
    report = gc_store(migration.store, indexes=[moved], forget=[gone, other], keep_days=0)
    assert report.segments > 0
    assert migration_status(moved) is None


@pytest.mark.parametrize("moved", [True, False])
def test_a_migration_of_an_index_with_a_new_id_goes_on(migration: Migration, moved: bool) -> None:
    before = migration.folder / "other"
    index = migration.folder / "moved" if moved else before
    migration.build(out=before)
    if moved:
        migration.run(index=before, rows=500)
        before.rename(index)
    (index / "index.json").unlink()
    options: dict[str, Any] = {"forget": [before], "keep_days": 0}
    if moved:
        options["indexes"] = [index]
        with pytest.raises(ArtifactError, match=r"no index\.json"):
            gc_store(migration.store, **options)
        assert migration_status(index) is None
    given = {"index": str(index), "store": str(migration.store)}
    update_index(UpdateConfig(**given, corpus=(migration.less(2_900),)))
    if not moved:
        migration.run(index=index, rows=500)
    assert gc_store(migration.store, **options).segments == 0
    assert migration_status(index) is not None


def test_a_certificate_of_a_bridged_version_encodes_no_rows(migration: Migration) -> None:
    encoded = migration.run(rows=500, bridge=True).encoded
    # Its texts are too short to be cut.
    with pytest.raises(ConfigError, match="cut"):
        certify_index(CertifyConfig(index=str(migration.index)))
    assert (migration_status(migration.index) or {})["encoded"] == encoded


def test_of_two_indexes_that_move_at_once_one_is_still_migrated(migration: Migration) -> None:
    store = migration.store
    gone, moved = ([migration.folder / f"{new}{name}" for name in "abc"] for new in ("", "new "))
    for each in gone:
        migration.build(out=each)
    migration.run(index=gone[0], rows=500)
    assert migration.run(index=gone[1]).finished
    for each, to in zip(gone, moved, strict=True):
        each.rename(to)
    assert gc_store(store, indexes=moved, forget=gone, keep_days=0).segments == 0
    status = [json.loads(succeed("inspect", each, "--json")).get("migration") for each in moved]
    assert [each is None for each in status] == [False, True, True]
    # Nor does a migration that was finished count as given up where its index is gone.
    for each in moved:
        shutil.rmtree(each)
    assert_lost_records_are_told(migration, forget=moved)
    assert_lost_records_are_told(migration)


def test_gc_removes_the_bridged_rows_of_versions_that_were_pruned(migration: Migration) -> None:
    before, index = migration.folder / "other", migration.folder / "moved"
    migration.build(out=before)
    migration.run(index=before, rows=500, bridge=True)
    before.rename(index)
    moved: dict[str, Any] = {"indexes": [index], "forget": [before], "keep_days": 0}
    migration.run(index=index, rows=500, bridge=True)
    # Until the migration is finished, the bridged rows of all of its versions stay.
    assert gc_store(migration.store, **moved).bridged == 0
    migration.run(index=index)
    assert gc_store(migration.store, keep_days=0).bridged == 0
    assert run("prune", index, "--keep", 2)[0] == 0
    # The version before is a bridged one.
    assert gc_store(migration.store, dry_run=True).bridged == 1
    assert gc_store(migration.store).bridged == 1
    assert len(migration.bridged()) == 1
    assert run("prune", index, "--keep", 1)[0] == 0
    assert gc_store(migration.store).bridged == 1
    assert not migration.bridged()


def test_gc_sees_bridged_rows_before_it_removes_anything(migration: Migration) -> None:
    migration.run(rows=500, bridge=True)
    (bridged,) = migration.bridged()
    run("migrate", migration.index, "--give-up")
    assert run("prune", migration.index, "--keep", 1)[0] == 0
    segments, scan = set(migration.store.glob("*/segments/*")), os.scandir

    def refused(path: Any) -> Any:
        if bridged.name in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    with patch.object(os, "scandir", refused), pytest.raises(StorageError, match="cannot list"):
        gc_store(migration.store, keep_days=0)
    assert set(migration.store.glob("*/segments/*")) == segments
    collected = gc_store(migration.store, keep_days=0)
    assert (collected.segments > 0, collected.bridged) == (True, 1)
    assert not migration.bridged()
