"""Errors that a user can meet, and secrets kept out of their messages.

Each message says what was given, what was expected and what to do.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

# Addresses that may hold a secret. Path("s3://bucket") has one slash.
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/{1,2}(\S.*)", re.DOTALL)
# fsspec chains addresses: zip://inside.parquet::https://host/archive.zip
_CHAIN = r"::(?=[A-Za-z][A-Za-z0-9+.-]*:/)"
_INSIDE = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]{{0,40}}:/{{1,2}}(?:(?!{_CHAIN})[^\s'\"<>`])+")
_WITHOUT_SCHEME = re.compile(
    r"(//[^/:@\s]+:[^/@\s]+@.*|[^/:@\s]+:[^/@\s]+@[\w.-]+[:/].*)", re.DOTALL
)
# As libpq has them: host=h user=u password=p
_KEY_VALUE = re.compile(r"(.*\s)?(ssl)?pass(word|wd)\s*=\s*\S.*", re.DOTALL | re.I)
_HOST = re.compile(r"(\[[\da-fA-F:.%]+\]|[^:@\[\],]*)(:\d{0,5})?(,[^:@,]*(:\d{0,5})?)*")
# Schemes whose user is a name; in others it may be a token.
_NAMED_USER = re.compile(
    r"postgres.*|pg.*|psql|hdfs|viewfs|ssh|sftp|ftp|smb|abfss?|wasbs?|git\+ssh"
)
_SECRET_NAME = re.compile(
    # An address that expires is a signed one.
    r"sig|token|key|secret|pass|pwd|auth|cred|jwt|bearer|session|expir|ticket|hmac|^hdn|"
    r"(^|[_-])(sas|pw|code|exp|sid|otp|pin|sk)$",
    re.I,
)
_PLAIN_NAME = re.compile(
    r"version_?id|generation|etag|revision|ref|commit|sslkey|passfile|require_auth|"
    r"target_session_attrs|client_key_path|sse_kms_key_id",
    re.I,
)
# No path: a token seldom begins with a slash.
_OPAQUE = re.compile(r"(?!/)(?=.*\d)(?=.*[A-Za-z])[\w+/=~-]{20,}")

_OF_S3 = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_OF_GS = "GOOGLE_APPLICATION_CREDENTIALS"
_OF_AZURE = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
_OF_STORES = f"{_OF_S3}, {_OF_AZURE}, or {_OF_GS}"
# By the scheme of an address, or the name of the option or variable that has it.
_REMEDIES = (
    ("--base-url|base_url|OPENAI_BASE_URL", "set OPENAI_API_KEY"),
    ("s3a?|s3n|AWS_.*", f"set {_OF_S3}"),
    ("gs|gcs", f"set {_OF_GS}"),
    ("az|adl|abfss?|wasbs?|AZURE_.*", f"set {_OF_AZURE}"),
    (r"postgres.*|pg.*|psql", "set PGPASSWORD, or write ~/.pgpass"),
    (r"qdrant.*", "set QDRANT_API_KEY"),
    (r"milvus.*", "set MILVUS_TOKEN"),
    (r"lance.*", f"set {_OF_STORES}"),
    ("ray|RAY_.*", "set RAY_AUTH_TOKEN"),
    ("hf|HF_.*", "set HF_TOKEN"),
    ("https?", "write it to ~/.config/fsspec/conf.json, or download the file and name its path"),
    ("", "set the environment variable, or write the credentials file, of the library that reads "
     "such addresses"),
)  # fmt: skip

_SECRET_VARIABLE = re.compile(r"(PASSWORD|PASSWD|SECRET|TOKEN|KEY|SAS|PWD)$", re.I)
_NO_SECRETS = ("PWD", "OLDPWD")
# A password may hold / ? # @ that its owner did not escape. A port is none.
_USER_INFO = re.compile(r"://[^/\s@:]*:(?!\d{1,5}/)((?:(?!://)\S)+)@")
_SHORTEST, _LONG = 6, 8
# Headers without a secret, and the one that aiohttp itself takes to no other server.
HARMLESS_HEADERS = ("accept", "accept-language", "user-agent")
_WORD = 10  # letters of a word that is likely to be none of a secret
# Secrets that libraries read from files of their own, such as ~/.pgpass, as far as they tell.
FILE_SECRETS = set[str]()


def first_line(message: object) -> str:
    """Return the first line of a library's message or error, or its kind if it has none."""
    # A secret may contain a line break.
    lines = hide_secrets(str(message)).strip().splitlines()
    return lines[0][:500] if lines else type(message).__name__


# Folder of copies -> URI in a bucket.
COPIES: dict[str, str] = {}


