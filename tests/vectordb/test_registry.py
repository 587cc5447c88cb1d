"""Addresses of databases: which there are, and what of one may be shown; options, as text."""

import subprocess
import sys
from pathlib import Path

import pytest

from whiten_index.errors import ConfigError, StorageError, first_line
from whiten_index.vectordb.engine_options import MilvusOptions, QdrantOptions
from whiten_index.vectordb.engine_support import EngineAddress
from whiten_index.vectordb.push import pushed_version
from whiten_index.vectordb.registry import open_writer, require_database

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "address",
    [
        "http://h:6333", "qdrants://h:6333", "mysql://h/db", "s3://bucket/v.parquet",
        "file:///tmp/v.arrow", "lancedb:/tmp/x", "milvus:docs.db", "out/v.csv", "vectors", "",
    ],
)  # fmt: skip
def test_an_address_of_no_database(address: str) -> None:
    told = (
        r"no database .*; give one of postgresql:.*, qdrant://.*, lancedb://.*, milvus://.*, "
        r"duckdb:///.*, sqlite:///.*, or a file that ends in .parquet"
    )
    with pytest.raises(ConfigError, match=told):
        require_database(address, {})


@pytest.mark.parametrize(
    "address",
    [
        f"http://{SECRET}@h:6333?key={SECRET}", f"pgvector://me:{SECRET}@h/db",
        f"lancedb:/key:{SECRET}@bucket", f"qdrant:/x;{SECRET}", f"postgresql:/me:{SECRET}@h/db",
        f"postgresql:/{SECRET}@h", f"postgres:{SECRET}@h/db", f"host=h password={SECRET}",
    ],
)  # fmt: skip
def test_a_wrong_address_with_a_secret_is_not_shown(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_database(address, {})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "shown", "url"),
    [
        ("qdrant://host", "qdrant://host:6333", "http://host:6333"),
        ("qdrant+https://host:443/base/", "qdrant+https://host:443/base", "https://host:443"),
        ("qdrant://[::1]:5", "qdrant://[::1]:5", "http://[::1]:5"),
        ("qdrant:///a%20b/c", "qdrant:///a b/c", ""),
        ("milvus://host:1", "milvus://host:1", "http://host:1"),
        ("milvus://[::1]/docs", "milvus://[::1]:19530/docs", "http://[::1]:19530"),
        ("milvus+https://h/?server_name=x", "milvus+https://h:443", "https://h:443"),
    ],
)
def test_parts_of_an_address(address: str, shown: str, url: str) -> None:
    engine = QdrantOptions if address.startswith("qdrant") else MilvusOptions
    found = EngineAddress.parse(address, engine)
    assert (found.shown, found.url) == (shown, url)
    assert found.inside == ("" if not url else shown.partition("//")[2].partition("/")[2])
    assert found.folder == (None if url else Path("/a b/c"))
    assert found.parameters == ({"server_name": "x"} if "?" in address else {})


@pytest.mark.parametrize(
    "address",
    [
        "sqlite:///x/my{}docs", "duckdb:///x/my{}docs", "lancedb:///x/my{}docs",
        "lancedb+s3://bucket/my{}docs", "milvus:///x/my{}docs.db", "qdrant:///x/my{}docs",
        "qdrant://h/my{}docs",
    ],
)  # fmt: skip
def test_a_path_is_not_cut_off(address: str) -> None:
    for odd, code in (("#", "%23"), ("\t", "%09"), ("\n", "%0A")):
        with pytest.raises(ConfigError, match=f"in it; write it as {code}|may be, a secret"):
            require_database(address.format(odd), {})
    require_database(address.format("%23"), {})


@pytest.mark.parametrize(
    "address",
    [
        "qdrant://[abc]", "milvus://[1.2.3.4]", "lancedb+s3://[abc]/x",
        "sqlite://[abc]/x", "duckdb://[abc]/x", "qdrant://h\u2100/x",
    ],
)  # fmt: skip
def test_an_address_that_is_no_url(address: str) -> None:
    with pytest.raises(ConfigError, match=r"the address of .* is one of .*://"):
        require_database(address, {})


CLIENTS = {
    "postgres": ("postgresql://h/db", "psycopg"),
    "qdrant": ("qdrant://h", "qdrant_client"),
    "lancedb": ("lancedb:///data", "lancedb"),
    "milvus": ("milvus://h", "pymilvus"),
}


@pytest.mark.parametrize("extra", CLIENTS)
def test_a_client_that_is_not_there(monkeypatch: pytest.MonkeyPatch, extra: str) -> None:
    address, client = CLIENTS[extra]
    monkeypatch.setitem(sys.modules, client, None)
    with pytest.raises(ConfigError, match=rf"not installed.*pip install 'whiten-index\[{extra}\]'"):
        open_writer(address, "docs")


def test_a_client_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that was built against another release of something fails as it likes."""
    (tmp_path / "psycopg.py").write_text("raise ValueError('size changed')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "psycopg", raising=False)
    told = r"cannot be loaded \(ValueError: size changed\); run pip install --force-reinstall 'w"
    with pytest.raises(ConfigError, match=told):
        open_writer("postgresql://h/db", "docs")


def test_a_client_that_the_system_does_not_let_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "psycopg.py").write_text("raise OSError(24, 'Too many open files')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "psycopg", raising=False)
    with pytest.raises(StorageError, match=r"cannot read the client psycopg: .* too many files"):
        open_writer("postgresql://h/db", "docs")


@pytest.mark.parametrize("scheme", ["sqlite", "duckdb"])
def test_a_link_to_itself(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "file").symlink_to(tmp_path / "file")
    with pytest.raises(StorageError, match="leads back to itself"):
        pushed_version(f"{scheme}://{tmp_path}/file", "docs")


def test_options_are_read_without_a_client() -> None:
    """In a process of its own, since another test may have loaded them."""
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({[client for _, client in CLIENTS.values()]}))\n"
        "from whiten_index.vectordb.registry import require_database\n"
        f"for address in {[address for address, _ in CLIENTS.values()]}:\n"
        "    print(require_database(address, {'m': '8'}).m)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["8"] * 4, "")


def test_options_that_a_database_does_not_have() -> None:
    for address, _ in CLIENTS.values():
        with pytest.raises(ConfigError, match=r"--option odd is unknown to"):
            require_database(address, {"odd": "1"})


def test_secrets_are_hidden_before_a_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    long = ("p/ä " * 200).strip()
    monkeypatch.setenv("QDRANT_API_KEY", long)
    assert first_line(f"{'x' * 494} {long} tail") == f"{'x' * 494} … tail"[:500]
    assert first_line("  one\ntwo") == "one"
    assert first_line(ValueError("")) == "ValueError"
