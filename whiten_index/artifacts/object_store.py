"""Requests to a prefix in a bucket, and the listing of its objects.

The only home of obstore. Its errors become errors of this package, with advice; a server that does
not answer is given up within seconds.
"""

import contextlib
import hashlib
import importlib
import math
import os
import re
import socket
import time
import urllib.request
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from whiten_index.artifacts.limits import MANIFEST_BYTES
from whiten_index.errors import ConfigError, StorageError, hide_secrets
from whiten_index.paths import require_no_secret, require_plain_environment

_SCHEMES = ("s3", "gs", "az")
_URI = re.compile(r"(s3|gs|az)://([^/]+)(?:/(.*))?", re.DOTALL)
_HOST = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
_QUOTED = re.compile(r"([\"'`]).*?\1", re.DOTALL)
_ADDRESS = re.compile(rf"https?://{_HOST}(:[0-9]+)?(/[!-~]*)?")
# For lists and small objects, and for objects of gigabytes.
_QUICK = {"connect_timeout": "4s", "timeout": "8s"}
_BULK = {"connect_timeout": "4s", "timeout": "10m", "read_timeout": "60s"}
_BLOCK = 64 << 20
_PART = 16 << 20
# A proxy that cannot be, as nobody listens at port 0.
_NOWHERE = "127.0.0.1:0"
# They are sent in headers, and obstore panics at what those do not take.
_IN_HEADERS = ("AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# What to check, by scheme.
_SETTINGS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles in ~/.aws are not read), "
    "AWS_ENDPOINT_URL and AWS_REGION",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS and the network",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY and AZURE_STORAGE_ENDPOINT",
}
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_GONE = re.compile(r"Bulk delete request failed for key.*\(code: 404\)", re.DOTALL)
# Reasons, and their signs in an error's type or text.
_REASONS: dict[str, tuple[str, ...]] = {
    "there is no bucket {bucket!r} at {server}": _NO_BUCKET,
    # Also the addresses at which machines in a cloud get credentials.
    "no credentials were found": (
        "MissingAccessKeyId", "MissingSecretAccessKey", "MissingAccount", "169.254.169.254",
        "169.254.170.2", "metadata.google.internal",
    ),
    "permission is denied": (
        "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403 Forbidden",
        "PermissionDeniedError", "UnauthenticatedError",
    ),
    "{server} redirects to another host, to which no keys are sent": (_NOWHERE,),
    "{server} does not answer": (
        "error sending request", "operation timed out", "TimedOut", "dns error",
    ),
}  # fmt: skip


# E-tag and, if the server has them, version of an object as it was read.
Tag = Mapping[str, Any]
ANY: Tag = {}
_PUTS, _PAUSE = 3, 0.5  # how often a put is tried that is refused without a reason; seconds


class Stat(NamedTuple):
    """Size and e-tag of an object, and the time of its last change, as a list gives them."""

    size: int
    e_tag: str
    modified: float = math.inf  # of what was put just now


class Digests(NamedTuple):
    """Size of an object, and its SHA-256 and MD5 in hexadecimal."""

    size: int
    sha256: str
    md5: str


class ChangedError(Exception):
    """An object is not as a conditional put requires it."""


