"""Runs of a migration: bridged versions, updates in between, the way back."""

import os
import shutil
from typing import Any

import numpy as np
import pytest

from tests.helpers.bad_input import ends, night, run, succeed
from tests.helpers.flipped import flip
from tests.pipeline.migrating import NEW, ROWS, Migration
from whiten_index import UpdateConfig, list_versions, load_encoder, open_index, update_index
from whiten_index.errors import ArtifactError
from whiten_index.pipeline.plan import plan_update
from whiten_index.versions.published import read_published
from whiten_index.versions.retention import rollback
from whiten_index.whitening.bridge import Bridge, joint_moments


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


def test_a_bridged_version_answers_queries_of_the_new_model(migration: Migration) -> None:
    report = migration.run(rows=1_000, bridge=True)
    assert (report.finished, report.rows) == (False, ROWS)
    assert 1_000 <= report.encoded < ROWS
    texts = migration.texts()[::30]
    bridged = migration.neighbours(migration.index, texts)
    encoder = load_encoder(
        str(migration.built / "model"), pooling="mean", layers=(1,), device="cpu"
    )
    assert open_index(migration.index).encoder.spec.fingerprint == encoder.spec.fingerprint
    # All rows are there once, and most of what is near by the new model is found.
    migration.run()
    finished = migration.neighbours(migration.index, texts)
    shared = [len(one & other) / 10 for one, other in zip(bridged, finished, strict=True)]
    # By chance it would be 1 in 300. The last version is centred, a bridged one is not.
    assert np.mean(shared) > 0.5
    # Readers may have the bridged version open until the next run.
    assert len(migration.bridged()) == 1
    migration.run()
    assert not migration.bridged()


@pytest.mark.parametrize("kind", ["none", "pca", "auto"])
def test_the_transform_of_a_bridged_version(migration: Migration, kind: str) -> None:
    index, k = migration.folder / "other", None if kind == "none" else 8
    migration.build(out=index, whiten=kind, k=k)
    made = list[Any]()
    for options in ({"rows": 500, "bridge": True}, {}):
        made.append(read_published(index).fields["whitening"])
        migration.run(index=index, **options)
    made.append(read_published(index).fields["whitening"])
    old, bridged, new = made
    for each in ("kind", "k", "exponent"):
        assert bridged[each] == old[each]
    # The common mean of mapped and new rows would set them apart.
    assert (bridged["center"], new["kind"]) == (False, old["kind"])
    assert new["center"] == (kind != "none") or kind == "auto"


def test_an_update_of_a_bridged_version_without_its_store(migration: Migration) -> None:
    index = migration.index
    migration.run(rows=500, bridge=True)
    (bridged,) = migration.bridged()
    shutil.rmtree(bridged)
    with pytest.raises(
        ArtifactError, match=r"to make another, run whiten-index migrate again .* or give"
    ):
        update_index(UpdateConfig(index=str(index)))
    migration.run(rows=500, bridge=True)
    assert update_index(UpdateConfig(index=str(index))).up_to_date


def test_a_migration_that_was_rolled_back_is_finished_again(migration: Migration) -> None:
    index, table = migration.build_own(), migration.table()
    migration.run(index=index, rows=500, bridge=True)
    migration.run(index=index)
    rollback(index)
    migration.write(table.slice(500))
    # Published after the version of the new model, which is withdrawn.
    update_index(UpdateConfig(index=str(index)))
    report = migration.run(index=index)
    assert (report.finished, report.rows) == (True, ROWS - 500)
    assert [each.name for each in list_versions(index) if each.published] == [report.version]


def test_runs_add_up_to_a_build_by_the_new_model(migration: Migration) -> None:
    counts = [migration.run(rows=500, bridge=True).encoded for _ in range(2)]
    assert counts[0] < counts[1] < ROWS
    report = migration.run()
    assert report.finished
    assert report.encoded == ROWS
    migration.assert_as_built(migration.index, migration.texts()[:50])
    # Four versions: the old one, two bridged ones, the new one.
    assert [each.published for each in list_versions(migration.index)] == [True, *[False] * 3]
    assert update_index(UpdateConfig(index=str(migration.index))).up_to_date
    again = migration.run()
    assert (again.finished, again.version) == (True, report.version)


def test_damaged_rows_of_the_new_model_are_encoded_again(migration: Migration) -> None:
    before = {path.name for path in migration.store.iterdir()}
    encoded = migration.run(rows=1_000).encoded
    (new,) = (path for path in migration.store.iterdir() if path.name not in before)
    damaged = sorted(new.glob("segments/*/embeddings.safetensors"))[0]
    flip(damaged)
    # They do not count, and a bridge is fitted on the others.
    assert not migration.run(rows=1, bridge=True).finished
    assert migration.run(rows=1, bridge=True).encoded > encoded
    assert migration.run().finished
    succeed("verify", migration.index, migration.store)