def named(text: object) -> str:
    """Return a text with buckets in place of the folders of their copies."""
    found = str(text)
    for folder, uri in COPIES.items():
        found = found.replace(folder, uri)
    return found


class WhitenIndexError(Exception):
    """Base of every error this package raises on purpose.

    Attributes:
        exit_code: the status with which the command line ends on this error.

    Examples:
        >>> try:
        ...     whiten_index.open_index("nowhere")
        ... except WhitenIndexError as error:
        ...     print(error.exit_code)
        5
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        # A library's message, which many errors quote, may name an address with its password.
        super().__init__(hide_secrets(message))

    def __str__(self) -> str:
        text = super().__str__()
        # These are of this machine: its disk, and a version that is kept aside here.
        return text if isinstance(self, StorageError | GateError) else named(text)


class ConfigError(WhitenIndexError):
    """An option, or a combination of options, that cannot work."""

    exit_code = 2


def require_config(given: object, kind: type) -> None:
    """Refuse a path or a dictionary where a function takes a configuration."""
    if not isinstance(given, kind):
        name = kind.__name__
        raise ConfigError(f"this takes a {name}, not a {type(given).__name__}: {name}(…=…)")


def require_installed(*packages: str, by: str, extra: str) -> None:
    """Refuse work whose optional packages are not installed, and name the extra that has them."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ConfigError(
            f"{by} needs {' and '.join(missing)}; run: pip install 'whiten-index[{extra}]'"
        )


class CorpusError(WhitenIndexError):
    """A corpus, a query file or a row of either that cannot be used."""

    exit_code = 3


class NotFoundError(CorpusError):
    """A document, or an index of a server, that is not there."""


class EncoderError(WhitenIndexError):
    """A model that cannot be had, loaded or matched."""

    exit_code = 4


