"""What a push replaces: whether it may, how the two differ, and what is to be told of it."""

from __future__ import annotations

from whiten_index.artifacts.files import exists
from whiten_index.errors import GateError
from whiten_index.vectordb.database_writer import PushedTable
from whiten_index.vectordb.push_config import PushConfig
from whiten_index.vectordb.push_source import PushSource

_IF_SO = "is it the right index, and the right table? If so, push with"


def require_rows(
    config: PushConfig, target: str, source: PushSource, before: PushedTable, *, there: int
) -> None:
    """Refuse to take rows away from whoever searches them, or that others put there.

    Args:
        config: says how many may be gone.
        target: what is pushed to.
        source: what is pushed.
        before: what is said of the rows there.
        there: how many there are.

    Raises:
        GateError: more than ``max_shrink`` of them would be gone, or no push sent some.
    """
    if there > before.rows and not before.changing and not config.full:
        raise GateError(
            f"{target} has {there:,} rows, and {there - before.rows:,} of them were put there by "
            "something else than a push, and would be lost; move them to a table of their own, "
            "or push with --full to have them replaced"
        )
    rows = len(source)
    if rows < before.rows * (1 - config.max_shrink):
        raise GateError(
            f"{target} has {before.rows:,} rows and version {source.folder.name} of {source.root} "
            f"has {rows:,}, and --max-shrink is {config.max_shrink:g}: {_IF_SO} --max-shrink 1"
        )


def require_form(target: str, before: PushedTable, after: PushedTable) -> None:
    """Refuse rows that programs which query those there would trip over.

    Raises:
        GateError: they are of another width or type, or lack a column.
    """
    broken = list[str]()
    if before.k != after.k:
        broken.append(
            f"vectors of {before.k} numbers would have {after.k} (--k {before.k} keeps them)"
        )
    if before.dtype != after.dtype:
        broken.append(f"{before.dtype} would be {after.dtype} (--dtype {before.dtype} keeps it)")
    if lost := _only_in(before, after):
        broken.append(f"{_columns(lost)} would be gone (build the index with --keep for each)")
    if broken:
        raise GateError(
            f"{target} is in use, and programs that query it would trip over this push: "
            f"{'; '.join(broken)}: {_IF_SO} --full"
        )


def what_differs(source: PushSource, before: PushedTable, after: PushedTable) -> str:
    """Return why rows of one pushed cannot be changed into those of the other."""
    told = [
        f"{name} is {new} and was {old}"
        for name, old, new in (("k", before.k, after.k), ("dtype", before.dtype, after.dtype))
        if new != old
    ]
    if lost := _only_in(before, after):
        told.append(f"without {_columns(lost)}")
    if before.columns and (new := _only_in(after, before)):
        told.append(f"with {_columns(new)}")
    if before.k == after.k and before.query_digest != after.query_digest:
        told.append("the transform or the encoder is another one")
        if not exists(source.folder.with_name(before.version)):
            told.append(f"and {source.root} has no version {before.version}, which is there")
    return ", ".join(told) or "the metric, or the type of a column, is another one"


def of_query_halves(before: PushedTable | None, after: PushedTable) -> list[str]:
    """Return what is to be known where queries must be reduced otherwise than before."""
    if before is None or before.query_digest in ("", after.query_digest):
        return []
    return [
        f"queries must be reduced anew: the query digest was {before.query_digest}; open query "
        "halves again, and export again what was exported (folders, models, SQL functions)"
    ]


def other_options(before: PushedTable, after: PushedTable) -> str:
    """Return which options of the table are others."""
    old, new = (
        {name: value for name, _, value in (one.partition("=") for one in each.options.split())}
        for each in (before, after)
    )
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return ", ".join(
        f"{name} is {old.get(name, 'not set')} there and {new.get(name, 'nothing')} was given"
        for name in names
    )


def _only_in(one: PushedTable, other: PushedTable) -> list[str]:
    return [name for name in one.columns if name not in other.columns]


def _columns(names: list[str]) -> str:
    return f"column{'s' if len(names) > 1 else ''} {', '.join(names)}"