def test_an_update_of_a_bridged_version(migration: Migration) -> None:
    index, table = migration.build_own(), migration.table()
    before = migration.run(index=index, rows=1_000, bridge=True)
    asked = UpdateConfig(index=str(index))
    assert update_index(asked).up_to_date
    migration.write(table.slice(500), NEW)
    plan, report = plan_update(asked), update_index(asked)
    assert plan["rows"] == report.changes.to_json()
    assert (plan["rows"]["new"], plan["rows"]["deleted"]) == (1, 500)
    # Only the new row, by the new model.
    assert plan["to_encode"] == report.encoded.counts.encoded == 1
    assert open_index(index).search([NEW])[0][0].id == NEW
    assert update_index(asked).up_to_date
    again = migration.run(index=index, rows=1, bridge=True)
    assert again.rows == ROWS - 499
    assert again.encoded > before.encoded - 500
    assert migration.run(index=index).finished
    migration.assert_as_built(index, migration.texts()[:1_000:20])


def test_the_old_index_is_updated_in_the_course_of_a_migration(migration: Migration) -> None:
    index, table = migration.build_own(), migration.table()
    assert migration.run(index=index, rows=1_000).encoded >= 1_000
    migration.write(table.slice(500), NEW)
    # A job of every night goes on, which removes what no version needs.
    job = migration.folder / "job.toml"
    job.write_text(f'index = "{index}"\nkeep-versions = 1\n')
    code, events = night(job)
    assert (code, events[-1]["rows"]["new"]) == (0, 1), events
    assert migration.run(index=index, rows=500, bridge=True).rows == ROWS - 499
    opened = open_index(index, rerank=20, rerank_by="embeddings")
    ends(0, "up_to_date", job)
    migration.write(table.slice(600), NEW)
    code, events = night(job)
    assert (code, events[-1]["rows"]["deleted"]) == (0, 100), events
    assert migration.run(index=index).finished
    assert opened.search([NEW])[0][0].id == NEW
    migration.assert_as_built(index, migration.texts()[600::50])


def test_back_to_a_bridged_version_and_on_again(migration: Migration) -> None:
    old = migration.published()
    bridged = migration.run(rows=1_000, bridge=True)
    # The migration goes on from the version of the old model, which stays.
    manifest = migration.index / "versions" / str(bridged.version) / "manifest.json"
    sound = manifest.read_bytes()
    manifest.write_bytes(sound.replace(b'"rows"', b'"rovs"', 1))
    assert run("prune", migration.index, "--keep", 1)[0] == 5
    manifest.write_bytes(sound)
    assert run("prune", migration.index, "--keep", 1)[0] == 0
    assert migration.versions() == [bridged.version, old]
    finished = migration.run()
    assert run("rollback", migration.index)[0] == 0
    assert migration.published() == bridged.version
    assert update_index(UpdateConfig(index=str(migration.index))).up_to_date
    # A version of the new model is there, as after a run that was killed before it published.
    again = migration.run()
    assert again.finished
    assert migration.published() == again.version != bridged.version
    assert again.version.partition("-")[2] == finished.version.partition("-")[2]


def test_a_migration_goes_back_to_where_it_began(migration: Migration) -> None:
    """A corpus that became again what it was is published as the version that it was."""
    index = migration.index
    (old,) = migration.versions()
    update_index(UpdateConfig(index=str(index), corpus=(migration.less(2_900),)))
    migration.build()
    assert migration.published() == old
    bridged = migration.run(rows=1_000, bridge=True).version
    assert run("prune", index, "--keep", 1)[0] == 0
    assert migration.versions() == [bridged, old]


@pytest.mark.parametrize("how", ["rolled back", "damaged"])
def test_a_version_that_was_rolled_back_or_damaged_is_no_way_back(
    migration: Migration, how: str
) -> None:
    index = migration.index
    (old,) = migration.versions()
    corpus = (migration.less(2_900),)
    unwanted = update_index(UpdateConfig(index=str(index), corpus=corpus)).version
    if how == "rolled back":
        rollback(index)
    bridged = migration.run(rows=1_000, bridge=True).version
    if how == "damaged":
        os.truncate(index / "versions" / unwanted / "index.faiss", 100)
    assert run("prune", index, "--keep", 1)[0] == 0
    assert migration.versions() == [bridged, old]
    assert run("migrate", index, "--store", migration.store, "--give-up")[0] == 0
    assert migration.published() == old
