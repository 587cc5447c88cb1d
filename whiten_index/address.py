"""Addresses that may hold a secret: how to find it, and how to keep it out of sight."""

import os
import re
from collections.abc import Iterator
from urllib.parse import quote, quote_plus, unquote, unquote_plus

# Path("s3://bucket") has one slash.
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/{1,2}(\S.*)", re.DOTALL)
# fsspec chains addresses: zip://inside.parquet::https://host/archive.zip
_CHAIN = r"::(?=[A-Za-z][A-Za-z0-9+.-]*:/)"
_INSIDE = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]{{0,40}}:/{{1,2}}(?:(?!{_CHAIN})[^\s'\"<>`])+")
_WITHOUT_SCHEME = re.compile(
    r"(//[^/:@\s]+:[^/@\s]+@.*|[^/:@\s]+:[^/@\s]+@[\w.-]+[:/].*)", re.DOTALL
)
# As libpq has them: host=h user=u password=p
_KEY_VALUE = re.compile(r"(.*\s)?(ssl)?pass(word|wd)\s*=\s*\S.*", re.DOTALL | re.I)
_HOST = re.compile(r"(\[[\da-fA-F:.%]+\]|[^:@\[\]]*)(:\d{0,5})?(,[^:@]*(:\d{0,5})?)*")
# Schemes whose user is a name; in others it may be a token.
_NAMED_USER = re.compile(
    r"postgres.*|pg.*|psql|hdfs|viewfs|ssh|sftp|ftp|smb|abfss?|wasbs?|git\+ssh"
)
_SECRET_NAME = re.compile(
    r"sig|token|key|secret|pass|pwd|auth|cred|jwt|bearer|session|(^|[_-])(sas|pw|code)$", re.I
)
_PLAIN_NAME = re.compile(
    r"version_?id|generation|etag|revision|ref|commit|sslkey|passfile|require_auth|"
    r"target_session_attrs|client_key_path|sse_kms_key_id",
    re.I,
)
# No path: a token seldom begins with a slash.
_OPAQUE = re.compile(r"(?!/)(?=.*\d)(?=.*[A-Za-z])[\w+/=~-]{24,}")

_OF_S3 = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_OF_GS = "GOOGLE_APPLICATION_CREDENTIALS"
_OF_AZURE = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
_OF_STORES = f"{_OF_S3}, {_OF_AZURE}, or {_OF_GS}"
_REMEDIES = (
    ("s3a?|s3n", f"set {_OF_S3}"),
    ("gs|gcs", f"set {_OF_GS}"),
    ("az|adl|abfss?|wasbs?", f"set {_OF_AZURE}"),
    (r"postgres.*|pg.*|psql", "set PGPASSWORD, or write ~/.pgpass"),
    (r"qdrant.*", "set QDRANT_API_KEY"),
    (r"milvus.*", "set MILVUS_TOKEN"),
    (r"lance.*", f"set {_OF_STORES}"),
    ("ray", "set RAY_AUTH_TOKEN"),
    ("hf", "set HF_TOKEN"),
    ("https?", "write it to ~/.config/fsspec/conf.json, or download the file and name its path"),
    ("", "set the environment variable, or write the credentials file, of the library that reads "
     "such addresses"),
)  # fmt: skip

_SECRET_VARIABLE = re.compile(r"(PASSWORD|PASSWD|SECRET|TOKEN|KEY|SAS|PWD)$", re.I)
_NO_SECRETS = ("PWD", "OLDPWD")
_USER_INFO = re.compile(r"://[^/\s@]*:([^/\s@]+)@")
_SHORTEST, _LONG = 6, 8


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


def remedy_for(text: str) -> str:
    """Return the proper place for the secret of an address, by its scheme."""
    scheme = scheme_of(text)
    return next(told for form, told in _REMEDIES if not form or re.fullmatch(form, scheme))


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
    if not _HOST.fullmatch(host) or ended_early or re.search(":[^/]*@", path):
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
    """
    forms = {form for each in _environment() for form in (each, quote(each, ""), quote_plus(each))}
    for form in sorted(forms, key=len, reverse=True):
        # A short one may be a part of a word.
        edges = ("", "") if len(form) >= _LONG else (r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])")
        text = re.sub(re.escape(form).join(edges), "…", text)
    return _INSIDE.sub(_hidden, text)


def _hidden(found: re.Match[str]) -> str:
    scheme, _, rest = found[0].partition(":")
    return f"{scheme}://…" if _secret_in(scheme.lower(), rest.lstrip("/")) else found[0]


def _environment() -> set[str]:
    """Return the secrets in the environment's variables."""
    found = set[str]()
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name) and name not in _NO_SECRETS:
            # A token of Milvus is USER:PASSWORD.
            found |= {value.strip(), value.strip().rpartition(":")[2]}
        found |= {unquote(each) for each in _USER_INFO.findall(value)}
    return {each for each in found if len(each) >= _SHORTEST}
