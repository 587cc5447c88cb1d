"""Build into a bucket and search there, by a server of S3 on this machine."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from tests.acceptance.commands import done, refused
from tests.acceptance.vectors import (
    OPTIONS,
    Vectors,
    assert_searches,
    build,
    search,
    some,
    write_corpus,
)
from tests.objects import conftest as objects

pytestmark = pytest.mark.service
NUMBERS = itertools.count()
server = objects.server


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A client of the server; the environment is set as users set it."""
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "WHITEN_INDEX_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    return boto3.client("s3", endpoint_url=server)


@pytest.fixture
def bucket(s3: Any) -> str:
    name = f"acceptance{next(NUMBERS)}"
    s3.create_bucket(Bucket=name)
    return name


def objects(s3: Any, bucket: str) -> dict[str, str]:
    """Return the e-tag of each object."""
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return {each["Key"]: each["ETag"] for page in pages for each in page.get("Contents", ())}


def put_corpus(s3: Any, bucket: str, rows: Vectors, work: Path) -> str:
    """Put the two files of a corpus into a bucket; return their address."""
    for path in sorted(write_corpus(work / "corpus", rows).iterdir()):
        s3.put_object(Bucket=bucket, Key=f"corpus/{path.name}", Body=path.read_bytes())
    return f"s3://{bucket}/corpus/"


def test_a_search_in_a_bucket_equals_one_in_a_folder(
    s3: Any, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that built it and one with an empty cache find the same."""
    rows, queries = some(300), some(20, "query").rows
    index = f"s3://{bucket}/a place/index"
    build(put_corpus(s3, bucket, rows, tmp_path), index)
    build(tmp_path / "corpus", tmp_path / "index")
    here = search(tmp_path / "index", queries, tmp_path)
    for cache in ("cache", "empty"):
        monkeypatch.setenv("WHITEN_INDEX_CACHE", str(tmp_path / cache))
        assert_searches(index, rows, tmp_path)
        assert search(index, queries, tmp_path) == here
        exact = search(index, queries, tmp_path, "--rerank", 50)
        assert exact == search(tmp_path / "index", queries, tmp_path, "--rerank", 50)
    done("verify", index)


def test_the_object_is_a_plain_faiss_index(s3: Any, bucket: str, tmp_path: Path) -> None:
    rows, queries = some(300), some(20, "query").rows
    build(write_corpus(tmp_path / "corpus", rows), f"s3://{bucket}/index")
    current = s3.get_object(Bucket=bucket, Key="index/CURRENT")["Body"].read()
    version = json.loads(current)["version"]
    (key,) = (each for each in objects(s3, bucket) if each.endswith("/index.faiss"))
    assert key.startswith(f"index/versions/{version}/")
    s3.download_file(bucket, key, str(tmp_path / "index.faiss"))
    scores, found = faiss.read_index(str(tmp_path / "index.faiss")).search(queries, 10)
    for row, hits in enumerate(search(f"s3://{bucket}/index", queries, tmp_path)):
        assert [rows.ids[each] for each in found[row]] == [each for each, _ in hits]
        np.testing.assert_allclose(scores[row], [score for _, score in hits], atol=1e-5)


def test_versions_in_a_bucket_and_the_way_back(s3: Any, bucket: str, tmp_path: Path) -> None:
    rows, index = some(300), f"s3://{bucket}/index"
    today = rows[50:] + some(60, "new")
    build(write_corpus(tmp_path / "corpus", rows), index)
    first = objects(s3, bucket)
    write_corpus(tmp_path / "corpus", today)
    build(tmp_path / "corpus", index)
    # What was there stays, but for the name of what is published.
    after = objects(s3, bucket)
    kept = {key for key in first if key.startswith("index/versions/")}
    assert {key: after[key] for key in kept} == {key: first[key] for key in kept}
    found = json.loads(done("versions", index, "--json"))["versions"]
    assert [each["rows"] for each in found] == [310, 300]
    assert_searches(index, today, tmp_path)
    done("rollback", index)
    assert_searches(index, rows, tmp_path)


def test_the_same_build_again_puts_nothing(
    s3: Any, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with an empty cache takes all embeddings from the bucket."""
    corpus = write_corpus(tmp_path / "corpus", some(300))
    for path in corpus.iterdir():
        # A file written within the last two seconds is read again, and then noted as read.
        os.utime(path, (1e9, 1e9))
    command = ("build", corpus, *OPTIONS, "--json")
    done(*command, "--out", f"s3://{bucket}/index")
    before = objects(s3, bucket)
    monkeypatch.setenv("WHITEN_INDEX_CACHE", str(tmp_path / "empty"))
    report = json.loads(done(*command, "--out", f"s3://{bucket}/index"))
    assert report["up_to_date"]
    assert (report["counts"]["encoded"], report["counts"]["reused"]) == (0, 300)
    assert objects(s3, bucket) == before


@pytest.mark.parametrize("mender", ["cache", "empty"])
def test_damage_in_a_bucket_is_found_and_mended(
    s3: Any, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mender: str
) -> None:
    """A machine with a sound copy puts it there again; another makes the index anew."""
    rows, index = some(300), f"s3://{bucket}/index"
    build(write_corpus(tmp_path / "corpus", rows), index)
    (key,) = (each for each in objects(s3, bucket) if each.endswith("/index.faiss"))
    sound = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    content = bytearray(sound)
    content[len(content) // 2] ^= 1
    s3.put_object(Bucket=bucket, Key=key, Body=bytes(content))
    refused(5, "verify", index)
    monkeypatch.setenv("WHITEN_INDEX_CACHE", str(tmp_path / "empty"))
    refused(5, "inspect", index)
    monkeypatch.setenv("WHITEN_INDEX_CACHE", str(tmp_path / mender))
    build(tmp_path / "corpus", index)
    if mender == "cache":
        done("verify", index)
        assert s3.get_object(Bucket=bucket, Key=key)["Body"].read() == sound
    monkeypatch.setenv("WHITEN_INDEX_CACHE", str(tmp_path / "another"))
    assert_searches(index, rows, tmp_path)


def test_upkeep_of_what_is_all_needed_removes_nothing(s3: Any, bucket: str, tmp_path: Path) -> None:
    rows, index = some(100), f"s3://{bucket}/index"
    build(write_corpus(tmp_path / "corpus", rows), index)
    before = objects(s3, bucket)
    for place in (index, f"{index}/store"):
        done("gc", place, "--keep-days", "0")
        done("verify", place)
    assert objects(s3, bucket) == before
    done("compact", index)
    done("verify", index)
    assert_searches(index, rows, tmp_path)
    assert "nowhere" in refused(7, "gc", "s3://nowhere-at-all/index")
