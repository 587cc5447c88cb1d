"""Manifests of artifacts, and publication that is all or nothing.

An artifact is a folder with a ``manifest.json``. It is written under a temporary name next to its
place, every file is fsynced, the manifest last, then the folder is renamed.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, Field, Strict, StringConstraints, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from whiten_index.artifacts.atomic import (
    make_folder,
    remove_leftovers,
    rename_unless_taken,
    replace_file,
    temporary_folder,
)
from whiten_index.artifacts.files import MANIFEST as MANIFEST
from whiten_index.artifacts.files import (
    exists,
    fsync_path,
    read_bytes,
    reading,
    require_regular,
    require_target,
    sha256_file,
    walk_files,
    writing,
)
from whiten_index.artifacts.limits import MANIFEST_BYTES, VECTOR_NUMBERS, canonical_json, load_json
from whiten_index.errors import ArtifactError, FormatError
from whiten_index.paths import cut

T = TypeVar("T")
# Remedy for every artifact; its reader may know a better one.
REMEDY = "restore it from a copy, or run the build again"
_MISSING = "check the path, or build it"
_DIGEST = "digest"


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Return 32 hex digits that identify ``identity``, a JSON-serialisable mapping."""
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:32]


@contextlib.contextmanager
def new_artifact(
    final: Path, place: Callable[[Mapping[str, Any]], Path] | None = None
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Publish the artifact ``final``, whole or not at all, at the end of the block.

    ``place`` may return another place for it, by its fields.

    Yields:
        A folder for the payload files, and the manifest's fields, to be filled. At the end they
        get ``files``: name -> {``bytes``, ``sha256``}. If ``final`` exists by then, it is kept.
    """
    with writing(final):
        make_folder(final.parent)
        with temporary_folder(final) as temporary:
            fields: dict[str, Any] = {}
            yield temporary, fields
            # A file that was replaced inside may have left its temporary folder.
            remove_leftovers(temporary)
            manifest = sealed({**fields, "files": describe_files(temporary)})
            for name in manifest["files"]:
                fsync_path(temporary / name)
            (temporary / MANIFEST).write_bytes(_pretty_json(manifest))
            fsync_path(temporary / MANIFEST)
            fsync_path(temporary)
            final = final if place is None else place(fields)
            rename_unless_taken(temporary, final)
            fsync_path(final.parent)


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the sizes and checksums of the files below a folder, by their paths in it."""
    return {path.relative_to(folder).as_posix(): describe_file(path) for path in walk_files(folder)}


def describe_file(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file, as ``check_files`` compares them."""
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def write_manifest(path: Path, fields: Mapping[str, Any]) -> None:
    """Put a manifest at ``path`` in one step, with a digest of its fields."""
    replace_file(path, sealed_json(fields))


def sealed_json(fields: Mapping[str, Any]) -> bytes:
    """Return the bytes of ``fields`` as ``write_manifest`` writes them, with their digest."""
    return _pretty_json(sealed(fields))


def unsealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields without their digest; raise ``ValueError`` if they do not match it."""
    if not isinstance(value, Mapping) or value != sealed(value):
        raise ValueError("its fields do not match its digest")
    return {name: field for name, field in value.items() if name != _DIGEST}


def sealed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with their digest."""
    plain = json.loads(json.dumps({k: v for k, v in fields.items() if k != _DIGEST}))
    return {**plain, _DIGEST: hashlib.sha256(canonical_json(plain).encode()).hexdigest()}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Put ``value`` at ``path`` as indented JSON, in one step."""
    replace_file(path, _pretty_json(value))


def _pretty_json(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    # File names that are not UTF-8 come as surrogates, which JSON readers take back.
    return text.encode("utf-8", "surrogatepass")


def read_json(
    path: Path, *, what: str, exact: bool = False, remedy: str = REMEDY, missing: str = _MISSING
) -> dict[str, Any]:
    """Read a JSON object of a ``what``, with advice if it is damaged or missing.

    ``exact`` requires the bytes that ``write_manifest`` wrote, its digest included.

    Raises:
        ArtifactError: the file is missing or not a JSON object.
        StorageError: the system does not let it be read; it may be sound.
    """
    try:
        with reading(path):
            data = read_bytes(path, limit=MANIFEST_BYTES)
        value = load_json(data)
    except (FileNotFoundError, NotADirectoryError) as error:
        require_target(path)
        raise ArtifactError(
            f"{path.parent} is not {what}: it has no {path.name}; {missing}"
        ) from error
    except (ValueError, IsADirectoryError) as error:
        raise ArtifactError(f"{path} of {what} cannot be read ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise _damaged(path, f"it is of {what}, and holds no JSON object", remedy)
    if exact and data != sealed_json(value):
        raise _damaged(path, "its fields do not match its digest", remedy)
    return value


def read_manifest(
    folder: Path,
    schema: "Schema[T]",
    *,
    name: str = MANIFEST,
    remedy: str = REMEDY,
    missing: str = _MISSING,
) -> T:
    """Read a manifest and check it against its digest and its schema; see ``read_json``."""
    what = f"a whiten-index {schema.kind}"
    found = read_json(folder / name, what=what, remedy=remedy, missing=missing)
    return as_manifest(found, schema, folder / name, remedy=remedy)


def as_manifest(
    value: Mapping[str, Any], schema: "Schema[T]", path: Path, *, remedy: str = REMEDY
) -> T:
    """Check a JSON object against its digest and a schema; see ``read_manifest``."""
    if value.get("kind") != schema.kind:
        found = cut(str(value.get("kind", "folder of unknown kind")))
        raise ArtifactError(f"{path} holds a {found}, not a {schema.kind}; check the path")
    version = value.get("format_version")
    sound = value == sealed(value)
    if not isinstance(version, int) or version > schema.version:
        # A changed version number is damage, which may be replaced; a real one may not.
        raise (FormatError if sound else ArtifactError)(
            f"{path} has {schema.kind} format {cut(str(version))}, and this release reads "
            f"up to {schema.version}; upgrade whiten-index"
        )
    if not sound:
        raise _damaged(path, "its fields do not match its digest", remedy)
    return checked(value, schema, path, remedy=remedy)


def checked(value: Any, schema: "Schema[T]", path: Path, *, remedy: str = REMEDY) -> T:
    """Return a value of JSON as a schema's type; raise ``ArtifactError`` if it does not fit."""
    try:
        return schema.check(value)
    except ValueError as error:
        raise _damaged(path, str(error), remedy) from error


def check_files(
    folder: Path, manifest: Mapping[str, Any], *, content: bool,
    names: Iterable[str] | None = None, remedy: str = REMEDY,
) -> None:  # fmt: skip
    """Check a folder's files against its manifest: sizes, and with ``content`` SHA-256 too.

    With ``names``, these alone are checked, and the manifest must list them.

    Raises:
        ArtifactError: a file is missing, is no regular file, or differs from its manifest.
        StorageError: a file cannot be read, or is a link to a file that is not there.
    """
    for name in manifest["files"] if names is None else names:
        path, expected = folder / name, manifest["files"].get(name)
        if expected is None:
            raise _damaged(folder, f"it has no {name}", remedy)
        try:
            with reading(path):
                size = require_regular(path)
                same = size == expected["bytes"]
                sound = not (same and content) or sha256_file(path) == expected["sha256"]
        except (FileNotFoundError, NotADirectoryError) as error:
            require_target(path)
            raise _damaged(path, "it is missing", remedy) from error
        except IsADirectoryError as error:
            raise _damaged(path, "it is a folder", remedy) from error
        if not same:
            raise _damaged(path, f"it has {size} bytes instead of {expected['bytes']}", remedy)
        if not sound:
            raise _damaged(path, "its content does not match its checksum", remedy)


def listed_files(folder: Path, schema: "Schema[Any]", *, name: str = MANIFEST) -> set[str] | None:
    """Return the files of an artifact and its manifest, None for another folder.

    Raises:
        FormatError: a later release wrote it.
    """
    try:
        return {name, *read_manifest(folder, schema, name=name)["files"]}
    except ArtifactError:
        return None


def first_damaged(folder: Path, schema: "Schema[Any]") -> Path | None:
    """Return the first missing or damaged file of an artifact, None if all are sound.

    A folder that does not exist has none.

    Raises:
        FormatError: a later release wrote it.
    """
    if not exists(folder):
        return None
    path = folder / MANIFEST
    try:
        fields = read_manifest(folder, schema)
        for name in fields["files"]:
            path = folder / name
            check_files(folder, fields, content=True, names=[name])
    except ArtifactError:
        return path
    return None


def _damaged(path: Path, how: str, remedy: str) -> ArtifactError:
    return ArtifactError(f"{path} is damaged: {how}; {remedy}")


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or str(path) != name or ".." in path.parts or "\0" in name or name == ".":
        raise ValueError("Input should be the path of a file inside the folder")
    return name


# Sizes in bytes and row numbers are kept as int64.
_MOST = 2**63 - 1
Integer = Annotated[int, Strict(), Field(ge=-_MOST, le=_MOST)]
Count = Annotated[int, Strict(), Field(ge=0, le=_MOST)]
Positive = Annotated[int, Strict(), Field(ge=1, le=_MOST)]
Width = Annotated[int, Strict(), Field(ge=1, le=VECTOR_NUMBERS)]
Number = Annotated[float, Strict()]
Flag = Annotated[bool, Strict()]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
# Of an encoder, or of the bridged rows of a migration.
EncoderName = Annotated[str, StringConstraints(pattern=r"^(bridged-)?[0-9a-f]{32}$")]
FileName = Annotated[str, AfterValidator(_inside)]


class FileFacts(TypedDict):
    """Size and SHA-256 of a file."""

    bytes: Count
    sha256: Sha256


Files = dict[FileName, FileFacts]


class Sealed(TypedDict):
    """Fields of every manifest."""

    kind: str
    format_version: Positive
    digest: Sha256


class Described(Sealed):
    """Fields of every manifest of a folder."""

    files: Files


@dataclass(frozen=True, eq=False)
class Schema(Generic[T]):
    """Kind of a manifest or record, the latest format that can be read, and its fields' type."""

    kind: str
    version: int
    shape: type[T]

    @cached_property
    def _adapter(self) -> TypeAdapter[list[T]]:
        # Only the types inside take the configuration from outside, so the shape is put inside.
        config: Any = {"extra": "forbid", "allow_inf_nan": False}
        return TypeAdapter(list[self.shape], config=config)  # type: ignore[name-defined]

    def headed(self, **fields: Any) -> dict[str, Any]:
        """Return the fields of a manifest with its kind and format."""
        return {"kind": self.kind, "format_version": self.version, **fields}

    def check(self, value: Any) -> T:
        """Return a value of JSON as the schema's type; a ``ValueError`` names a wrong field."""
        try:
            return self._adapter.validate_python([value])[0]
        except ValidationError as error:
            raise _wrong_field(error) from None


def json_of(kind: type[Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a check of a dataclass's JSON object, to annotate a field of a shape with."""

    @cache
    def adapter() -> TypeAdapter[Any]:
        config: Any = {"extra": "forbid", "allow_inf_nan": False, "strict": True}
        return TypeAdapter(list[kind], config=config)  # type: ignore[valid-type]

    def check(value: dict[str, Any]) -> dict[str, Any]:
        try:
            # As JSON, in which a list may be a tuple; names of files may be no UTF-8.
            text = json.dumps([value], ensure_ascii=False)
            adapter().validate_json(text.encode("utf-8", "replace"))
        except ValidationError as error:
            raise _wrong_field(error) from None
        return value

    return check


def _wrong_field(error: ValidationError) -> ValueError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"][1:]))
    return ValueError(f"field {cut(place)!r}: {first['msg']}")
