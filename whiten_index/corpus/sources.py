"""Parquet files of a corpus, by path, folder, glob or URI, on any file system."""

import contextlib
import errno
import fnmatch
import functools
import glob
import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterator, Sequence
from configparser import Error as IniError
from dataclasses import dataclass, replace
from email.utils import mktime_tz, parsedate_tz
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, quote

import pyarrow as pa
import pyarrow.fs as pafs

from whiten_index.artifacts.files import exists, is_link, list_folder, reading, system_error
from whiten_index.errors import (
    FILE_SECRETS,
    HARMLESS_HEADERS,
    ConfigError,
    CorpusError,
    StorageError,
    first_line,
    parts_of_header,
)
from whiten_index.paths import at_home, cut, require_no_secret, require_plain_environment

SUFFIXES = (".parquet", ".pq", ".parq")
_DATASET = "dataset_info.json"
# Python that makes one Parquet file of others, by their ending. DuckDB is to skip no line of a
# table, and to make text of UUIDs and of columns with values of several types.
_FILES = "f, to = sorted(glob.glob(%s, recursive=True)), %s; "
_DUCKDB, _WHOLE = f"import duckdb, glob; {_FILES}", "sample_size=-1, union_by_name=True"
_CSV = f"{_DUCKDB}duckdb.read_csv(f, header=True, skiprows=0, {_WHOLE}, "
_JSON = (
    f"{_DUCKDB}r = duckdb.read_json(f, {_WHOLE}); r.project("
    r'", ".join(f"to_json(\"{c}\")->>$$$$ AS \"{c}\"" if str(t) in ("JSON", "UUID") else f"\"{c}\""'
    " for c, t in ((c.replace(chr(34), 2 * chr(34)), t) for c, t in zip(r.columns, r.types)))"
    ").write_parquet(to)"
)
_PYARROW = (
    f"import glob, pyarrow as pa, pyarrow.parquet; {_FILES}pa.parquet.write_table(pa.concat_tables("
)
# A file of Arrow is a stream after eight bytes.
_ARROW = (
    f'{_PYARROW}[pa.ipc.open_stream(b[8 * b.startswith(b"ARROW1"):]).read_all() for b in '
    '(open(p, "rb").read() for p in f)], promote_options="permissive"), to)'
)
_CONVERSIONS = {
    **dict.fromkeys((".arrow", ".feather"), _ARROW),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), _JSON),
    ".csv": _CSV + r'sep=",", quotechar="\"").write_parquet(to)',
    ".tsv": _CSV + r'sep="\t", quotechar="", escapechar="").write_parquet(to)',
    ".txt": _PYARROW
    + '[pa.table({"text": open(p, encoding="utf-8-sig").read().splitlines()}) for p in f]), to)',
}
_LOAD = "import datasets; datasets.load_from_disk(%s).to_parquet(%s)"
# Arrow would leave out what follows the sign.
_PLAIN = "".join(map(chr, range(33, 127))).replace("#", "")
_HIDDEN = "._"
_MOST_LEVELS = 100
_HADOOP = ("hdfs", "viewfs")
_ARROW_SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", *_HADOOP)
# Options of their addresses that do not say where keys are sent.
_OPTIONS = (
    "region", "user", "project_id", "retry_limit_seconds", "allow_bucket_creation",
    "check_directory_existence_before_creation",
)  # fmt: skip
# Of containers, accounts, and hosts of accounts.
_AZURE = r"[a-z0-9$-]*(\.(dfs|blob)\.core\.windows\.net)?"
_RETRY_SECONDS = 60
# Errors of servers, which Arrow raises with the same type as those of damaged files.
_SERVERS = re.compile("AWS Error|google::cloud::Status|Azure Error")
# File systems of fsspec that read another one, or local files without a look at pipes. A damaged
# archive raises errors of any kind, and copies of files stay when a process is killed.
_WITHIN_OTHERS = (
    "zip", "tar", "libarchive", "reference", "dir", "cached", "simplecache", "filecache",
    "blockcache", "generic", "async_wrapper", "asyncwrapper", "local", "asynclocal", "arrow_hdfs",
)  # fmt: skip
_REDIRECTS = (301, 302, 303, 307, 308)
_LONGEST_ANSWER = 1 << 26  # bytes of a list of links
_SECRET_NAME = re.compile("headers|cookies|auth|pass|secret|token|key", re.I)
# Decides by the names below the source whether a file is wanted or, with ``whole=False``, whether a
# folder may hold wanted files.
_Match = Callable[..., bool]


