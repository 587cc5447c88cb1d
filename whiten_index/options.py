"""Schemas of options: types, bounds, defaults and help texts, declared once.

A schema is a dataclass whose fields are made by ``option``. This one declaration checks Python
arguments and job files, makes the options of the command line, and is recorded in manifests.
"""

import contextlib
import difflib
import functools
import re
import types
from collections.abc import Collection
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import ByteSize, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated_dataclass

from whiten_index.errors import ConfigError
from whiten_index.paths import cut, require_no_secret, shown

CORPUS, MODEL, TRANSFORM = "Corpus", "Model", "Transform"
INDEX, RESOURCES, OUTPUT = "Index", "Resources", "Output"
# Bounds that many fields have.
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Schema = TypeVar("Schema")
# Key of an option among the facts of a field.
_FACE = "option"
# No file is so large; a float may be infinite.
_BEYOND = 1 << 63
_SIZES = TypeAdapter(ByteSize)
_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list",
}


@dataclass(frozen=True)
class Option:
    """A field of a schema, and its face on the command line."""

    help: str  # text of ``--help``
    group: str  # heading in it
    shown: str | None  # description of the default, if the value does not show it
    flag: str  # name on the command line
    commas: bool  # whether values of a list are separated by commas
    # It, or one of these fields, must be given to a command; None: it may be left out.
    needed: tuple[str, ...] | None
    name: str = ""
    kind: type = str  # without None
    choices: tuple[str, ...] = ()  # allowed values, if they are listed
    default: Any = None


def option(
    help: str, group: str = OUTPUT, *, default: Any = MISSING, shown: str | None = None,
    flag: str = "", commas: bool = False, needed: tuple[str, ...] | None = None, **bounds: float,
) -> Any:  # fmt: skip
    """Return a field of a schema that is an option; see ``Option``.

    ``bounds`` are those of pydantic's ``Field``, such as ``ge``.
    """
    face = Option(help, group, shown, flag, commas, needed)
    return field(default=default, metadata={_FACE: face, **bounds})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, option))
def schema(made_from: type[Schema]) -> type[Schema]:
    """Make a class a frozen, checked dataclass that takes keyword arguments only.

    A single value is taken for a list of one, a list for a tuple, and a path for a text.

    Raises:
        ConfigError: on making an instance, where a value has the wrong type or is out of bounds, or
            where it holds a secret.

    Examples:
        >>> @schema
        ... class Job:
        ...     rows: int = option("Rows at most.", default=10, ge=1)
        >>> Job(rows="ten")
        Traceback (most recent call last):
        whiten_index.errors.ConfigError: --rows takes a whole number; 'ten' was given
    """
    config = ConfigDict(
        strict=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )
    made = validated_dataclass(frozen=True, kw_only=True, config=config)(made_from)
    check = made.__init__

    @functools.wraps(check)
    def __init__(self: Any, **values: Any) -> None:  # noqa: N807
        flags = {each.name: each.flag for each in options_of(made)}
        for name, value in values.items():
            flag = flags.get(name, flag_of(name))
            require_no_secret(value, what=flag)
            if hasattr(value, "to_parquet"):
                raise ConfigError(f"{flag} takes paths; first: data.to_parquet('docs.parquet')")
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, int) and abs(each) >> 63:
                    raise ConfigError(
                        f"{flag} takes a number of at most 64 bits; {shown(each)} was given"
                    )
        hints = _hints(made)
        plain = {name: _plain(value, hints.get(name)) for name, value in values.items()}
        try:
            check(self, **plain)
        except ValidationError as error:
            raise ConfigError(_message(made, error)) from None

    made.__init__ = __init__  # type: ignore[method-assign]
    return cast("type[Schema]", made)


@functools.cache
def options_of(made: type) -> tuple[Option, ...]:
    """Return the fields of a schema that are options, in the order declared."""
    found, hints = [], _hints(made)
    for each in fields(made):
        if (face := each.metadata.get(_FACE)) is not None:
            kinds, choices = _kinds(hints[each.name])
            given = each.default is MISSING
            face = replace(
                face,
                name=each.name,
                flag=face.flag or flag_of(each.name),
                kind=kinds[0],
                choices=choices,
                default=None if given else each.default,
                needed=() if given else face.needed,
            )
            found.append(face)
    return tuple(found)


def changed(given: Any, *, without: Collection[str] = (), only: Collection[str] = ()) -> list[str]:
    """Return the flags of the options of a schema's instance that are not at their defaults."""
    return [
        each.flag
        for each in options_of(given.__class__)
        if each.name not in without
        and (not only or each.name in only)
        and getattr(given, each.name) != each.default
    ]


def job_keys(made: type) -> dict[str, str]:
    """Return key of a job file -> field of a schema: the field's name, or its flag's."""
    keys = {each.name: each.name for each in fields(made)}
    return keys | {each.flag[2:].replace("-", "_"): each.name for each in options_of(made)}


