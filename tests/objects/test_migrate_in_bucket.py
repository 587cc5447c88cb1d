"""A migration of an index in a bucket, each of its runs on a machine without copies."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import tiny_models
from tests.helpers.bad_input import fails, run, succeed
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
from whiten_index.artifacts.object_store import Bucket
from whiten_index.errors import ArtifactError, StorageError
from whiten_index.versions.gc import gc_store
from whiten_index.versions.retention import rollback

pytestmark = pytest.mark.service

WORDS = ("the", "cat", "sat", "on", "mat", "dog", "ran", "to", "small", "river", "sang", "king")


def test_each_run_on_another_machine(
    s3: Any, bucket: str, machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    # It goes on where index and store moved together.
    for key in keys(s3, bucket, "index/"):
        s3.copy_object(Bucket=bucket, Key=f"moved/{key}", CopySource=f"{bucket}/{key}")
        s3.delete_object(Bucket=bucket, Key=key)
    before, out = out, f"s3://{bucket}/moved/index"
    machine("mover")
    assert gc_store(f"{out}/store", forget=[before], keep_days=0).segments == 0
    new["index"] = out
    pq.write_table(table.slice(100), tmp_path / "c.parquet")
    assert update_index(UpdateConfig(index=out, store=f"{out}/store")).changes is not None
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
    left = bridged(s3, bucket)
    assert left
    machine("cleaner")
    assert gc_store(f"{out}/store").bridged == 0
    # What cannot be read may name it.
    (damaged,) = (
        key
        for key in keys(s3, bucket, f"moved/index/versions/{first.version}/")
        if key.endswith("/manifest.json")
    )
    whole = s3.get_object(Bucket=bucket, Key=damaged)["Body"].read()
    s3.put_object(Bucket=bucket, Key=damaged, Body=whole[:-9])
    with pytest.raises(ArtifactError, match="does not say which rows"):
        gc_store(f"{out}/store")
    s3.put_object(Bucket=bucket, Key=damaged, Body=whole)
    machine("seventh")
    assert run("prune", out, "--keep", 1)[0] == 0
    assert bridged(s3, bucket) == left
    real, gone = Bucket.delete, list[str]()

    def fail(there: Bucket, key: str) -> None:
        if ".marks" not in key and len(gone) > 2:
            raise StorageError("the server is gone")
        real(there, key)
        gone.append(key)

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "delete", fail)
        fails(7, "server is gone", "gc", out)
    assert json.loads(succeed("gc", out, "--json"))["bridged"] == 1
    assert not bridged(s3, bucket)
    assert run("verify", out)[0] == 0


def bridged(s3: Any, bucket: str) -> list[str]:
    """Return the objects of the rows of bridged versions."""
    return keys(s3, bucket, "moved/index/store/bridged-")


def test_a_store_that_is_a_whole_bucket(bucket: str, tmp_path: Path) -> None:
    tiny_models.bert(tmp_path / "model")
    table = pa.table({"text": [f"the cat sat on {row}" for row in range(1_500)]})
    pq.write_table(table, tmp_path / "c.parquet")
    model: dict[str, Any] = {"model": str(tmp_path / "model"), "pooling": "mean", "device": "cpu"}
    build = BuildConfig(
        corpus=str(tmp_path / "c.parquet"), text_columns="text", whiten="pca", k=8,
        out=str(tmp_path / "index"), store=f"s3://{bucket}", **model,
    )  # fmt: skip
    build_index(build)
    new = {"index": str(tmp_path / "index"), **model, "layers": (1,)}
    assert migrate_index(MigrateConfig(**new, rows=1_000, bridge=True)).bridge
    assert migrate_index(MigrateConfig(**new)).finished
    assert run("prune", tmp_path / "index", "--keep", 1)[0] == 0
    assert gc_store(f"s3://{bucket}").bridged == 1
