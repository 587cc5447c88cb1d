"""Schemas of manifests and records: what is read from disk is checked once, before any use.

A schema is a ``TypedDict`` or a dataclass. A field that it does not name, a missing field and a
value of another type are refused. Numbers and flags must use the types below: a plain ``int``
would take the text "3".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, Field, Strict, StringConstraints, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from whiten_index.artifacts.paths import cut

T = TypeVar("T")
# Sizes in bytes and row numbers are kept as int64.
_MOST = 2**63 - 1


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or str(path) != name or ".." in path.parts or "\0" in name or not name:
        raise ValueError("Input should be the path of a file inside the folder")
    return name


Integer = Annotated[int, Strict(), Field(ge=-_MOST, le=_MOST)]
Count = Annotated[int, Strict(), Field(ge=0, le=_MOST)]
Positive = Annotated[int, Strict(), Field(ge=1, le=_MOST)]
Number = Annotated[float, Strict()]
Share = Annotated[float, Strict(), Field(ge=0, le=1)]
Flag = Annotated[bool, Strict()]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
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
    """A kind of manifest or record.

    Attributes:
        kind: the value of its field ``kind``.
        version: the latest format that can be read.
        shape: the type of its fields.
    """

    kind: str
    version: int
    shape: type[T]

    @cached_property
    def _adapter(self) -> TypeAdapter[list[T]]:
        # Only the types inside take the configuration from outside, so the shape is put inside.
        config: Any = {"extra": "forbid", "allow_inf_nan": False}
        return TypeAdapter(list[self.shape], config=config)  # type: ignore[name-defined]

    def check(self, value: Any) -> T:
        """Return a value of JSON as the schema's type.

        Raises:
            ValueError: it does not fit; the message names the first wrong field.
        """
        try:
            return self._adapter.validate_python([value])[0]
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"][1:]))
            raise ValueError(f"field {cut(place)!r}: {first['msg']}") from None
