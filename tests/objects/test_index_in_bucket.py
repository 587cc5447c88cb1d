"""Builds whose corpus, store and index are in a bucket, and searches of what they publish."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.choosing_helpers import Place
from tests.objects.helpers import OPTIONS, ROWS, SHARDS, build, corpus_file, hits, keys, put_corpus
from whiten_index import BuildConfig, build_index, open_index
from whiten_index.build import BuildReport
from whiten_index.cli import cli
from whiten_index.encode import encode_corpus
from whiten_index.errors import ArtifactError, BusyError, ConfigError, StorageError
from whiten_index.index.library import load_faiss
from whiten_index.index.vectors import vectors_of
from whiten_index.plan import plan_build
from whiten_index.update import UpdateConfig, update_index
from whiten_index.upkeep import gc_store, verify_paths
from whiten_index.versions import list_versions, rollback

pytestmark = pytest.mark.service


def vectors(place: Path | str) -> Any:
    bundle = open_index(place).bundle
    inner = load_faiss().downcast_index(bundle.index.index)
    found = np.asarray(vectors_of(inner, range(len(bundle))), dtype=np.float64)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


@pytest.mark.parametrize("prefix", ["p", "with spaces/Ümläute/日本"])
def test_the_same_as_in_folders(
    s3: Any, bucket: str, machine: Any, tmp_path: Path, prefix: str
) -> None:
    corpus = put_corpus(s3, bucket, "corpus/part 1.parquet")
    out, store = f"s3://{bucket}/{prefix}/index", f"s3://{bucket}/{prefix}/raw"
    there = build(corpus, out=out, store=store)
    here = build(corpus_file(tmp_path / "c.parquet"), out=str(tmp_path / "index"))

    assert there.encoded.counts.to_json() == here.encoded.counts.to_json()
    assert there.to_json()["out"] == out
    assert there.to_json()["store"] == store
    assert (vectors(out) * vectors(tmp_path / "index")).sum(axis=1).min() >= 0.99999
    assert hits(out) == hits(tmp_path / "index")
    assert hits(out, rerank=20) == hits(tmp_path / "index", rerank=20)
    machine("second")
    assert hits(out) == hits(tmp_path / "index")
    assert hits(out, rerank=20) == hits(tmp_path / "index", rerank=20)
    titles = [hit.columns["title"] for hit in open_index(out).search_like(7, top_k=3)]
    assert titles == [
        hit.columns["title"] for hit in open_index(tmp_path / "index").search_like(7, top_k=3)
    ]


def test_manifests_name_the_bucket_and_never_the_copies(
    s3: Any, bucket: str, machine: Any, tmp_path: Path
) -> None:
    out = f"s3://{bucket}/index"
    report = build(corpus_file(tmp_path / "c.parquet"), out=out)
    assert report.manifest["store"] == f"{out}/store"
    assert report.manifest["config"]["out"] == out
    cache = str(machine("first")).encode()
    for key in keys(s3, bucket):
        if key.endswith((".json", "CURRENT")):
            assert cache not in s3.get_object(Bucket=bucket, Key=key)["Body"].read(), key
    assert any(key.startswith("index/store/") for key in keys(s3, bucket))


def test_another_machine_goes_on_with_what_is_there(
    s3: Any, bucket: str, machine: Any, tmp_path: Path
) -> None:
    corpus = corpus_file(tmp_path / "c.parquet")
    out = f"s3://{bucket}/index"
    first = build(corpus, out=out)
    machine("second")
    again = build(corpus, out=out)
    assert again.up_to_date
    assert again.version == first.version
    assert again.encoded.counts.encoded == 0
    machine("third")
    alone = build_index(
        BuildConfig(store=f"{out}/store", out=f"s3://{bucket}/other", k=4, whiten="pca")
    )
    assert alone.encoded.record.rows == SHARDS * ROWS


def test_a_changed_corpus_is_a_new_version(
    s3: Any, bucket: str, machine: Any, tmp_path: Path
) -> None:
    out = f"s3://{bucket}/index"
    build(corpus_file(tmp_path / "c.parquet"), out=out)
    opened = open_index(out)
    assert not opened.reload()
    machine("second")
    more = build(corpus_file(tmp_path / "c.parquet", shards=SHARDS + 1), out=out)
    assert more.encoded.counts.encoded == ROWS
    assert more.version.startswith("000002-")
    assert opened.reload()
    assert len(opened) == (SHARDS + 1) * ROWS
    back = build(corpus_file(tmp_path / "c.parquet"), out=out)
    assert back.version.startswith("000001-")
    assert len(open_index(out)) == SHARDS * ROWS


def test_a_second_opening_compares_and_downloads_nothing(
    s3: Any, bucket: str, machine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = f"s3://{bucket}/index"
    build(corpus_file(tmp_path / "c.parquet"), out=out)
    machine("second")
    caplog.set_level("INFO", logger="werkzeug")
    open_index(out)
    assert sum("GET" in line for line in caplog.messages) > 3
    caplog.clear()
    open_index(out)
    assert len(caplog.messages) == 2
    assert "/index/CURRENT" in caplog.messages[0]
    assert "list-type=2&prefix=index/versions/" in caplog.messages[1]


def test_of_two_builds_at_once_one_is_published(
    s3: Any, bucket: str, machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one publishes between the first one's look at what there is and its own."""
    from whiten_index import build as room

    out, store = f"s3://{bucket}/index", f"s3://{bucket}/store"
    corpus, other = (corpus_file(tmp_path / f"{seed}.parquet", seed=seed) for seed in (0, 1))
    real, second = room.embeddings, []

    def overtaken(*arguments: Any) -> Any:
        encoded = real(*arguments)
        if not second:
            second.append(None)
            machine("second")
            second[0] = build(other, out=out, store=store)
            machine("first")
        return encoded

    monkeypatch.setattr(room, "embeddings", overtaken)
    with pytest.raises(BusyError, match="published by another build meanwhile") as raised:
        build(corpus, out=out, store=store)
    assert f"s3://{bucket}/index" in str(raised.value)
    for name in ("second", "third"):
        machine(name)
        assert open_index(out).bundle.version == second[0].version
    machine("first")
    again = build(corpus, out=out, store=store)
    assert again.encoded.counts.encoded == 0
    assert open_index(out).bundle.version == again.version


