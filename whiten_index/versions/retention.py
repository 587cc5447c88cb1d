"""The versions of an index: listing, rollback, pruning and description."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.files import MANIFEST
from whiten_index.artifacts.lock import only_writer
from whiten_index.artifacts.storage import LOCAL, Place, Storage
from whiten_index.encoding.spec import recorded_spec
from whiten_index.errors import ArtifactError, BusyError, ConfigError, FormatError, StorageError
from whiten_index.versions.published import (
    CANDIDATES,
    CURRENT,
    FULL,
    VERSIONS,
    WHITENING,
    Current,
    Version,
    current_or_none,
    model_of,
    put_current,
    read_current,
    read_version,
    require_published,
    set_current,
    strange_entries,
    tidy,
    version_names,
    version_number,
    with_published,
    withdrawn_facts,
)
from whiten_index.versions.references import corpus_record, open_store
from whiten_index.whitening.spectrum import variance_kept
from whiten_index.whitening.transform import Whitening


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """A version that is there."""

    name: str
    created: str | None  # time in its manifest; None where that cannot be read
    rows: int | None  # vectors in it, None likewise
    bytes: int | None  # of its files; None where that cannot be read
    published: bool  # whether readers open this one
    withdrawn: bool  # whether it was published and taken back
    candidate: bool  # whether a gate kept it from being published
    sound: str  # empty, or the damage
    unread: str  # empty, or the error of the system; the version may be sound
    decision: str | None  # of the update that made it: keep or refit; None for a build
    base: str | None  # the version that update started from
    drift: float | None  # that it measured, in nats a dimension


@dataclass(frozen=True, slots=True)
class RollbackReport:
    """Result of a rollback."""

    left: str | None  # the version that was published before, None where it was not known
    to: str  # the one published
    note: str  # why the version left is not withdrawn; else empty
    skipped: Mapping[str, str]  # newer version -> why it was not taken


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Result of a prune."""

    removed: tuple[str, ...]  # versions, oldest first
    bytes: int  # of these
    kept: tuple[str, ...]  # versions
    # Paths that may be versions and are links, no folders or named otherwise; left alone.
    strange: tuple[str, ...]


def list_versions(root: Path | str, *, verify: str = "manifest") -> list[VersionFacts]:
    """Return the versions that are there, newest first, candidates among them.

    Args:
        root: the index folder, or its URI.
        verify: ``manifest`` checks each version's sizes and manifest, ``full`` every checksum.

    Raises:
        ArtifactError: there is no index.

    Examples:
        >>> list_versions("index")[0].published
        True
    """
    folder, mirror = place_of(root)
    mirror.latest(folder / CURRENT)
    folders = [folder / VERSIONS / name for name in _names(folder, mirror)]
    if not mirror.uri:
        folders += [folder / CANDIDATES / name for name in version_names(folder, inside=CANDIDATES)]
    try:
        current = read_current(folder)
    except (ArtifactError, FormatError):
        current = None
        if not folders:
            raise
    found = [_facts(each, current, mirror, verify=verify) for each in folders]
    # One that vanished meanwhile was pruned.
    return sorted(
        (facts for facts in found if facts is not None),
        key=lambda facts: (version_number(facts.name), facts.candidate, facts.name),
        reverse=True,
    )


def _facts(
    folder: Path, current: Current | None, mirror: Storage, *, verify: str
) -> VersionFacts | None:
    """Return what is known of a version, None if it vanished meanwhile."""
    name, candidate = folder.name, folder.parent.name == CANDIDATES
    published = current is not None and current.version == name and not candidate
    sha256 = current.manifest_sha256 if current is not None and published else None
    fields: Mapping[str, Any] = {}
    size, damage, unread = None, None, ""
    try:
        size = mirror.size(folder)
        fields, damage = _examined(folder, mirror, verify, sha256)
    except StorageError as error:
        unread = str(error)
    if damage:
        # Another process may have removed it since it was listed.
        mirror.look_again()
        if not mirror.holds(folder):
            return None
    update = fields.get("update")
    return VersionFacts(
        name=name,
        created=fields.get("created"),
        rows=fields.get("rows"),
        bytes=size,
        published=published,
        withdrawn=current is not None and name in current.withdrawn and not candidate,
        candidate=candidate,
        sound=str(damage or ""),
        unread=unread,
        decision=update and update["decision"]["whitening"],
        base=update and update["base"],
        drift=update and update["drift"].get("kl_of_refit"),
    )


