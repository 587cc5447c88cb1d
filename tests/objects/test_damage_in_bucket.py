"""Damage in a bucket, seen from machines with sound copies and without any."""

import hashlib
import os
import stat
from functools import partial
from typing import Any

import pytest

from tests.helpers.bad_input import process
from tests.objects.helpers import ROWS, SHARDS, build, corpus_file, hits, keys
from whiten_index.errors import ArtifactError, StorageError
from whiten_index.versions.compaction import compact_store
from whiten_index.versions.gc import gc_store
from whiten_index.versions.retention import describe_index, list_versions
from whiten_index.versions.verify import verify_index, verify_paths

pytestmark = pytest.mark.service


def body(s3: Any, bucket: str, key: str) -> bytes:
    return bytes(s3.get_object(Bucket=bucket, Key=key)["Body"].read())


def flip(s3: Any, bucket: str, key: str) -> None:
    data = bytearray(body(s3, bucket, key))
    data[len(data) // 2] ^= 1
    s3.put_object(Bucket=bucket, Key=key, Body=bytes(data))


def truncate(s3: Any, bucket: str, key: str) -> None:
    s3.put_object(Bucket=bucket, Key=key, Body=body(s3, bucket, key)[:-1])


def delete(s3: Any, bucket: str, key: str) -> None:
    s3.delete_object(Bucket=bucket, Key=key)


def published(s3: Any, bucket: str) -> list[str]:
    return [key for key in keys(s3, bucket, "index/") if not key.startswith("index/store/")]


@pytest.mark.parametrize("damage", [flip, truncate, delete])
def test_damage_of_each_object_is_noticed_and_mended(s3, bucket, machine, damage, corpus, out):
    first = build(corpus, out=out)
    expected, places = hits(out), published(s3, bucket)
    assert len(places) >= 6
    for key in places:
        before = body(s3, bucket, key)
        damage(s3, bucket, key)
        machine(key.replace("/", "-"))
        # What a search does not open is not read, and has its size.
        if damage is not flip or not key.endswith(("corpus.json", "moments.safetensors")):
            name = key.rpartition("/")[2]
            told = r"damaged|missing|is not a" if name in ("CURRENT", "manifest.json") else name
            with pytest.raises(ArtifactError, match=told):
                hits(out)
        machine("first")
        report = verify_index(out)
        assert not report.sound, key
        assert any(damage.path.startswith(out) and damage.remedy for damage in report.damages), key
        again = build(corpus, out=out)
        assert again.version == first.version
        assert body(s3, bucket, key) == before, key
        report = verify_index(out)
        assert report.sound, (key, report.damages)
        assert [facts.sound for facts in list_versions(out)] == [""]
        assert hits(out) == expected
    # Another machine, which has no copies, finds all of it sound.
    machine("second")
    assert hits(out) == expected


def test_a_machine_without_copies_makes_the_version_again(s3, bucket, machine, corpus, out):
    build(corpus, out=out)
    expected = hits(out)
    machine("with a part")
    describe_index(out)
    (key,) = (key for key in published(s3, bucket) if key.endswith("/index.faiss"))
    flip(s3, bucket, key)
    assert hits(out) == expected
    machine("second")
    assert not build(corpus, out=out).up_to_date
    machine("with a part")
    assert hits(out) == expected


@pytest.mark.parametrize("damage", [flip, delete])
@pytest.mark.parametrize("command", [partial(gc_store, keep_days=0), compact_store])
def test_upkeep_puts_files_of_older_versions_there_again(
    s3, bucket, machine, tmp_path, damage, command, corpus, out
):
    """An update of a changed corpus reads none of them, and other machines have no copies."""
    build(corpus, out=out)
    every = keys(s3, bucket, "index/store/")
    lost = [key for key in every if "/digests/" in key or "/rows/" in key]
    assert len(lost) == 2 * SHARDS
    before = {key: body(s3, bucket, key) for key in lost}
    for key in lost:
        damage(s3, bucket, key)
    build(corpus_file(tmp_path / "c.parquet", seed=1, first=1000), out=out)
    (report,) = (each for each in verify_paths([f"{out}/store"]) if not each.sound)
    remedies = {each.path: each.remedy for each in report.damages}
    for key in lost:
        advice = f"whiten-index gc {out}/store, on a machine with a sound copy"
        assert remedies[f"s3://{bucket}/{key}"].startswith(advice)
    command(f"{out}/store")
    assert {key: body(s3, bucket, key) for key in lost} == before
    machine("without copies")
    gc_store(f"{out}/store", keep_days=0)
    assert verify_index(out).sound


@pytest.mark.parametrize("command", ["build", "build of an encrypted bucket", "search"])
def test_damaged_shards_of_the_store_are_put_there_again(
    s3, bucket, machine, monkeypatch, command, corpus, out
):
    """And each command that does it says so in a line on standard error."""
    if "encrypted" in command:
        from moto.s3.models import FakeKey

        # If the bucket is encrypted with KMS, an ETag is not the MD5 of the object. Objects that
        # were put before have not been encrypted.
        command, value = "build", FakeKey.value.fget
        salts = {True: b"kms", False: b""}

        def etag(self: Any) -> str:
            content = salts["/segments/" in self.name] + value(self)
            return f'"{hashlib.md5(content).hexdigest()}"'

        monkeypatch.setattr(FakeKey, "etag", property(etag))
    build(corpus, out=out)
    files = [key for key in keys(s3, bucket, "index/store/") if "/segments/" in key]
    # A shard whose manifest is gone counts as none, which hides the rest.
    shards = [key for key in files if not key.endswith("/manifest.json")]
    assert len(shards) >= SHARDS
    before = {key: body(s3, bucket, key) for key in shards}
    for number, key in enumerate(shards):
        (flip, truncate, delete)[number % 3](s3, bucket, key)
    arguments = {
        "build": (corpus, "--embedding-column", "embedding", "--id-column", "id", "--k", 6,
                  "--keep", "title", "--whiten", "whitening", "--shard-rows", ROWS, "--out", out),
        "search": (out, "--like", 0, "--rerank", SHARDS * ROWS, "--top-k", SHARDS * ROWS),
    }[command]  # fmt: skip
    with process(command, *arguments) as child:
        said = child.communicate()[1]
    assert child.returncode == 0, said
    mended = {line.split()[1] for line in said.splitlines() if "was put there again" in line}
    assert mended == {f"s3://{bucket}/{key.rsplit('/', 2)[0]}" for key in shards}
    assert {key: body(s3, bucket, key) for key in shards} == before


def test_a_bucket_that_cannot_be_read_is_not_damage(bucket, machine, tmp_path, guarded):
    with pytest.raises(StorageError, match="permission is denied"):
        verify_paths([f"s3://{bucket}/index"])


def test_copies_are_for_their_owner_alone(machine, monkeypatch, corpus, out):
    for mask in (0o000, 0o022, 0o777):
        cache = machine(f"umask{mask}")
        before = os.umask(mask)
        try:
            if mask == 0o777:
                # A folder that others made for everybody, as an administrator may.
                os.umask(0)
                (cache / "objects").mkdir(parents=True)
            build(corpus, out=out)
        finally:
            os.umask(before)
        assert stat.S_IMODE((cache / "objects").stat().st_mode) == 0o700
        assert mask == 0o777 or stat.S_IMODE(cache.stat().st_mode) == 0o700
    # Another user's is refused.
    taken = machine("taken")
    (taken / "objects").mkdir(parents=True)
    if os.getuid() == 0:
        os.chown(taken / "objects", 12345, -1)
        with pytest.raises(StorageError, match=r"belongs to another user.*WHITEN_INDEX_CACHE"):
            build(corpus, out=out)
        assert list((taken / "objects").iterdir()) == []


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_copy_is_not_waited_for(machine, tmp_path, out):
    build(corpus_file(tmp_path / "c.parquet"), out=out)
    (copy,) = machine("first").rglob("CURRENT")
    copy.unlink()
    os.mkfifo(copy)
    with pytest.raises(ArtifactError, match="is a pipe"):
        hits(out)
