"""What the tests of stores and indexes in buckets share."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.builds import random_rows
from whiten_index import BuildConfig, build_index, open_index
from whiten_index.pipeline.build import BuildReport

SHARDS, ROWS = 5, 40
OPTIONS: dict[str, Any] = {
    "embedding_column": "embedding", "id_column": "id", "keep": ("title",), "k": 6,
    "whiten": "whitening", "shard_rows": ROWS,
}  # fmt: skip


def corpus_table(shards: int = SHARDS, *, seed: int = 0, first: int = 0) -> pa.Table:
    rows = random_rows(seed, rows=shards * ROWS)
    ids = np.arange(first, first + len(rows))
    return pa.table({"id": ids, "title": [f"t{i}" for i in ids], "embedding": list(rows)})


def corpus_file(path: Path, **options: Any) -> str:
    pq.write_table(corpus_table(**options), path)
    return str(path)


def put_corpus(s3: Any, bucket: str, key: str, **options: Any) -> str:
    data = io.BytesIO()
    pq.write_table(corpus_table(**options), data)
    s3.put_object(Bucket=bucket, Key=key, Body=data.getvalue())
    return f"s3://{bucket}/{key}"


def build(corpus: str, **options: Any) -> BuildReport:
    return build_index(BuildConfig(corpus=(corpus,), **{**OPTIONS, **options}))


def keys(s3: Any, bucket: str, prefix: str = "") -> list[str]:
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [each["Key"] for page in pages for each in page.get("Contents", ())]


def hits(place: Path | str, **options: Any) -> list[list[tuple[int, int]]]:
    """The ids and the scores, to four digits, that some queries find."""
    found = open_index(place, **options).search_embeddings(random_rows(9, rows=7), top_k=5)
    return [[(hit.id, round(hit.score * 10_000)) for hit in each] for each in found]