def _examined(
    folder: Path, mirror: Storage, verify: str, sha256: str | None = None
) -> tuple[Mapping[str, Any], ArtifactError | FormatError | None]:
    """Return the manifest of a version, if it is sound, and the damage of the version.

    In a bucket, sizes are those of its list; ``full`` reads every object.
    """
    fields: Mapping[str, Any] = {}
    try:
        with mirror.opened(folder, ()) as copy:
            # A manifest may be sound though other files are damaged.
            fields = read_version(copy, verify=verify).fields
            version = read_version(copy, verify=verify, sha256=sha256)
            if not mirror.uri:
                version.check()
            elif fault := mirror.fault(
                folder, (copy / MANIFEST).read_bytes(), content=verify == FULL
            ):
                raise ArtifactError(f"{folder} is damaged: {fault}")  # noqa: TRY301
    except (ArtifactError, FormatError) as error:
        return fields, error
    return fields, None


def rollback(root: Path | str, *, to: str | None = None) -> RollbackReport:
    """Publish an earlier version again, checked in full before anyone reads it.

    The version left is withdrawn, unless it is damaged or cannot be read: it stays, and no build or
    update takes it for its own result.
    Named with ``to`` it is published again. Of a newer one none is withdrawn.

    Of an index in a bucket the version is downloaded, and of its store nothing.

    Args:
        root: the index folder, or its URI.
        to: a version, or its number; by default the newest that is sound, not withdrawn, and older
            than the published one.

    Raises:
        ConfigError: there is no such version, or it is the published one.
        ArtifactError: the version is damaged, none is left to go back to, or its searches need rows
            that its store lacks.
        BusyError: another process is writing the index.
        StorageError: a version that may be sound cannot be read.
    """
    folder, mirror = place_of(root)
    tag = mirror.latest(folder / CURRENT)
    _require_index(folder, mirror)
    with only_writer(folder, what="index"):
        tidy(folder)
        skipped = dict[str, str]()
        left = read_current(folder) if to is None else current_or_none(folder)
        if left is not None:
            mirror.fetch(folder / VERSIONS / left.version, names=())
        if to is None and left is not None:
            version = _older(folder, left, mirror, skipped)
        else:
            version = _named(folder, left, str(to), mirror)
        note, gone = "", set(() if left is None else left.withdrawn)
        if left and version_number(version.name) < version_number(left.version):
            try:
                gone |= _alike(folder, left.version, mirror)
            except StorageError as error:
                # A disk that fails is a reason to go back.
                note = f"version {left.version} is not withdrawn, as it was not checked ({error})"
        set_current(folder, version.name, withdrawn=gone, mirror=mirror, tag=tag)
    before = None if left is None else left.version
    return RollbackReport(before, version.name, note, skipped)


def _alike(root: Path, name: str, mirror: Storage) -> set[str]:
    """Return a version and its copies without a certificate, or with another; none if damaged."""
    # The next build may make a damaged version again.
    if _damage(root / VERSIONS / name, "manifest" if mirror.uri else FULL, mirror) is not None:
        return set()
    return {each for each in _names(root, mirror) if _identity(each) == _identity(name)}


def _older(root: Path, current: Current, mirror: Storage, skipped: dict[str, str]) -> Version:
    """Return the newest sound version before the published one; add damaged ones to ``skipped``.

    A version that was certified has the files of the one before, which is no way back.
    """
    # One that cannot be read may be sound: the user decides whether to go back further.
    for name in reversed(_names(root, mirror)):
        older = version_number(name) < version_number(current.version)
        same = _identity(name) == _identity(current.version)
        if not older or same or name in current.withdrawn:
            continue
        try:
            return _checked(root, name, mirror)
        except (ArtifactError, FormatError) as error:
            skipped[name] = str(error)
        except StorageError as error:
            raise StorageError(
                f"{error}; or name another version: whiten-index rollback {mirror.uri or root} "
                "--to VERSION"
            ) from error
    raise ArtifactError(
        f"{root} has no sound version older than {current.version} to go back to"
        + "".join(f"; {reason}" for reason in skipped.values())
        + f"; see them with whiten-index versions {root}, name one with --to, or build again"
    )


def _named(root: Path, current: Current | None, name: str, mirror: Storage) -> Version:
    names = _names(root, mirror)
    numbered = [each for each in names if str(version_number(each)) == name]
    name = numbered[0] if len(numbered) == 1 else name
    if current is not None and name == current.version:
        raise ConfigError(f"{name} is the published version already; name another with --to")
    if name not in names:
        kept_back = name in version_names(root, inside=CANDIDATES)
        why = "is a candidate that a gate kept back" if kept_back else f"is no version of {root}"
        raise ConfigError(f"{name} {why}; it has {', '.join(names) or 'none'}")
    return _checked(root, name, mirror)