def find_files(sources: Sequence[str | Path]) -> "list[SourceFile]":
    """List the Parquet files of ``sources``, sorted by path within each source."""
    if not sources:
        raise CorpusError("no corpus was given; name a Parquet file, folder, glob or URI")
    files = [file for source in sources for file in _files_of(os.fspath(source))]
    seen: set[str] = set()
    for file in files:
        if file.place in seen:
            raise CorpusError(f"{file.path} is named twice in the corpus; name each file once")
        seen.add(file.place)
    names = [file.name for file in files]
    if len(set(names)) == len(names):
        return files
    # Two sources hold the same name.
    paths = [file.path for file in files]
    names = paths if len(set(paths)) == len(paths) else [file.place for file in files]
    return [replace(file, name=name) for file, name in zip(files, names, strict=True)]


def to_parquet(filesystem: Any, *paths: str, folder: str = "", pattern: str = "") -> str:
    """Return how the first file that can be converted is, or all of its kind in ``folder``.

    Of ``datasets`` it is the folder of the file.
    """
    local = isinstance(filesystem, pafs.LocalFileSystem)
    for path in map(PurePosixPath, paths if local else ()):
        code, source = _CONVERSIONS.get(path.suffix, ""), PurePosixPath(folder or path)
        files = glob.escape(str(source))
        if path.name == _DATASET:
            code, source = _LOAD, path.parent
            files = str(source)
        elif folder:
            files += "/" + (pattern or f"**/*{path.suffix}")
        if code:
            made = f"{source.stem}.parquet"
            code %= tuple(json.dumps(each, ensure_ascii=False) for each in (files, made))
            what = "this, after pip install duckdb," if "duckdb" in code else "this"
            return f"; a corpus is Parquet, which {what} makes of it: python -c {shlex.quote(code)}"
    return ""


def resolve(source: str) -> tuple[Any, str]:
    """Return the file system of ``source`` and its path there.

    pyarrow's own file systems come first (local, s3, gs, hdfs), then those of fsspec.
    """
    require_no_secret(source, what="the corpus")
    require_plain_environment()
    if "://" not in source:
        return pafs.LocalFileSystem(), _utf8(canonical(source))
    scheme = source.partition(":")[0]
    chained = "::" in source and scheme not in _ARROW_SCHEMES
    if chained or scheme.startswith("fsspec+") or scheme in _WITHIN_OTHERS:
        raise CorpusError(
            f"{cut(source, most=200)} is in an archive, or behind another file system, where "
            "no corpus is read; unpack it, or name its files by their own address"
        )
    if scheme in _ARROW_SCHEMES and (found := _arrow(scheme, source)) is not None:
        return found
    fsspec = _fsspec()
    try:
        with asking(source):
            try:
                # A client takes what follows a # for a part of the page.
                plain = source.replace("#", "%23") if scheme in ("http", "https") else source
                known, path = fsspec.core.url_to_fs(plain, **_http_options(source))
            except (ValueError, TypeError, ImportError) as error:
                raise CorpusError(
                    f"{source} cannot be opened ({first_line(error)}); use a URI that pyarrow or "
                    "an installed fsspec package reads"
                ) from None
    except FileNotFoundError as error:
        raise CorpusError(f"{source} does not exist; check the address") from error
    return pafs.PyFileSystem(_Handler(known)), path


def _arrow(scheme: str, source: str) -> tuple[Any, str] | None:
    """Return the file system of Arrow's for an address, None if Arrow was built without it."""
    # Names with spaces and letters beyond ASCII are written as they are, or escaped.
    address = quote(_utf8(source), safe=_PLAIN)
    if scheme != "file":
        _require_no_server(scheme, address)
    if scheme in ("gs", "gcs") and "retry_limit_seconds=" not in source:
        # Arrow's own limit is 15 minutes.
        address += f"{'&' if '?' in source else '?'}retry_limit_seconds={_RETRY_SECONDS}"
    try:
        # Arrow asks Amazon for the region of a bucket, and connects to Hadoop.
        with asking(source, content=scheme not in _HADOOP):
            filesystem, path = pafs.FileSystem.from_uri(address)
    except pa.ArrowNotImplementedError:
        return None
    except (OSError, pa.ArrowException) as error:
        raise CorpusError(
            f"{source} cannot be opened ({first_line(error)}); check the URI"
        ) from None
    return filesystem, path