def test_two_processes_that_build_at_once(
    s3: Any, bucket: str, machine: Any, tmp_path: Path
) -> None:
    """Whichever comes first: what is published is one of them, and whole."""
    out = f"s3://{bucket}/index"
    children = []
    for seed in (0, 1, 2):
        corpus = corpus_file(tmp_path / f"{seed}.parquet", seed=seed, shards=SHARDS + seed)
        options = ("--embedding-column", "embedding", "--id-column", "id", "--k", "6")
        cache = {**os.environ, "WHITEN_INDEX_CACHE": str(tmp_path / f"cache{seed}")}
        command = (sys.executable, "-c", "from whiten_index.cli import main; main()", "build")
        children.append(subprocess.Popen((*command, corpus, *options, "--out", out), env=cache))
    ended = [child.wait() for child in children]
    assert set(ended) <= {0, 6}
    assert 0 in ended
    last = open_index(out)
    assert len(last) in [(SHARDS + seed) * ROWS for seed in (0, 1, 2) if ended[seed] == 0]
    assert len(list_versions(out)) >= ended.count(0)
    assert all(facts.sound == "" for facts in list_versions(out))


def test_the_same_build_on_two_machines_at_once(
    s3: Any, bucket: str, machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both make a version of one name, of files that differ: what is published is one of them."""
    from whiten_index import build as room

    corpus, out = corpus_file(tmp_path / "c.parquet"), f"s3://{bucket}/index"
    real, second = room.write_version, []

    def overtaken(*arguments: Any) -> Any:
        if not second:
            second.append(None)
            machine("second")
            second[0] = build(corpus, out=out)
            machine("first")
        return real(*arguments)

    monkeypatch.setattr(room, "write_version", overtaken)
    first = build(corpus, out=out)
    # The second one's, whose seconds are other ones.
    assert first.manifest == second[0].manifest
    for name in ("first", "second", "third"):
        machine(name)
        assert dict(open_index(out).bundle.manifest) == first.manifest
        assert build(corpus, out=out).up_to_date


def test_a_version_without_its_manifest_is_none(
    s3: Any, bucket: str, machine: Any, tmp_path: Path
) -> None:
    out = f"s3://{bucket}/index"
    first = build(corpus_file(tmp_path / "c.parquet"), out=out)
    key = f"index/versions/{first.version}/manifest.json"
    s3.delete_object(Bucket=bucket, Key=key)
    machine("second")
    with pytest.raises(
        ArtifactError, match=rf"version {first.version}, which {out} publishes, is missing"
    ):
        open_index(out)
    assert [facts.name for facts in list_versions(out)] == []
    again = build(corpus_file(tmp_path / "c.parquet"), out=out)
    assert not again.up_to_date
    assert hits(out)


def test_an_upload_that_was_cut_off_shows_nothing(
    s3: Any, bucket: str, machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whiten_index.objects.bucket import Bucket

    out = f"s3://{bucket}/index"
    first = build(corpus_file(tmp_path / "c.parquet"), out=out)
    real = Bucket.put

    def cut(self: Bucket, key: str, *rest: Any, **options: Any) -> None:
        if key.startswith("versions/"):
            raise StorageError("cut off")
        real(self, key, *rest, **options)

    larger = corpus_file(tmp_path / "c.parquet", shards=SHARDS + 1)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put", cut)
        with pytest.raises(StorageError, match="cut off"):
            build(larger, out=out)
    machine("second")
    assert open_index(out).bundle.version == first.version
    assert len(list_versions(out)) == 1
    # The machine that was cut off puts there what it has made.
    machine("first")
    second = build(larger, out=out)
    machine("third")
    assert open_index(out).bundle.version == second.version


@pytest.mark.parametrize("name", ["index.faiss", "documents.arrow"])
def test_a_damaged_copy_is_fetched_again(
    s3: Any, bucket: str, machine: Any, tmp_path: Path, name: str
) -> None:
    out = f"s3://{bucket}/index"
    report = build(corpus_file(tmp_path / "c.parquet"), out=out)
    cache, before = machine("second"), hits(out)
    (copy,) = cache.glob(f"objects/*/versions/{report.version}/{name}")
    copy.write_bytes(b"x" + copy.read_bytes()[1:])
    assert hits(out) == before
    copy.write_bytes(b"")
    assert hits(out) == before


def test_a_damaged_object_is_told(s3: Any, bucket: str, machine: Any, tmp_path: Path) -> None:
    out = f"s3://{bucket}/index"
    build(corpus_file(tmp_path / "c.parquet"), out=out)
    (key,) = (key for key in keys(s3, bucket) if key.endswith("/index.faiss"))
    body = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    s3.put_object(Bucket=bucket, Key=key, Body=b"x" + body[1:])
    cache = machine("second")
    with pytest.raises(ArtifactError, match=r"index\.faiss is damaged") as raised:
        open_index(out)
    assert f"s3://{bucket}/index/versions/" in str(raised.value)
    assert str(cache) not in str(raised.value)


def test_nothing_there(s3: Any, bucket: str, machine: Any) -> None:
    out = f"s3://{bucket}/none"
    with pytest.raises(ArtifactError, match=rf"{out} is not a published index"):
        open_index(out)
    with pytest.raises(ArtifactError, match=rf"{out} is not a published index"):
        list_versions(out)
    with pytest.raises(ArtifactError, match=rf"{out} holds no store of embeddings"):
        build_index(BuildConfig(store=out, out=f"s3://{bucket}/other"))


def test_no_bucket_and_no_server_are_told_at_once(
    s3: Any, machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = corpus_file(tmp_path / "c.parquet")
    for ask in (
        lambda: open_index("s3://nowhere-at-all/i"),
        lambda: build(corpus, out="s3://nowhere-at-all/i"),
        lambda: encode_corpus(
            BuildConfig(corpus=(corpus,), store="s3://nowhere-at-all/i", **OPTIONS)
        ),
    ):
        with pytest.raises(StorageError, match="there is no bucket 'nowhere-at-all'"):
            ask()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="does not answer"):
        build(corpus, out="s3://nowhere-at-all/i")


def test_keys_that_are_refused(
    s3: Any, bucket: str, machine: Any, tmp_path: Path, guarded: None
) -> None:
    corpus = corpus_file(tmp_path / "c.parquet")
    with pytest.raises(StorageError, match="permission is denied"):
        build(corpus, out=f"s3://{bucket}/i")
    with pytest.raises(StorageError, match="permission is denied"):
        open_index(f"s3://{bucket}/i")


def test_commands(s3: Any, bucket: str, machine: Any, tmp_path: Path) -> None:
    corpus, out = corpus_file(tmp_path / "c.parquet"), f"s3://{bucket}/index"

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    options = ("--embedding-column", "embedding", "--id-column", "id", "--k", "6")
    assert "nothing was written" in run("build", corpus, *options, "--out", out, "--plan")
    assert keys(s3, bucket) == []
    said = run("build", corpus, *options, "--out", out)
    assert f"raw embeddings: {out}/store" in said
    assert f"{out}: version 000001-" in said
    machine("second")
    assert f"{out}: version 000001-" in run("inspect", out)
    (facts,) = json.loads(run("versions", out, "--json"))["versions"]
    assert facts["published"]
    assert facts["rows"] == SHARDS * ROWS
    assert facts["sound"] == ""
    found = json.loads(run("search", out, "--like", "7", "--rerank", "20", "--json"))
    assert len(found["results"][0]["hits"]) == 10
    assert "0.0000" not in run("search", out, "--like", "7")


def test_the_plan_tells_what_is_in_the_bucket(
    s3: Any, bucket: str, machine: Any, tmp_path: Path
) -> None:
    corpus = corpus_file(tmp_path / "c.parquet")
    wanted = BuildConfig(corpus=(corpus,), out=f"s3://{bucket}/index", **OPTIONS)
    plan = plan_build(wanted)
    assert (plan.to_encode, plan.reused) == (SHARDS * ROWS, 0)
    assert plan.store == f"s3://{bucket}/index/store"
    build(corpus, out=f"s3://{bucket}/index")
    before = keys(s3, bucket)
    machine("second")
    plan = plan_build(wanted)
    assert (plan.to_encode, plan.reused) == (0, SHARDS * ROWS)
    assert keys(s3, bucket) == before


def test_a_local_index_of_a_store_in_a_bucket_and_the_other_way(
    s3: Any, bucket: str, machine: Any, tmp_path: Path
) -> None:
    corpus = corpus_file(tmp_path / "c.parquet")
    out, store = tmp_path / "index", f"s3://{bucket}/store"
    build(corpus, out=str(out), store=store)
    expected = hits(out, rerank=20)
    machine("second")
    assert hits(out, rerank=20) == expected
    there = f"s3://{bucket}/index"
    build(corpus, out=there, store=str(tmp_path / "store"))
    assert hits(there, rerank=20) == expected
    assert hits(there, rerank=20, store=store) == expected


def test_back_to_an_earlier_version(
    s3: Any, bucket: str, machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, out = corpus_file(tmp_path / "c.parquet"), f"s3://{bucket}/index"
    first = build(corpus, out=out)
    second = build(corpus_file(tmp_path / "d.parquet", shards=SHARDS + 1), out=out)
    cache = machine("second")
    rolled = rollback(out)
    assert (rolled.left, rolled.to, rolled.note) == (second.version, first.version, "")
    assert not list(cache.glob("objects/*/*/shards/*"))
    for name in ("first", "third"):
        machine(name)
        assert open_index(out).bundle.version == first.version
    states = {facts.name: (facts.published, facts.withdrawn) for facts in list_versions(out)}
    assert states == {first.version: (True, False), second.version: (False, True)}
    with pytest.raises(ArtifactError, match=rf"{out} has no sound version older") as raised:
        rollback(out)
    assert str(cache.parent) not in str(raised.value)
    with pytest.raises(ConfigError, match=rf"is no version of {out}"):
        rollback(out, to="000009-aaaaaaaaaaaa")
    assert rollback(out, to=second.version).to == second.version

    # A version is published between the look at what there is and the rollback's own.
    from whiten_index import versions as room

    def overtaken(*arguments: Any) -> Any:
        s3.put_object(Bucket=bucket, Key="index/CURRENT", Body=b"another")
        return checked(*arguments)

    checked = room._checked
    monkeypatch.setattr(room, "_checked", overtaken)
    with pytest.raises(BusyError, match="published by another build meanwhile"):
        rollback(out)


def test_no_way_back_where_the_store_lacks_shards(
    s3: Any, bucket: str, machine: Any, tmp_path: Path
) -> None:
    out = f"s3://{bucket}/index"
    first = build(corpus_file(tmp_path / "c.parquet", seed=1), out=out)
    build(corpus_file(tmp_path / "c.parquet", seed=2), out=out)
    shard = first.encoded.record.parts[0].shard
    for key in keys(s3, bucket):
        if f"/{shard}/" in key:
            s3.delete_object(Bucket=bucket, Key=key)
    machine("second")
    with pytest.raises(ArtifactError, match="lacks 1 of the shards"):
        rollback(out, to=first.version)
    assert rollback(out, to=first.version, without_store=True).to == first.version


def test_a_store_of_an_index_in_a_bucket_is_not_collected(
    s3: Any, bucket: str, machine: Any, tmp_path: Path
) -> None:
    store, out = tmp_path / "store", f"s3://{bucket}/index"
    build(corpus_file(tmp_path / "c.parquet"), out=out, store=str(store))
    with pytest.raises(ConfigError, match=rf"{out} was built from .*, and gc and compact do not"):
        gc_store(store, keep_days=0)
    assert all(report.sound for report in verify_paths([str(store)]))


def test_an_update_of_a_local_index_fills_its_store_in_the_bucket(
    s3: Any, bucket: str, machine: Any, tmp_path: Path
) -> None:
    out, store = tmp_path / "index", f"s3://{bucket}/store"
    build(corpus_file(tmp_path / "c.parquet"), out=str(out), store=store)
    machine("second")
    larger = corpus_file(tmp_path / "c.parquet", shards=SHARDS + 1)
    report = update_index(UpdateConfig(corpus=(larger,), index=str(out)))
    assert report.to_json()["store"] == store
    assert report.to_json()["counts"]["encoded"] == ROWS
    machine("third")
    assert len(hits(out, rerank=20)) == 7
    assert build(larger, out=str(tmp_path / "other"), store=store).encoded.counts.encoded == 0


def test_texts_whose_transform_is_chosen(
    s3: Any, bucket: str, machine: Any, tmp_path: Path, chosen: tuple[Place, BuildReport]
) -> None:
    """The choice, and the sample it is made on, are in the bucket too."""
    place, here = chosen
    out = f"s3://{bucket}/index"
    wanted = BuildConfig(
        corpus=(place.corpus,), out=out, store=f"s3://{bucket}/store", model=str(place.model),
        text_columns=("text",), id_column="id", shard_rows=100,
    )  # fmt: skip
    there = build_index(wanted)
    assert there.manifest["identity"] == here.manifest["identity"]
    assert (vectors(out) * vectors(here.out)).sum(axis=1).min() >= 0.99999
    assert {"choices", "samples"} <= {key.split("/")[2] for key in keys(s3, bucket, "store/")}
    machine("second")
    again = build_index(wanted)
    assert again.up_to_date
    assert again.encoded.counts.encoded == 0
    query = [place.texts[5]]
    found = [open_index(each).search(query, top_k=3)[0] for each in (out, here.out)]
    assert [hit.id for hit in found[0]] == [hit.id for hit in found[1]]
