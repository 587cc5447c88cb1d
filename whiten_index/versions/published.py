"""Versions of an index: each a folder, whole or absent, and ``CURRENT`` that names one.

Layout::

    index.json                    the id of the index, which stays when the folder is moved
    CURRENT                       the version that readers open, the digest of its manifest, and
                                  the versions withdrawn; sealed, replaced in one step
    versions/<version>/           manifest.json, whitening.safetensors, moments.safetensors,
                                  index.faiss (and index.ivfdata), documents.arrow, corpus.json
                                  (the shards it was made of), changes.arrow (made by an update)
    candidates/<version>/         the same of a version that did not pass the gates

A version's folder never changes: what is in it when it appears stays until all of it is removed.
"""

import contextlib
import re
import stat
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from whiten_index.artifacts.atomic import make_folder, remove_leftovers
from whiten_index.artifacts.cached_storage import place_of
from whiten_index.artifacts.files import (
    exists,
    mode_of,
    reading,
    require_target,
    sha256_file,
    state_of,
    writing,
)
from whiten_index.artifacts.lock import require_marks
from whiten_index.artifacts.manifest import (
    MANIFEST,
    REMEDY,
    Schema,
    Sha256,
    check_files,
    checked,
    new_artifact,
    read_json,
    read_manifest,
    sealed_json,
    unsealed,
    write_manifest,
)
from whiten_index.artifacts.object_store import Tag
from whiten_index.artifacts.storage import LOCAL, Place, Storage
from whiten_index.encoding.spec import recorded_spec
from whiten_index.errors import ArtifactError, BusyError, ConfigError, FormatError, StorageError
from whiten_index.paths import as_place
from whiten_index.versions.version_manifest import (
    INDEX_ID_SCHEMA,
    VERSION_SCHEMA,
    VersionManifest,
    VersionName,
    WithdrawnFacts,
)

T = TypeVar("T")
INDEX_ID = "index.json"
CURRENT, VERSIONS, CANDIDATES = "CURRENT", "versions", "candidates"
WHITENING = "whitening.safetensors"
MOMENTS, DOCUMENTS = "moments.safetensors", "documents.arrow"
RECORD, CHANGES = "corpus.json", "changes.arrow"
_VERSION = re.compile(r"(\d{6,})-[0-9a-f]{12}")
FULL, _ = VERIFY = ("full", "manifest")
# Each try needs a version published and another removed since the one before.
_TRIES = 20


@dataclass(frozen=True, slots=True)
class Current:
    """Content of ``CURRENT``."""

    version: VersionName  # the published one
    manifest_sha256: Sha256  # of its manifest.json
    # Versions that were published and taken back -> fingerprint of the corpus and identity, which
    # outlive the version; empty where they were not known. They are published again only if the
    # user names them.
    withdrawn: Mapping[VersionName, WithdrawnFacts]
    # Versions that a prune removes, or has removed: nobody publishes them, or uses their numbers,
    # again. On a disk only those that were newer than what it left.
    removed: tuple[VersionName, ...]


_CURRENT_SCHEMA = Schema("published index", 1, Current)