def _require_no_server(scheme: str, address: str) -> None:
    """Refuse an address of Arrow's that says where keys are sent, or has code loaded.

    It may come from an index that somebody else made.
    """
    authority = re.split(r"[/?]", address.partition("://")[2], maxsplit=1)[0]
    host = authority.rpartition("@")[2]
    given = dict(parse_qsl(address.partition("?")[2], keep_blank_values=True))
    servers = [f"the option {name}" for name in given if name not in _OPTIONS]
    if scheme.startswith("abfs") and not re.fullmatch(_AZURE, host):
        servers.append(f"the host {host}")
    if servers:
        remedy = "leave it out" + (", and set AWS_ENDPOINT_URL" if scheme == "s3" else "")
        raise CorpusError(
            f"the corpus {cut(address, most=200)} has {servers[0]}, and an address of a corpus "
            f"may not say to which server keys are sent; {remedy}"
        )
    library = Path("libhdfs.so")
    if scheme in _HADOOP and exists(library):
        raise CorpusError(
            f"Arrow would run {library.absolute()}; work in another folder, and name that of "
            "Hadoop's library with ARROW_LIBHDFS_DIR"
        )


def require_reachable(source: str) -> None:
    """Look at a URI, or at the folder that a pattern begins with, once."""
    base, _ = _split_glob(source)
    filesystem, path = resolve(base)
    shown = cut(source, most=200)
    try:
        with asking(shown):
            _look(filesystem, path)
    except FileNotFoundError as error:
        raise CorpusError(f"{shown} of the corpus is not there") from error


@contextlib.contextmanager
def asking(path: str, *, content: bool = False) -> Iterator[None]:
    """Turn errors of the system, or of a server, into a ``StorageError`` that names ``path``.

    ``FileNotFoundError`` passes, and with ``content`` what Arrow raises for damage.
    """
    try:
        with reading(path):
            yield
    except Exception as error:
        # fsspec reports a missing file for every error of an HTTP server; the cause has the error.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
        http = path.startswith(("http://", "https://"))
        known = http or isinstance(cause, TimeoutError) or _library(cause) == "aiohttp"
        answer = cause if cause and known else error
        if http and type(answer) in (TypeError, AttributeError):
            # aiohttp is given the configuration of fsspec as it is.
            raise _misconfigured(answer) from None
        if isinstance(answer, FileNotFoundError) or getattr(answer, "status", None) in (404, 410):
            raise FileNotFoundError(path) from None
        system = isinstance(answer, OSError) or type(answer) is ValueError
        other = _library(answer) in ("builtins", "whiten_index") and not system
        damage = _library(answer) == "pyarrow" or type(answer) is OSError
        if other or (content and damage and not _SERVERS.search(str(answer))):
            raise
        raise StorageError(
            f"cannot read {cut(path, most=200)}: {first_line(answer)}; check the address, its "
            "server and keys, then run the same command again"
        ) from None


def _library(error: BaseException | None) -> str:
    return type(error).__module__.partition(".")[0]


def _fsspec() -> Any:
    """Import fsspec, which reads its configuration then; what that says may be secret."""
    try:
        import fsspec

        for name in ("http", "https"):
            _require_objects(fsspec.config.conf.get(name, {}))
        FILE_SECRETS.update(_secrets_of(fsspec.config.conf))
    except OSError as error:
        raise system_error("the configuration of fsspec", error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, IniError) as error:
        raise _misconfigured(error) from None
    return fsspec


def _require_objects(settings: Any) -> None:
    for name, inside in settings.items():
        if name in ("client_kwargs", "headers", "cookies"):
            _require_objects(inside)


def _secrets_of(settings: Any, *, secret: bool = False) -> Iterator[str]:
    """Yield the texts of a configuration whose names say that they are secret, and headers."""
    if isinstance(settings, dict):
        for name, inside in settings.items():
            named = _SECRET_NAME.search(str(name)) is not None
            if str(name).lower() not in HARMLESS_HEADERS:
                yield from _secrets_of(inside, secret=secret or named)
    elif secret and isinstance(settings, list | tuple):
        for inside in settings:
            yield from _secrets_of(inside, secret=True)
    elif secret and isinstance(settings, str):
        yield from parts_of_header(settings)


def _misconfigured(error: BaseException) -> ConfigError:
    return ConfigError(
        f"the configuration of fsspec cannot be read ({type(error).__name__}); mend or remove the "
        "files in ~/.config/fsspec, or in FSSPEC_CONFIG_DIR, and the variables FSSPEC_*"
    )


