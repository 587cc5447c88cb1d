"""Which documents differ between the version that a database has and the one that is published."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from whiten_index.artifacts.files import exists, reading
from whiten_index.corpus.batches import ID
from whiten_index.errors import ArtifactError
from whiten_index.versions.published import CHANGES, VERSIONS, read_version


@dataclass(frozen=True, eq=False)
class _Step:
    """What an update changed: ids of documents, the version before it, and the transform."""

    ids: pa.ChunkedArray
    base: str
    keeps: bool


@dataclass(frozen=True, eq=False)
class Changes:
    """What may differ between versions.

    Attributes:
        ids: of documents, as text; None where that is not known, or they are too many.
        known: whether it is known.
    """

    ids: pa.Array | None
    known: bool = True


_UNKNOWN = Changes(None, known=False)
_TOO_MANY = Changes(None)


def changed_ids(root: Path, was: str, others: Iterable[str], *, most: int) -> Changes:
    """Return the ids of all documents that may differ between a version and some others.

    That is not known where a build or a new transform lies between two of them, or where a version
    whose changes are needed was pruned.

    Args:
        root: the index folder.
        was: name of the version that the database has.
        others: names of the published one, an earlier one after a rollback, and of those to which
            rows were being changed when a push was cut off.
        most: ids that are of use; of more none are read.

    Raises:
        ArtifactError: the list of what an update changed is damaged.
    """
    one, needed = _history(root, was), dict[str, _Step]()
    for now in others:
        other = _history(root, now)
        common = next((name for name in other if name in one), None)
        if common is None:
            return _UNKNOWN
        for history in (one, other):
            for name, step in history.items():
                if name == common:
                    break
                if step is None or not step.keeps:
                    return _UNKNOWN
                needed[name] = step
    # Each names a document once: with one that is too long, nothing has to be read.
    if any(len(step.ids) > most for step in needed.values()):
        return _TOO_MANY
    found = pa.array([], pa.large_string())
    for step in needed.values():
        both = pa.chunked_array([found, *step.ids.cast(pa.large_string()).chunks])
        found = pc.unique(both)
        if len(found) > most:
            return _TOO_MANY
    return Changes(found)


def _history(root: Path, version: str) -> dict[str, _Step | None]:
    """Return a version and those it came of, the latest first, as far back as is known."""
    steps = dict[str, _Step | None]()
    while version not in steps:
        steps[version] = step = _step(root / VERSIONS / version)
        if step is None:
            break
        version = step.base
    return steps


def _step(folder: Path) -> _Step | None:
    """Return what an update changed, None where the version is gone or a build made it.

    Raises:
        ArtifactError: the version's manifest or its list of changes is damaged.
    """
    path = folder / CHANGES
    try:
        if not exists(folder):
            return None
        version = read_version(folder)
        if CHANGES not in version:
            return None
        path = version.file(CHANGES)
        with reading(path), pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
        told = table.schema.metadata or {}
        return _Step(table[ID], told[b"base"].decode(), told.get(b"whitening") == b"keep")
    except ArtifactError as error:
        if not exists(folder):
            return None  # it was pruned meanwhile
        raise ArtifactError(f"{error}; or push all rows with --full") from error
    except (OSError, pa.ArrowException, LookupError, ValueError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArtifactError(
            f"{path} cannot be read ({why}); restore it, or push all rows with --full"
        ) from error