class Bucket:
    """Objects below a prefix in a bucket; keys are relative to it."""

    def __init__(self, uri: str) -> None:
        require_plain_environment()
        for name in _IN_HEADERS:
            if not re.fullmatch("[ -~]*", os.environ.get(name, "")):
                raise ConfigError(
                    f"{name} has a line break or a character beyond ASCII; set it again without"
                )
        self._scheme, self._name, self._prefix = split_uri(uri)
        self.uri = plain_uri(uri)
        try:
            importlib.import_module("obstore.store")
            self._obstore: Any = importlib.import_module("obstore")
        except ImportError as error:
            raise ConfigError(
                f"object stores need obstore ({error}); pip install 'whiten-index[objects]'"
            ) from error
        self._quick, self._bulk = self._client(_QUICK), self._client(_BULK)

    def get(self, key: str) -> tuple[bytes, Tag] | None:
        """Return the bytes of an object and its tag, ``None`` without an object.

        One that is too large for a manifest is cut, so that it is still too large for its reader.
        """
        try:
            with self._translated("read", key):
                found = self._obstore.get(self._quick, self._key(key))
                tag = _tag(found.meta)
                if "e_tag" not in tag:
                    raise ValueError("the answer has no ETag, by which changes are noticed")
                if found.meta["size"] > MANIFEST_BYTES:
                    return self._range(key, 0, MANIFEST_BYTES + 1), tag
                return bytes(found.bytes()), tag
        except _MissingError:
            return None

    def put(self, key: str, data: bytes, *, over: Tag | None = ANY) -> Tag:
        """Put an object over one with this tag, none or any; return its own tag.

        Raises:
            ChangedError: the object there is another, or gone.
            StorageError: the server does not take it, although the object is as required.
        """
        mode: Any = "create" if over is None else dict(over) or "overwrite"
        refusal = Exception()
        for number in range(_PUTS):
            time.sleep(number * _PAUSE)
            try:
                with self._translated("put", key):
                    made = self._obstore.put(
                        self._quick, self._key(key), data, mode=mode, use_multipart=False
                    )
                    return _tag(made)
            except (ChangedError, _MissingError) as error:
                refusal = error
                found = self.get(key)
                # The answer to a put that came through may have been lost, and the put tried again.
                if found is not None and found[0] == data:
                    return found[1]
                # S3 also refuses a put during another one that then fails.
                if over != ANY and over != (None if found is None else found[1]):
                    raise ChangedError(key) from error
        raise self._failure("put", f"{self.uri}/{key}", f"{refusal.__context__}") from None

    def upload(self, key: str, path: Path) -> Stat:
        """Put a file, in parts if it is large, and return its size and e-tag."""
        # Opened before, so that errors of the disk are not taken for those of the server.
        with path.open("rb") as file, self._translated("write", key):
            made = self._obstore.put(self._bulk, self._key(key), file, chunk_size=_PART)
            return stat_of(path.stat().st_size, made)

    def download(self, key: str, path: Path) -> bool:
        """Write an object to a new path; return whether there is one."""
        try:
            with path.open("wb") as file:
                file.writelines(self._parts(key))
        except _MissingError:
            return False
        return True

    def digest(self, key: str) -> Digests | None:
        """Return size and digests of an object, None without an object."""
        read, sha, md5 = 0, hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        try:
            for data in self._parts(key):
                read += len(data)
                sha.update(data)
                md5.update(data)
        except _MissingError:
            return None
        return Digests(read, sha.hexdigest(), md5.hexdigest())

    def _parts(self, key: str) -> Iterator[Any]:
        """Yield an object in blocks of bounded size, whatever a list or a manifest says of it."""
        with self._translated("read", key):
            found = self._obstore.get(self._bulk, self._key(key))
            size = found.meta["size"]
            if size <= _BLOCK:
                yield found.bytes()
                return
        for start in range(0, size, _BLOCK):
            yield self._range(key, start, min(start + _BLOCK, size))

    def piece(self, key: str, start: int, stop: int) -> bytes:
        """Return some bytes of an object, none without an object."""
        try:
            return self._range(key, start, stop)
        except _MissingError:
            return b""

    def _range(self, key: str, start: int, stop: int) -> bytes:
        asked, read = {"range": (start, stop)}, bytearray()
        with self._translated("read", key):
            # A server may send more than the range.
            for part in self._obstore.get(self._bulk, self._key(key), options=asked).stream():
                if len(read) + len(part) > stop - start:
                    raise ValueError("the answer is longer than what was asked for")
                read += part
        return bytes(read)

    def delete(self, key: str) -> None:
        """Remove an object, if it exists."""
        with contextlib.suppress(_MissingError), self._translated("remove", key):
            self._obstore.delete(self._quick, self._key(key))

    def objects(self, folder: str) -> dict[str, Stat]:
        """Return all objects in a folder and those below it, by key."""
        with self._translated("list", folder):
            lists = self._obstore.list(self._quick, self._key(folder) or None, chunk_size=1000)
            entries = (each for some in lists for each in some)
            return {self._relative(each["path"]): stat_of(each["size"], each) for each in entries}

    def folders(self) -> list[str]:
        """Return the names of the folders right below the prefix, sorted."""
        with self._translated("list", ""):
            found = self._obstore.list_with_delimiter(self._quick, self._prefix or None)
            return sorted(self._relative(each.rstrip("/")) for each in found["common_prefixes"])

    def _key(self, key: str) -> str:
        return "/".join(filter(None, (self._prefix, key)))

    def _relative(self, key: str) -> str:
        return key[len(self._prefix) + 1 :] if self._prefix else key

    def _client(self, client: Mapping[str, Any]) -> Any:
        stores = importlib.import_module("obstore.store")
        servers = map(os.environ.get, (*_ENDPOINTS, "AZURE_STORAGE_ENDPOINT"))
        plain = any((server or "").startswith("http://") for server in servers)
        options: dict[str, Any] = {
            "client_options": {**client, "allow_http": plain, **self._no_other_host()},
            "retry_config": {
                "max_retries": 5,
                "retry_timeout": timedelta(seconds=10),
                "backoff": {"max_backoff": timedelta(seconds=2)},
            },
        }
        if self._scheme == "s3" and endpoint():
            options["endpoint"] = endpoint()
        made = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}
        with self._translated("open", ""):
            return made[self._scheme](self._name, **options)

    def _no_other_host(self) -> Mapping[str, str]:
        """Return options by which no redirect takes a session token to another host.

        obstore follows redirects, and leaves out no header but those of HTTP itself. With keys from
        the environment it asks no other host for any, so that a proxy may stand before all others.
        A proxy of the user's stays.
        """
        server = urlsplit(endpoint() if self._scheme == "s3" else "")
        proxies, host = urllib.request.getproxies(), server.hostname or ""
        proxied = server.scheme in proxies or "all" in proxies
        if not host or not os.environ.get("AWS_ACCESS_KEY_ID"):
            return {}
        if proxied and not urllib.request.proxy_bypass(host):
            return {}
        with contextlib.suppress(OSError):
            # As obstore writes an address such as 127.1.
            host = socket.inet_ntoa(socket.inet_aton(host))
        return {"proxy_url": f"http://{_NOWHERE}", "proxy_excludes": host}

    @contextlib.contextmanager
    def _translated(self, what: str, key: str) -> Iterator[None]:
        """Turn errors of obstore into this package's, which name the object."""
        place = f"{self.uri}/{key}".rstrip("/")
        errors = importlib.import_module("obstore.exceptions")
        unmet = (errors.AlreadyExistsError, errors.PreconditionError) if what == "put" else ()
        # S3 answers a removal of what is not there as any other. Azure does not, in an answer to
        # several removals.
        lost = what in ("write", "list") or (what == "remove" and self._scheme == "s3")
        missing = () if lost else (errors.NotFoundError, FileNotFoundError)
        try:
            yield
        except (errors.BaseError, FileNotFoundError, ValueError) as error:
            text = f"{type(error).__name__} {error}"
            # A proxy that does not reach the server names no code.
            answered = ("<Code>" in text or _GONE.search(text)) and not any(
                code in text for code in _NO_BUCKET
            )
            if answered and isinstance(error, unmet):
                raise ChangedError(place) from None
            if answered and isinstance(error, missing):
                raise _MissingError(place) from None
            raise self._failure(what, place, text) from None
        except BaseException as error:
            # Of Rust, for an answer that obstore does not expect.
            if type(error).__name__ != "PanicException":
                raise
            raise self._failure(what, place, f"obstore cannot read an answer: {error}") from None

    def _failure(self, what: str, place: str, text: str) -> StorageError:
        if what == "open":
            # The reader of a file of credentials quotes its values.
            text = _QUOTED.sub("…", text)
        plain = " ".join(hide_secrets(text).partition("Debug source:")[0].split())[:200]
        found = (
            reason for reason, signs in _REASONS.items() if any(each in text for each in signs)
        )
        why = next(found, "{plain}").format(
            bucket=self._name, server=endpoint() or "the service", plain=plain
        )
        return StorageError(
            f"cannot {what} {place}: {why}; check {_SETTINGS[self._scheme]}, then run the same "
            "command again (what is finished is kept)"
        )


