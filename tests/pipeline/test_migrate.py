"""Migration to another embedding model: the bridge, its runs, the comparison, what is refused."""

import datetime
import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.helpers import tiny_models
from tests.helpers.bad_input import night, run
from whiten_index import (
    BuildConfig,
    MigrateConfig,
    PushConfig,
    UpdateConfig,
    build_index,
    list_versions,
    load_encoder,
    migrate_index,
    open_index,
    push_index,
    update_index,
)
from whiten_index.errors import (
    ArtifactError,
    ConfigError,
    CorpusError,
    GateError,
    StorageError,
    WhitenIndexError,
)
from whiten_index.pipeline.plan import plan_update
from whiten_index.progress import Progress
from whiten_index.store.notes import ResultCache
from whiten_index.versions import gc
from whiten_index.versions.gc import gc_store
from whiten_index.versions.published import ensure_index_id, read_published
from whiten_index.versions.retention import rollback
from whiten_index.whitening.bridge import Bridge, joint_moments

ROWS = 3_000
WORDS = ("the", "cat", "sat", "on", "mat", "dog", "ran", "to", "small", "river", "sang", "king",
         "queen", "walks", "writes", "book", "cold", "given", "passage", "query")  # fmt: skip


def build(built: Path, folder: Path, **options: Any) -> None:
    """Index the corpus of a folder by the old model."""
    given: dict[str, Any] = {
        "corpus": str(folder / "c.parquet"), "text_columns": "text", "id_column": "id",
        "model": str(built / "model"), "pooling": "mean", "whiten": "pca", "k": 16,
        "device": "cpu", "factory": "Flat", "out": str(folder / "index"),
        "store": str(folder / "store"), "store_dtype": "float32",
    }  # fmt: skip
    build_index(BuildConfig(**{**given, **options}))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, an index of it, its store, and two models."""
    folder, rng = tmp_path_factory.mktemp("migrate"), np.random.default_rng(0)
    tiny_models.bert(folder / "model")
    texts = [
        " ".join(rng.choice(WORDS, size=rng.integers(3, 9))) + f" {row}" for row in range(ROWS)
    ]
    table = {"id": [f"d{row}" for row in range(ROWS)], "text": texts}
    pq.write_table(pa.table(table), folder / "c.parquet")
    build(folder, folder)
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """Return a copy of the index and its store, whose corpus and models stay where they are."""
    shutil.copytree(built / "index", tmp_path / "index")
    shutil.copytree(built / "store", tmp_path / "store")
    return tmp_path


def migrate(built: Path, folder: Path, **options: Any) -> Any:
    """Migrate to the same model by its first layer, which differs and can be foretold."""
    given: dict[str, Any] = {"index": str(folder / "index"), "model": str(built / "model")}
    given |= {"pooling": "mean", "layers": (1,), "device": "cpu", "store": str(folder / "store")}
    return migrate_index(MigrateConfig(**{**given, **options}))


def texts_of(built: Path) -> list[str]:
    return pq.read_table(built / "c.parquet")["text"].to_pylist()


def neighbours(index: Path, texts: list[str]) -> list[set[str]]:
    found = open_index(index).search(texts)
    return [{str(hit.id) for hit in hits} for hits in found]


def test_a_bridge_finds_a_map_that_there_is() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2_000, 12)) * np.linspace(1, 3, 12) + 0.3
    turn, _ = np.linalg.qr(rng.standard_normal((12, 12)))
    moments = joint_moments((x[i : i + 300], x[i : i + 300] @ turn) for i in range(0, 2_000, 300))
    fresh = rng.standard_normal((200, 12)) * np.linspace(1, 3, 12) + 0.3
    unit = fresh / np.linalg.norm(fresh, axis=1, keepdims=True)
    for bridge in (Bridge.fit(moments, 12, "orthogonal"), Bridge.fit(moments, 12, "ridge", 1e-9)):
        np.testing.assert_allclose(bridge.apply(fresh), unit @ turn, atol=1e-6)
    assert Bridge.choose(moments, (fresh, fresh @ turn)).agreement == pytest.approx(1.0)


def test_a_bridged_version_answers_queries_of_the_new_model(built: Path, folder: Path) -> None:
    report = migrate(built, folder, rows=1_000, bridge=True)
    assert (report.finished, report.rows) == (False, ROWS)
    assert 1_000 <= report.encoded < ROWS
    texts = texts_of(built)[::30]
    bridged = neighbours(folder / "index", texts)
    encoder = load_encoder(str(built / "model"), pooling="mean", layers=(1,), device="cpu")
    assert open_index(folder / "index").encoder.spec.fingerprint == encoder.spec.fingerprint
    # All rows are there once, and most of what is near by the new model is found.
    migrate(built, folder)
    finished = neighbours(folder / "index", texts)
    shared = [len(one & other) / 10 for one, other in zip(bridged, finished, strict=True)]
    # By chance it would be 1 in 300. The last version is centred, a bridged one is not.
    assert np.mean(shared) > 0.5
    # Readers may have the bridged version open until the next run.
    assert len(list(folder.glob("store.bridged-*"))) == 1
    migrate(built, folder)
    assert not list(folder.glob("store.bridged-*"))


@pytest.mark.parametrize("kind", ["none", "pca", "auto"])
def test_the_transform_of_a_bridged_version(built: Path, folder: Path, kind: str) -> None:
    index, k = folder / "other", None if kind == "none" else 8
    corpus = str(built / "c.parquet")
    build(built, folder, out=str(index), corpus=corpus, whiten=kind, k=k)
    made = list[Any]()
    for options in ({"rows": 500, "bridge": True}, {}):
        made.append(read_published(index).fields["whitening"])
        migrate(built, folder, index=str(index), **options)
    made.append(read_published(index).fields["whitening"])
    old, bridged, new = made
    for each in ("kind", "k", "exponent"):
        assert bridged[each] == old[each]
    # The common mean of mapped and new rows would set them apart.
    assert (bridged["center"], new["kind"]) == (False, old["kind"])
    assert new["center"] == (kind != "none") or kind == "auto"


def test_stores_of_others_are_left_alone(built: Path, folder: Path) -> None:
    build(built, folder, out=str(folder / "other"), corpus=str(built / "c.parquet"))
    mine = folder / "store.bridged-by-hand"
    mine.mkdir()
    for name in ("index", "other"):
        migrate(built, folder, index=str(folder / name), rows=500, bridge=True)
    for _ in range(2):
        assert migrate(built, folder).finished
    assert mine.exists()
    assert len(list(folder.glob("store.bridged-*"))) == 2
    push_index(PushConfig(index=str(folder / "other"), to=str(folder / "p.parquet")))


def test_the_store_of_a_bridged_version_stays_while_a_copy_has_it_published(
    built: Path, folder: Path
) -> None:
    migrate(built, folder, rows=500, bridge=True)
    copy = shutil.copytree(folder / "index", folder / "copy")
    gc_store(folder / "store", indexes=[copy])
    stores = set(folder.glob("store.bridged-*"))
    for _ in range(2):
        assert migrate(built, folder).finished
    assert set(folder.glob("store.bridged-*")) == stores
    open_index(copy, rerank=10).search("the cat", top_k=1)
    assert migrate(built, folder, index=str(copy)).finished
    for _ in range(2):
        migrate(built, folder)
    assert not list(folder.glob("store.bridged-*"))


def test_the_name_of_a_store_is_no_pattern(built: Path, folder: Path) -> None:
    store, alike = folder / "st[ao]re*\n", folder / "stare*\n"
    for place in (store, alike):
        shutil.copytree(folder / "store", place)
    migrate(built, folder, store=str(alike), rows=500, bridge=True)
    (others,) = folder.glob("stare*\n.bridged-*")
    for _ in range(2):
        migrate(built, folder, store=str(store), rows=500, bridge=True)
    for _ in range(2):
        assert migrate(built, folder, store=str(store)).finished
    assert [path for path in folder.iterdir() if ".bridged-" in path.name] == [others]


def test_bridged_stores_are_next_to_the_folder_that_a_link_names(
    built: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    Path("disk").mkdir()
    Path("link").symlink_to(Path("store").rename("disk/store"))
    build(built, folder, corpus=str(built / "c.parquet"), store="link", out="other")
    migrate(built, folder, index="other", store=None, rows=500, bridge=True)
    migrate(built, folder, index="other", store=None)
    assert run("prune", "other", "--keep", 1)[0] == 0
    assert list(folder.rglob("*.bridged-*"))
    assert run("gc", "other")[0] == 0
    assert not list(folder.rglob("*.bridged-*"))


@pytest.mark.parametrize("column", [False, True])
def test_a_store_of_a_name_that_bridged_ones_have_is_refused(
    built: Path, folder: Path, column: bool
) -> None:
    """gc would take it for one that can be made again."""
    store = folder / "store.bridged-0123456789abcdef"
    options: dict[str, Any] = {"store": str(store), "out": str(folder / "other")}
    if column:
        rows = pa.array(np.eye(70, 8).tolist(), pa.list_(pa.float32()))
        pq.write_table(pa.table({"id": list(map(str, range(70))), "e": rows}), folder / "e.parquet")
        options |= {"corpus": str(folder / "e.parquet"), "text_columns": (), "model": None}
        options |= {"embedding_column": "e", "pooling": None, "k": 4}
    else:
        options["corpus"] = str(built / "c.parquet")
    with pytest.raises(ConfigError, match=r"has a name of the stores of bridged.*; give it"):
        build(built, folder, **options)
    assert not store.exists()


def test_gc_leaves_what_a_migration_encoded_until_it_is_finished(built: Path, folder: Path) -> None:
    # Another index of the store has the new model already.
    pq.write_table(pq.read_table(built / "c.parquet").slice(0, 70), folder / "c.parquet")
    build(built, folder, out=str(folder / "other"), layers=(1,))
    encoded = migrate(built, folder, rows=1).encoded
    left_alone = gc_store(folder / "store", keep_days=0)
    (note,) = (
        each for each in folder.glob("store/*/migrations/*") if b"since" in each.read_bytes()
    )
    whole = note.read_bytes()
    note.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    for command in (("gc", folder / "store", "--keep-days", 0), ("compact", folder / "store")):
        status, _, told = run(*command)
        assert (status, f"{note} is damaged; remove it" in told) == (5, True), told
    facts = json.loads(run("inspect", folder / "index", "--json")[1])["migration"]
    assert f"{note} is damaged" in facts["unread"]
    with pytest.raises(ArtifactError, match="run again, before any gc, the migrations that fill"):
        migrate(built, folder, rows=1)
    note.write_bytes(whole)
    assert migrate(built, folder, rows=1).encoded > encoded
    assert migrate(built, folder).finished
    found = gc_store(folder / "store", keep_days=0)
    assert found.kept["segments"] > left_alone.kept["segments"]


def test_a_migration_that_is_given_up_holds_gc_off_no_longer(built: Path, folder: Path) -> None:
    index, answers = folder / "index", neighbours(folder / "index", texts_of(built)[:20])
    (old,) = (each.name for each in list_versions(index))
    migrate(built, folder, rows=500)
    assert gc_store(folder / "store", keep_days=0).segments == 0
    migrate(built, folder, rows=500, bridge=True)
    code, out, _ = run("migrate", index, "--store", folder / "store", "--give-up")
    assert code == 0
    assert f"version {old} answers\nto remove what was encoded: whiten-index gc {index}" in out
    assert neighbours(index, texts_of(built)[:20]) == answers
    assert update_index(UpdateConfig(index=str(index), store=str(folder / "store"))).up_to_date
    found = gc_store(folder / "store", keep_days=0)
    assert found.segments > 1
    with pytest.raises(ConfigError, match="no migration under way"):
        migrate(built, folder, model=None, give_up=True)
    # All is encoded once more.
    assert migrate(built, folder).finished


def test_a_migration_that_is_given_up_withdraws_all_its_versions(built: Path, folder: Path) -> None:
    index = folder / "index"
    (old,) = (each.name for each in list_versions(index))
    for rows in (1_000, 500):
        migrate(built, folder, rows=rows, bridge=True)
    assert migrate(built, folder, model=None, give_up=True).given_up
    corpus = (str(folder / "less.parquet"),)
    pq.write_table(pq.read_table(built / "c.parquet").slice(0, 2_900), corpus[0])
    update_index(UpdateConfig(index=str(index), corpus=corpus))
    assert rollback(index).to == old


def test_a_note_that_a_disk_refused_is_written_by_the_next_run(
    built: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = str(folder / "less.parquet")
    pq.write_table(pq.read_table(built / "c.parquet").slice(0, 70), corpus)
    build(built, folder, out=str(folder / "other"), corpus=corpus, layers=(1,))
    real = ResultCache.save_migration

    def fail(self: ResultCache, index: str, note: Any) -> None:
        if not index:
            raise StorageError("the disk is full")
        real(self, index, note)

    with monkeypatch.context() as patched:
        patched.setattr(ResultCache, "save_migration", fail)
        with pytest.raises(StorageError, match="the disk is full"):
            migrate(built, folder, rows=1)
    migrate(built, folder, rows=1)
    migrate(built, folder, model=None, give_up=True)
    (new,) = {path.parent.parent for path in folder.glob("store/*/migrations/*")}
    for path in new.glob("corpora/*"):
        path.unlink()
    with pytest.raises(ArtifactError, match="has no record of a corpus"):
        gc_store(folder / "store", keep_days=0)


def test_a_migration_that_was_given_up_excuses_no_lost_records(built: Path, folder: Path) -> None:
    corpus = str(folder / "less.parquet")
    pq.write_table(pq.read_table(built / "c.parquet").slice(0, 70), corpus)
    build(built, folder, out=str(folder / "other"), corpus=corpus, layers=(1,))
    migrate(built, folder, rows=1)
    assert run("migrate", folder / "index", "--store", folder / "store", "--give-up")[0] == 0
    (new,) = {path.parent.parent for path in folder.glob("store/*/migrations/*")}
    for path in new.glob("corpora/*"):
        path.unlink()
    with pytest.raises(ArtifactError, match="has no record of a corpus"):
        gc_store(folder / "store", keep_days=0)


def test_a_migration_of_an_index_that_is_gone_does_not_hold_gc_off(
    built: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(built, folder, out=str(folder / "other"), corpus=str(built / "c.parquet"))
    migrate(built, folder, index=str(folder / "other"), rows=500)
    assert gc_store(folder / "store", keep_days=0).segments == 0
    # Every model of the store is filled, as by two migrations in opposite directions.
    with monkeypatch.context() as patched:
        patched.setattr(gc, "is_being_filled", lambda *_: True)
        assert gc_store(folder / "store", keep_days=0).segments == 0
    # One that moved needs what was encoded, under its new place.
    (folder / "other").rename(folder / "moved")
    moved = {"indexes": [folder / "moved"], "forget": [folder / "other"]}
    for options in (moved, {}):
        assert gc_store(folder / "store", **options, keep_days=0).segments == 0
    # So does one that moved back, or has another id at the same place.
    (folder / "moved").rename(folder / "other")
    back = {"indexes": [folder / "other"], "forget": [folder / "moved"]}
    assert gc_store(folder / "store", **back, keep_days=0).segments == 0
    (folder / "other" / "index.json").unlink()
    ensure_index_id(folder / "other")
    again = {"indexes": [folder / "other"], "forget": [folder / "other"]}
    for options in (again, {}):
        assert gc_store(folder / "store", **options, keep_days=0).segments == 0
    (folder / "other").rename(folder / "moved")
    assert gc_store(folder / "store", **moved, keep_days=0).segments == 0
    shutil.rmtree(folder / "moved")
    assert gc_store(folder / "store", forget=[folder / "moved"], keep_days=0).segments > 0


def test_of_two_indexes_that_move_at_once_one_is_still_migrated(built: Path, folder: Path) -> None:
    store = folder / "store"
    for name in ("a", "b"):
        build(built, folder, out=str(folder / name), corpus=str(built / "c.parquet"))
    migrate(built, folder, index=str(folder / "a"), rows=500)
    assert migrate(built, folder, index=str(folder / "b")).finished
    for name in ("a", "b"):
        (folder / name).rename(folder / f"new {name}")
    gone, moved = ([folder / f"{new}{name}" for name in "ab"] for new in ("", "new "))
    assert gc_store(store, indexes=moved, forget=gone, keep_days=0).segments == 0
    (new,) = {each.parent.parent for each in store.glob("*/migrations/*")}
    for path in new.glob("corpora/*"):
        path.unlink()
    # Nor does a migration that was finished count as given up where its index is gone.
    for each in moved:
        shutil.rmtree(each)
    with pytest.raises(ArtifactError, match="has no record of a corpus"):
        gc_store(store, forget=[*moved, gone[1]], keep_days=0)
    with pytest.raises(ArtifactError, match="has no record of a corpus"):
        gc_store(store, keep_days=0)


def test_gc_removes_the_stores_of_bridged_versions_that_were_pruned(
    built: Path, folder: Path
) -> None:
    before, index = folder / "other", folder / "moved"
    build(built, folder, out=str(before), corpus=str(built / "c.parquet"))
    migrate(built, folder, index=str(before), rows=500, bridge=True)
    before.rename(index)
    moved: dict[str, Any] = {"indexes": [index], "forget": [before], "keep_days": 0}
    migrate(built, folder, index=str(index), rows=500, bridge=True)
    # Until the migration is finished, the stores of all of its versions stay.
    assert gc_store(folder / "store", **moved).bridged == 0
    migrate(built, folder, index=str(index))
    assert gc_store(folder / "store", keep_days=0).bridged == 0
    assert run("prune", index, "--keep", 2)[0] == 0
    # The version before is a bridged one.
    assert gc_store(folder / "store", dry_run=True).bridged == 1
    assert gc_store(folder / "store").bridged == 1
    assert len(list(folder.glob("store.bridged-*"))) == 1
    assert run("prune", index, "--keep", 1)[0] == 0
    assert gc_store(folder / "store").bridged == 1
    assert not list(folder.glob("store.bridged-*"))


def test_gc_sees_the_stores_of_bridged_versions_before_it_removes_anything(
    built: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate(built, folder, rows=500, bridge=True)
    run("migrate", folder / "index", "--give-up")
    mine = folder / "store.bridged-0123456789abcdef"
    mine.mkdir()
    (mine / "notes").write_text("")
    (mine.parent / "store.bridged-fedcba9876543210").write_text("")
    segments, scan = set(folder.glob("store/*/segments/*")), os.scandir

    def refused(path: Any) -> Any:
        if ".bridged-" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refused)
        with pytest.raises(StorageError, match="cannot list"):
            gc_store(folder / "store", keep_days=0)
    assert set(folder.glob("store/*/segments/*")) == segments
    assert run("prune", folder / "index", "--keep", 1)[0] == 0
    collected = gc_store(folder / "store", keep_days=0)
    assert (collected.segments > 0, collected.bridged) == (True, 1)
    # What the user keeps by such a name stays.
    assert len(list(folder.glob("store.bridged-*"))) == 2
    assert (mine / "notes").exists()


def test_an_update_of_a_bridged_version_without_its_store(built: Path, folder: Path) -> None:
    index = folder / "index"
    migrate(built, folder, rows=500, bridge=True)
    (bridged,) = folder.glob("store.bridged-*")
    shutil.rmtree(bridged)
    with pytest.raises(
        ArtifactError, match=r"to make another, run whiten-index migrate again .* or give"
    ):
        update_index(UpdateConfig(index=str(index)))
    migrate(built, folder, rows=500, bridge=True)
    assert update_index(UpdateConfig(index=str(index))).up_to_date


def test_a_migration_that_was_rolled_back_is_finished_again(built: Path, folder: Path) -> None:
    index, table = folder / "other", pq.read_table(built / "c.parquet")
    pq.write_table(table, folder / "c.parquet")
    build(built, folder, out=str(index))
    migrate(built, folder, index=str(index), rows=500, bridge=True)
    migrate(built, folder, index=str(index))
    rollback(index)
    pq.write_table(table.slice(500), folder / "c.parquet")
    # Published after the version of the new model, which is withdrawn.
    update_index(UpdateConfig(index=str(index)))
    report = migrate(built, folder, index=str(index))
    assert (report.finished, report.rows) == (True, ROWS - 500)
    assert [each.name for each in list_versions(index) if each.published] == [report.version]


def test_runs_add_up_to_a_build_by_the_new_model(built: Path, folder: Path) -> None:
    counts = [migrate(built, folder, rows=500, bridge=True).encoded for _ in range(2)]
    assert counts[0] < counts[1] < ROWS
    report = migrate(built, folder)
    assert report.finished
    assert report.encoded == ROWS
    build(
        built,
        folder,
        out=str(folder / "fresh"),
        store=None,
        layers=(1,),
        corpus=str(built / "c.parquet"),
    )
    texts = texts_of(built)[:50]
    assert neighbours(folder / "index", texts) == neighbours(folder / "fresh", texts)
    # Four versions: the old one, two bridged ones, the new one.
    assert [each.published for each in list_versions(folder / "index")] == [True, *[False] * 3]
    assert update_index(UpdateConfig(index=str(folder / "index"))).up_to_date
    again = migrate(built, folder)
    assert (again.finished, again.version) == (True, report.version)


def test_damaged_rows_of_the_new_model_are_encoded_again(built: Path, folder: Path) -> None:
    before = {path.name for path in (folder / "store").iterdir()}
    encoded = migrate(built, folder, rows=1_000).encoded
    (new,) = (path for path in (folder / "store").iterdir() if path.name not in before)
    damaged = sorted(new.glob("segments/*/embeddings.safetensors"))[0]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 64
    damaged.write_bytes(content)
    # They do not count, and a bridge is fitted on the others.
    assert not migrate(built, folder, rows=1, bridge=True).finished
    assert migrate(built, folder, rows=1, bridge=True).encoded > encoded
    assert migrate(built, folder).finished
    code, out, _ = run("verify", folder / "index", folder / "store")
    assert code == 0, out


def test_an_update_of_a_bridged_version(built: Path, folder: Path) -> None:
    index, table = folder / "other", pq.read_table(built / "c.parquet")
    pq.write_table(table, folder / "c.parquet")
    build(built, folder, out=str(index))
    before = migrate(built, folder, index=str(index), rows=1_000, bridge=True)
    asked = UpdateConfig(index=str(index))
    assert update_index(asked).up_to_date
    new = pa.table({"id": ["new"], "text": ["the new king of the small river"]})
    pq.write_table(pa.concat_tables([table.slice(500), new]), folder / "c.parquet")
    plan, report = plan_update(asked), update_index(asked)
    assert plan["rows"] == report.changes.to_json()
    assert (plan["rows"]["new"], plan["rows"]["deleted"]) == (1, 500)
    # Only the new row, by the new model.
    assert plan["to_encode"] == report.encoded.counts.encoded == 1
    hits = open_index(index).search(["the new king of the small river"])[0]
    assert hits[0].id == "new"
    assert update_index(asked).up_to_date
    again = migrate(built, folder, index=str(index), rows=1, bridge=True)
    assert again.rows == ROWS - 499
    assert again.encoded > before.encoded - 500
    assert migrate(built, folder, index=str(index)).finished
    build(built, folder, out=str(folder / "fresh"), store=None, layers=(1,))
    texts = texts_of(built)[:1_000:20]
    assert neighbours(index, texts) == neighbours(folder / "fresh", texts)


def test_the_old_index_is_updated_in_the_course_of_a_migration(built: Path, folder: Path) -> None:
    index, table = folder / "other", pq.read_table(built / "c.parquet")
    pq.write_table(table, folder / "c.parquet")
    build(built, folder, out=str(index))
    assert migrate(built, folder, index=str(index), rows=1_000).encoded >= 1_000
    new = pa.table({"id": ["new"], "text": ["the new king of the small river"]})
    pq.write_table(pa.concat_tables([table.slice(500), new]), folder / "c.parquet")
    # A job of every night goes on, which removes what no version needs.
    (folder / "job.toml").write_text(f'index = "{index}"\nkeep-versions = 1\n')
    code, events = night(folder / "job.toml")
    assert (code, events[-1]["rows"]["new"]) == (0, 1), events
    assert migrate(built, folder, index=str(index), rows=500, bridge=True).rows == ROWS - 499
    opened = open_index(index, rerank=20, rerank_by="embeddings")
    code, events = night(folder / "job.toml")
    assert (code, events[-1]["event"]) == (0, "up_to_date")
    pq.write_table(pa.concat_tables([table.slice(600), new]), folder / "c.parquet")
    code, events = night(folder / "job.toml")
    assert (code, events[-1]["rows"]["deleted"]) == (0, 100), events
    assert migrate(built, folder, index=str(index)).finished
    assert opened.search(["the new king of the small river"])[0][0].id == "new"
    build(built, folder, out=str(folder / "fresh"), store=None, layers=(1,))
    texts = texts_of(built)[600::50]
    assert neighbours(index, texts) == neighbours(folder / "fresh", texts)


def test_back_to_a_bridged_version_and_on_again(built: Path, folder: Path) -> None:
    def published() -> list[str]:
        return [each.name for each in list_versions(folder / "index") if each.published]

    old = published()
    bridged = migrate(built, folder, rows=1_000, bridge=True)
    # The migration goes on from the version of the old model, which stays.
    manifest = folder / "index" / "versions" / str(bridged.version) / "manifest.json"
    sound = manifest.read_bytes()
    manifest.write_bytes(sound.replace(b'"rows"', b'"rovs"', 1))
    assert run("prune", folder / "index", "--keep", 1)[0] == 5
    manifest.write_bytes(sound)
    assert run("prune", folder / "index", "--keep", 1)[0] == 0
    assert [each.name for each in list_versions(folder / "index")] == [bridged.version, *old]
    finished = migrate(built, folder)
    assert run("rollback", folder / "index")[0] == 0
    assert published() == [bridged.version]
    assert update_index(UpdateConfig(index=str(folder / "index"))).up_to_date
    # A version of the new model is there, as after a run that was killed before it published.
    again = migrate(built, folder)
    assert again.finished
    assert published() == [again.version] != [bridged.version]
    assert again.version.partition("-")[2] == finished.version.partition("-")[2]


def test_a_migration_goes_back_to_where_it_began(built: Path, folder: Path) -> None:
    """A corpus that became again what it was is published as the version that it was."""
    index, whole = folder / "index", pq.read_table(built / "c.parquet")
    (old,) = (each.name for each in list_versions(index))
    pq.write_table(whole.slice(0, 2_900), folder / "less.parquet")
    update_index(UpdateConfig(index=str(index), corpus=(str(folder / "less.parquet"),)))
    build(built, folder, corpus=str(built / "c.parquet"))
    assert [each.name for each in list_versions(index) if each.published] == [old]
    bridged = migrate(built, folder, rows=1_000, bridge=True).version
    assert run("prune", index, "--keep", 1)[0] == 0
    assert [each.name for each in list_versions(index)] == [bridged, old]


@pytest.mark.parametrize("how", ["rolled back", "damaged"])
def test_a_version_that_was_rolled_back_or_damaged_is_no_way_back(
    built: Path, folder: Path, how: str
) -> None:
    index = folder / "index"
    (old,) = (each.name for each in list_versions(index))
    pq.write_table(pq.read_table(built / "c.parquet").slice(0, 2_900), folder / "less.parquet")
    corpus = (str(folder / "less.parquet"),)
    unwanted = update_index(UpdateConfig(index=str(index), corpus=corpus)).version
    if how == "rolled back":
        rollback(index)
    bridged = migrate(built, folder, rows=1_000, bridge=True).version
    if how == "damaged":
        os.truncate(index / "versions" / unwanted / "index.faiss", 100)
    assert run("prune", index, "--keep", 1)[0] == 0
    assert [each.name for each in list_versions(index)] == [bridged, old]
    assert run("migrate", index, "--store", folder / "store", "--give-up")[0] == 0
    assert [each.name for each in list_versions(index) if each.published] == [old]


def judged(built: Path, folder: Path) -> dict[str, str]:
    rows, texts = list(range(600, 1_000, 10)), texts_of(built)
    queries = {"id": [f"q{row}" for row in rows], "text": [texts[row] for row in rows]}
    pq.write_table(pa.table(queries), folder / "q.parquet")
    lines = [f"q{row}\t0\td{row}\t1" for row in rows]
    (folder / "q.qrels").write_text("\n".join(lines) + "\n")
    return {"queries": str(folder / "q.parquet"), "qrels": str(folder / "q.qrels")}


def test_a_model_that_loses_is_not_published(built: Path, folder: Path) -> None:
    given = judged(built, folder)
    before = json.loads((folder / "index/CURRENT").read_text())
    # Its prompt is all that a text of eight tokens has room for.
    worse = {"document_prompt": "the cat sat on the ", "max_length": 8}
    said = r"may lose more than 1 points of ndcg@10: 100\.00 before.*, of which '.*' 100 → \d+"
    with pytest.raises(GateError, match=said):
        migrate(built, folder, **given, **worse, max_loss=1.0)
    assert json.loads((folder / "index/CURRENT").read_text()) == before
    report = migrate(built, folder, **given, max_loss=1.0)
    assert report.comparison["old"] == report.comparison["new"] == 100
    assert report.finished


def test_rows_that_a_condition_selects_come_first(built: Path, folder: Path) -> None:
    chosen = {"rows": 2_000, "first": "id >= 'd29'"}
    wanted = pq.read_table(built / "c.parquet").filter(pc.field("id") >= "d29").num_rows
    assert migrate(built, folder, **chosen).encoded == wanted
    # All of them are there, so that others follow.
    assert migrate(built, folder, **chosen).encoded >= wanted + 1_000
    with pytest.raises(ConfigError, match="--first is for runs of --rows N"):
        migrate(built, folder, first="id >= 'd29'")


def test_sentences_compare_where_there_are_no_judgements(built: Path, tmp_path: Path) -> None:
    texts = texts_of(built)
    documents = [". ".join(texts[row : row + 4]) + "." for row in range(0, 1_200, 4)]
    ids = [f"d{row}" for row in range(len(documents))]
    pq.write_table(pa.table({"id": ids, "text": documents}), tmp_path / "c.parquet")
    build(built, tmp_path)
    before = json.loads((tmp_path / "index/CURRENT").read_text())
    worse = {"document_prompt": "the cat sat on the mat dog ran to ", "max_length": 20}
    # Already the first rows tell, before all are paid for.
    with pytest.raises(GateError, match="may lose more than 1 points of MRR"):
        migrate(built, tmp_path, **worse, rows=100, max_loss=1.0)
    assert json.loads((tmp_path / "index/CURRENT").read_text()) == before
    report = migrate(built, tmp_path, max_loss=100.0)
    assert report.finished
    assert report.comparison["measure"] == "MRR"
    assert 100 <= report.comparison["queries"] <= 300
    least, greatest = report.comparison["interval"]
    assert least < report.comparison["new"] - report.comparison["old"] < greatest
    changed = report.comparison["changed_most"]
    apart = [each["new"] - each["old"] for each in changed]
    assert sorted(apart[:5]) == apart[:5]
    assert apart[0] < 0 < apart[-1]
    assert {each["query"] for each in changed} <= {f"{text}." for text in texts}


def test_what_is_wrong_is_said_before_rows_are_encoded(built: Path, folder: Path) -> None:
    def rows() -> int:
        return sum(1 for path in (folder / "store").rglob("segments/*"))

    before = rows()
    missing = {"queries": str(folder / "q.jsonl"), "qrels": str(folder / "r.tsv")}
    for wrong, said in (({"k": 999}, "999"), (missing, "q.jsonl")):
        with pytest.raises(WhitenIndexError, match=said):
            migrate(built, folder, **wrong)
    assert rows() == before


def test_a_corpus_that_shrank_is_migrated_if_that_is_meant(built: Path, folder: Path) -> None:
    table = pq.read_table(built / "c.parquet")
    pq.write_table(table, folder / "c.parquet")
    build(built, folder, out=str(folder / "other"))
    pq.write_table(table.slice(0, 1_000), folder / "c.parquet")
    with pytest.raises(GateError, match="add --force"):
        migrate(built, folder, index=str(folder / "other"))
    assert migrate(built, folder, index=str(folder / "other"), force=True).rows == 1_000


def test_what_cannot_be_migrated_says_so(built: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="say to which model: --model NAME"):
        migrate(built, folder, model=None)
    # Its texts are of one sentence.
    with pytest.raises(CorpusError, match=r"too short to cut .* add --queries and --qrels"):
        migrate(built, folder, max_loss=1.0)
    (folder / "files").mkdir()
    for number in range(10):
        part = pq.read_table(built / "c.parquet").slice(20 * number, 20)
        pq.write_table(part, folder / f"files/{number}.parquet")
    config = BuildConfig(
        corpus=str(folder / "files"), text_columns="text", model=str(built / "model"),
        pooling="mean", out=str(folder / "few"), whiten="pca", k=8, device="cpu",
    )  # fmt: skip
    build_index(config)
    few = {"index": str(folder / "few"), "store": None, "rows": 1, "bridge": True}
    with pytest.raises(CorpusError, match="are needed; encode more with --rows"):
        migrate(built, folder, **few)


def test_the_command(built: Path, folder: Path) -> None:
    places = ("--store", folder / "store", "--model", built / "model")
    command = ("migrate", folder / "index", *places, "--layers", "1", "--device", "cpu")
    code, out, err = run(*command, "--rows", "1000", "--bridge")
    assert code == 0, err
    assert "of 3,000 rows are encoded by the new model" in out
    assert "run the same command again to continue" in out
    assert run("verify", folder / "index")[0] == 0
    gc_store(folder / "store", keep_days=0)
    facts = json.loads(run("inspect", folder / "index", "--json")[1])["migration"]
    assert (facts["from"], facts["to"], facts["rows"]) == ("model", "model", ROWS)
    assert 1_000 <= facts["encoded"] < ROWS
    assert facts["bridge"]["kind"] in ("ridge", "orthogonal")
    assert 0.3 < facts["bridge"]["agreement"] <= 1
    assert "migration" in run("inspect", folder / "index")[1]
    assert run("search", folder / "index", "the cat", "--device", "cpu")[0] == 0
    code, out, err = run(*command, "--json")
    assert (code, json.loads(out)["finished"]) == (0, True), err
    assert "migration" not in json.loads(run("inspect", folder / "index", "--json")[1])


def test_inspect_tells_how_far_a_run_is(built: Path, folder: Path) -> None:
    index, found = folder / "other", list[dict[str, Any]]()
    build(built, folder, out=str(index), corpus=str(built / "c.parquet"))

    def inspected() -> Any:
        code, out, err = run("inspect", index, "--json")
        assert code == 0, err
        return json.loads(out).get("migration")

    class SecondTerminal(Progress):
        def advance(self, rows: int) -> None:
            found.append(inspected())

    assert inspected() is None
    given: dict[str, Any] = {"model": str(built / "model"), "pooling": "mean", "layers": (1,)}
    config = MigrateConfig(index=str(index), rows=3_000, device="cpu", **given)
    migrate_index(config, progress=SecondTerminal())
    counts = [each["encoded"] for each in found if each]
    assert counts == sorted(counts)
    assert {0, 1_024, 2_048} <= {*counts}
    assert {each["rows"] for each in found if each} == {ROWS}
    since = datetime.datetime.fromisoformat(found[-1]["since"])
    assert datetime.timedelta(0) < datetime.datetime.now(datetime.UTC) - since
    assert re.search(rf"since +{re.escape(found[-1]['since'])}", run("inspect", index)[1])
    migrate_index(replace(config, rows=None))
    assert inspected() is None


def test_a_plan_writes_nothing(built: Path, folder: Path) -> None:
    before = sorted(path for path in folder.rglob("*"))
    places = ("--store", folder / "store", "--model", built / "model")
    code, out, err = run("migrate", folder / "index", *places, "--layers", "1", "--plan", "--json")
    assert code == 0, err
    assert json.loads(out)["to_encode"] == ROWS
    assert sorted(path for path in folder.rglob("*")) == before


def test_a_corpus_that_changes_in_the_course_of_a_migration(built: Path, folder: Path) -> None:
    table = pq.read_table(built / "c.parquet")
    pq.write_table(table, folder / "c.parquet")
    build(built, folder, out=str(folder / "other"))
    assert not migrate(built, folder, index=str(folder / "other"), rows=1_000, bridge=True).finished
    new = pa.table({"id": ["new"], "text": ["the new king of the small river"]})
    pq.write_table(pa.concat_tables([table.slice(500), new]), folder / "c.parquet")
    report = migrate(built, folder, index=str(folder / "other"), rows=ROWS, **judged(built, folder))
    assert (report.finished, report.rows, report.encoded) == (True, ROWS - 499, ROWS - 499)
    assert report.comparison["queries"] >= 30
    hits = open_index(folder / "other").search(["the new king of the small river"])[0]
    assert hits[0].id == "new"
