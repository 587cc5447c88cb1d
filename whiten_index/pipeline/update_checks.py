"""What is looked at before an update does its work, or makes a version."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whiten_index.artifacts.disk_space import require_space
from whiten_index.artifacts.files import exists, is_folder, list_folder
from whiten_index.corpus.parquet_corpus import RepeatedIdsError
from whiten_index.errors import (
    ConfigError,
    CorpusError,
    GateError,
    StorageError,
    WhiteningError,
)
from whiten_index.pipeline.canaries import CanaryFile
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.store.records import CorpusRecord
from whiten_index.versions.published import CANDIDATES, VERSIONS, withdrawn_facts

if TYPE_CHECKING:
    from whiten_index.pipeline.base_version import BaseVersion

# Room beyond what files are expected to take.
_SPARE = 1.1
# float32 squares numbers up to 1.8e19, and sums them up.
_LARGEST = 1e18
_OPTION = re.compile(r"--[a-z][a-z-]*")
_OF_THE_BUILD = ("row filter", "columns named", "name a column")


@contextlib.contextmanager
def advising(config: UpdateConfig) -> Iterator[None]:
    """Say of errors that advise an option of the build what helps an update."""
    own = {f"--{name.replace('_', '-')}" for name in UpdateConfig.__dataclass_fields__}
    try:
        yield
    except RepeatedIdsError as error:
        # Told apart by file and row, all rows would be others.
        advice = "make them unique, or take the repeated rows out of the corpus"
        raise RepeatedIdsError(error.args[0], advice) from error
    except (ConfigError, CorpusError, WhiteningError) as error:
        said = str(error)
        strange = set(_OPTION.findall(said)) - own
        if not strange and not any(words in said for words in _OF_THE_BUILD):
            raise
        fits = isinstance(error, WhiteningError) and config.order != "never"
        keep = " keep the transform with --refit never," if fits else ""
        raise type(error)(
            f"{said} (an update keeps the options that the index was built with: mend the corpus,"
            f"{keep} or run whiten-index build again with other options)"
        ) from error


def require_writable(base: BaseVersion) -> None:
    """Refuse before work folders that cannot be written, or not in one step.

    Raises:
        StorageError: one cannot be written, or candidates and versions lie on different disks.
    """
    out, store = Path(str(base.config.out)), base.store.folder
    versions = out / VERSIONS
    for folder in (out, versions, store, *filter(is_folder, list_folder(store, "[!.]*"))):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise StorageError(
                f"cannot write {folder}: permission is denied or the file system is read-only; "
                "change its permissions, then run the same command again"
            )
    candidates = out / CANDIDATES
    aside = candidates if exists(candidates) else out
    if aside.stat().st_dev != versions.stat().st_dev:
        raise StorageError(
            f"{versions} is on another file system than {aside}, so that no version can be moved "
            f"there in one step; keep them on one: move the whole of {out} to that disk, and link "
            "to it from here"
        )


def nothing_to_do(config: UpdateConfig, base: BaseVersion, record: CorpusRecord) -> bool:
    """Tell whether the published version is what an update of this corpus would publish."""
    if record.fingerprint != base.fields["corpus"]["fingerprint"] or config.choose_again:
        return False
    decided = base.update.get("decision") or {}
    if decided.get("whitening") != "keep" or config.order == "never":
        # A transform that was fitted on this very corpus comes out the same.
        return True
    return config.order == "auto" and decided.get("threshold") == config.drift_threshold


def canary_file(config: UpdateConfig, base: BaseVersion) -> CanaryFile | None:
    """Read the queries that gates ask, before hours of work rather than after them."""
    if config.canary_file is None:
        return None
    found = CanaryFile.read(config.canary_file, dim=base.fitted.whitening.dim)
    if found.needs_encoder and base.config.model is None:
        raise ConfigError(
            f"{config.canary_file} holds texts, and the index was built from an embedding column, "
            "so that nothing is known to encode them with; give their embeddings"
        )
    if found.embeddings is not None:
        raw = found.embeddings.astype(np.float64)
        for vectors in (raw, base.fitted.whitening.apply(raw)):
            sizes = np.linalg.norm(vectors, axis=1)
            if not (sizes < _LARGEST).all():
                query = int(np.argmin(sizes < _LARGEST))
                raise CorpusError(
                    f"row {query + 1} of {config.canary_file} has numbers too large to be searched "
                    "with in float32; scale it as the corpus's embeddings are"
                )
    return found


def room_wanted(base: BaseVersion, *, rows: int, stored: int | None = None) -> dict[Path, int]:
    """Return folder -> bytes that a version of so many rows is expected to take there.

    Args:
        base: the published version.
        rows: of the corpus as it is now.
        stored: bytes of what the store does not have yet. None before the corpus was read: then
            only the rows that there are more are thought of, and not those that changed.
    """
    sizes, had = base.fields["bytes"], max(base.record.rows, 1)
    index = sum(file["bytes"] for file in base.fields["files"].values()) * rows / had * _SPARE
    if base.config.budget is not None:
        # Lists are written in parts, which are then joined.
        index *= 2
    if stored is None:
        stored = int(max(rows - had, 0) * sizes["raw"] / had)
    return {Path(str(base.config.out)): int(index), base.store.folder: stored}


def require_room(base: BaseVersion, *, rows: int) -> None:
    """Refuse before work what the disk has no room for.

    Raises:
        StorageError: it has not.
    """
    require_space(room_wanted(base, rows=rows), f"a version of {rows:,} rows")


def require_not_withdrawn(
    config: UpdateConfig, record: CorpusRecord, *, identity: str | None = None
) -> None:
    """Refuse to publish once more what someone took back.

    Args:
        config: whose order to fit again, or not to, may make another version of the same corpus.
        record: the corpus.
        identity: of the version that came of it, None before that is known.

    Raises:
        GateError: the corpus is that of a version which was rolled back.
    """
    out = Path(config.index)
    for name, facts in withdrawn_facts(out).items():
        if facts.get("corpus") != record.fingerprint:
            continue
        if config.order != "auto" and identity != facts.get("identity"):
            continue
        there = exists(out / VERSIONS / name)
        back = f"; or take that version back: whiten-index rollback {out} --to {name}"
        raise GateError(
            f"the corpus still is that of version {name}, which was rolled back, so nothing is "
            "published; mend the corpus; or, where the transform was at fault, order another with "
            f"--refit always or never{back if there else ''}"
        )