@dataclass(frozen=True, eq=False)
class Version:
    """A version whose manifest is checked, and whose files are checked before their first use.

    Readers get at a file of a version through ``file`` and nowhere else.
    """

    folder: Path
    fields: VersionManifest  # its manifest
    # ``full`` compares the SHA-256 of a file, ``manifest`` only its size; None checks nothing, for
    # a version that is still being made.
    verify: str | None = FULL
    sha256: str | None = None  # of the manifest as ``CURRENT`` has it; None if opened by its folder
    mirror: Storage = LOCAL  # from where a file is fetched that is not in the folder yet
    # Files that were checked, and which file each was then.
    _checked: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Name of the version."""
        return self.folder.name

    @property
    def root(self) -> Path:
        """Folder of the index, or of the copies of one in a bucket."""
        return self.folder.parent.parent

    @property
    def place(self) -> Place:
        """Folder of the index, or its URI."""
        return self.mirror.uri or self.root

    def __contains__(self, name: str) -> bool:
        return name in self.fields["files"] if self.verify else exists(self.folder / name)

    def file(self, name: str) -> Path:
        """Return the path of a file, whose content is checked once."""
        if self.verify and name not in self._checked:
            if not exists(self.folder / name):
                self.mirror.fetch(self.folder, names=[name])
            remedy, content = mending(self.root), self.verify == FULL
            state = state_of(self.folder / name)
            try:
                check_files(self.folder, self.fields, content=content, names=[name], remedy=remedy)
            except ArtifactError:
                # The copy here may be damaged; it is fetched again once.
                if self.mirror.fetch_again(self.folder):
                    return self.file(name)
                raise
            self._checked[name] = state
        return self.folder / name

    def check_changed(self) -> None:
        """Check files again that were replaced or written to since: another library opened them."""
        for name, state in list(self._checked.items()):
            if state_of(self.folder / name) != state:
                del self._checked[name]
                self.file(name)

    def check_read(self, *names: str) -> None:
        """Check files after they were read, those that the version has, whenever it was checked."""
        here = [name for name in names if name in self.fields["files"]]
        remedy = mending(self.root)
        check_files(self.folder, self.fields, content=True, names=here, remedy=remedy)

    def check(self, *, whole: bool = False) -> "Version":
        """Check every file; of a version in a bucket those that are here, or ``whole`` all."""
        for name in self.fields["files"]:
            if whole or not self.mirror.uri or exists(self.folder / name):
                self.file(name)
        return self


def read_index_id(root: Path) -> str:
    """Return the id of an index."""
    remedy = "restore it from a copy, or build or update the index again, which gives it a new id"
    return read_manifest(root, INDEX_ID_SCHEMA, name=INDEX_ID, remedy=remedy, missing=remedy)["id"]


def ensure_index_id(root: Path) -> str:
    """Return the id of an index, a new one if it has none yet or its file is damaged."""
    try:
        return read_index_id(root)
    except ArtifactError:
        index_id = uuid.uuid4().hex
        with writing(root):
            write_manifest(root / INDEX_ID, INDEX_ID_SCHEMA.headed(id=index_id))
        return index_id


def read_current(root: Path, mirror: Storage = LOCAL) -> Current:
    """Return the content of ``CURRENT``."""
    path = root / CURRENT
    mirror.latest(path)
    if not exists(root):
        raise ArtifactError(f"{root} does not exist; check the path, or build an index there")
    # To the byte, so that any damage to it shows.
    remedy = mending(root)
    value = read_json(path, what="a published index", exact=True, remedy=remedy)
    return checked(unsealed(value), _CURRENT_SCHEMA, path, remedy=remedy)


def set_current(
    root: Path,
    version: str,
    *,
    withdrawn: Collection[str] | None = None,
    mirror: Storage = LOCAL,
    tag: Tag | None = None,
    made: bool = False,
) -> None:
    """Publish ``version``, in one step.

    Where another machine published meanwhile, one that was ``made`` for this is removed.
    """
    folder = root / VERSIONS / version
    with writing(root / CURRENT):
        digest, before = sha256_file(folder / MANIFEST), current_or_none(root)
        known = {} if before is None else before.withdrawn
        taken_back = {*(known if withdrawn is None else withdrawn)} - {version}
        facts = {name: known.get(name) or withdrawn_facts(root, name) for name in taken_back}
    removed = () if before is None else before.removed
    try:
        put_current(root, Current(version, digest, facts, removed), mirror, tag)
    except BusyError:
        if made:
            _remove_unpublished(root, version, mirror)
        raise


def _remove_unpublished(root: Path, version: str, mirror: Storage) -> None:
    """Remove a version that another machine was quicker than, and publish it nowhere again."""
    tag, folder = mirror.latest(root / CURRENT), root / VERSIONS / version
    if not exists(root / CURRENT):
        mirror.remove(folder, own=True)
        return
    current = current_or_none(root)
    if current is None or version == current.version or version in current.withdrawn:
        return
    # If a third machine is quicker again, the version stays until it is pruned.
    with contextlib.suppress(BusyError):
        # The mark of this process may be gone, by which only what is not its own is safe.
        pass_over(root, current, version, mirror, tag)
        mirror.remove(folder, own=True)


def pass_over(
    root: Path, current: Current, version: str, mirror: Storage, tag: Tag | None
) -> Tag | None:
    """Note that nobody publishes a version that was made and never published; prune removes it.

    Return the tag of ``CURRENT`` as it is then.
    """
    now = replace(current, removed=(*current.removed, version))
    with writing(root / CURRENT):
        return mirror.replace(root / CURRENT, sealed_json(asdict(now)), tag)


def put_current(root: Path, current: Current, mirror: Storage, tag: Tag | None) -> None:
    """Replace ``CURRENT``, if it is still as it was when ``tag`` was read.

    Raises:
        BusyError: another machine replaced it, or may have removed rows that it needs.
    """
    require_marks()
    with writing(root / CURRENT):
        mirror.replace(root / CURRENT, sealed_json(asdict(current)), tag)


def current_or_none(root: Path) -> Current | None:
    """Return the content of ``CURRENT``, None where nothing is published or it is damaged."""
    try:
        return read_current(root)
    except ArtifactError:
        return None


def require_own_current(root: Path, mirror: Storage = LOCAL) -> None:
    """Refuse a place whose ``CURRENT`` another program wrote, as LevelDB and RocksDB have one.

    Also refuse one whose published version is missing: its disk may not be mounted.
    """
    if not exists(root / CURRENT):
        return
    if (current := current_or_none(root)) is not None:
        if not mirror.uri and not exists(root / VERSIONS / current.version):
            raise ArtifactError(
                f"version {current.version}, which {root} publishes, is missing: mount the disk of "
                f"{root / VERSIONS}, or, if it is gone for good, remove {root / CURRENT} and build "
                "again"
            )
        return
    mirror.latest(root / INDEX_ID)
    if not exists(root / INDEX_ID) and not version_names(root, mirror):
        raise ConfigError(
            f"{mirror.uri or root} has a file {CURRENT} that another program wrote, and a build "
            "would replace it; name another place"
        )


def model_of(fields: Mapping[str, Any]) -> str:
    """Return the fingerprint of a version's encoder, of a bridged one that of the new model."""
    spec = recorded_spec(fields["encoder"])
    found: str = fields["encoder_fingerprint"] if spec is None else spec.fingerprint
    return found


