"""Builds whose corpus, store and index are in a bucket, and searches of what they publish."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest

from tests.helpers.bad_input import process, succeed
from tests.objects.helpers import OPTIONS, SHARDS, build, corpus_file, hits, keys
from whiten_index import BuildConfig, encode_corpus, list_versions, open_index
from whiten_index.artifacts.object_store import Bucket
from whiten_index.errors import ArtifactError, BusyError, ConfigError, StorageError
from whiten_index.pipeline import build as build_room
from whiten_index.versions import retention
from whiten_index.versions.gc import gc_store
from whiten_index.versions.retention import rollback

pytestmark = pytest.mark.service


def test_a_second_opening_compares_and_downloads_nothing(machine, tmp_path, caplog, out):
    build(corpus_file(tmp_path / "c.parquet"), out=out)
    machine("second")
    caplog.set_level("INFO", logger="werkzeug")
    open_index(out)
    assert sum("GET" in line for line in caplog.messages) > 3
    caplog.clear()
    open_index(out)
    assert "/index/CURRENT" in caplog.messages[0]
    assert len(caplog.messages) == 2
    assert "list-type=2&prefix=index/versions/" in caplog.messages[1]


def test_an_object_of_others_is_left_as_it_is(s3, bucket, machine, tmp_path):
    s3.put_object(Bucket=bucket, Key="index/CURRENT", Body=b"MANIFEST-000004")
    with pytest.raises(
        ConfigError, match=r"s3://.*/index has a file CURRENT that another program wrote"
    ):
        build(corpus_file(tmp_path / "c.parquet"), out=f"s3://{bucket}/index")
    assert s3.get_object(Bucket=bucket, Key="index/CURRENT")["Body"].read() == b"MANIFEST-000004"


WHITENING, DOCUMENTS, INDEX = "whitening.safetensors", "documents.arrow", "index.faiss"
# Files of the published version that a command opens.
OPENED: dict[tuple[str, ...], set[str]] = {
    ("export", "OUT", "HERE/to.safetensors"): {WHITENING},
    ("push", "OUT", "--to", "HERE/to.parquet"): {WHITENING, DOCUMENTS, "corpus.json"},
    ("search", "OUT", "--like", "0"): {WHITENING, DOCUMENTS, INDEX},
    ("update", "OUT"): {WHITENING, "corpus.json", "moments.safetensors"},
    ("encode", "HERE/c.parquet", "--store", "OUT/store", "--embedding-column", "embedding"): set(),
}


@pytest.mark.parametrize("command", OPENED, ids=lambda command: command[0])
def test_only_files_that_are_opened_are_fetched(bucket, machine, tmp_path, caplog, command):
    out, opened = f"s3://{bucket}/index", OPENED[command]
    # A file that changed just now may change again without a trace.
    os.utime(corpus := corpus_file(tmp_path / "c.parquet"), (1e9, 1e9))
    version, expected = build(corpus, out=out).version, hits(out)
    cache = machine("second")
    caplog.set_level("INFO", logger="werkzeug")
    caplog.clear()
    succeed(*(word.replace("OUT", out).replace("HERE", str(tmp_path)) for word in command))
    lines = [line for line in caplog.messages if f"/{version}/" in line and "?" not in line]
    files = [line.split()[-4].rpartition("/")[2] for line in lines]
    assert sorted(files) == sorted({*opened, "manifest.json"} if opened else ())
    assert any(cache.glob("objects/*/*/segments/*/*.safetensors")) == (command[0] == "push")
    # A copy of a part is not taken for the whole. Several may fill it at once.
    assert list(ThreadPoolExecutor(4).map(hits, [out] * 4)) == [expected] * 4


def tags(s3: Any, bucket: str) -> dict[str, str]:
    return {key: s3.head_object(Bucket=bucket, Key=key)["ETag"] for key in keys(s3, bucket)}


def test_the_same_build_on_two_machines_at_once(s3, bucket, machine, tmp_path, overtaken, out):
    """Both make a version of one name, of files that differ: what is published is one of them."""
    # A file that changed just now is read again, and then noted as read.
    os.utime(corpus := corpus_file(tmp_path / "c.parquet"), (1e9, 1e9))
    second = []
    with overtaken(build_room, "write_files", lambda: second.append(build(corpus, out=out))):
        first = build(corpus, out=out)
    # The second one's, whose seconds are other ones.
    assert first.manifest == second[0].manifest
    before = tags(s3, bucket)
    for name in ("first", "second", "third"):
        machine(name)
        assert dict(open_index(out).bundle.manifest) == first.manifest
        again = build(corpus, out=out)
        assert (again.up_to_date, again.encoded.counts.encoded) == (True, 0)
    assert tags(s3, bucket) == before


def test_an_upload_that_was_cut_off_shows_nothing(machine, tmp_path, out):
    first = build(corpus_file(tmp_path / "c.parquet"), out=out)
    real = Bucket.put

    def cut(self: Bucket, key: str, *rest: Any, **options: Any) -> Any:
        if key.startswith("versions/"):
            raise StorageError("cut off")
        return real(self, key, *rest, **options)

    larger = corpus_file(tmp_path / "c.parquet", shards=SHARDS + 1)
    with patch.object(Bucket, "put", cut), pytest.raises(StorageError, match="cut off"):
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
def test_a_damaged_copy_is_fetched_again(machine, tmp_path, name, out):
    report = build(corpus_file(tmp_path / "c.parquet"), out=out)
    cache, before = machine("second"), hits(out)
    (copy,) = cache.glob(f"objects/*/versions/{report.version}/{name}")
    copy.write_bytes(b"x" + copy.read_bytes()[1:])
    assert hits(out) == before
    copy.write_bytes(b"")
    with process("search", out, "--like", 0) as child:
        assert "here was damaged, and was fetched again" in child.communicate()[1]
    assert hits(out) == before


def test_a_killed_download_leaves_nothing_after_the_next_start(machine, tmp_path, out):
    build(corpus_file(tmp_path / "c.parquet"), out=out)
    expected, cache = hits(out), machine("second")
    code = """if True:
        import os
        from whiten_index.artifacts.object_store import Bucket
        Bucket.download = lambda _, key, path: (path.touch(), os.kill(os.getpid(), 9))
        from whiten_index.cli import main
        main()"""
    with process("search", out, "--like", 0, code=code) as child:
        child.communicate()
    assert child.returncode == -9
    assert list(cache.glob("objects/*/.downloads/*"))
    assert hits(out) == expected
    assert not list(cache.glob("objects/*/.downloads/*"))


def test_no_bucket_and_no_server_are_told_at_once(s3, machine, monkeypatch, corpus):
    for ask in (
        lambda: open_index("s3://nowhere-at-all/i"),
        lambda: build(corpus, out="s3://nowhere-at-all/i"),
        lambda: encode_corpus(
            BuildConfig(corpus=(corpus,), store="s3://nowhere-at-all/i", **OPTIONS)
        ),
        lambda: gc_store("s3://nowhere-at-all/i/store"),
    ):
        with pytest.raises(StorageError, match="there is no bucket 'nowhere-at-all'"):
            ask()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="does not answer"):
        build(corpus, out="s3://nowhere-at-all/i")


def test_back_to_an_earlier_version(s3, bucket, machine, tmp_path, monkeypatch, corpus, out):
    first = build(corpus, out=out)
    second = build(corpus_file(tmp_path / "d.parquet", shards=SHARDS + 1), out=out)
    cache = machine("second")
    rolled = rollback(out)
    assert (rolled.left, rolled.to, rolled.note) == (second.version, first.version, "")
    assert not list(cache.glob("objects/*/*/segments/*"))
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
    def overtaken(*arguments: Any) -> Any:
        s3.put_object(Bucket=bucket, Key="index/CURRENT", Body=b"another")
        return checked(*arguments)

    checked = retention._checked
    monkeypatch.setattr(retention, "_checked", overtaken)
    with pytest.raises(BusyError, match="changed by another command meanwhile"):
        rollback(out)
