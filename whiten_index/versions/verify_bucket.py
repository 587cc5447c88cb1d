"""Reads every object of an index in a bucket again, whatever copies this machine has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from whiten_index.artifacts.cached_storage import Mirror, naming, place_of
from whiten_index.artifacts.manifest import MANIFEST, sealed_json
from whiten_index.artifacts.storage import stamp
from whiten_index.errors import ArtifactError
from whiten_index.versions.published import CURRENT, VERSIONS, Current, read_current, version_number
from whiten_index.versions.verify_report import Damage, VerifyReport, reason

_AGAIN = (
    "run the same build again: it uploads what is damaged from a sound copy on the machine that "
    "runs it, or makes the version from the store"
)


def verify_bucket(uri: str) -> VerifyReport:
    """Check ``CURRENT`` and every version of an index in a bucket against its checksums.

    Every object is read from the bucket; nothing is locked or written.

    Args:
        uri: the URI of the index.

    Raises:
        ArtifactError: there is no index.
        StorageError: the bucket cannot be read.
    """
    folder, mirror = place_of(uri)
    if not isinstance(mirror, Mirror):
        raise ArtifactError(f"{uri} is not in a bucket; give the path of its folder")
    names = sorted(filter(version_number, mirror.names(folder / VERSIONS)))
    damages, current = list[Damage](), None
    published = mirror.latest(folder / CURRENT) is not None
    if not published and not names:
        raise ArtifactError(
            f"{mirror.uri} holds no index; check the URI. A store is verified in a folder: copy it "
            "to one"
        )
    try:
        with naming():
            current = read_current(folder, mirror)
    except ArtifactError as error:
        damages.append(Damage(f"{mirror.uri}/{CURRENT}", reason(error), (), ""))
    sound, size = [], 0
    for name in names:
        found = list(_damages(mirror, folder / VERSIONS / name, current))
        damages += found
        sound += [] if found else [name]
        size += mirror.size(folder / VERSIONS / name)
    if current is not None and current.version not in names:
        why = f"{CURRENT} names {current.version}, which has no {MANIFEST}"
        damages.append(Damage(f"{mirror.uri}/{VERSIONS}/{current.version}", why, (), ""))
    others = [name for name in sound if current is None or name != current.version]
    remedy = f"{_AGAIN}; or whiten-index rollback {mirror.uri} --to {others[-1]}" if others else ""
    return VerifyReport(
        mirror.uri,
        "index",
        {CURRENT: int(published), "versions": len(names)},
        size,
        tuple(Damage(each.path, each.why, each.touches, remedy or _AGAIN) for each in damages),
        (),
        ("the store in the bucket, if there is one, was not looked at",),
    )


def _damages(mirror: Mirror, folder: Path, current: Current | None) -> Iterator[Damage]:
    """Yield what is damaged of a version."""
    place, touches = f"{mirror.uri}/{VERSIONS}/{folder.name}", (f"version {folder.name}",)
    data = mirror.manifest(folder) or b""
    wanted = current.manifest_sha256 if current and current.version == folder.name else None
    try:
        fields = json.loads(data)
        files = {name: (each["bytes"], each["sha256"]) for name, each in fields["files"].items()}
        whole = sealed_json(fields) == data
    except (ValueError, KeyError, TypeError, AttributeError):
        files, whole = {}, False
    if not whole or wanted not in (None, hashlib.sha256(data).hexdigest()):
        why = "its fields do not match its digest" if not whole else f"it does not match {CURRENT}"
        yield Damage(f"{place}/{MANIFEST}", f"{MANIFEST} is damaged: {why}", touches, "")
        return
    for name, described in files.items():
        found = mirror.digest(folder / stamp(data) / name)
        if found != described:
            why = "is missing" if found is None else (
                f"has {found[0]} bytes instead of {described[0]}"
                if found[0] != described[0] else "does not match its checksum"
            )  # fmt: skip
            yield Damage(f"{place}/{stamp(data)}/{name}", f"{name} {why}", touches, "")