def withdrawn_facts(root: Path, name: str) -> WithdrawnFacts:
    """Return the facts of a withdrawn version that outlive it, none if it cannot be read."""
    try:
        fields = read_version(root / VERSIONS / name).fields
        corpus, identity = fields["corpus"]["fingerprint"], fields["identity"]
        return {"encoder": model_of(fields), "corpus": corpus, "identity": identity}
    except (ArtifactError, FormatError):
        return {}


def tidy(root: Path) -> None:
    """Remove what a build that died left in the index folder."""
    with writing(root):
        for folder in (root, root / VERSIONS, root / CANDIDATES):
            remove_leftovers(folder)


def version_names(root: Path, mirror: Storage = LOCAL, *, inside: str = VERSIONS) -> list[str]:
    """Return the names of the versions, or candidates, oldest first, without links and files."""
    found = filter(version_number, mirror.names(root / inside))
    plain = [name for name in found if not _is_strange(root / inside / name)]
    return sorted(plain, key=lambda name: (version_number(name), name))


def strange_entries(root: Path) -> list[Path]:
    """Return paths that may be versions or candidates, and are not read as such.

    These are links and files with such a name, and folders of versions with another name.
    """

    def is_strange(path: Path) -> bool:
        if version_number(path.name):
            return _is_strange(path)
        return any(exists(path / name) for name in (MANIFEST, RECORD))

    folders = (root / VERSIONS, root / CANDIDATES)
    paths = (folder / name for folder in folders for name in LOCAL.names(folder, "*"))
    return list(filter(is_strange, paths))


def _is_strange(path: Path) -> bool:
    """Return whether a path is there, and a link or no folder."""
    mode = mode_of(path, follow=False)
    return mode != 0 and not stat.S_ISDIR(mode)


def version_number(name: str) -> int:
    """Return the number that a version's name begins with; 0 where it is no such name."""
    match = _VERSION.fullmatch(name)
    return int(match[1]) if match else 0


def find_version(root: Path, identity: str, mirror: Storage = LOCAL) -> str | None:
    """Return a sound version with the same identity that was not withdrawn, if there is one."""
    current = current_or_none(root)
    others = () if current is None else (*current.withdrawn, *current.removed)
    # One that is here alone was cut off as it was put into the bucket.
    for name in sorted({*version_names(root), *version_names(root, mirror)}, reverse=True):
        if not name.endswith(f"-{identity[:12]}") or name in others:
            continue
        folder = root / VERSIONS / name
        mirror.settle(folder)
        try:
            version = read_version(folder, mirror=mirror)
            if version.fields["identity"] == identity:
                version.check(whole=True)
                mirror.keep(folder)
                return name
        except (ArtifactError, FormatError):
            continue
    return None


def next_version(root: Path, identity: str, mirror: Storage = LOCAL) -> str:
    """Return a name for a new version: the next number, then the first digits of the identity.

    Numbers are never used again, not even those of versions removed since.
    """
    names = [*mirror.names(root / VERSIONS)]
    names += [name for each in (VERSIONS, CANDIDATES) for name in LOCAL.names(root / each)]
    if (current := current_or_none(root)) is not None:
        names += [current.version, *current.withdrawn, *current.removed]
    return f"{max(map(version_number, names), default=0) + 1:06d}-{identity[:12]}"


