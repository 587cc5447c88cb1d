"""Finished shards on disk: whole, made of rows that others hold, or packed with others.

A shard is found by the fingerprint of its texts however it is kept:

- whole: a folder with all its embeddings;
- derived: a folder with the embeddings of rows that no other shard holds, and with *picks* that
  say where each row lies: in the folder itself or in one of its *sources*, other folders;
- packed: a stretch of the embeddings of a pack, a folder that small or derived shards were
  joined in.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whiten_index import manifest
from whiten_index.errors import ArtifactError, FormatError
from whiten_index.moments import Moments
from whiten_index.store.dtypes import StoreDtype, as_kept
from whiten_index.store.gathered import EmbeddingRows, GatheredRows
from whiten_index.store.known import Found, KnownRows
from whiten_index.store.packs import Member, Packs
from whiten_index.tensors import map_tensor, write_tensors

KIND, FORMAT_VERSION = "shard", 2
# What an earlier release reads too.
_WHOLE_VERSION = 1
EMBEDDINGS, MOMENTS = "embeddings.safetensors", "moments.safetensors"
REMEDY = "run the same encode or build with the corpus again, which makes just what is missing anew"
# Where rows lie: a folder or a packed shard, and the SHA-256 of its embeddings, since a shard that
# is made anew may hold its rows in another order.
Source = tuple[str, str]
# The source that is the shard itself.
OWN: Source = ("", "")
Numbers = NDArray[np.int32]
T = TypeVar("T")
_MOVES = 2


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard that is done.

    Attributes:
        fingerprint: of its texts and of how they are kept.
        rows: n.
        dtype: numpy name of the embeddings' type.
        truncated: texts that were longer than the encoder's limit.
        bytes: size of the embeddings, wherever they lie.
    """

    fingerprint: str
    rows: int
    dtype: str
    truncated: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Picks:
    """Where the rows (n,) of a derived shard lie.

    Attributes:
        sources: which hold them, ``OWN`` being the shard itself.
        source: (n,) int32, number of the source of each row.
        row: (n,) int32, the row among those that the source holds itself.
    """

    sources: tuple[Source, ...]
    source: NDArray[np.int32]
    row: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Change:
    """What tells rows picked from those of a shard before.

    Attributes:
        left: (m,) positions in the shard before of rows that are not picked.
        joined: (l,) positions among the rows picked of those that were not in it.
    """

    left: NDArray[np.int64]
    joined: NDArray[np.int64]


