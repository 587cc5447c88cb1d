"""An object of the corpus that is overwritten while a command reads it: refused, or one of both."""

import datetime
from typing import Any

import pytest

from tests.corpus.test_changed_files import MOMENTS, Clock
from tests.objects.helpers import build, hits, put_corpus
from whiten_index.errors import CorpusError

pytestmark = pytest.mark.service


def put(s3: Any, bucket: str, seed: int) -> str:
    """Put a corpus there, as if in the same second as any other."""
    from moto.s3.models import s3_backends

    corpus = put_corpus(s3, bucket, "c.parquet", seed=seed)
    (account,) = (each for each in s3_backends.values() if bucket in each["aws"].buckets)
    when = datetime.datetime(2024, 1, 1)
    account["aws"].buckets[bucket].keys["c.parquet"].last_modified = when
    return corpus


def test_an_object_that_is_overwritten_is_never_published_as_a_mixture(s3, bucket, tmp_path):
    """Only the ETag tells one from the other."""
    allowed, sizes, clock = [], set(), Clock()
    for seed in (1, 2):
        corpus, clock = put(s3, bucket, seed), Clock()
        sizes.add(s3.head_object(Bucket=bucket, Key="c.parquet")["ContentLength"])
        with clock.running():
            build(corpus, out=str(tmp_path / f"fresh{seed}"))
        allowed.append(hits(tmp_path / f"fresh{seed}"))
    assert len(sizes) == 1
    assert allowed[0] != allowed[1]
    refusals = []
    for moment in MOMENTS:
        put(s3, bucket, 1)
        out = tmp_path / f"index-{moment}"

        def overwrite() -> None:
            put(s3, bucket, 2)

        try:
            with Clock(1 + int(moment * (clock.calls - 1)), overwrite).running():
                build(corpus, out=str(out))
        except CorpusError as error:
            refusals.append(str(error))
            assert not (out / "CURRENT").exists()
        else:
            assert hits(out) in allowed
    assert refusals
    assert all("changed while it was read; run the same command again" in each for each in refusals)
