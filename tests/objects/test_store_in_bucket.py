"""Stores of raw embeddings in a bucket: resumed anywhere, mended where they are damaged."""

import time
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.helpers.bad_input import process, succeed
from tests.helpers.builds import random_rows
from tests.objects.helpers import OPTIONS, ROWS, SHARDS, build, corpus_file, hits, keys
from whiten_index import BuildConfig, EmbeddingStore, encode_corpus
from whiten_index.errors import ArtifactError, BusyError
from whiten_index.measure import sweep_run
from whiten_index.pipeline.encode import EncodeReport

pytestmark = pytest.mark.service


@pytest.fixture
def store(bucket: str, machine: Any) -> str:
    return f"s3://{bucket}/raw"


def encode(corpus: str, store: str) -> EncodeReport:
    return encode_corpus(BuildConfig(corpus=(corpus,), store=store, **OPTIONS))


def rows_of(store: str, report: EncodeReport) -> np.ndarray[Any, Any]:
    opened = EmbeddingStore.open(store)
    return np.concatenate([opened.embeddings(part)[:] for part in report.record.parts])


def test_rows_that_others_hold_are_picked_from_the_bucket(store, machine, tmp_path):
    encode(corpus_file(tmp_path / "c.parquet"), store)
    table = pq.read_table(tmp_path / "c.parquet").slice(3)
    pq.write_table(table, tmp_path / "d.parquet")
    machine("second")
    report = encode(str(tmp_path / "d.parquet"), store)
    assert report.counts.encoded == 0
    machine("third")
    np.testing.assert_array_equal(rows_of(store, report), random_rows(0, rows=SHARDS * ROWS)[3:])


# A build that waits after some of its shards to be killed.
CHILD = """
import sys, time
from pathlib import Path
from tests.objects.helpers import build
from whiten_index.artifacts.cached_storage import BucketStorage
corpus, out, shards, mark = sys.argv[1:]
real, pushed = BucketStorage.push, []
def push(self, path):
    if path.parent.name == "segments":
        if len(pushed) == int(shards):
            Path(mark).touch()
            time.sleep(600)
        pushed.append(path)
    real(self, path)
BucketStorage.push = push
build(corpus, out=out)
"""


@pytest.mark.parametrize("finished", [0, 2])
def test_killed_and_resumed_elsewhere(s3, bucket, machine, tmp_path, finished, corpus, out):
    mark = tmp_path / "mark"
    with process(corpus, out, finished, mark, code=CHILD) as child:
        while not mark.exists():
            assert child.poll() is None, child.communicate()
            time.sleep(0.05)
        child.kill()
    done = [
        key for key in keys(s3, bucket) if "/segments/" in key and key.endswith("manifest.json")
    ]
    assert len(done) == finished
    machine("second")
    report = build(corpus, out=out)
    assert report.encoded.counts.encoded == (SHARDS - finished) * ROWS
    machine("first")
    # What was made and not put into the bucket before is nobody's loss.
    assert build(corpus, out=out).up_to_date
    build(corpus, out=str(tmp_path / "here"))
    assert hits(out) == hits(tmp_path / "here")


def require_all(store: EmbeddingStore, report: EncodeReport) -> None:
    for part in report.record.parts:
        store.require_segment(part.digests)


def segment_keys(s3: Any, bucket: str, name: str) -> list[str]:
    return [key for key in keys(s3, bucket) if "/segments/" in key and key.endswith(f"/{name}")]


@pytest.mark.parametrize("name", ["manifest.json", "embeddings.safetensors", "moments.safetensors"])
@pytest.mark.parametrize("how", ["cut", "gone", "flipped"])
def test_what_is_damaged_or_gone_is_encoded_again(s3, bucket, store, machine, name, how, corpus):
    report = encode(corpus, store)
    key = segment_keys(s3, bucket, name)[1]
    body = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    flipped = body[:-30] + bytes([body[-30] ^ 4]) + body[-29:]
    if how == "gone":
        s3.delete_object(Bucket=bucket, Key=key)
    else:
        s3.put_object(Bucket=bucket, Key=key, Body=b"{" if how == "cut" else flipped)
    machine("second")
    with pytest.raises(ArtifactError, match="is missing or damaged") as raised:
        require_all(EmbeddingStore.open(store), report)
    assert store in str(raised.value)
    mended = encode(corpus, store).counts
    # A shard without a manifest counts as none.
    remade = (name, how) != ("manifest.json", "gone")
    assert (mended.encoded, mended.remade_shards) == (ROWS, remade)
    machine("third")
    assert encode(corpus, store).counts.encoded == 0
    np.testing.assert_array_equal(rows_of(store, report), random_rows(0, rows=SHARDS * ROWS))


def test_a_sweep_goes_on_on_another_machine(bucket, machine, tmp_path, overtaken):
    out = f"s3://{bucket}/swept"
    wish = {"corpus": (corpus_file(tmp_path / "c.parquet"),), "embedding_column": "embedding"}

    def swept(codecs: str) -> Any:
        config = sweep_run.SweepConfig(**wish, out=out, widths="4", indexes="flat", codecs=codecs)
        return sweep_run.run_sweep(config)

    first, found = swept("fp32"), list[int]()
    with (
        overtaken(sweep_run, "measure_points", lambda: found.append(swept("fp32,sq8").found)),
        pytest.raises(BusyError, match=f"{out} was changed"),
    ):
        swept("sq6")
    assert found == [first.measured]
    machine("third")
    assert (swept("fp32,sq8").runs, swept("fp32,sq8").measured) == (first.runs, 0)
    assert succeed("report", out) == f"{out}/report.html\n"