def _http_options(source: str) -> dict[str, Any]:
    """Return options by which no answer of a server at http:// or https:// does harm.

    None fills the memory, and no redirect takes what fsspec's configuration adds to another server.
    """
    if (scheme := source.partition(":")[0]) not in ("http", "https"):
        return {}
    import aiohttp
    from yarl import URL

    fsspec = _fsspec()
    settings = [fsspec.config.conf.get(each, {}) for each in ("http", "https")]
    given = fsspec.config.conf.get(scheme, {}).get("client_kwargs", {})
    added = {str(name).lower() for each in (given, *settings) for name in each.get("headers") or ()}
    secret = any(each.get(name) for each in (given, *settings) for name in ("cookies", "auth"))
    # aiohttp takes this one to no other server.
    secret = secret or not added.issubset((*HARMLESS_HEADERS, "authorization"))

    class Response(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            if self.status == 416:
                # fsspec takes it for the end of the file.
                raise aiohttp.ClientError("it refuses a range of the file")
            place = self.headers.get("Location") or self.headers.get("URI")
            if secret and place and self.status in _REDIRECTS:
                to = self.url.join(URL(place))
                # At another port is another server.
                servers = [(each.scheme, each.host, each.port) for each in (self.url, to)]
                upgrade = [("http", to.host, 80), ("https", to.host, 443)]
                if servers[0] != servers[1] and servers != upgrade:
                    raise aiohttp.ClientError(
                        f"it redirects to {to.scheme}://{to.host}:{to.port}, to which the headers "
                        "of fsspec's configuration are not sent"
                    )
            return self

        async def read(self) -> bytes:
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_info.headers.get("Range", ""))
            most = int(asked[2]) - int(asked[1]) + 1 if asked else _LONGEST_ANSWER
            body = bytearray()
            async for part in self.content.iter_any():
                body += part
                if len(body) > most:
                    raise ValueError("the answer is longer than the range")
            start = re.match(r"bytes (\d+)-", self.headers.get("Content-Range", ""))
            if asked and (len(body) < most or (start and start[1] != asked[1])):
                raise ValueError("the answer is not the range that was asked for")
            return bytes(body)

    return {"client_kwargs": {**given, "response_class": Response}}


class _Handler(pafs.FSSpecHandler):  # type: ignore[misc]
    """File system of fsspec that reports why a file is not found, unlike pyarrow's handler."""

    def get_file_info(self, paths: Sequence[str]) -> list[Any]:
        return [self._create_file_info(path, self.fs.info(path)) for path in paths]

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self.fs.open(path), mode="r")


def canonical(source: str | Path) -> str:
    """Return ``source`` in the form that names it whatever the working directory."""
    text = os.fspath(source)
    return text if "://" in text else os.path.normpath(at_home(text).absolute())


def _files_of(source: str) -> "list[SourceFile]":
    base, pattern = _split_glob(source)
    filesystem, path = resolve(base or ".")
    named = functools.partial(_matches, patterns=pattern.split("/"))
    match: _Match = named if pattern else _is_parquet
    listed: list[str] = []
    try:
        with asking(path):
            info = _look(filesystem, path)
            if not pattern and info.type == pafs.FileType.Unknown:
                raise CorpusError(f"{source} is neither a file nor a folder; name Parquet files")
            if not pattern and info.type == pafs.FileType.File:
                return [SourceFile(PurePosixPath(path).name, info.path, filesystem)]
            if not pattern or info.type == pafs.FileType.Directory:
                listed = _listed(filesystem, path, match)
    except FileNotFoundError as error:
        if not pattern:
            raise CorpusError(f"{source} does not exist; check the path") from error
    names = {each: PurePosixPath(each).relative_to(path).parts for each in sorted(listed)}
    files = [
        SourceFile("/".join(inside), _utf8(each), filesystem)
        for each, inside in names.items()
        if match(inside)
    ]
    if not files and pattern:
        raise CorpusError(f"no file matches {pattern} in {path}; check the pattern")
    if not files:
        datasets_first = sorted(listed, key=lambda each: not each.endswith(_DATASET))
        raise CorpusError(
            f"{source} holds no Parquet file ({len(listed)} files, none ending with "
            f"{', '.join(SUFFIXES)}); name the files with a glob, or another folder"
            + to_parquet(filesystem, *datasets_first, folder=path)
        )
    if pattern and len({PurePosixPath(file.path).suffix for file in files}) == 1:
        converted = to_parquet(filesystem, files[0].path, folder=path, pattern=pattern)
        if converted:
            raise CorpusError(f"{source} names no Parquet files{converted}")
    return files