def unknown(name: str, known: Collection[str]) -> str:
    """Return a sentence about a name that is not among the known ones; the nearest comes first."""
    plain = [each.replace("-", "_") for each in known]
    near = difflib.get_close_matches(cut(name).replace("-", "_"), plain, n=1)
    meant = f"did you mean {near[0]}? K" if near else "k"
    return f"{cut(name)} is unknown; {meant}nown are {', '.join(sorted(known))}"


def flag_of(name: str) -> str:
    """Return the name of a field on the command line."""
    return f"--{name.replace('_', '-')}"


@functools.cache
def _hints(made: type) -> dict[str, Any]:
    return get_type_hints(made, include_extras=True)


def _kinds(hint: Any) -> tuple[tuple[type, ...], tuple[str, ...]]:
    """Return the plain types that a hint allows, and its choices."""
    if get_origin(hint) is Annotated:
        return _kinds(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_kinds(part) for part in get_args(hint) if part is not type(None)]
        kinds = dict.fromkeys(kind for found, _ in parts for kind in found)
        return tuple(kinds), tuple(choice for _, found in parts for choice in found)
    if get_origin(hint) is Literal:
        return (str,), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return (hint,), tuple(str(each.value) for each in hint)
    return (get_origin(hint) or hint,), ()


def _item_types(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Annotated:
        return _item_types(get_args(hint)[0])
    items = get_args(hint)[:1] if get_origin(hint) is tuple else ()
    return _kinds(items[0])[0] if items else ()


def _plain(value: Any, hint: Any) -> Any:
    """Return a value as its field keeps it: tuple, number, text or member of an enumeration."""
    if hint is None:
        return value
    kinds, choices = _kinds(hint)
    if tuple in kinds:
        if isinstance(value, str | Path):
            return (str(value),)
        if isinstance(value, list | tuple):
            return tuple(str(each) if isinstance(each, Path) else each for each in value)
        if type(value) in _item_types(hint):
            return (value,)
    for kind in kinds:
        if issubclass(kind, Enum) and isinstance(value, str) and value in choices:
            return kind(value)
    return str(value) if isinstance(value, Path) and Path not in kinds else value


def _message(made: type, error: ValidationError) -> str:
    """Return the first finding in words: the option, its allowed values, the value given."""
    found = error.errors()[0]
    if not found["loc"]:
        given = ", ".join(map(flag_of, found["input"].kwargs))
        return f"one of {given} cannot be used ({found['msg']}); check their values"
    name = str(found["loc"][0])
    option = next((each for each in options_of(made) if each.name == name), None)
    flag = option.flag if option else flag_of(name)
    kinds, choices = _kinds(_hints(made).get(name, Any))
    if found["type"] == "unexpected_keyword_argument":
        if (own := job_keys(made).get(name)) is not None:
            return f"{name} is unknown; in Python its name is {own}"
        return unknown(name, [each.name for each in fields(made)])
    if found["type"] == "missing":
        lacking = [str(each["loc"][0]) for each in error.errors() if each["type"] == "missing"]
        flags = {each.name: each.flag for each in options_of(made)}
        named = [flags.get(each, flag_of(each)) for each in lacking]
        return f"{' and '.join(named)} {'is' if len(named) == 1 else 'are'} missing"
    given = shown(found["input"])
    said = str(found["msg"]).removeprefix("Input should be ")
    # A number that fits no type of several is refused for each of them.
    if any(each["type"] == "finite_number" for each in error.errors()):
        return f"{flag} takes a finite number; {given} was given"
    if found["type"].startswith(("greater", "less")):
        return f"{flag} takes a value {said}; {given} was given"
    if choices:
        return f"{flag} {given} is unknown; use {', '.join(choices)}"
    if len(found["loc"]) > 1 and tuple in kinds:
        return (
            f"{flag} takes a list, each of them {said.removeprefix('a valid ')}; {given} was given"
        )
    wanted = " or ".join(_KINDS.get(kind, kind.__name__) for kind in kinds)
    return f"{flag} takes {wanted}; {given} was given"


def parse_bytes(text: str | int, *, option: str = "--memory-budget") -> int:
    """Return bytes of a text such as ``4GiB``, ``512MB`` or ``1000000``."""
    with contextlib.suppress(ValueError, OverflowError):
        if 1 <= (size := int(_SIZES.validate_python(text))) < _BEYOND:
            return size
    raise ConfigError(
        f"{option} {shown(text)} is no size; write bytes, or a number with KB, MB, GB, KiB, MiB or "
        "GiB, such as 4GiB"
    )


def parse_seconds(text: str | None, *, option: str = "--max-latency") -> float | None:
    """Return seconds of a text such as ``5ms`` or ``1s``, ``None`` of none."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(us|ms|s)", text)
    if found and (seconds := float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1}[found[2]]) > 0:
        return seconds
    raise ConfigError(f"{option} {shown(text)} is no time; write one with us, ms or s, such as 5ms")
