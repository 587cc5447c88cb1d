"""A build on a cluster whose machines share nothing but a bucket."""

import pytest

from tests.objects.helpers import ROWS, SHARDS, build, hits, put_corpus

pytestmark = pytest.mark.service


def test_corpus_and_store_in_a_bucket(cluster, s3, bucket, machine, tmp_path):
    corpus = put_corpus(s3, bucket, "corpus.parquet")
    there = build(
        corpus, store=f"s3://{bucket}/store", out=str(tmp_path / "out"), factory="IVF4,Flat",
        runner="ray", address=cluster.address,
    )  # fmt: skip
    assert there.encoded.counts.encoded == SHARDS * ROWS
    assert there.to_json()["runner"]["failures"] == 0
    # What a machine made it has a copy of.
    caches = [tmp_path / "caches" / name for name in ("one", "two")]
    assert any(list(cache.rglob("embeddings.safetensors")) for cache in caches)
    here = build(
        corpus, store=str(tmp_path / "store"), out=str(tmp_path / "here"), factory="IVF4,Flat"
    )
    assert hits(tmp_path / "out") == hits(tmp_path / "here")
    assert here.encoded.record.fingerprint == there.encoded.record.fingerprint
    machine("another")
    again = build(corpus, store=f"s3://{bucket}/store", out=str(tmp_path / "again"))
    assert again.encoded.counts.reused == SHARDS * ROWS
