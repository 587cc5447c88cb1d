"""Refusal of secrets in the address and the options of a database."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from whiten_index.address import Address
from whiten_index.errors import ConfigError
from whiten_index.paths import require_no_secret

# Lists of what is allowed: the names of secrets are not known.
_OF_POSTGRES = frozenset((
    "application_name", "channel_binding", "client_encoding", "connect_timeout", "dbname",
    "fallback_application_name", "gssdelegation", "gssencmode", "gsslib", "host", "hostaddr",
    "keepalives", "keepalives_count", "keepalives_idle", "keepalives_interval", "krbsrvname",
    "load_balance_hosts", "max_protocol_version", "min_protocol_version", "options", "passfile",
    "port", "require_auth", "requirepeer", "service", "ssl", "ssl_max_protocol_version",
    "ssl_min_protocol_version", "sslcert", "sslcertmode", "sslcompression", "sslcrl",
    "sslcrldir", "sslkey", "sslmode", "sslnegotiation", "sslrootcert", "sslsni",
    "target_session_attrs", "tcp_user_timeout", "user",
))  # fmt: skip
_OF_MILVUS = frozenset(
    ("ca_pem_path", "client_key_path", "client_pem_path", "server_name", "server_pem_path")
)
# Of object stores, without the prefixes of AWS, Azure and Google.
_OF_STORES = frozenset((
    "account_name", "allow_http", "allow_invalid_certificates", "application_credentials",
    "bucket", "bucket_name", "client_id", "client_max_retries", "client_retry_timeout",
    "connect_timeout", "container_name", "copy_if_not_exists", "default_region", "endpoint",
    "endpoint_url", "federated_token_file", "http1_only", "http2_only", "pool_idle_timeout",
    "pool_max_idle_per_host", "proxy_excludes", "proxy_url", "region", "request_payer",
    "retry_timeout", "role_arn", "role_session_name", "s3_express", "server_side_encryption",
    "service_account", "service_account_path", "skip_signature", "sse_bucket_key_enabled",
    "sse_kms_key_id",
    "tenant_id", "timeout", "unsigned_payload", "use_azure_cli", "use_emulator", "user_agent",
    "virtual_hosted_style_request", "web_identity_token_file",
))  # fmt: skip
_STORAGE = "storage."
_PREFIX = re.compile(r"^(aws|azure_storage|azure|google)_")
# Neither a URL with a user or a query, nor JSON.
_PLAIN = re.compile(r"[\w./:,+~ \[\]-]*")

_HOST = r"(?:\[[\da-fA-F:.]+\]|(?:[\w.~-]|%2[Ff])*)(?::\d{0,5})?"
_QUERY = r"(?:\?(?P<query>[^@#\s]*))?"
# Any name that does not look like a password before a host.
_FOLDER = r"(?![^?#]*:[^/]*@)/[^?#]*"
_SETTING = (
    r"(?:search_path|role|statement_timeout|lock_timeout|idle_in_transaction_session_timeout)"
)
_SETTINGS = re.compile(rf"(?:\s*-c\s*{_SETTING}=[\w$\",.-]+)+\s*")


@dataclass(frozen=True)
class _Engine:
    """Form of the addresses of an engine.

    Attributes:
        form: regular expression of the address after ``://``.
        parameters: allowed after the question mark.
    """

    form: str
    parameters: frozenset[str] = frozenset()


# The role before the @ may have a colon and an empty password.
_POSTGRES = _Engine(
    rf"(?:(?P<user>[^:@/?#\s]*):?@)?{_HOST}(?:,{_HOST})*(?P<path>/[^:@/?#;=\s]*)?/?{_QUERY}",
    _OF_POSTGRES,
)
_SERVER = rf"{_HOST}(?P<path>/[^:@?#;=\s]*)?{_QUERY}"
_ENGINES = {
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    "qdrant": _Engine(rf"{_FOLDER}|{_SERVER}"),
    "milvus": _Engine(rf"{_FOLDER}|{_SERVER}", _OF_MILVUS),
    "lancedb": _Engine(rf"(?:[\w.-]+(?=/|$))?(?:{_FOLDER})?"),
}


def require_no_secrets(address: str, options: Mapping[str, str]) -> None:
    """Refuse an address and options that may hold a password, key or token.

    Args:
        address: of a known database.
        options: of the database; only those of an object store can be secrets.

    Raises:
        ConfigError: with the variables to use, without the secret.
    """
    require_no_secret(address, what="the address")
    scheme, _, rest = address.partition("://")
    engine = _ENGINES[scheme.lower().partition("+")[0]]
    found = re.fullmatch(engine.form, rest)
    if not found or not _is_plain(found.groupdict()):
        raise _secret(f"something in the address ({scheme}://…)", address)
    for each in filter(None, (found.groupdict().get("query") or "").split("&")):
        name, equals, value = map(unquote, each.partition("="))
        if name not in engine.parameters or not equals or not _may_be(name, value):
            # One without a value may be a token.
            shown = f" {name}" if re.fullmatch("[a-z_]+", name) and value else ""
            raise _secret(f"a parameter{shown} of the address ({scheme}://…)", address)
    for name, value in options.items():
        if not _is_plain_option(name, value):
            raise _secret(f"--option {name}", address)


def _secret(what: str, address: str) -> ConfigError:
    return ConfigError(
        f"{what} is, or may be, a secret and would be stored and shown; leave it out, and "
        f"{Address(address).remedy}"
    )


def _is_plain(parts: Mapping[str, str | None]) -> bool:
    """Tell whether user and path, decoded, are plain names."""
    user, path = (unquote(parts.get(name) or "") for name in ("user", "path"))
    return not re.search(r"[:=]", user) and not re.search(r"[:@;=\s]", path)


def _may_be(name: str, value: str) -> bool:
    if name == "options":
        return _SETTINGS.fullmatch(value) is not None
    if name in ("dbname", "user"):
        # libpq would read more parameters from it.
        return not re.search(r"[:=@\s]", value)
    # Hosts alone have colons.
    return not re.search("[=@]" if name in ("host", "hostaddr") else "[:=@]", value)


def _is_plain_option(name: str, value: str) -> bool:
    if not name.startswith(_STORAGE):
        return True
    key = _PREFIX.sub("", name.removeprefix(_STORAGE).lower())
    return key in _OF_STORES and _PLAIN.fullmatch(value) is not None