def _split_glob(source: str) -> tuple[str, str]:
    # A question mark in a URI begins its options.
    wildcards = "*[" if "://" in source else "*?["
    first = next((i for i, character in enumerate(source) if character in wildcards), None)
    if first is None:
        return source, ""
    # A pattern may be longer than the system takes names.
    with contextlib.suppress(ConfigError):
        if exists(source):
            return source, ""
    at = source.rfind("/", 0, first) + 1
    return source[:at], source[at:]


def _matches(names: Sequence[str], patterns: Sequence[str], *, whole: bool = True) -> bool:
    """Match folder by folder: ``*`` stays within one, ``**`` stands for any number of them.

    A writer's bookkeeping (``_SUCCESS``, ``.crc``) needs its first letter in the pattern. Without
    ``whole``, the names may also be a folder that holds matches.
    """
    if not names or not patterns:
        return not names and not (whole and patterns)
    hidden = names[0][0] in _HIDDEN and patterns[0][0] != names[0][0]
    if patterns[0] == "**":
        here = _matches(names, patterns[1:] or ["*"], whole=whole)
        return here or (not hidden and _matches(names[1:], patterns, whole=whole))
    matched = not hidden and fnmatch.fnmatchcase(names[0], patterns[0])
    return matched and _matches(names[1:], patterns[1:], whole=whole)


def _is_parquet(names: Sequence[str], *, whole: bool = True) -> bool:
    shown = all(name[0] not in _HIDDEN for name in names)
    return shown and (not whole or names[-1].lower().endswith(SUFFIXES))


def _listed(filesystem: Any, path: str, match: _Match) -> list[str]:
    """Return the paths of the files below a folder, those in folders without matches left out."""
    if isinstance(handler := getattr(filesystem, "handler", None), pafs.FSSpecHandler):
        # fsspec's own search leaves out folders that a server refuses.
        folders, files = [path], list[str]()
        for folder in folders:
            for info in handler.fs.ls(folder, detail=True):
                if info["type"] == "file":
                    files.append(info["name"])
                elif info["type"] == "directory" and info["name"].rstrip("/") not in folders:
                    folders.append(info["name"].rstrip("/"))
        return files
    if not isinstance(filesystem, pafs.LocalFileSystem):
        infos = filesystem.get_file_info(pafs.FileSelector(path, recursive=True))
        return [info.path for info in infos if info.type == pafs.FileType.File]
    # pyarrow leaves out links that lead nowhere, and follows one to a folder above for ever.
    found = Path(path).stat()
    return list(_walk(Path(path), (), {(found.st_dev, found.st_ino)}, match))


def _walk(
    folder: Path, names: tuple[str, ...], above: set[tuple[int, int]], match: _Match
) -> Iterator[str]:
    """Yield the paths of the files below ``folder``; links are followed."""
    if len(names) > _MOST_LEVELS:
        raise CorpusError(f"{folder} is more than {_MOST_LEVELS} folders deep; move it up")
    # Nothing is left out in silence, since its rows would look deleted.
    entries = list_folder(folder)
    if not entries and not exists(folder):
        raise CorpusError(
            f"{folder} was removed while the corpus was listed; run the same command again"
        )
    for path in entries:
        inside = (*names, path.name)
        if not match(inside, whole=False):
            continue
        found = _stat(path)
        place = (found.st_dev, found.st_ino)
        if stat.S_ISREG(found.st_mode):
            yield str(path)
        elif not stat.S_ISDIR(found.st_mode):
            if match(inside):
                raise CorpusError(
                    f"{path} is neither a file nor a folder; remove it, or name the corpus's files"
                )
        elif place in above:
            raise CorpusError(
                f"the link {path} leads to a folder above it, so that the corpus has no end; "
                "remove the link"
            )
        else:
            yield from _walk(path, inside, above | {place}, match)


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) and is_link(path):
            raise CorpusError(
                f"the link {path} leads nowhere ({error.strerror}), and what it named would be "
                "missing from the corpus; restore that, or remove the link"
            ) from error
        raise system_error(path, error) from error


