"""Where stores and indexes are: folders and object stores; what is said of others."""

from pathlib import Path

import pytest

from tests.helpers.builds import random_rows, write_rows
from whiten_index import BuildConfig, open_index
from whiten_index.artifacts.object_store import plain_uri, split_uri
from whiten_index.errors import ConfigError
from whiten_index.paths import as_place

URI = "s3://bucket/some/prefix"


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_rows(tmp_path / "c" / "c.parquet", random_rows(rows=80))


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("s3://b", ("s3", "b", "")),
        ("s3://b/", ("s3", "b", "")),
        ("gs://b/x/y/", ("gs", "b", "x/y")),
        ("az://b/with spaces/Ü%20+", ("az", "b", "with spaces/Ü%20+")),
    ],
)
def test_parts_of_a_uri(uri: str, parts: tuple[str, str, str]) -> None:
    assert split_uri(uri) == parts
    assert split_uri(plain_uri(uri)) == parts
    assert not plain_uri(uri).endswith("/")


@pytest.mark.parametrize(("given", "path"), [("a/b", "a/b"), ("/a%20b", "/a%20b"), (URI, URI)])
def test_places(given: str, path: str) -> None:
    assert str(as_place(given, what="--out")) == path


@pytest.mark.parametrize("given", ["http://host/a", "file:///a", "hdfs://host/a", "S3A://b/x"])
def test_other_schemes_are_refused(given: str, corpus: str) -> None:
    for name in ("out", "store"):
        with pytest.raises(ConfigError, match=rf"--{name} cannot be at .*s3://BUCKET"):
            BuildConfig(corpus=(corpus,), embedding_column="embedding", **{name: given})
    with pytest.raises(ConfigError, match="cannot be at"):
        open_index(given)