def _checked(root: Path, name: str, mirror: Storage) -> Version:
    """Return a version that is sound, with the rows of its store that its searches need."""
    folder = root / VERSIONS / name
    mirror.settle(folder)
    version = read_version(folder, mirror=mirror).check(whole=True)
    if version.fields["factory"]["rerank"]:
        remedy = "mount its disk, or name another version with --to"
        store = open_store(version, given=None, reader=f"each search of {name}", remedy=remedy)
        missing = sum(map(store.missing_rows, corpus_record(version).distinct_parts))
        if missing:
            raise ArtifactError(
                f"{name} ranks candidates again from its store: {store.place} lacks {missing:,} of "
                "its rows, so that its searches fail; restore them from a copy, or name another "
                "version with --to"
            )
    mirror.keep(folder)
    return version


def _names(root: Path, mirror: Storage) -> list[str]:
    """Return the names of the versions, oldest first, without those that a prune removes."""
    current = current_or_none(root)
    gone = () if current is None else current.removed
    return [name for name in version_names(root, mirror) if name not in gone]


def _require_index(root: Path, mirror: Storage = LOCAL) -> None:
    """Refuse a folder that is no index, in which even a lock would be out of place."""
    if not _names(root, mirror):
        current = read_current(root)
        raise ArtifactError(
            f"{root} holds no versions, and {CURRENT} names {current.version}; mount the disk of "
            f"{root / VERSIONS}, or, if they are gone for good, remove {root / CURRENT} and build "
            "again"
        )


def prune(root: Path | str, *, keep: int, verify: str = "full") -> PruneReport:
    """Remove versions but the published one and the newest sound ones before it.

    Damaged and withdrawn versions do not count, and are removed. Files that readers hold open stay
    readable. Candidates, links and files are left alone.

    Args:
        root: the index folder, or its URI.
        keep: versions to keep, the published one among them.
        verify: check of those kept; see ``list_versions``.

    Raises:
        ConfigError: ``keep`` is below 1.
        ArtifactError: the published version is missing, or ``CURRENT`` is damaged.
        BusyError: another process is writing the index.
        StorageError: the disk cannot be read or written.
    """
    if keep < 1:
        raise ConfigError(f"--keep takes how many versions to keep, 1 or more; {keep!r} was given")
    folder, mirror = place_of(root)
    tag = mirror.latest(folder / CURRENT)
    _require_index(folder, mirror)
    with only_writer(folder, what="index"):
        current = require_published(folder, mirror) or read_current(folder)
        names = _names(folder, mirror)
        kept = _kept(folder, current, names, keep, verify, mirror)
        others = [name for name in names if name not in kept]
        removed = [
            name
            for name in others
            if not isinstance(_damage(folder / VERSIONS / name, "manifest", mirror), FormatError)
        ]
        left = tuple(name for name in names if name not in removed)
        # A prune that died left some; others were never published.
        before = [folder / VERSIONS / name for name in current.removed]
        gone = [folder / VERSIONS / name for name in removed]
        gone += [path for path in before if mirror.size(path)]
        noted = removed
        if not mirror.uri:
            # Numbers are never used again; older ones need no note, for which a disk may be full.
            last = max(map(version_number, (*left, current.version)))
            newer = (name for name in removed if version_number(name) > last)
            noted = [name for name in newer if name not in current.withdrawn]
        if noted:
            # From now on no other machine publishes one of them.
            if mirror.latest(folder / CURRENT) != tag or read_current(folder) != current:
                raise BusyError(f"{mirror.uri} changed meanwhile; run the same command again")
            now = replace(current, removed=(*current.removed, *noted))
            put_current(folder, now, mirror, tag)
        freed = mirror.size(*gone)
        tidy(folder)
        for path in gone:
            mirror.remove(path)
        gone_names = tuple(path.name for path in gone)
        return PruneReport(gone_names, freed, left, tuple(map(str, strange_entries(folder))))