def _utf8(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise CorpusError(f"the name of {shown} is not UTF-8; rename the file") from error
    return path


# Names under which servers and fsspec give the version of a file. A date alone is no version: a
# file may be written twice in a second or in place.
_DATE, _MADE = "last-modified", "created"
_TAGS = ("etag", "generation", "versionid", "version_id", "md5hash", "content-md5", _MADE,
         "blob_id", _DATE)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity that changes with the content of a file."""

    size: int  # bytes
    # Nanoseconds since 1970 of the last write, which programs that copy files set; 0 with a tag,
    # None if only reading can show a change.
    modified: int | None
    tag: str = ""  # ETag, generation or version that an object store gives, else empty
    # Inode and ctime of a local file. No program can set the ctime. It is not pickled, since
    # another host may see another inode.
    local: tuple[int, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Identity, (self.size, self.modified, self.tag)

    def matches(self, other: "Identity") -> bool:
        """Return whether both may be of the same content."""
        both = self.local is not None and other.local is not None
        return self == other if both else replace(self, local=None) == replace(other, local=None)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One Parquet file."""

    name: str  # its path below the source that the user named; part of a row's identity
    path: str  # its path on `filesystem`
    filesystem: Any  # the pyarrow file system that opens it
    identity: Identity | None = None  # taken before it is read; None until then
    footer: str = ""  # digest of its footer; empty until that is read

    @property
    def place(self) -> str:
        """Path and kind of file system, which identify a file."""
        return f"{self.filesystem.type_name}:{self.path}"

    @property
    def packed(self) -> int:
        """Bytes of the file, 0 if not known."""
        return 0 if self.identity is None else self.identity.size

    @property
    def by_fsspec(self) -> bool:
        """True for a file of a web server, or of another place that fsspec reads."""
        return isinstance(getattr(self.filesystem, "handler", None), pafs.FSSpecHandler)

    def open(self) -> pa.NativeFile:
        """Open the file for random access."""
        if self.identity is None or not isinstance(self.filesystem, pafs.LocalFileSystem):
            return self.filesystem.open_input_file(self.path)
        # Another file may be there for a moment, or a pipe, which would wait for ever.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not self.identity.matches(_identity_of(os.fstat(descriptor))):
                raise self.changed()
            return self.filesystem.open_input_file(f"/dev/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def identified(self) -> "SourceFile":
        """Return the file with its present identity."""
        try:
            with asking(self.path):
                return replace(self, identity=_identify(self.filesystem, self.path))
        except FileNotFoundError as error:
            raise CorpusError(
                f"{self.path} vanished while the corpus was read; restore it or take it out of "
                "the corpus, then run the same command again"
            ) from error

    def require_unchanged(self) -> None:
        """Raise ``CorpusError`` if the file changed since its identity was taken, or is gone."""
        now = self.identified().identity
        if self.identity is None or now is None or not self.identity.matches(now):
            raise self.changed()

    def changed(self) -> CorpusError:
        """Return the error to raise for a file that changed."""
        return CorpusError(
            f"{self.path} changed while it was read; run the same command again when nothing "
            "writes to it"
        )


def _identity_of(found: os.stat_result) -> Identity:
    return Identity(found.st_size, found.st_mtime_ns, local=(found.st_ino, found.st_ctime_ns))


def _identify(filesystem: Any, path: str) -> Identity:
    if isinstance(filesystem, pafs.LocalFileSystem):
        # A network file system asks its server when a file is opened, and else may remember.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return _identity_of(os.fstat(descriptor))
        finally:
            os.close(descriptor)
    if isinstance(handler := getattr(filesystem, "handler", None), pafs.FSSpecHandler):
        # Some of fsspec's file systems remember listings.
        handler.fs.invalidate_cache()
        given = handler.fs.info(path)
        size = given["size"]
    else:
        with filesystem.open_input_file(path) as file:
            given, size = file.metadata() or {}, file.size()
    tags = {str(key).lower(): str(given[key]) for key in sorted(given) if str(key).lower() in _TAGS}
    if tags.keys() - {_DATE, _MADE}:
        return Identity(size, 0, " ".join(tags.values()))
    with contextlib.suppress(OverflowError):
        if written := parsedate_tz(tags.get(_DATE)):
            return Identity(size, mktime_tz(written) * 10**9)
    info = _look(filesystem, path)
    if info.type != pafs.FileType.File:
        raise FileNotFoundError(path)
    return Identity(size, info.mtime_ns, tags.get(_MADE, ""))


def _look(filesystem: Any, path: str) -> Any:
    info = filesystem.get_file_info(path)
    if info.type == pafs.FileType.NotFound:
        raise FileNotFoundError(path)
    return info
