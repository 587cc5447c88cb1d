"""A migration of an index in a bucket, each of its runs on a machine without copies."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import tiny_models
from tests.helpers.bad_input import run, succeed
from tests.objects.helpers import keys
from whiten_index import (
    BuildConfig,
    MigrateConfig,
    UpdateConfig,
    build_index,
    migrate_index,
    open_index,
    update_index,
)
from whiten_index.errors import ArtifactError, ConfigError, StorageError
from whiten_index.versions.gc import gc_store
from whiten_index.versions.retention import rollback

pytestmark = pytest.mark.service

WORDS = ("the", "cat", "sat", "on", "mat", "dog", "ran", "to", "small", "river", "sang", "king")


def test_each_run_on_another_machine(s3: Any, bucket: str, machine: Any, tmp_path: Path) -> None:
    out, rng = f"s3://{bucket}/index", np.random.default_rng(0)
    tiny_models.bert(tmp_path / "model")
    texts = [f"{' '.join(rng.choice(WORDS, 6))} {row}" for row in range(1_500)]
    table = pa.table({"id": [f"d{row}" for row in range(len(texts))], "text": texts})
    pq.write_table(table, tmp_path / "c.parquet")
    model: dict[str, Any] = {"model": str(tmp_path / "model"), "pooling": "mean", "device": "cpu"}
    options: dict[str, Any] = {
        "corpus": str(tmp_path / "c.parquet"), "text_columns": "text", "id_column": "id",
        "whiten": "pca", "k": 16, "factory": "Flat", **model,
    }  # fmt: skip
    build_index(BuildConfig(**options, out=out))
    new = {"index": out, **model, "layers": (1,)}
    machine("second")
    first = migrate_index(MigrateConfig(**new, rows=1_000, bridge=True))
    assert (first.finished, first.rows) == (False, 1_500)
    machine("third")
    inspected = succeed("inspect", out, "--json")
    assert json.loads(inspected)["migration"]["encoded"] == first.encoded
    pq.write_table(table.slice(100), tmp_path / "c.parquet")
    assert update_index(UpdateConfig(index=out)).changes is not None
    machine("fourth")
    assert migrate_index(MigrateConfig(**new)).finished
    found = open_index(out, rerank=20).search(texts[100::50])
    build_index(BuildConfig(**{**options, "layers": (1,)}, out=str(tmp_path / "fresh")))
    alike = open_index(tmp_path / "fresh").search(texts[100::50])
    assert [[hit.id for hit in hits][:1] for hits in found] == [
        [hit.id for hit in hits][:1] for hits in alike
    ]
    rollback(out)
    machine("fifth")
    assert migrate_index(MigrateConfig(**new)).rows == 1_400
    # As it is after the index was moved: the name of the store is that of another.
    left = [key for key in keys(s3, bucket) if ".bridged-" in key]
    for key in left:
        moved = re.sub(r"bridged-\w+", f"bridged-{16 * '0'}", key)
        s3.copy_object(Bucket=bucket, Key=moved, CopySource=f"{bucket}/{key}")
    # A machine has no folder by which it would know the store of another.
    machine("sixth")
    assert migrate_index(MigrateConfig(**new)).finished
    kept = [key for key in keys(s3, bucket) if ".bridged-" in key]
    assert len(kept) == len(left) > 0
    assert all(f".bridged-{16 * '0'}/" in key for key in kept)
    machine("cleaner")
    assert gc_store(f"{out}/store").bridged == 0
    # What cannot be read may name it.
    (damaged,) = (
        key
        for key in keys(s3, bucket, f"index/versions/{first.version}/")
        if key.endswith("/manifest.json")
    )
    whole = s3.get_object(Bucket=bucket, Key=damaged)["Body"].read()
    s3.put_object(Bucket=bucket, Key=damaged, Body=whole[:-9])
    with pytest.raises(ArtifactError, match="does not say which rows"):
        gc_store(f"{out}/store")
    s3.put_object(Bucket=bucket, Key=damaged, Body=whole)
    machine("seventh")
    assert run("prune", out, "--keep", 1)[0] == 0
    assert kept == [key for key in keys(s3, bucket) if ".bridged-" in key]
    code, said, _ = run("gc", out, "--json")
    assert (code, json.loads(said)["bridged"]) == (0, 1)
    assert not [key for key in keys(s3, bucket) if ".bridged-" in key]
    assert run("verify", out)[0] == 0


def build_small(folder: Path, store: str) -> dict[str, Any]:
    """Build an index in a folder; return the options of a migration of it."""
    tiny_models.bert(folder / "model")
    table = pa.table({"text": [f"the cat sat on {row}" for row in range(60)]})
    pq.write_table(table, folder / "c.parquet")
    model: dict[str, Any] = {"model": str(folder / "model"), "pooling": "mean", "device": "cpu"}
    build = BuildConfig(
        corpus=str(folder / "c.parquet"), text_columns="text", whiten="pca", k=8,
        out=str(folder / "index"), store=store, **model,
    )  # fmt: skip
    build_index(build)
    return {"index": str(folder / "index"), **model, "layers": (1,)}


def test_a_store_without_a_prefix_has_no_room_for_a_bridged_one(
    bucket: str, tmp_path: Path
) -> None:
    new = build_small(tmp_path, f"s3://{bucket}")
    with pytest.raises(ConfigError, match=f"all of bucket {bucket}, .* leave out --bridge"):
        migrate_index(MigrateConfig(**new, rows=20, bridge=True))
    assert migrate_index(MigrateConfig(**new, rows=20)).encoded == 60


def test_an_account_that_may_not_list_the_place_above_the_store(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"s3://{bucket}/store"
    new = build_small(tmp_path, store)
    from obstore.exceptions import PermissionDeniedError

    denied = PermissionDeniedError("<Code>AccessDenied</Code>")
    monkeypatch.setattr("obstore.list_with_delimiter", Mock(side_effect=denied))
    for _ in range(2):
        assert migrate_index(MigrateConfig(**new)).finished
    # What it cannot see may be there.
    with pytest.raises(StorageError, match=r"cannot list .* permission is denied"):
        gc_store(store)