class RefusedTextError(EncoderError):
    """A text that a model does not take; ``text`` is it, if it is known."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class EndpointError(EncoderError):
    """A model behind an API that cannot be asked.

    Attributes:
        plain: the message without the words of the endpoint, which may quote texts.
        of_any_text: whether it is likely to be so for every text.
    """

    def __init__(self, message: str, *, plain: str = "", of_any_text: bool = False) -> None:
        super().__init__(message)
        self.plain, self.of_any_text = hide_secrets(plain), of_any_text


class ArtifactError(WhitenIndexError):
    """A store, moments file, whitening or index on disk that is missing, damaged or mismatched."""

    exit_code = 5


class FormatError(WhitenIndexError):
    """An artifact that a later release wrote: sound, but not to be read or replaced by this one."""

    exit_code = 5


class BusyError(WhitenIndexError):
    """An output folder that another process is writing."""

    exit_code = 6


class StorageError(WhitenIndexError):
    """A disk that is full, or a disk or bucket that cannot be written or read."""

    exit_code = 7


class WhiteningError(WhitenIndexError):
    """Moments from which the asked whitening cannot be computed (rank, rows, width)."""

    exit_code = 8


class GateError(WhitenIndexError):
    """A new version that was made, and that a gate kept from being published.

    Attributes:
        gates: the gates' findings as JSON values.
        candidate: folder in which the version is kept aside.
    """

    exit_code = 9

    def __init__(
        self, message: str, *, gates: Sequence[Mapping[str, Any]] = (), candidate: str = ""
    ) -> None:
        super().__init__(message)
        self.gates, self.candidate = tuple(gates), candidate


class DatabaseError(WhitenIndexError):
    """A database that cannot be reached, or that refuses what it was asked."""

    exit_code = 10


class ClusterError(WhitenIndexError):
    """A cluster that cannot be reached, or that has no worker left."""

    exit_code = 11


class PartialFailureError(WhitenIndexError):
    """Parts of the work that failed, while all the others were done.

    Attributes:
        items: parts, each with its name, its reason and its number of shards.
    """

    exit_code = 12

    def __init__(self, message: str, *, items: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.items = tuple(items)


def secret_in(text: str) -> str:
    """Return the place of a possible secret in a path or URI, in words; empty without one."""
    found = next(filter(None, (_secret_in(*uri) for uri in _uris(text))), "")
    if not found and _WITHOUT_SCHEME.fullmatch(text):
        return "a password before the @"
    return "a password" if not found and _KEY_VALUE.fullmatch(text) else found


def scheme_of(text: str) -> str:
    """Return the scheme in lower case, of the URI with a secret if there are several."""
    uris = list(_uris(text))
    return next((uri for uri in uris if _secret_in(*uri)), uris[0] if uris else ("", ""))[0]


def remedy_for(text: str, *, what: str = "") -> str:
    """Return the proper place for the secret of an address that an option or variable has."""
    scheme = scheme_of(text)
    # Addresses at https:// are of files, or of services.
    names = (*(what.split(": ")[-1:] * scheme.startswith("http")), scheme, "")
    return next(remedy for each in names for form, remedy in _REMEDIES if re.fullmatch(form, each))


def _uris(text: str) -> Iterator[tuple[str, str]]:
    """Yield scheme and rest of the URIs in a text: the whole text, chained ones, and others."""
    for piece in [*re.split(_CHAIN, text), *_INSIDE.findall(text)]:
        if match := _URI.fullmatch(piece):
            yield match[1].lower(), match[2]


def _secret_in(scheme: str, rest: str) -> str:
    """Return the place of a possible secret in a URI; empty without one."""
    before, _, query = re.sub("[#;]", "?", rest, count=1).partition("?")
    authority, _, path = before.partition("/")
    user, _, host = unquote(authority).rpartition("@")
    if ":" in user.rstrip(":"):
        return "a password before the @"
    if user and user != "anonymous" and not _NAMED_USER.fullmatch(scheme):
        return "a user before the @"
    if scheme == "file":
        # A folder may have any name.
        return ""
    # A password with a / or a ? in it ends the host too early.
    ended_early = ":" in host and "@" in path + query
    in_path = any(":" in part.rpartition("@")[0] for part in path.split("/"))
    if not _HOST.fullmatch(host) or ended_early or in_path:
        return "something that may be a password"
    for each in filter(None, re.split("[&;?#]", query)):
        name, _, value = map(unquote_plus, each.partition("="))
        if _PLAIN_NAME.fullmatch(name):
            continue
        if _SECRET_NAME.search(name):
            # Without a value, the name itself may be a token.
            named = value and re.fullmatch(r"[A-Za-z_-]+", name)
            return f"the parameter {name}" if named else "a parameter"
        if _OPAQUE.fullmatch(value or name):
            return "a parameter that may be a token"
        if ":" in value and secret_in(value):
            return "an address inside the address"
    return _secret_in(scheme, unquote(rest)) if "%3f" in path.lower() else ""


def hide_secrets(text: str) -> str:
    """Return a text with ``…`` in place of the secrets of the environment and of addresses.

    Call this before a text is cut: half a secret is not found any more.
    If a server or a configuration file may be quoted, raise the error ``from None``, as Python also
    shows its causes.
    """
    coders = (str, partial(quote, safe="", errors="replace"), partial(quote_plus, errors="replace"))
    forms = {coded(each) for each in _secrets() for coded in coders}
    for form in sorted(forms, key=len, reverse=True):
        # A short one may be a part of a word.
        edges = ("", "") if len(form) >= _LONG else (r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])")
        text = re.sub(re.escape(form).join(edges), "…", text)
    return _INSIDE.sub(_hidden, text)


def _hidden(found: re.Match[str]) -> str:
    scheme, _, rest = found[0].partition(":")
    return f"{scheme}://…" if _secret_in(scheme.lower(), rest.lstrip("/")) else found[0]


def parts_of_header(value: str) -> set[str]:
    """Return a header's value and its parts that may be secret; a server may quote a part.

    Of ``Bearer KEY`` and ``session=KEY; theme=dark`` it is the key. Short words are left out, since
    they may be in any message.
    """
    parts = re.split(r'[\s=;,:"]+', value) + re.split(r"""[\s=;,:"'|&()<>\[\]]+""", value)
    secret = {part for part in parts if len(part) > _WORD or not part.isalpha()}
    return {value, value.rpartition(" ")[2], *secret}


def _secrets() -> set[str]:
    """Return the secrets in the environment's variables, and in files of libraries."""
    found = set(FILE_SECRETS)
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name) and name not in _NO_SECRETS:
            # A token of Milvus is USER:PASSWORD.
            found |= {value.strip(), value.strip().rpartition(":")[2]}
        if name.endswith("_HEADERS"):
            # Lines of OPENAI_CUSTOM_HEADERS, which is sent to an endpoint.
            for header, _, content in (line.partition(":") for line in value.splitlines()):
                if header.strip().lower() not in HARMLESS_HEADERS:
                    found |= parts_of_header(content.strip())
        # The scheme of a proxy may be left out.
        proxy = name.lower().endswith("_proxy") and "://" not in value
        for whole in _USER_INFO.findall(f"://{value}" if proxy else value):
            found |= {unquote(each) for each in (whole, *re.split("[/?#@]", whole))}
    return {each for each in found if len(each) >= _SHORTEST}
