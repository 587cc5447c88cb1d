"""Where stores and indexes are: folders, file:// URIs, object stores; what is said of others."""

from __future__ import annotations

import importlib
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.build_helpers import build, random_rows, write_rows
from whiten_index import BuildConfig, build_index, open_index
from whiten_index.cli import cli
from whiten_index.describe import describe_index
from whiten_index.encode import encode_corpus
from whiten_index.errors import ConfigError
from whiten_index.given import absolute, as_place
from whiten_index.objects import HERE, place_of, settled
from whiten_index.objects.bucket import plain_uri, split_uri
from whiten_index.objects.copies import cache_folder
from whiten_index.objects.listing import Listing
from whiten_index.store import EmbeddingStore
from whiten_index.update import UpdateConfig
from whiten_index.upkeep import compact_store, gc_store
from whiten_index.vectordb.push_config import PushConfig
from whiten_index.versions import list_versions, prune

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


@pytest.mark.parametrize("uri", ["s3://", "s3:///x", "s3://b//x", "s3://b/./x", "s3://b/x/.."])
def test_uris_that_name_no_place(uri: str) -> None:
    with pytest.raises(ConfigError, match="names no place in an object store"):
        split_uri(uri)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("file:///a/b", "/a/b"),
        ("file://localhost/a/b", "/a/b"),
        ("file:///a%20b/%C3%9C", "/a b/Ü"),
        ("FILE:///a#b?c", "/a#b?c"),
        ("a/b", "a/b"),
        ("/a%20b", "/a%20b"),
        (URI, URI),
    ],
)
def test_places(given: str, path: str) -> None:
    assert as_place(given, what="--out") == path


@pytest.mark.parametrize("given", ["file://host/a", "file:///", "file://"])
def test_file_uris_of_no_folder(given: str) -> None:
    with pytest.raises(ConfigError, match="names no folder of this machine"):
        as_place(given, what="--out")


@pytest.mark.parametrize("given", ["http://host/a", "ftp://host/a", "hdfs://host/a", "S3A://b/x"])
def test_other_schemes_are_refused(given: str, corpus: str) -> None:
    for name in ("out", "store"):
        with pytest.raises(
            ConfigError, match=rf"--{name} cannot be at .*file:///FOLDER.*s3://BUCKET"
        ):
            BuildConfig(corpus=(corpus,), embedding_column="embedding", **{name: given})
    with pytest.raises(ConfigError, match="cannot be at"):
        open_index(given)


def test_nul_in_a_file_uri() -> None:
    with pytest.raises(ConfigError, match="NUL"):
        as_place("file:///a%00b", what="--out")


def test_absolute_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("x") == tmp_path / "x"
    assert absolute("file:///x%20y") == Path("/x y")
    assert absolute(URI) == URI
    assert settled(f"{URI}/") == URI
    assert settled("x") == (tmp_path / "x").resolve()


def test_a_folder_has_no_bucket(tmp_path: Path) -> None:
    assert place_of(tmp_path) == (tmp_path, HERE)
    assert place_of(str(tmp_path)) == (tmp_path, HERE)
    assert HERE.uri == ""


def test_file_uris_are_folders(tmp_path: Path, corpus: str) -> None:
    folder = tmp_path / "with space Ü"
    uri = folder.as_uri()
    assert "%20" in uri
    first = build_index(
        BuildConfig(
            corpus=(corpus,), out=f"{uri}/index", store=f"{uri}/store", k=6, whiten="whitening",
            embedding_column="embedding", id_column="id",
        )
    )  # fmt: skip
    here = build(tmp_path / "here", corpus)
    assert first.out == folder / "index"
    assert first.manifest["store"] == str(folder / "store")
    assert first.manifest["config"]["out"] == str(folder / "index")
    queries = random_rows(3, rows=4)
    places = (f"{uri}/index", str(folder / "index"), here.out)
    found = [open_index(place).search_embeddings(queries) for place in places]
    assert found[0] == found[1] == found[2]
    assert describe_index(f"{uri}/index")["version"] == first.version
    assert len(list_versions(f"{uri}/index")) == 1
    again = build(folder / "index", corpus, store=str(folder / "store"))
    assert again.up_to_date


