"""Secrets in addresses and options: what may stand in a job file that many can read."""

import pytest

from whiten_index.errors import ConfigError
from whiten_index.vectordb.registry import require_database

SECRET = "s3cr3t"


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
