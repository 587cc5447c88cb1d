"""Addresses of stores and indexes: their parts, and secrets, which are refused and never shown."""

import base64
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import click
import fsspec
import pytest
from click.testing import CliRunner, Result

from tests.helpers.builds import random_rows, write_rows
from whiten_index import BuildConfig, build_index, open_index
from whiten_index.artifacts.object_store import plain_uri, split_uri
from whiten_index.cli import cli
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.errors import ConfigError, WhitenIndexError
from whiten_index.measure.sweep_config import SweepConfig
from whiten_index.paths import as_place, require_no_secret
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.vectordb.push_config import PushConfig
from whiten_index.versions.compaction import compact_store
from whiten_index.versions.gc import gc_store
from whiten_index.versions.retention import list_versions, prune, rollback
from whiten_index.versions.verify import verify_paths

SECRET = "hush/Zebra+77q"
ESCAPED = quote(SECRET, safe="")
FORMS = {
    f"s3://KEY:{ESCAPED}@bucket/x": "AWS_SECRET_ACCESS_KEY",
    f"s3://KEY:{SECRET}@bucket/x.parquet": "AWS_SECRET_ACCESS_KEY",
    f"s3://KEY%3A{ESCAPED}%40bucket/x": "AWS_SECRET_ACCESS_KEY",
    f"gs://bucket/x?X-Goog-Signature={ESCAPED}": "GOOGLE_APPLICATION_CREDENTIALS",
    f"az://container/x.parquet?sv=2024&sig={ESCAPED}": "AZURE_STORAGE_ACCOUNT_KEY",
    f"https://user:{ESCAPED}@host/x.parquet": "fsspec",
    f"https://{ESCAPED}@host/x.parquet": "fsspec",
    f"https://host/x.parquet?X-Amz-Signature={ESCAPED}": "fsspec",
    f"https://host/x.parquet?a=1#token={ESCAPED}": "fsspec",
    f"https://host/x.parquet?md5={ESCAPED}&expires=1999999999": "fsspec",
    f"https://host/x.parquet?hdnts=exp=1~acl=/*~hmac={ESCAPED}": "fsspec",
    f"https://host/x.parquet?ticket={ESCAPED}": "fsspec",
    f"zip://a.parquet::https://user:{ESCAPED}@host/x.zip": "fsspec",
    f"postgresql://user:{ESCAPED}@host/db": "PGPASSWORD",
    f"qdrant://:{ESCAPED}@host:6333": "QDRANT_API_KEY",
    f"milvus://root:{ESCAPED}@host": "MILVUS_TOKEN",
    f"lancedb+s3://KEY:{ESCAPED}@bucket": "AWS_SECRET_ACCESS_KEY",
    f"ray://user:{ESCAPED}@host:10001": "RAY_AUTH_TOKEN",
    f"file://user:{ESCAPED}@host/x": "variable",
    f"user:{ESCAPED}@host/x.parquet": "variable",
    f"user:{ESCAPED}@host:/folder": "variable",
    f"//user:{ESCAPED}@host/x": "variable",
    f"host=h user=u password={ESCAPED}": "variable",
    f"s3://b/x%3Fsignature={ESCAPED}": "AWS",
    f"user:{ESCAPED}@host:6379": "variable",
}
# Addresses without a secret, which must pass.
PLAIN = (
    "s3://bucket/2024-01-01T00:00/x@y.parquet", "gs://anonymous@bucket/x", "/data/a:b@c.parquet",
    "s3://bucket/x?region=eu-west-1&endpoint_override=http://127.0.0.1:9000", "file:///a#b?c=d",
    "abfs://container@account.dfs.core.windows.net/x", "hdfs://user@host:8020/x", "gs://b/*.parquet",
    "https://host:8080/x.parquet?download=true&versionId=3sL4kqtJlcpXroDTDmJ+rmSpXd3dIbrHY",
    "hf://datasets/a/b@main/x.parquet", "zip://x.parquet::s3://bucket/y.zip", "x@y.org",
    "postgresql://user@[::1]:5432/db?sslkey=/k&passfile=/p", "git@host:a/b",
    "https://www.youtube.com/watch?v=dQw4w9WgXcQ", "what does https://host/?q=1 say",
)  # fmt: skip


IN_A_BUCKET = (
    ("build", "c.parquet", "--embedding-column", "e", "--out", "s3://bucket/x"),
    ("build", "s3://bucket/c.parquet", "--embedding-column", "e", "--out", "x"),
    ("search", "s3://bucket/x", "text"),
)


