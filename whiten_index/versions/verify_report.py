"""What a verification found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from whiten_index.errors import FormatError, StorageError, WhitenIndexError


@dataclass(frozen=True)
class Damage:
    """Something that is damaged or missing, or cannot be read.

    Attributes:
        path: of it.
        why: what is wrong with it.
        touches: corpora and versions that need it.
        remedy: what to do, and what that makes anew.
    """

    path: str
    why: str
    touches: tuple[str, ...]
    remedy: str


@dataclass(frozen=True)
class VerifyReport:
    """What was looked at, and what of it is damaged.

    Attributes:
        path: of the index or store.
        kind: ``index`` or ``store``.
        checked: kind of thing -> how many were looked at.
        bytes: of these.
        damages: what is damaged.
        unread: what the system does not let be read: it may be sound or damaged.
        stores: folders of the stores that an index reads.
        notes: what could not be looked at, and is no damage.
    """

    path: str
    kind: str
    checked: Mapping[str, int]
    bytes: int
    damages: tuple[Damage, ...]
    stores: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unread: tuple[Damage, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether everything was read, and nothing is damaged."""
        return not self.damages and not self.unread

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "sound": self.sound}


def reason(error: WhitenIndexError) -> str:
    """Return what an error says is wrong, without what it says to do."""
    return str(error).partition("; ")[0]


def remedy_for(error: WhitenIndexError, usual: str) -> str:
    """Return what to do about an error: the usual thing where it is one of damage."""
    if isinstance(error, FormatError):
        return "upgrade whiten-index: a later release wrote it"
    if isinstance(error, StorageError):
        return "mend the disk, or the permissions, and verify again"
    return usual
