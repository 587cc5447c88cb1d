"""gc, compact and verify of a store in a bucket: as in a folder, beside others, killed anywhere."""

import contextlib
import datetime
import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.exceptions import AlreadyExistsError

from tests.helpers.bad_input import fails, night, process, run, succeed
from tests.objects.helpers import build, corpus_table, hits, keys
from tests.versions.upkeep import Crash, dying_at
from whiten_index import UpdateConfig, update_index
from whiten_index.artifacts.lock import this_owner
from whiten_index.artifacts.manifest import sealed_json
from whiten_index.artifacts.object_store import Bucket
from whiten_index.errors import BusyError
from whiten_index.pipeline import build as build_room
from whiten_index.store.dtypes import StoreDtype
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.versions import gc as gc_room
from whiten_index.versions import published as published_room
from whiten_index.versions import references as references_room
from whiten_index.versions import verify as verify_room

pytestmark = pytest.mark.service
CHANGED = 17
GC = ("gc", "--keep-days", 0, "--json")


def corpus_of_night(path: Path, number: int) -> str:
    """Rows of which some are others each night, so that shards are partly needed."""
    rows, other = corpus_table(), corpus_table(seed=number + 1)
    cut = number * CHANGED
    if number:
        rows = pa.concat_tables([other.slice(0, cut), rows.slice(cut)])
    pq.write_table(rows, path)
    return str(path)


def nights(work: Path, out: str, count: int = 3, **options: Any) -> None:
    """Build an index, and update it night by night."""
    build(corpus_of_night(work / "c.parquet", 0), out=out, **options)
    for number in range(1, count):
        corpus_of_night(work / "c.parquet", number)
        update_index(UpdateConfig(index=out, refit="never"))


def store_keys(s3: Any, bucket: str) -> list[str]:
    found = (key.split("/") for key in keys(s3, bucket, "index/store/"))
    return sorted({parts[4] for parts in found if parts[3] == "segments"})


def age(bucket: str, minutes: float = 11, *, of: str = "/.marks/") -> None:
    """Let the server think that objects were put so long ago."""
    from moto.s3.models import s3_backends

    (account,) = (each for each in s3_backends.values() if bucket in each["aws"].buckets)
    for name, key in account["aws"].buckets[bucket].keys.items():
        if of in name:
            key.last_modified -= datetime.timedelta(minutes=minutes)


def marks(s3: Any, bucket: str) -> list[str]:
    return [key for key in keys(s3, bucket) if "/.marks/" in key]