def commands(group: click.Group, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*above, name))
        else:
            yield (*above, name)


def command_at(path: tuple[str, ...]) -> click.Command:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command


def leaks(data: bytes) -> bool:
    """Tell whether the secret, or half of it, is in some bytes, in one of its forms."""
    text = data.decode("utf-8", "replace")
    coded = base64.b64encode(SECRET.encode()).decode().rstrip("=")
    return any(form in each for each in (text, unquote(text))
               for form in (SECRET, ESCAPED, "Zebra", coded))  # fmt: skip


def require_no_leak(work: Path, said: str) -> None:
    assert not leaks(said.encode()), said
    for folder, _, names in os.walk(work):
        for name in names:
            path = Path(folder) / name
            assert not leaks(str(path.relative_to(work)).encode()), path
            assert not leaks(path.read_bytes()), path


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a home and a cache of its own."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    for name in ("WHITEN_INDEX_CACHE", "AWS_ENDPOINT_URL", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return folder


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_no_command_takes_a_secret(work: Path) -> None:
    """All that is given is looked at before it is known what it is, so the forms take turns."""
    forms, tried = itertools.cycle(FORMS.items()), set[tuple[str, bool]]()
    for path in commands(cli):
        for parameter in command_at(path).params:
            if getattr(parameter, "is_flag", False):
                continue
            option = parameter.opts[-1] if isinstance(parameter, click.Option) else None
            for joined in (True, False):
                form, remedy = next(forms)
                given = (form,) if option is None else (option, form)
                result = run(*path, *(("=".join(given),) if joined else given))
                assert result.exit_code == 2, (path, given, result.output)
                if option == "--base-url" and form.startswith("http"):
                    remedy = "OPENAI_API_KEY"
                assert remedy in result.output, (path, given, result.output)
                require_no_leak(work, result.output)
                tried.add((form, joined))
    assert len(tried) == 2 * len(FORMS)
    assert list(work.iterdir()) == []


def test_no_job_file_takes_a_secret(work: Path, tmp_path: Path) -> None:
    job, forms = tmp_path / "job.toml", itertools.cycle(FORMS)
    tried = set[tuple[str, bool]]()
    for key in (field.name for field in dataclasses.fields(BuildConfig)):
        for listed in (True, False):
            form = next(forms)
            job.write_text(f"{key} = {json.dumps([form] if listed else form)}\n")
            result = run("build", "corpus.parquet", "--out", "index", "--config", str(job))
            assert result.exit_code == 2, result.output
            assert f"job.toml: {key} " in result.output
            require_no_leak(work, result.output)
            tried.add((form, listed))
    assert len(tried) == 2 * len(FORMS)
    assert list(work.iterdir()) == []


