"""Rows that changed between the version in a database and the published one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from whiten_index.artifacts.files import exists, reading
from whiten_index.corpus.batches import ID, PASSAGE
from whiten_index.errors import ArtifactError
from whiten_index.vectordb.push_source import PushSource
from whiten_index.vectordb.pushed_table import PushedTable
from whiten_index.versions.published import CHANGES, VERSIONS, read_version

# From this share of the rows on, filling a new table is faster than changing the old one, whose
# index takes each row on its own.
_MOST_CHANGED = 0.1


@dataclass(frozen=True, eq=False)
class Delta:
    """Changes to make in a database.

    Attributes:
        rows: (n,) numbers of the rows to upsert.
        gone: ids, as text, of the documents to delete first. If rows are passages, these are all
            changed documents, which may have fewer passages than before.
        deleted: number of documents that are no longer in the corpus.
    """

    rows: NDArray[np.int64]
    gone: pa.Array
    deleted: int


@dataclass(frozen=True, eq=False)
class _Update:
    """Change list of one update: ids, the version before it, and whether the transform stayed."""

    ids: pa.ChunkedArray
    base: str
    keeps: bool


def delta_since(
    source: PushSource, before: PushedTable, after: PushedTable
) -> tuple[Delta | None, str]:
    """Return the changes to make, None for all rows, and the reason."""
    total, most = len(source), int(_MOST_CHANGED * len(source))
    interrupted = before.changing.split()
    updates = _updates_between(source.root, before.version, [after.version, *interrupted])
    if updates is None:
        return None, f"what changed since version {before.version} is not known"
    many = f"more than a tenth of the {total:,} rows changed since version {before.version}"
    # Each list names a document once.
    if max((len(each.ids) for each in updates), default=0) > most:
        return None, many
    lists = [chunk for each in updates for chunk in each.ids.cast(pa.large_string()).chunks]
    ids = pc.unique(pa.chunked_array(lists, pa.large_string()))
    if len(ids) > most:
        return None, many
    rows, there = source.rows_of(ids)
    gone = ids if PASSAGE in source.layout.schema.names else ids.filter(pa.array(~there))
    delta = Delta(rows, gone, int(np.count_nonzero(~there)))
    touched = len(rows) + delta.deleted
    if touched > most:
        return None, many
    why = f"{touched:,} row{'s' * (touched != 1)} changed since version {before.version}"
    if interrupted:
        why += f", including those that a push to {' and '.join(interrupted)} had begun to change"
    return delta, why


def _updates_between(root: Path, was: str, others: Iterable[str]) -> list[_Update] | None:
    """Return the updates between a version and some others, earlier or later."""
    one, needed = _history(root, was), dict[str, _Update | None]()
    for now in others:
        other = _history(root, now)
        common = next((name for name in other if name in one), None)
        if common is None:
            return None
        for history in (one, other):
            names = list(history)
            needed |= {name: history[name] for name in names[: names.index(common)]}
    found = [update for update in needed.values() if update is not None and update.keeps]
    return found if len(found) == len(needed) else None


def _history(root: Path, version: str) -> dict[str, _Update | None]:
    """Return a version and its predecessors, the latest first, as far back as is known."""
    updates = dict[str, _Update | None]()
    while version not in updates:
        updates[version] = update = _update(root / VERSIONS / version)
        if update is None:
            break
        version = update.base
    return updates


def _update(folder: Path) -> _Update | None:
    """Return the change list of a version, None if it was pruned or a build made it."""
    path = folder / CHANGES
    try:
        if not exists(folder):
            return None
        version = read_version(folder)
        if CHANGES not in version:
            return None
        path = version.file(CHANGES)
        with reading(path), pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        metadata = table.schema.metadata or {}
        base, keeps = metadata[b"base"].decode(), metadata.get(b"whitening") == b"keep"
        return _Update(table[ID], base, keeps)
    except ArtifactError as error:
        if not exists(folder):
            return None  # it was pruned meanwhile
        raise ArtifactError(f"{error}; or push all rows with --full") from error
    except (OSError, pa.ArrowException, LookupError, ValueError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArtifactError(
            f"{path} cannot be read ({why}); restore it, or push all rows with --full"
        ) from error