class Shards:
    """The shards of one encoder in a store.

    Attributes:
        folder: that they are in.
        packs: of small ones.
    """

    def __init__(self, folder: Path, packs: Packs) -> None:
        self.folder, self.packs = folder, packs
        # Sources are looked at once for all the shards that pick from them.
        self._sound_sources: dict[tuple[Source, bool], bool] = {}

    def find(self, fingerprint: str, *, verify: bool = True) -> StoredShard | None:
        """Return a finished shard, or None where it is missing, unfinished or damaged.

        Args:
            fingerprint: of the shard.
            verify: check the content against its checksums, not only the sizes.

        Raises:
            FormatError: a later release wrote it.
        """
        if (found := self.in_folder(fingerprint, verify=verify)) is not None:
            return found
        member = self.packs.find(fingerprint, verify=verify)
        return None if member is None else StoredShard(**member.facts())

    def in_folder(self, fingerprint: str, *, verify: bool) -> StoredShard | None:
        """Return a finished shard that has a folder of its own, with all that it picks from."""
        found = self.fields(fingerprint, verify=verify)
        try:
            if found is not None and all(
                self.is_sound(source, verify=verify) for source in other_sources(found)
            ):
                return StoredShard(**found["shard"])
        except (KeyError, TypeError, ValueError):
            pass
        return None

    def fields(self, fingerprint: str, *, verify: bool) -> dict[str, Any] | None:
        """Return the manifest of a folder of a shard, None where it is missing or damaged.

        What it picks from is not looked at.
        """
        folder = self.folder / fingerprint
        try:
            found = manifest.read_manifest(folder, kind=KIND, version=FORMAT_VERSION)
            manifest.check_files(folder, found, content=verify)
        except FormatError:
            raise
        except ArtifactError:
            return None
        return found

    def is_damaged(self, fingerprint: str) -> bool:
        """Tell whether a shard that ``find`` does not return is there, damaged."""
        packed = self.packs.find(fingerprint, verify=False)
        return packed is not None or (self.folder / fingerprint).exists()

    def require_there(self, fingerprint: str) -> None:
        """Make sure that a shard is there, sound or not.

        Raises:
            ArtifactError: it is not.
        """
        folder = self.folder / fingerprint / manifest.MANIFEST
        if not folder.exists() and self.packs.find(fingerprint, verify=False) is None:
            raise ArtifactError(f"shard {fingerprint} is not in {self.folder}; {REMEDY}")

    def write(
        self,
        fingerprint: str,
        digests: NDArray[np.uint8],
        embeddings: NDArray[np.floating],
        *,
        dtype: StoreDtype,
        truncated: NDArray[np.bool_],
        moments_of: Callable[[str], Moments] | None = None,
    ) -> StoredShard:
        """Keep a whole shard; see ``EmbeddingStore.write``."""
        kept = as_kept(embeddings, dtype)
        shard = StoredShard(
            fingerprint, len(kept), str(kept.dtype), int(truncated.sum()), kept.nbytes
        )
        moments = moments_of(str(kept.dtype)) if moments_of else Moments.of(kept)
        tensors = {"embeddings": kept, "digests": digests, "truncated": _flags(truncated)}
        return self._publish(shard, tensors, moments, {"format_version": _WHOLE_VERSION})

    def derive(
        self,
        fingerprint: str,
        digests: NDArray[np.uint8],
        picks: Picks,
        own: NDArray[np.floating],
        *,
        truncated: NDArray[np.bool_],
        moments: Moments,
        dtype: str,
    ) -> StoredShard:
        """Keep a shard most of whose rows others hold, whole or not at all.

        Args:
            fingerprint: of the shard.
            digests: (n, 16) uint8, of its rows.
            picks: where the n rows lie.
            own: (m, d) as kept, the rows that the shard holds itself, in the order of the shard.
            truncated: (n,) whether a text was cut to the encoder's limit.
            moments: of the n rows.
            dtype: numpy name of the widest type of the rows.
        """
        rows = len(picks.source)
        size = rows * own.shape[1] * np.dtype(dtype).itemsize
        shard = StoredShard(fingerprint, rows, dtype, int(truncated.sum()), size)
        tensors = {
            "embeddings": own,
            "digests": digests,
            "truncated": _flags(truncated),
            "source": picks.source,
            "row": picks.row,
        }
        facts = {
            "format_version": FORMAT_VERSION,
            "sources": [list(each) for each in picks.sources],
        }
        return self._publish(shard, tensors, moments, facts)

    def _publish(
        self,
        shard: StoredShard,
        tensors: Mapping[str, NDArray[Any]],
        moments: Moments,
        facts: Mapping[str, Any],
    ) -> StoredShard:
        folder = self.folder / shard.fingerprint
        if folder.exists() and self.find(shard.fingerprint) is None:
            # Two processes may find the same damaged shard.
            shutil.rmtree(folder, ignore_errors=True)
        version = facts["format_version"]

        def fill(temporary: Path) -> dict[str, Any]:
            write_tensors(temporary / EMBEDDINGS, tensors, kind=KIND, version=version)
            moments.save(temporary / MOMENTS)
            return {"kind": KIND, **facts, "shard": asdict(shard)}

        manifest.publish_folder(folder, fill)
        return shard

    def embeddings(self, fingerprint: str) -> NDArray[np.floating]:
        """Return the embeddings of a shard, (n, d), as kept, all finite.

        Raises:
            ArtifactError: they cannot be read.
        """
        rows = self.mapped(fingerprint)
        array = rows[np.arange(len(rows))]
        if not np.isfinite(array).all():
            raise ArtifactError(
                f"shard {fingerprint} in {self.folder} holds NaN or infinity; {REMEDY}"
            )
        return array

    def mapped(self, fingerprint: str) -> EmbeddingRows:
        """Return the embeddings of a shard, (n, d), of which only rows asked for are read.

        Raises:
            ArtifactError: a file is missing or damaged.
        """

        def gathered(folder: Path) -> EmbeddingRows:
            picks = self.picks(fingerprint)
            own = map_tensor(folder / EMBEDDINGS, "embeddings", remedy=REMEDY)
            return own if picks is None else self.picked(picks, own)

        return self._read(fingerprint, self.packs.mapped, gathered)

    def picked(self, picks: Picks, own: NDArray[np.floating]) -> EmbeddingRows:
        """Return the rows (n, d) that are picked, ``own`` (m, d) being those held by none other."""
        holders = [own if each == OWN else self.held_by(each) for each in picks.sources]
        return GatheredRows(holders, picks.source, picks.row)

    def held_by(self, source: Source) -> NDArray[np.floating]:
        """Return the embeddings (m, d) that a source holds itself, mapped.

        Raises:
            ArtifactError: it is missing or damaged.
        """
        name, held_as = source
        fields = self.fields(name, verify=False)
        if fields is not None and held_by_folder(fields) == held_as:
            return map_tensor(self.folder / name / EMBEDDINGS, "embeddings", remedy=REMEDY)
        if member := self.packs.find(name, verify=False, held_as=held_as):
            return self.packs.mapped(member)
        raise ArtifactError(
            f"shard {name} in {self.folder}, which others pick rows from, is missing or damaged; "
            f"{REMEDY}"
        )

    def own_tensor(self, fingerprint: str, name: str) -> NDArray[Any]:
        """Return an array of a shard's own folder, mapped.

        Raises:
            ArtifactError: it is missing or damaged.
        """
        return map_tensor(self.folder / fingerprint / EMBEDDINGS, name, remedy=REMEDY)

    def picks(self, fingerprint: str) -> Picks | None:
        """Return where the rows of a derived shard lie, None where a shard holds all of them.

        Raises:
            ArtifactError: its folder is damaged.
        """
        folder = self.folder / fingerprint
        if not folder.exists():
            return None
        found = manifest.read_manifest(folder, kind=KIND, version=FORMAT_VERSION)
        if "sources" not in found:
            return None
        source, row = (
            np.array(map_tensor(folder / EMBEDDINGS, name, remedy=REMEDY), dtype=np.int32)
            for name in ("source", "row")
        )
        return Picks(_sources(found), source, row)

    def moments(self, fingerprint: str) -> Moments:
        """Return the moments of a shard's embeddings as kept."""

        def load(folder: Path) -> Moments:
            return Moments.load(folder / MOMENTS)

        return self._read(fingerprint, self.packs.moments, load)

    def digests(self, fingerprint: str) -> NDArray[np.uint8]:
        """Return the digests (n, 16) of the texts of a shard.

        Raises:
            ArtifactError: they cannot be read.
        """
        return self._tensor(fingerprint, "digests")

    def truncated(self, fingerprint: str) -> NDArray[np.bool_] | None:
        """Return which texts (n,) of a shard were cut, None where an earlier release did not tell.

        Raises:
            ArtifactError: they cannot be read.
        """
        shard = self.find(fingerprint, verify=False)
        if shard is not None and shard.truncated in (0, shard.rows):
            return np.full(shard.rows, bool(shard.truncated))
        try:
            return self._tensor(fingerprint, "truncated").astype(bool)
        except ArtifactError:
            return None

    def known_rows(self, fingerprints: Iterable[str], *, dtypes: Collection[str]) -> KnownRows:
        """Return what looks up the rows of shards by their digests; see ``EmbeddingStore``."""
        shards = ((name, self.find(name)) for name in dict.fromkeys(fingerprints))
        sound = [name for name, shard in shards if shard is not None and shard.dtype in dtypes]
        return KnownRows((name, self.digests(name)) for name in sound)

    def picks_of(self, known: KnownRows, found: Found) -> Picks:
        """Return where rows (n,) lie that were looked up; those not known are the shard's own."""
        sources: dict[Source, int] = {} if found.known.all() else {OWN: 0}
        source = np.zeros(len(found.shard), dtype=np.int32)
        row = np.zeros(len(found.shard), dtype=np.int32)
        row[~found.known] = np.arange(np.count_nonzero(~found.known))
        for number in np.unique(found.shard[found.known]):
            inside = found.shard == number
            places, of, at = self._places(known.shards[number])
            numbers = [sources.setdefault(place, len(sources)) for place in places]
            source[inside] = np.array(numbers, dtype=np.int32)[of[found.row[inside]]]
            row[inside] = at[found.row[inside]]
        return Picks(tuple(sources), source, row)

    def change(self, fingerprint: str, picks: Picks) -> Change:
        """Return which rows were in a shard and are not among those picked, and the reverse.

        A row that is there several times counts as often.
        """
        places, of, at = self._places(fingerprint)
        # Under one number each, own rows of the shard to be under −1: they were nowhere.
        numbers = {place: number for number, place in enumerate(places)}
        for place in picks.sources:
            numbers.setdefault(place, len(numbers) if place != OWN else -1)
        renamed = np.array([numbers[place] for place in picks.sources], dtype=np.int64)
        before = (of.astype(np.int64) << 32) + at
        after = (renamed[picks.source] << 32) + picks.row
        return Change(_beyond(before, after), _beyond(after, before))

    def _places(self, fingerprint: str) -> tuple[tuple[Source, ...], Numbers, Numbers]:
        """Return sources, and for each row (n,) of a shard its source and its row there."""
        # A pack first: what picks from it needs none of what was picked from before.
        if member := self.packs.find(fingerprint, verify=True):
            own, picks, rows = (fingerprint, member.held_as), None, member.rows
        else:
            fields = manifest.read_manifest(
                self.folder / fingerprint, kind=KIND, version=FORMAT_VERSION
            )
            own, picks = (fingerprint, held_by_folder(fields)), self.picks(fingerprint)
            rows = int(fields["shard"]["rows"])
        if picks is None:
            return (own,), np.zeros(rows, dtype=np.int32), np.arange(rows, dtype=np.int32)
        places = tuple(own if each == OWN else each for each in picks.sources)
        return places, picks.source, picks.row

    def _tensor(self, fingerprint: str, name: str) -> NDArray[Any]:
        def packed(member: Member) -> NDArray[Any]:
            return self.packs.tensor(member, name)

        def own(folder: Path) -> NDArray[Any]:
            return np.array(map_tensor(folder / EMBEDDINGS, name, remedy=REMEDY))

        return self._read(fingerprint, packed, own)

    def _read(
        self,
        fingerprint: str,
        packed: Callable[[Member], T],
        own: Callable[[Path], T],
    ) -> T:
        """Return what is read from a shard's own folder where that stands, else from a pack.

        A pack may be damaged that the folder was made anew for.
        """
        for _ in range(_MOVES):
            with contextlib.suppress(ArtifactError):
                # It may be moved into a pack, or into another, between the look and the reading.
                return self._read_now(fingerprint, packed, own)
        return self._read_now(fingerprint, packed, own)

    def _read_now(
        self,
        fingerprint: str,
        packed: Callable[[Member], T],
        own: Callable[[Path], T],
    ) -> T:
        if self.in_folder(fingerprint, verify=False) is None and (
            member := self.packs.find(fingerprint, verify=False)
        ):
            return packed(member)
        return own(self.folder / fingerprint)

    def is_sound(self, source: Source, *, verify: bool) -> bool:
        """Tell whether what others pick rows from is there, and with ``verify`` undamaged."""
        key = source, verify
        if key not in self._sound_sources:
            name, held_as = source
            fields = self.fields(name, verify=verify)
            in_folder = fields is not None and held_by_folder(fields) == held_as
            self._sound_sources[key] = in_folder or (
                self.packs.find(name, verify=verify, held_as=held_as) is not None
            )
        return self._sound_sources[key]