class _MissingError(Exception):
    """There is no such object."""


def is_without_bucket(error: StorageError) -> bool:
    """Return whether the server itself said that there is no such bucket."""
    return any(code in str(error.__context__) for code in _NO_BUCKET)


def _tag(of: Mapping[str, Any]) -> Tag:
    """Return e-tag and version as the server gave them: only so does it take them back."""
    return {name: of[name] for name in ("e_tag", "version") if of.get(name)}


def stat_of(size: int, of: Mapping[str, Any]) -> Stat:
    """Return the entry of an object in a list, from the fields that obstore gives of it."""
    modified = of.get("last_modified")
    return Stat(int(size), e_tag(of), math.inf if modified is None else modified.timestamp())


def e_tag(of: Mapping[str, Any]) -> str:
    """Return an e-tag without quotes, which some servers give in one answer and not in another."""
    return str(of.get("e_tag") or "").strip('"')


def split_uri(uri: str) -> tuple[str, str, str]:
    """Return scheme, bucket and prefix, not decoded."""
    require_no_secret(uri, what="the place")
    match = _URI.fullmatch(uri)
    prefix = "" if match is None else (match[3] or "").rstrip("/")
    parts = prefix.split("/") if prefix else []
    if match is None or any(each in ("", ".", "..") for each in parts):
        raise ConfigError(
            f"{uri} names no place in an object store; write scheme://bucket/prefix with a scheme "
            f"of {', '.join(_SCHEMES)} and no empty, . or .. part in the prefix"
        )
    return match[1], match[2], prefix


def plain_uri(uri: str) -> str:
    """Return a URI without slashes at its end."""
    scheme, name, prefix = split_uri(uri)
    return f"{scheme}://{'/'.join(filter(None, (name, prefix)))}"


def endpoint() -> str:
    """Return the server of S3 that the environment names, empty for the provider's own."""
    for name in _ENDPOINTS:
        if found := os.environ.get(name):
            if not _ADDRESS.fullmatch(found):
                raise ConfigError(
                    f"{name} is no address of a server; write https://HOST or http://HOST:PORT"
                )
            return found.rstrip("/")
    return ""
