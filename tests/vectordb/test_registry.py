"""Addresses of databases: which there are, which may hold a secret, what is shown; options."""

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


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me@h:5432/db?sslmode=require&keepalives=1",
        "postgresql://h/db?passfile=/p&sslkey=/k&sslcert=/c&sslrootcert=/r&require_auth=!md5",
        "postgresql://me@h1:5432,h2:5433/db?target_session_attrs=primary",
        "postgresql://me@[::1]:5432/db/", "postgresql://[::1],h2",
        "postgresql:///db?host=/run/postgresql&application_name=my%20app",
        "postgresql://%2Frun%2Fpostgresql/db",
        "postgresql://h/db?hostaddr=::1&connect_timeout=3&client_encoding=UTF8&service=news",
        "postgresql://h/db?options=-c%20search_path=news,public%20-cstatement_timeout%3D3s",
        "postgresql://me@/db",
        # As some write it who have no password; there is none.
        "postgresql://me:@h/db", "postgresql://me%40realm@h/db?user=you&port=5433&dbname=other",
        "POSTGRES://h/db?", "qdrant://h:6333/prefix/more", "qdrant+https://h",
        "qdrant:///srv/keys@home/my tokens", "milvus:///srv/password-store/docs.db",
        "milvus+https://h:443/news?server_pem_path=/p&server_name=h&ca_pem_path=/c",
        "milvus://h?client_pem_path=/p&client_key_path=/k",
        "lancedb:///data/password-store/key=1/x", "lancedb+s3://bucket/tokens/key=1",
        "lancedb+gs://bucket",
    ],
)  # fmt: skip
def test_addresses_without_secrets(address: str) -> None:
    require_database(address, {})


@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://me:{SECRET}@h/db", f"postgresql://me%3A{SECRET}@h/db",
        f"postgresql://password%3D{SECRET}@h/db", f"postgresql://me:{SECRET}/db",
        f"postgresql://me:{SECRET},h2:5432/db", f"postgresql://me:12/34{SECRET}@h/db",
        f"postgresql://me:a?b{SECRET}@h/db", f"postgresql://me:a#b{SECRET}@h/db",
        f"postgresql://me@h/db?password={SECRET}",
        f"postgresql://me@h/db?sslmode=require&sslpassword={SECRET}",
        f"postgresql://me@h/db?PASS%77ORD={SECRET}", f"postgresql://me@h/db?{SECRET}",
        f"postgresql://me@h/db;password={SECRET}", f"postgresql://me@h/db password={SECRET}",
        f"postgresql://me@h/db?sslmode=require password={SECRET}",
        f"postgresql://me@h/password={SECRET}",
        f"postgresql://h?dbname=postgresql://me:{SECRET}@h/db",
        f"postgresql://h/db?user=me:{SECRET}", f"postgresql://h/?dbname=db%09{SECRET}",
        f"postgresql://h/db?options=-c%20app.password%3D{SECRET}", f"qdrant://{SECRET}@h",
        f"qdrant://:{SECRET}@h", "qdrant://:@h", f"qdrant:///:{SECRET}@h",
        f"qdrant://h?api_key={SECRET}", f"qdrant:///srv/store?api_key={SECRET}",
        f"qdrant://h#apikey={SECRET}", f"qdrant://h/a;key={SECRET}",
        f"milvus+https://h?token={SECRET}", f"milvus://h:19530/db?{SECRET}",
        f"milvus://root:{SECRET}@h", f"milvus://root%3A{SECRET}%40h",
        f"milvus:///docs.db?token={SECRET}", f"lancedb+s3://key:{SECRET}@bucket",
        f"lancedb+s3://bucket?secret_access_key={SECRET}", f"lancedb+az://c/p?sig={SECRET}",
        f"lancedb:///data/:{SECRET}@x",
    ],
)  # fmt: skip
def test_addresses_with_secrets(address: str) -> None:
    variable = {"p": "PGPASSWORD", "q": "QDRANT_API_KEY", "m": "MILVUS_TOKEN"}.get(
        address[0], "AWS_SECRET_ACCESS_KEY"
    )
    told = f"is, or may be, a secret and would be .* leave it out, and .*{variable}"
    with pytest.raises(ConfigError, match=told) as raised:
        require_database(address, {})
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("address", "named"),
    [
        (f"postgresql://h/db?sslmode=require&sslpassword={SECRET}", "parameter sslpassword"),
        (f"milvus://h?token={SECRET}", "parameter token"),
        # A token may have the form of a name, and be cut off at a character of its own.
        ("milvus://h?deadbeef=", "a parameter"),
        ("milvus://h?deadbeef", "a parameter"),
        (f"milvus://h?Dead-beef={SECRET}", "a parameter"),
    ],
)
def test_a_parameter_is_named(address: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        require_database(address, {})
