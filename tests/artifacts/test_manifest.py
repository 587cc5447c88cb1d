"""Publishing that is all or nothing."""

import contextlib
import errno
import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import NotRequired

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import with_config

from whiten_index.artifacts import manifest
from whiten_index.artifacts.atomic import replacing
from whiten_index.artifacts.lock import only_writer
from whiten_index.artifacts.manifest import Files, Schema, Sealed
from whiten_index.errors import ArtifactError, FormatError, StorageError

quick = settings(max_examples=30, deadline=None, derandomize=True, database=None)

FIELDS = {"kind": "thing", "format_version": 1}


@contextlib.contextmanager
def filling(final: Path):
    """Publish two files, after the block did more with their folder and the manifest's fields."""
    with manifest.new_artifact(final) as (folder, fields):
        (folder / "a.bin").write_bytes(b"a" * 1000)
        (folder / "b.bin").write_bytes(b"")
        fields |= FIELDS
        yield folder, fields


def publish(final: Path):
    with filling(final):
        pass


@contextlib.contextmanager
def child(code, *arguments):
    """Run Python code in another process, which has reached its end of work when it says ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline().strip() == "ready"
        yield process
    finally:
        process.kill()
        process.communicate()


def enter(folder):
    with only_writer(folder, what="store"):
        pass


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@quick
@given(identity=st.dictionaries(st.text(), json_values, max_size=5))
def test_a_fingerprint_knows_neither_key_order_nor_a_trip_through_json(identity):
    turned = dict(reversed(identity.items()))
    found = manifest.fingerprint(identity)
    assert found == manifest.fingerprint(turned)
    assert found == manifest.fingerprint(json.loads(json.dumps(identity)))
    assert len(found) == 32
    assert set(found) <= set("0123456789abcdef")


def test_a_published_folder_is_whole_when_it_is_first_seen(tmp_path):
    final = tmp_path / "deep" / "thing"
    with filling(final) as (folder, _):
        assert not final.exists()
        assert not (folder / manifest.MANIFEST).exists()
    assert sorted(p.name for p in final.iterdir()) == ["a.bin", "b.bin", manifest.MANIFEST]
    assert [p.name for p in final.parent.iterdir()] == ["thing"]
    found = read(final)
    sha256 = hashlib.sha256(b"a" * 1000).hexdigest()
    assert found["files"]["a.bin"] == {"bytes": 1000, "sha256": sha256}
    manifest.check_files(final, found, content=True)


@pytest.mark.parametrize(
    ("error", "seen", "message"),
    [
        *((kind("half way"), kind, "half way") for kind in (RuntimeError, KeyboardInterrupt)),
        *((kind("half way"), kind, "half way") for kind in (SystemExit, MemoryError)),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            StorageError,
            r"cannot write .*thing: the disk is full; free space",
        ),
        (None, TypeError, "JSON"),  # fields that are no JSON
    ],
)
def test_when_the_work_fails_nothing_is_left(tmp_path, error, seen, message):
    def fail():
        with filling(tmp_path / "thing") as (_, fields):
            fields["kind"] = object()
            if error is not None:
                raise error

    with pytest.raises(seen, match=message):
        fail()
    assert not list(tmp_path.iterdir())
    publish(tmp_path / "thing")  # and nothing is in the way


def test_of_many_writers_one_publishes_and_all_are_content(tmp_path):
    final, start, errors = tmp_path / "thing", threading.Barrier(4), []

    def work(letter):
        try:
            with manifest.new_artifact(final) as (folder, fields):
                (folder / "a.bin").write_bytes(letter * 5000)
                fields |= FIELDS
                start.wait(timeout=30)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(c,)) for c in (b"a", b"b", b"c", b"d")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    found = read(final)
    manifest.check_files(final, found, content=True)
    assert [p.name for p in tmp_path.iterdir()] == ["thing"]


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, old):
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)

    def half():
        with replacing(path) as temporary:
            temporary.write_bytes(b"hal")
            raise RuntimeError("pulled the plug")

    with pytest.raises(RuntimeError, match="pulled the plug"):
        half()
    assert [p.read_bytes() for p in tmp_path.iterdir()] == ([] if old is None else [old])


@with_config({"extra": "allow"})
class Thing(Sealed):
    files: NotRequired[Files]


def read(folder, version=2):
    return manifest.read_manifest(folder, Schema("thing", version, Thing))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "store", "format_version": 1}, "holds a store, not a thing; check the path"),
        ({"format_version": 1}, "folder of unknown kind, not a thing"),
        ({"kind": "thing", "format_version": 3}, r"format 3, .*reads up to 2; upgrade whiten-ind"),
        ({"kind": "thing", "format_version": "1"}, "thing format 1"),
        ({"kind": "thing"}, "thing format None"),
    ],
)
def test_another_kind_or_a_later_format_is_refused(tmp_path, fields, message):
    for write in (manifest.write_manifest, manifest.write_json):  # with and without a digest
        write(tmp_path / manifest.MANIFEST, fields)
        with pytest.raises((ArtifactError, FormatError), match=message):
            read(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 2},
        {"files": {}},
        {"files": {"a.bin": {"bytes": 1, "sha256": ""}}},
        {"more": None},
        {"digest": ""},
        {"digest": None},
        {"digest": "0" * 64},
    ],
)
def test_a_manifest_whose_fields_were_changed_is_damaged(tmp_path, change):
    publish(tmp_path / "thing")
    written = read(tmp_path / "thing")
    manifest.write_json(tmp_path / "thing" / manifest.MANIFEST, written | change)
    with pytest.raises(ArtifactError, match=r"manifest\.json is damaged: its fields .*; restore"):
        read(tmp_path / "thing")


@pytest.fixture
def published(tmp_path):
    publish(tmp_path / "thing")
    return tmp_path / "thing", read(tmp_path / "thing")


@pytest.mark.parametrize("files", [None, [], {"a.bin": None}, {"a.bin": {"bytes": 1000}}])
def test_a_manifest_that_vouches_for_nothing_passes_nothing(published, files):
    folder, written = published
    manifest.write_manifest(folder / manifest.MANIFEST, written | {"files": files})
    with pytest.raises(ArtifactError, match="damaged"):
        read(folder)