def _sources(fields: Mapping[str, Any]) -> tuple[Source, ...]:
    """Return what the manifest of a derived shard says it picks from."""
    return tuple((str(name), str(held_as)) for name, held_as in fields["sources"])


def other_sources(fields: Mapping[str, Any]) -> list[Source]:
    """Return the sources of a shard but itself; none where it is whole."""
    return [each for each in _sources({"sources": (), **fields}) if each != OWN]


def held_by_folder(fields: Mapping[str, Any]) -> str:
    """Return what the rows that a shard's folder holds are known by, from its manifest."""
    return str(fields["files"][EMBEDDINGS]["sha256"])


def _beyond(some: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions in ``some`` that are more than ``others`` has of the same number."""
    order = np.argsort(some, kind="stable")
    numbers, starts, counts = np.unique(some[order], return_index=True, return_counts=True)
    there, times = np.unique(others, return_counts=True)
    place = np.minimum(np.searchsorted(there, numbers), max(len(there) - 1, 0))
    met = there[place] == numbers if len(there) else np.zeros(len(numbers), dtype=bool)
    taken = np.where(met, times[place] if len(there) else 0, 0)
    rank = np.arange(len(some)) - np.repeat(starts, counts)
    return np.sort(order[rank >= np.repeat(taken, counts)])


def _flags(truncated: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return truncated.astype(np.uint8)