def _kept(
    root: Path, current: Current, names: list[str], keep: int, verify: str, mirror: Storage
) -> set[str]:
    """Return the versions to keep; those after the published one only where there is room.

    Of neighbours with the same files, as a certificate makes them, one counts.
    """
    published = version_number(current.version)
    older = [name for name in reversed(names) if version_number(name) <= published]
    newer = [name for name in names if version_number(name) > published]
    sound = (
        name
        for name in dict.fromkeys([current.version, *older, *newer])
        if name not in current.withdrawn and _damage(root / VERSIONS / name, verify, mirror) is None
    )
    apart = (next(group) for _, group in groupby(sound, _identity))
    before = before_bridged(mirror.uri or root) or current.version
    return {current.version, before, *islice(apart, min(keep, len({*names, current.version})))}


def bridged_versions(index: Place, encoders: Collection[str]) -> list[str]:
    """Return the bridged versions of models with these fingerprints, without damaged ones."""
    root, mirror = place_of(index)
    names = _names(root, mirror)
    found = {name: _looked(root / VERSIONS / name, "manifest", mirror)[0] for name in names}
    return [
        name
        for name, fields in found.items()
        if "bridge" in fields and model_of(fields) in encoders
    ]


def withdraw(index: Place, versions: Collection[str]) -> None:
    """Withdraw versions besides the published one, so that no rollback publishes them."""
    root, mirror = place_of(index)
    tag = mirror.latest(root / CURRENT)
    with only_writer(root, what="index"):
        current = read_current(root)
        facts = {name: withdrawn_facts(root, name) for name in versions}
        now = replace(current, withdrawn={**facts, **current.withdrawn})
        put_current(root, now, mirror, tag)


def before_bridged(index: Place) -> str | None:
    """Return the version that a migration goes on from, None if no bridged one is published."""
    root, mirror = place_of(index)
    current = read_current(root, mirror)
    published, damage = _looked(root / VERSIONS / current.version, "manifest", mirror)
    if not published and damage is not None:
        raise damage
    if "bridge" not in published:
        return None
    model, damaged = recorded_spec(published["encoder"]), None
    names, noted = list(reversed(_names(root, mirror))), published.get("bridged_from")
    # Others only count if it was pruned or is damaged.
    for name in sorted(names, key=lambda name: name != noted):
        found, damage = _looked(root / VERSIONS / name, "manifest", mirror)
        older = version_number(name) < version_number(published["version"])
        # A run that was killed made one of the new model, or a rollback left it.
        of_old = model and found.get("encoder_fingerprint") not in (None, model.fingerprint)
        # What was rolled back is not what the migration began from.
        older = older and name not in current.withdrawn
        if older and of_old and "bridge" not in found:
            if damage is None:
                return name
            damaged = damaged or name
    return damaged


def _identity(name: str) -> str:
    """Return the first digits of a version's identity, which its name ends with."""
    return name.partition("-")[2]


def _damage(folder: Path, verify: str, mirror: Storage) -> ArtifactError | FormatError | None:
    """Return the damage of a version; raise ``StorageError`` if it cannot be read."""
    return _looked(folder, verify, mirror)[1]


def _looked(
    folder: Path, verify: str, mirror: Storage
) -> tuple[Mapping[str, Any], ArtifactError | FormatError | None]:
    """Return the fields of a version, and its damage, of two looks if there is any."""
    found = _examined(folder, mirror, verify)
    if found[1] is not None and mirror.look_again():
        # One answer of a bucket's server may have been cut, or come from a proxy.
        found = _examined(folder, mirror, verify)
    return found


_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024)


def describe_index(root: Path | str, *, verify: str = "full") -> dict[str, Any]:
    """Return the published version's manifest with its ``spectrum``.

    ``spectrum`` lists, for round widths up to the rank, for k and for the rank, the eigenvalue
    there and the share of variance that the directions up to it hold.
    """
    place, mirror = place_of(root)

    def read(version: Version) -> tuple[Version, Whitening]:
        return version, Whitening.load(version.check(whole=True).file(WHITENING))

    version, whitening = with_published(place, read, mirror, verify=verify)
    return {**described(version.fields, whitening), "path": str(version.folder)}


def described(fields: Mapping[str, Any], whitening: Whitening) -> dict[str, Any]:
    """Return a version's manifest with its ``spectrum``; see ``describe_index``."""
    rank = max(whitening.rank, 1)
    widths = {k for k in _WIDTHS if k <= rank} | {min(whitening.k, rank), rank}
    spectrum = [
        {
            "k": k,
            "eigenvalue": float(whitening.eigenvalues[k - 1]),
            "variance_kept": variance_kept(whitening.eigenvalues, k),
        }
        for k in sorted(widths)
    ]
    return {**fields, "spectrum": spectrum}
