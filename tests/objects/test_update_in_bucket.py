"""Updates, pushes and evaluations of an index in a bucket, from machines without copies of it."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.objects.helpers import SHARDS, build, corpus_file, hits, keys, put_corpus
from whiten_index import PushConfig, QueryTransform, open_index, push_index
from whiten_index.artifacts.object_store import Bucket, Digests, _MissingError
from whiten_index.errors import BusyError, ConfigError, GateError, StorageError
from whiten_index.pipeline import update as update_room
from whiten_index.pipeline.update import update_index
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.versions import retention
from whiten_index.versions.gc import gc_store
from whiten_index.versions.retention import list_versions, prune, rollback

pytestmark = pytest.mark.service


def update(index: str | Path, **options: Any) -> Any:
    return update_index(UpdateConfig(index=str(index), refit="never", **options))


def test_a_night_on_another_machine_is_that_of_a_folder(s3, bucket, machine, tmp_path):
    out = f"s3://{bucket}/a place/index"
    put_corpus(s3, bucket, "corpus/c.parquet")
    for place in (out, str(tmp_path / "folder")):
        build(f"s3://{bucket}/corpus/", out=place)
    assert push_index(PushConfig(index=out, to=str(tmp_path / "before.parquet"))).pushed > 0
    put_corpus(s3, bucket, "corpus/c.parquet", shards=SHARDS + 1)
    machine("second")
    done, same = update(out), update(tmp_path / "folder")
    assert done.changes.to_json() == same.changes.to_json()
    assert str(done.out) == out
    assert done.manifest["config"]["out"] == out
    machine("third")
    assert update(out).up_to_date
    assert hits(out) == hits(tmp_path / "folder")
    for place, name in ((out, "a"), (str(tmp_path / "folder"), "b")):
        push_index(PushConfig(index=place, to=str(tmp_path / f"{name}.parquet")))
    one, other = (pq.read_table(tmp_path / f"{name}.parquet") for name in "ab")
    assert one.equals(other)
    transform = QueryTransform.of(out, k=4)
    assert transform.query_digest == QueryTransform.of(tmp_path / "folder", k=4).query_digest


def test_a_text_that_is_new_is_stored_by_another_machine(
    bucket, machine, tmp_path, texts, tiny_model
):
    corpus, out, folder = tmp_path / "c.parquet", f"s3://{bucket}/index", str(tmp_path / "folder")
    encoder = {"embedding_column": None, "text_columns": ("text",), "model": str(tiny_model)}

    def written(first: int, place: str) -> Any:
        ids, kept = list(range(first, 30)), texts[first:30]
        pq.write_table(pa.table({"id": ids, "title": kept, "text": kept}), corpus)
        return build(str(corpus), out=place, **encoder) if first % 2 else update(place)

    for first, name in ((5, "first"), (4, "second"), (3, "third")):
        # A shard is known in part, and its segment is not on this machine.
        machine(name)
        same = [written(first, place).manifest["files"]["index.faiss"] for place in (out, folder)]
        assert same[0] == same[1]


def made(out: str, folder: Path, number: int) -> list[str]:
    """Return the names of so many versions, each of a corpus with a shard more."""
    names = list[str]()
    for more in range(number):
        corpus = corpus_file(folder / "c.parquet", shards=SHARDS + more)
        names.append((update(out) if more else build(corpus, out=out)).version)
    return names


def test_of_two_updates_at_once_one_is_published(machine, tmp_path, overtaken, corpus, out):
    build(corpus, out=out)
    other = corpus_file(tmp_path / "d.parquet", shards=SHARDS + 2)
    corpus_file(tmp_path / "c.parquet", shards=SHARDS + 1)
    second = list[Any]()
    with (
        overtaken(update_room, "write_files", lambda: second.append(update(out, corpus=(other,)))),
        pytest.raises(BusyError, match="was changed by another"),
    ):
        update(out)
    machine("third")
    assert open_index(out).bundle.manifest["version"] == second[0].version
    # The other's version is gone, so that no rollback finds what was never published.
    assert len(list_versions(out)) == 2
    with pytest.raises(GateError, match="would publish 40 in their place"):
        build(corpus, out=out, limit=40)
    # One that makes what a build has published meanwhile succeeds.
    with overtaken(update_room, "write_files", lambda: second.append(build(corpus, out=out))):
        done = update_index(UpdateConfig(index=out, corpus=(corpus,), refit="always"))
    assert done.version == second[1].version
    assert (done.to_json()["rows"]["deleted"] > 0, done.to_json()["gates"]) == (True, [])


def test_a_version_of_a_machine_whose_mark_was_taken_is_removed(
    s3, bucket, machine, tmp_path, monkeypatch, corpus, out
):
    build(corpus, out=out)
    corpus_file(tmp_path / "c.parquet", shards=SHARDS + 1)
    real = update_room.set_current

    def unmarked(*arguments: Any, **options: Any) -> None:
        for key in keys(s3, bucket):
            if "/.marks/" in key:
                s3.delete_object(Bucket=bucket, Key=key)
        real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(update_room, "set_current", unmarked)
        with pytest.raises(BusyError, match="was not heard of"):
            update(out)
    machine("second")
    assert len({key.split("/")[2] for key in keys(s3, bucket) if "/versions/" in key}) == 1
    assert gc_store(f"{out}/store", keep_days=0)


def test_pruned_versions_are_gone_from_the_bucket_and_never_published_again(
    s3: Any, bucket: str, machine: Any, tmp_path: Path, out: str
) -> None:
    names = made(out, tmp_path, 4)
    machine("second")
    real, deleted = Bucket.delete, list[str]()

    def dies(self: Bucket, key: str) -> None:
        deleted.append(key)
        if len(deleted) == 3:
            raise KeyboardInterrupt
        real(self, key)

    with patch.object(Bucket, "delete", dies), pytest.raises(KeyboardInterrupt):
        prune(out, keep=2)
    assert deleted[0].endswith(f"{names[0]}/manifest.json")
    # The one that is half removed, and the one that is still whole.
    machine("third")
    assert [each.name for each in list_versions(out)] == names[:1:-1]
    with pytest.raises(ConfigError, match="is no version of"):
        rollback(out, to=names[1])
    report = prune(out, keep=2)
    assert set(report.removed) == {*names[:2]}
    assert not [key for name in names[:2] for key in keys(s3, bucket, f"index/versions/{name}")]
    machine("fourth")
    assert rollback(out).to == names[2]
    assert hits(out)


def test_one_bad_answer_of_the_server_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    made(out, tmp_path, 2)
    real, cut = Bucket.digest, list[str]()

    def digest(self: Bucket, key: str) -> Digests | None:
        if key.endswith("index.faiss") and "/000001-" in key and not cut:
            cut.append(key)
            return Digests(100, "0" * 64, "0" * 32)
        return real(self, key)

    monkeypatch.setattr(Bucket, "digest", digest)
    assert prune(out, keep=2).removed == ()
    assert len(cut) == 1
    assert len(list_versions(out)) == 2


@pytest.mark.parametrize("name", ["index.faiss", "manifest.json"])
def test_one_bad_answer_of_the_server_skips_no_version(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, out: str
) -> None:
    names = made(out, tmp_path, 3)
    machine("second")
    download, get, cut = Bucket.download, Bucket.get, list[str]()

    def is_cut(key: str) -> bool:
        hit = key.endswith(name) and names[1] in key and not cut
        cut.extend([key] * hit)
        return hit

    def downloaded(self: Bucket, key: str, path: Path) -> bool:
        found = download(self, key, path)
        if is_cut(key):
            path.write_bytes(path.read_bytes()[:99])
        return found

    def got(self: Bucket, key: str) -> Any:
        found = get(self, key)
        return (found[0][:99], *found[1:]) if found is not None and is_cut(key) else found

    monkeypatch.setattr(Bucket, "download", downloaded)
    monkeypatch.setattr(Bucket, "get", got)
    report = rollback(out)
    assert (report.to, dict(report.skipped)) == (names[1], {})
    assert len(cut) == 1


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("index.faiss", "absent"), ("index.faiss", "another page"), ("index.faiss", "flipped"),
        ("manifest.json", "absent"), ("manifest.json", "another page"),
    ],
)  # fmt: skip
def test_answers_that_are_not_what_is_listed_are_no_damage(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str, out: str
) -> None:
    """As of a proxy with a broken copy, or a replica that lags; the object itself is sound."""
    names = made(out, tmp_path, 3)
    real = Bucket._parts, Bucket.get

    def wrong(data: bytes) -> bytes:
        return b"<html>" if how == "another page" else data[:50] + bytes([data[50] ^ 1]) + data[51:]

    def is_hit(key: str) -> bool:
        return key.endswith(name) and names[1] in key

    def parts(self: Bucket, key: str) -> Any:
        if is_hit(key) and how == "absent":
            raise _MissingError(key)
        found = b"".join(map(bytes, real[0](self, key)))
        return iter([wrong(found) if is_hit(key) else found])

    def got(self: Bucket, key: str) -> Any:
        found = real[1](self, key)
        if not is_hit(key) or found is None:
            return found
        return None if how == "absent" else (wrong(found[0]), found[1])

    for do in (partial(prune, out, keep=2), partial(rollback, out)):
        machine(f"of {do.func.__name__}")
        with monkeypatch.context() as patched:
            patched.setattr(Bucket, "_parts", parts)
            patched.setattr(Bucket, "get", got)
            with pytest.raises(StorageError, match="is another object than it lists") as raised:
                do()
        assert do.func is prune or f"whiten-index rollback {out} --to VERSION" in str(raised.value)
        assert len(list_versions(out)) == 3
    assert rollback(out).to == names[1]


def test_a_rollback_that_a_prune_overtakes_publishes_nothing(
    machine: Any, tmp_path: Path, overtaken: Any, out: str
) -> None:
    first = build(corpus_file(tmp_path / "c.parquet"), out=out).version
    corpus_file(tmp_path / "c.parquet", shards=SHARDS + 1)
    second, removed = update(out).version, list[Any]()
    with (
        overtaken(retention, "set_current", lambda: removed.append(prune(out, keep=1).removed)),
        pytest.raises(BusyError),
    ):
        rollback(out)
    assert removed == [(first,)]
    machine("third")
    assert open_index(out).bundle.manifest["version"] == second