def test_a_store_of_a_folder_is_pickled_as_its_place(tmp_path: Path, corpus: str) -> None:
    build(tmp_path / "here", corpus)
    store = EmbeddingStore.open(tmp_path / "here" / "store")
    again = pickle.loads(pickle.dumps(store))
    assert (again.root, again.fingerprint, again.encoder) == (
        store.root, store.fingerprint, store.encoder,
    )  # fmt: skip


def test_copies_of_different_places_are_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHITEN_INDEX_CACHE", str(tmp_path / "own"))
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert cache_folder(URI).parent == tmp_path / "own" / "objects"
    assert cache_folder(URI) != cache_folder(f"{URI}2")
    before = cache_folder(URI)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://elsewhere")
    assert cache_folder(URI) != before
    monkeypatch.delenv("WHITEN_INDEX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(URI).parent == tmp_path / "xdg" / "whiten-index" / "objects"


@pytest.mark.parametrize(
    "ask",
    [
        lambda: gc_store(URI),
        lambda: compact_store(URI),
        lambda: prune(URI, keep=1),
        lambda: UpdateConfig(corpus=("c",), index=URI),
        lambda: UpdateConfig(corpus=("c",), index="i", store=URI),
        lambda: PushConfig(index=URI, to="postgresql://x/y"),
    ],
    ids=["gc", "compact", "prune", "update", "its store", "push"],
)
def test_what_works_in_folders_only(ask: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=rf"works in folders, not at {URI}; copy what is there"):
        ask()


@pytest.mark.parametrize(
    "command",
    [
        ("gc", URI),
        ("compact", URI),
        ("prune", URI, "--keep", "2"),
        ("update", "c", "--index", URI),
        ("push", URI, "--to", "postgresql://x/y"),
        ("sweep", "c.parquet", "--text-column", "t", "--out", URI),
        ("export", URI, "transform.safetensors"),
        ("eval", "geometry", "c.parquet", "--index", URI),
    ],
    ids=lambda command: command[0],
)
def test_commands_that_work_in_folders_only(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 2, result.output
    assert f"folders, not at {URI}" in result.output


def test_without_obstore(tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    importlib.invalidate_caches()
    options: dict[str, Any] = {"corpus": (corpus,), "embedding_column": "embedding"}
    for ask in (
        lambda: build_index(BuildConfig(out=URI, **options)),
        lambda: build_index(BuildConfig(out=str(tmp_path / "o"), store=URI, **options)),
        lambda: encode_corpus(BuildConfig(store=URI, **options)),
        lambda: open_index(URI),
        lambda: list_versions(URI),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'whiten-index\[objects\]'"):
            ask()


def test_a_listing_knows_its_folders() -> None:
    keys = {
        "e/manifest.json": 1, "e/shards/a/manifest.json": 2, "e/shards/a/0f/embeddings": 3,
        "e/shards/b/0e/embeddings": 4, "e/rows/x.zst": 5, "e/rows/y.zst": 6,
    }  # fmt: skip
    listing = Listing({key: (size, "tag") for key, size in keys.items()})
    assert listing.names("e/shards") == {"a"}
    assert listing.names("e/rows") == {"x.zst", "y.zst"}
    assert listing.below("e/shards/a") == {"manifest.json": 2, "0f/embeddings": 3}
    assert listing.is_artifact("e/shards/a")
    assert not listing.is_artifact("e/shards/b")
    listing.add("e/shards/b/manifest.json", (7, "tag"))
    listing.add("e/rows/z.zst", (8, "tag"))
    assert listing.discard("e/rows/x.zst")
    assert not listing.discard("e/rows/x.zst")
    assert listing.discard("e/shards/a/manifest.json")
    assert listing.names("e/shards") == {"b"}
    assert listing.names("e/rows") == {"y.zst", "z.zst"}
    assert "e/rows/x.zst" not in listing
    assert (listing.size("e/rows/z.zst"), listing.size("e/rows/x.zst")) == (8, 0)


def test_a_listing_of_many_shards_is_quick_to_ask() -> None:
    shards = {
        f"e/shards/{n:032x}/{name}": (1, "tag")
        for n in range(20_000)
        for name in ("manifest.json", "0/x")
    }
    listing = Listing(shards)
    assert listing.names("e/packs") == set()
    started = time.monotonic()
    for number in range(20_000):
        assert not listing.is_artifact(f"e/shards/{number:033x}")
        assert not listing.names("e/packs")
    assert time.monotonic() - started < 2