def test_a_process_keeps_the_secret_too(work: Path) -> None:
    """What logs and tracebacks would say is seen as well."""
    form = next(iter(FORMS))
    command = (sys.executable, "-c", "from whiten_index.cli import main; main()", "build", form)
    ended = subprocess.run((*command, "--out", form), capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    require_no_leak(work, ended.stdout + ended.stderr)


@pytest.mark.parametrize(
    "ask",
    [
        lambda form: BuildConfig(corpus=(form,), out="index"),
        lambda form: BuildConfig(corpus=(Path(form),), out="index"),
        lambda form: BuildConfig(corpus=("c",), out=form),
        lambda form: BuildConfig(corpus=("c",), out="index", store=form),
        lambda form: BuildConfig(corpus=("c",), out="index", model=form),
        lambda form: BuildConfig(corpus=("c",), out="index", runner="ray", address=form),
        lambda form: BuildConfig(corpus=("c",), out="index", queries="q", qrels=form),
        lambda form: UpdateConfig(corpus=("c",), index=form),
        lambda form: UpdateConfig(corpus=(form,), index="index"),
        lambda form: UpdateConfig(corpus=("c",), index="index", canary_file=form),
        lambda form: SweepConfig(corpus=("c",), out="o", queries=form),
        lambda form: PushConfig(index="index", to=form, table="docs"),
        lambda form: PushConfig(index=form, to="x.parquet"),
        lambda form: PushConfig(index="i", to="qdrant:///x", options={"storage.endpoint": form}),
        lambda form: EncoderConfig(model=form),
        lambda form: open_index(form),
        lambda form: open_index("index", store=form),
        lambda form: list_versions(form),
        lambda form: rollback(form),
        lambda form: prune(form, keep=1),
        lambda form: verify_paths([form]),
        lambda form: gc_store(form),
        lambda form: gc_store("store", forget=[form]),
        lambda form: compact_store(form),
        lambda form: EmbeddingStore.open(form),
    ],
)  # fmt: skip
def test_no_call_takes_a_secret(ask: Callable[[str], Any], work: Path) -> None:
    for form in FORMS:
        with pytest.raises(WhitenIndexError) as raised:
            ask(form)
        assert not leaks(f"{raised.value} {raised.value!r}".encode()), (form, raised.value)
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("AWS_ENDPOINT_URL", "set AWS_ACCESS_KEY_ID"),
        ("AWS_ENDPOINT_URL_S3", "set AWS_ACCESS_KEY_ID"),
        ("AZURE_STORAGE_ENDPOINT", "set AZURE_STORAGE_ACCOUNT_NAME"),
        ("RAY_ADDRESS", "set RAY_AUTH_TOKEN"),
    ],
)
def test_no_endpoint_has_a_secret(
    name: str, remedy: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for endpoint in (f"http://user:{ESCAPED}@127.0.0.1:9", f"http://127.0.0.1:9/?sig={ESCAPED}"):
        monkeypatch.setenv(name, endpoint)
        for command in IN_A_BUCKET:
            result = run(*command)
            assert result.exit_code == 2, result.output
            assert name in result.output
            assert remedy in result.output
            require_no_leak(work, result.output)
        with pytest.raises(ConfigError, match=name) as raised:
            list_versions("s3://bucket/x")
        assert not leaks(str(raised.value).encode())


@pytest.mark.parametrize("content", [f'["{SECRET}"]', f'"{SECRET}"', f'{{"type": "{SECRET}"}}'])
def test_a_file_of_credentials_is_not_quoted(
    work: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    (work / "key.json").write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(work / "key.json"))
    result = run("search", "gs://bucket/x", "text")
    assert result.exit_code == 7
    assert "cannot open gs://bucket/x" in result.output
    assert not leaks(result.output.encode())


@pytest.mark.parametrize("form", ["KEY:{}/x@minio:9", "KEY:{}@minio", "https//KEY:{}@minio:9"])
def test_an_endpoint_that_is_no_address_is_not_quoted(
    work: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", form.format(ESCAPED))
    for command in IN_A_BUCKET:
        result = run(*command)
        assert result.exit_code in (2, 7), result.output
        require_no_leak(work, result.output)


@pytest.mark.parametrize("header", ["Authorization: Bearer {}", "Cookie: session={}; theme=dark"])
def test_what_a_library_says_of_a_secret_of_the_environment_is_hidden(
    work: Path, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    class Leaky(fsspec.AbstractFileSystem):  # type: ignore[misc]
        protocol = "leaky"

        def info(self, path: str, **_: Any) -> Any:
            secrets = f"{SECRET}, http://u:{ESCAPED}@h, ?key={ESCAPED}"
            ports = "Invalid port: 'Geheim', 'Simsala'"
            raise OSError(f"401 for {path} with {secrets}, second-one ({ports})")

        ls = info

    fsspec.register_implementation("leaky", Leaky, clobber=True)
    monkeypatch.setenv("LEAKY_CUSTOM_HEADERS", f"X-Org: a\n{header.format(SECRET)}")
    # A slash should be written as %2F there; a library then takes what is before it for a port.
    monkeypatch.setenv("HTTPS_PROXY", "http://user:Geheim/wort77@proxy.test:3128")
    monkeypatch.setenv("ALL_PROXY", "user:Simsala/bim@proxy.test:3128")
    # Bytes that are no UTF-8.
    monkeypatch.setenv("ODD_TOKEN", os.fsdecode(b"abcdef\xff"))
    monkeypatch.setenv("TWO", "amqp://u:first-one@h:1,amqp://u:second-one@h:2")
    monkeypatch.setenv("IMAGE", "docker://h.corp:5000/c.parquet/with@sha256:0")
    result = run("build", "leaky://x/c.parquet", "--embedding-column", "e", "--out", "index")
    assert result.exit_code == 7
    assert "401 for x/c.parquet with" in result.output
    assert "…, … (Invalid port: '…', '…')" in result.output
    require_no_leak(work, result.output)
    config = BuildConfig(corpus=("leaky://x/c.parquet",), embedding_column="e", out="index")
    with pytest.raises(WhitenIndexError) as raised:
        build_index(config)
    assert not leaks(f"{raised.value}{raised.value!r}".encode())


@pytest.mark.parametrize("given", PLAIN)
def test_addresses_without_a_secret(given: str) -> None:
    require_no_secret(given, what="--out")


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