def test_compact_removes_nothing_whose_copy_the_server_refuses(s3, bucket, machine, tmp_path):
    out, put = f"s3://{bucket}/index", obstore.put
    nights(tmp_path, out)
    machine("second")
    before, refused = store_keys(s3, bucket), AlreadyExistsError("<Code>Conflict</Code>")

    def refusing(client: Any, key: str, *given: Any, **options: Any) -> Any:
        if "/segments/" in key and key.endswith("/manifest.json"):
            raise refused
        return put(client, key, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(obstore, "put", refusing)
        status, _, said = run("compact", out)
    assert (status, "cannot put" in said) == (7, True), said
    assert set(before) <= set(store_keys(s3, bucket))
    succeed("compact", out)
    succeed("verify", out)


def test_they_do_what_they_do_in_a_folder(s3, bucket, machine, tmp_path):
    out, folder = f"s3://{bucket}/index", str(tmp_path / "folder")
    for place in (out, folder):
        nights(tmp_path, place)
    expected, reports = hits(out), []
    for place, name in ((out, "second"), (folder, "second")):
        machine(name)
        succeed("prune", place, "--keep", 1)
        # What is young stays.
        assert json.loads(succeed("gc", place, "--json"))["segments"] == 0
        found = [json.loads(succeed(*GC, place, *flag)) for flag in (("--dry-run",), (), ())]
        assert {**found[0], "dry_run": False} == found[1]
        assert (found[1]["segments"], found[1]["parts"]) > (0, 2)
        assert found[2]["segments"] == found[2]["parts"] == 0
        assert [each["indexes"] for each in found] == [[place]] * 3
        found += [json.loads(succeed("compact", place, "--json")) for _ in range(2)]
        assert (found[3]["written"], found[4]["written"]) == (1, 0)
        reports.append([{**each, "store": "", "indexes": []} for each in found])
        stores = Path(folder).glob("store/*/segments/*")
        here = store_keys(s3, bucket) if place == out else sorted(path.name for path in stores)
        reports[-1].append({"segments": here})
    assert reports[0] == reports[1]
    machine("third")
    said = succeed("verify", out, f"{out}/store")
    assert f"index {out}: sound" in said
    assert f"store {out}/store: sound (1 manifests, 1 corpora, 2 registered indexes" in said
    assert hits(out) == hits(folder) == expected
    assert not marks(s3, bucket)


def test_a_machine_with_copies_does_not_put_there_again_what_is_gone(
    s3, bucket, machine, tmp_path, out
):
    nights(tmp_path, out)
    machine("second")
    succeed("prune", out, "--keep", 1)
    succeed("compact", out)
    succeed(*GC, out)
    there = store_keys(s3, bucket)
    machine("first")
    corpus = corpus_of_night(tmp_path / "c.parquet", 3)
    report = build(corpus, out=out)
    assert report.encoded.counts.encoded == 3 * CHANGED
    # A whole shard, and a part of one.
    assert len(store_keys(s3, bucket)) == len(there) + 2
    succeed("verify", out)
    machine("third")
    assert build(corpus, out=out).up_to_date


def test_verify_reads_every_kind_of_object_of_the_store(s3, bucket, machine, tmp_path, out):
    nights(tmp_path, out, count=2)
    # Of each kind of file one.
    for key in {key.rpartition("/")[2]: key for key in keys(s3, bucket, "index/store/")}.values():
        data = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        flipped = data[:-30] + bytes([data[-30] ^ 4]) + data[-29:]
        s3.put_object(Bucket=bucket, Key=key, Body=flipped)
        status, said, error = run("verify", f"{out}/store")
        assert (status, f"{out}/store" in error) == (5, True), key
        assert (
            "/".join(f"s3://{bucket}/{key}".split("/")[:8]).removesuffix("/manifest.json") in said
        )
        assert s3.get_object(Bucket=bucket, Key=key)["Body"].read() == flipped
        s3.put_object(Bucket=bucket, Key=key, Body=data)
    succeed("verify", f"{out}/store")


def test_wrong_bytes_that_a_server_answers_are_no_damage(
    s3: Any, bucket: str, machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The e-tags that it lists say what the objects are."""
    place, real = f"s3://{bucket}/index/store", Bucket.download
    nights(tmp_path, f"s3://{bucket}/index", 1)
    store = EmbeddingStore.open(place)
    segments = list(map(store.require_segment, store.segment_names()))
    digests, rows = (
        np.concatenate([store.tensor(each.name, what) for each in segments])
        for what in ("digests", "embeddings")
    )
    joined = store.write(digests, rows, dtype=StoreDtype.OWN).name

    def flipped(bucket: Bucket, key: str, path: Path) -> bool:
        found = real(bucket, key, path)
        if joined in key and key.endswith("embeddings.safetensors"):
            path.write_bytes(damaged_bytes(path.read_bytes(), 200))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "download", flipped)
        fails(7, "may be sound", "verify", place)
        # Of the rows that are there twice, the others are really damaged.
        (key,) = (
            key
            for key in keys(s3, bucket, "index/store/")
            if segments[0].name in key and key.endswith("embeddings.safetensors")
        )
        body = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        s3.put_object(Bucket=bucket, Key=key, Body=damaged_bytes(body, len(body) - 1_500))
        machine("second")
        fails(7, "is another object than it lists", "gc", place, "--keep-days", 0)
    succeed("gc", place, "--keep-days", 0)
    assert {joined, segments[0].name} & {*store_keys(s3, bucket)} == {joined}
    succeed("verify", place)


def test_a_segment_that_names_no_embeddings_stops_nothing(
    s3: Any, bucket: str, machine: Any, tmp_path: Path
) -> None:
    nights(tmp_path, f"s3://{bucket}/index", 1)
    (key, *_) = (
        key
        for key in keys(s3, bucket, "index/store/")
        if "/segments/" in key and key.endswith("/manifest.json")
    )
    fields = json.loads(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
    name = fields["segment"]["name"]
    fields |= {"files": {}, "segment": {**fields["segment"], "name": "0" * 32}}
    s3.put_object(Bucket=bucket, Key=key.replace(name, "0" * 32), Body=sealed_json(fields))
    machine("second")
    succeed("gc", f"s3://{bucket}/index/store", "--keep-days", 0)
    assert "0" * 32 not in store_keys(s3, bucket)


def damaged_bytes(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def test_no_segment_stays_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux lets a process map some 65,000 files, and a store may have more segments."""
    nights(tmp_path, str(tmp_path / "index"), count=1)
    maps, mapped = Path("/proc/self/maps"), list[int]()
    # Other tests of the process may have left theirs to the garbage collector.
    store = f"{tmp_path.resolve()}/index/store/"
    assert Path(store).is_dir()

    def looking(real: Any, *arguments: Any) -> Any:
        mapped.append(maps.read_text().count(store))
        return real(*arguments)

    for room, name in ((gc_room, "digest_keys"), (verify_room, "DigestIndex")):
        monkeypatch.setattr(room, name, functools.partial(looking, getattr(room, name)))
    succeed(*GC, tmp_path / "index")
    succeed("verify", tmp_path / "index")
    assert (len(mapped) > 2, max(mapped)) == (True, 0)


def test_a_store_knows_its_indexes_as_long_as_one_list_is_there(s3, bucket, machine, tmp_path):
    out, store = f"s3://{bucket}/index", f"s3://{bucket}/raw"
    nights(tmp_path, out, count=1, store=store)
    before = bodies(s3, bucket)
    for lost in ("/indexes/", "/registered/"):
        machine(lost.strip("/"))
        restore(s3, bucket, {key: data for key, data in before.items() if lost not in key})
        assert json.loads(succeed(*GC, store))["indexes"] == [out]
    machine("third")
    segments = {key: data for key, data in before.items() if "/corpora/" not in key}
    restore(s3, bucket, segments)
    fails(5, "has no record of a corpus", *GC, store)


@pytest.mark.parametrize("command", ["gc", "compact"])
def test_they_may_be_killed_at_any_request(
    s3, bucket, machine, tmp_path, monkeypatch, command, out
):
    nights(tmp_path, out)
    succeed("prune", out, "--keep", 1)
    before, expected = bodies(s3, bucket), hits(out)
    arguments = GC if command == "gc" else (command,)
    step, ends, killed = 0, set(), True
    while killed:
        restore(s3, bucket, before)
        machine(f"{command}{step}")
        killed = True
        with monkeypatch.context() as patch, contextlib.suppress(Crash):
            dying_at(patch, step, of=Bucket, names=("put", "upload", "delete"))
            run(*arguments, out)
            killed = False
        if killed and marks(s3, bucket):
            assert run(*arguments, out)[0] == 6
            age(bucket)
        machine("next")
        assert hits(out) == expected
        succeed(*arguments, out)
        succeed(*GC, out)
        succeed("verify", out)
        ends.add(frozenset(keys(s3, bucket, "index/store/")))
        step += 1 + step // 2
    assert step > 8
    # Segments that were joined and not removed yet have rows that are needed.
    assert len(ends) == 1 or command == "compact"


def test_the_mark_of_a_process_of_this_machine_that_ended_is_taken(
    s3, bucket, machine, tmp_path, out
):
    nights(tmp_path, out, count=1)
    with process(code="") as child:
        child.wait()
    alive = {"host": "h" * 9000}, {"space": "another"}, {"pid": os.getpid()}, {"pid": "1"}
    for changes in (*alive, {}):
        owner = {**this_owner(), "pid": child.pid, **changes}
        s3.put_object(Bucket=bucket, Key="index/store/.marks/writer-1", Body=json.dumps(owner))
        status, _, said = run(*GC, out)
        assert (status, len(said) < 500) == (6 if changes else 0, True), said
    assert not marks(s3, bucket)


def bodies(s3: Any, bucket: str) -> dict[str, bytes]:
    return {key: s3.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys(s3, bucket)}


def restore(s3: Any, bucket: str, before: dict[str, bytes]) -> None:
    for key in keys(s3, bucket):
        s3.delete_object(Bucket=bucket, Key=key)
    for key, data in before.items():
        s3.put_object(Bucket=bucket, Key=key, Body=data)


def published(s3: Any, bucket: str) -> dict[str, bytes]:
    found = bodies(s3, bucket)
    return {
        key: found[key] for key in found if key.startswith(("index/versions/", "index/CURRENT"))
    }


def test_gc_beside_a_build_on_another_machine(s3, bucket, machine, tmp_path, overtaken, out):
    """It waits for a live one, and from one that is not heard of it takes the right to publish."""
    nights(tmp_path, out)
    first = corpus_of_night(tmp_path / "c.parquet", 3)
    current = []

    def upkeep() -> None:
        for command in (GC, ("compact",)):
            fails(6, "is in use by process", *command, out)
        assert len(marks(s3, bucket)) == 1
        succeed(*GC, out, "--dry-run")
        age(bucket)
        succeed("prune", out, "--keep", 1)
        # The corpus that it encoded is on record: another machine encodes another one.
        update_index(UpdateConfig(index=out, corpus=(second,), refit="never"))
        assert json.loads(succeed(*GC, out))["segments"] > 0
        current.append(published(s3, bucket))

    second = corpus_of_night(tmp_path / "d.parquet", 1)
    with (
        overtaken(build_room, "write_files", upkeep),
        pytest.raises(BusyError, match="not heard of for 10 minutes"),
    ):
        build(first, out=out, force=True)
    assert published(s3, bucket) == current[0]
    build(first, out=out)
    machine("third")
    succeed("verify", out)
    assert not marks(s3, bucket)


def test_gc_beside_a_first_build_that_is_about_to_publish(
    s3: Any, bucket: str, tmp_path: Path, overtaken: Any, out: str
) -> None:
    corpus = corpus_of_night(tmp_path / "c.parquet", 0)
    columns = ("--embedding-column", "embedding", "--id-column", "id")

    def collect() -> None:
        age(bucket)
        succeed(*GC, f"{out}/store")

    with overtaken(published_room, "put_current", collect):
        status, _, said = run("build", corpus, *columns, "--out", out)
    assert (status, "not heard of for 10 minutes" in said) == (6, True), said
    assert not published(s3, bucket)
    succeed("build", corpus, *columns, "--out", out)
    succeed("verify", out)


@pytest.mark.parametrize(
    ("room", "step", "night"),
    [(gc_room, "_needed_segments", 0), (references_room, "index_references", 3)],
    ids=["rows of before", "new rows, which are no damage"],
)
def test_a_build_beside_gc_on_another_machine(
    s3, bucket, tmp_path, overtaken, room, step, night, out
):
    """It does not begin; and a gc that is not heard of removes nothing more."""
    nights(tmp_path, out)
    succeed("prune", out, "--keep", 1)
    corpus = corpus_of_night(tmp_path / "c.parquet", night)
    there = store_keys(s3, bucket)

    def build_there() -> None:
        with pytest.raises(BusyError, match="is in use by process"):
            build(corpus, out=out)
        age(bucket)
        build(corpus, out=out)

    with overtaken(room, step, build_there):
        status, _, said = run(*GC, out)
    assert (status, "not heard of for 10 minutes" in said) == (6, True), said
    assert set(store_keys(s3, bucket)) >= set(there)
    succeed("verify", out)


def test_a_store_in_a_folder_of_an_index_in_a_bucket(s3, bucket, tmp_path, monkeypatch, overtaken):
    store, out = tmp_path / "store", f"s3://{bucket}/index"
    nights(tmp_path, out, store=str(store))
    found = json.loads(succeed(*GC, store))
    assert (found["indexes"], found["segments"], found["references"]) == ([out], 0, 4)
    succeed("prune", out, "--keep", 1)
    assert json.loads(succeed(*GC, store))["segments"] > 0
    succeed("verify", store, out)
    assert "is there, and its versions need" in run("gc", store, "--forget", out)[2]
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        assert run("gc", store, "--forget", out)[0] == 7
    # On another machine that has the folder, locks of this one are not seen.
    with overtaken(build_room, "write_files", lambda: fails(6, "", *GC, store)):
        build(corpus_of_night(tmp_path / "c.parquet", 0), out=out, store=str(store))
    for key in keys(s3, bucket, "index/"):
        s3.delete_object(Bucket=bucket, Key=key)
    fails(5, f"{out}, an index built from", *GC, store)
    s3.delete_bucket(Bucket=bucket)
    succeed("gc", store, "--forget", out)
    assert json.loads(succeed(*GC, store))["indexes"] == []


def test_the_nightly_job_collects_in_a_bucket(s3, bucket, machine, tmp_path, out):
    nights(tmp_path, out)
    job = tmp_path / "job.toml"
    job.write_text(f'index = "{out}"\nkeep-versions = 1\ncompact = true\nrefit = "never"\n')
    corpus_of_night(tmp_path / "c.parquet", 3)
    age(bucket, 8 * 24 * 60, of="/store/")
    machine("second")
    status, events = night(job)
    found = {event["event"]: event for event in events}
    assert status == 0, events
    assert found["compact_finished"]["written"] == 1
    assert found["gc_finished"]["parts"] > 0
    assert len(store_keys(s3, bucket)) == 1
    machine("third")
    assert len(hits(out)) > 0
    succeed("verify", out)