@contextlib.contextmanager
def new_version(
    root: Path, version: str, mirror: Storage = LOCAL
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Write a version's folder, whole or not at all; ``set_current`` makes it the one read.

    One that failed a gate becomes a candidate instead.
    """
    final = root / VERSIONS / version

    def place(fields: Mapping[str, Any]) -> Path:
        require_marks()
        if all(gate["passed"] for gate in fields.get("gates", ())):
            return final
        make_folder(root / CANDIDATES)
        return root / CANDIDATES / version

    with new_artifact(final, place) as opened:
        yield opened
    if exists(final):
        mirror.push(final)


def with_published(
    root: Path, use: Callable[[Version], T], mirror: Storage = LOCAL, *, verify: str = FULL
) -> T:
    """Return the result of ``use`` on the published version.

    If it fails on a version that was replaced meanwhile, and so may have been removed, it is called
    again with the new one.
    """
    current = read_current(root, mirror)
    for _ in range(_TRIES):
        try:
            return use(_fetched(root, current, mirror, verify))
        except (ArtifactError, StorageError) as error:
            latest = read_current(root, mirror)
            damaged = isinstance(error, ArtifactError)
            if latest.manifest_sha256 != current.manifest_sha256:
                current = latest
            elif not (damaged and mirror.fetch_again(root / VERSIONS / current.version)):
                require_there(root, current.version, mirror)
                raise
    return use(_fetched(root, current, mirror, verify))


def _fetched(root: Path, current: Current, mirror: Storage, verify: str) -> Version:
    folder = root / VERSIONS / current.version
    if not mirror.holds(folder):
        # It may have been published since the bucket was listed.
        mirror.look_again()
        require_there(root, current.version, mirror)
    mirror.fetch(folder, names=())
    return read_version(folder, verify=verify, sha256=current.manifest_sha256, mirror=mirror)


def require_published(root: Path, mirror: Storage = LOCAL) -> Current | None:
    """Check, before anything is deleted, that the version that ``CURRENT`` names is there.

    If it is not, the disk of the versions may not be mounted, and their shards are not known.
    """
    require_target(root / CURRENT)
    if not exists(root / CURRENT):
        return None
    current = read_current(root)
    require_there(root, current.version, mirror)
    return current


def require_there(root: Path, version: str, mirror: Storage = LOCAL) -> None:
    """Refuse an index whose published version is missing."""
    if not mirror.holds(root / VERSIONS / version):
        raise ArtifactError(
            f"version {version}, which {root} publishes, is missing; mount its disk or restore its "
            f"folder in {root / VERSIONS}, or publish another one of whiten-index versions {root} "
            f"with: whiten-index rollback {root} --to VERSION"
        )


def split_version(place: Place) -> tuple[Place, str | None]:
    """Return index and version, if a place is the folder of a version, else the place and None."""
    index, _, name = str(place).rstrip("/").rpartition(f"/{VERSIONS}/")
    return (as_place(index, what="the index"), name) if version_number(name) else (place, None)


def read_published(index: Place) -> Version:
    """Return the published version of an index."""
    root, mirror = place_of(index)
    return with_published(root, lambda version: version, mirror)


def published_fields(root: Path, mirror: Storage) -> Mapping[str, Any]:
    """Return the manifest of the published version, read by itself; empty for none or damage."""
    try:
        current = read_current(root)
        with mirror.opened(root / VERSIONS / current.version, ()) as copy:
            return read_version(copy, sha256=current.manifest_sha256).fields
    except ArtifactError:
        return {}


def read_version(
    folder: Path, *, verify: str = FULL, sha256: str | None = None, mirror: Storage = LOCAL
) -> Version:
    """Return a version, published or not, by its folder.

    Its manifest is checked now, and each of its files fetched and checked before its first use.
    """
    if verify not in VERIFY:
        raise ConfigError(f"verify {verify!r} is unknown; use {', '.join(VERIFY)}")
    remedy = mending(folder.parent.parent)
    if not exists(folder) and (fault := mirror.fault(folder)):
        raise ArtifactError(f"{folder} is damaged: {fault}; {remedy}")
    fields = read_manifest(folder, VERSION_SCHEMA, remedy=remedy, missing=remedy)
    path = folder / MANIFEST
    if sha256 is not None:
        try:
            with reading(path):
                found = sha256_file(path)
        except OSError as error:
            raise ArtifactError(f"{path} is missing; {remedy}") from error
        if found != sha256:
            raise ArtifactError(f"{path} is damaged: it does not match {CURRENT}; {remedy}")
    if fields["version"] != folder.name:
        raise ArtifactError(
            f"{path} is damaged: it is the manifest of {fields['version']}; {remedy}"
        )
    return Version(folder, fields, verify, sha256, mirror)


def mending(root: Path) -> str:
    """Return advice on damage in an index."""
    if not exists(root / CURRENT):
        return REMEDY
    return f"whiten-index verify {root} says how to mend it; or restore it from a copy"
