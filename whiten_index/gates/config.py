"""What gates ask of a new version, and what they found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.errors import ConfigError, GateError
from whiten_index.given import is_finite, shown
from whiten_index.index import parse_bytes

# Each canary is compared with every row.
_MOST_CANARIES, _MOST_GROWTH = 1_000_000, 1e12


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """What a new version must show before it is published.

    Attributes:
        canaries: documents sampled that must find themselves and their neighbours; 0 for none.
        canary_file: Parquet with queries of one's own; see ``CanaryFile``.
        canary_recall: share of the exact neighbours that canaries must find; by default what the
            index was set to reach, less 0.05.
        max_shrink: share of the rows of the version before that may be gone.
        max_growth: share of them that may come on top, 1 for twice as many.
        max_bytes: what the version's files may take, such as ``4GiB``.

    Raises:
        ConfigError: a value outside its bounds.
    """

    canaries: int = 200
    canary_file: str | None = None
    canary_recall: float | None = None
    max_shrink: float = 0.2
    max_growth: float = 1.0
    max_bytes: str | int | None = None

    def __post_init__(self) -> None:
        recall = 0.0 if self.canary_recall is None else self.canary_recall
        for option, value, most, legal in (
            ("--canaries", self.canaries, _MOST_CANARIES, "whole numbers from 0 to 1,000,000"),
            ("--canary-recall", recall, 1, "0 to 1"),
            ("--max-shrink", self.max_shrink, 1, "0 to 1"),
            ("--max-growth", self.max_growth, _MOST_GROWTH, "numbers from 0 to 1e12"),
        ):
            inside = is_finite(value) and 0 <= value <= most
            if not inside or (option == "--canaries" and value != int(value)):
                raise ConfigError(f"{option} {shown(value)} is outside {legal}")
        if self.max_bytes is not None:
            parse_bytes(self.max_bytes, option="--max-bytes")

    @property
    def most_bytes(self) -> int | None:
        """``max_bytes`` as a number."""
        if self.max_bytes is None:
            return None
        return parse_bytes(self.max_bytes, option="--max-bytes")

    def to_json(self) -> dict[str, Any]:
        """Return what was asked as JSON values."""
        return dict(vars(self))


@dataclass(frozen=True)
class Base:
    """The version before, and what became of its rows; rows are passages where it has these.

    Attributes:
        rows: of its index.
        new: rows that came since, None where it is not known.
        deleted: rows that went, None where it is not known.
    """

    rows: int
    new: int | None = None
    deleted: int | None = None

    @property
    def expected(self) -> int | None:
        """Rows that there should be now, None where it is not known."""
        if self.new is None or self.deleted is None:
            return None
        return self.rows - self.deleted + self.new


@dataclass(frozen=True)
class Gate:
    """What one gate found.

    Attributes:
        name: counts, codes, canaries or size.
        passed: whether the version may be published for all this gate knows.
        found: figures, as JSON values.
        bound: what was asked of them.
        why: what failed, in sentences; empty where nothing did.
    """

    name: str
    passed: bool
    found: dict[str, Any]
    bound: dict[str, Any]
    why: str = ""

    @classmethod
    def of(
        cls, name: str, found: dict[str, Any], bound: dict[str, Any], faults: Sequence[str]
    ) -> Gate:
        """Return a gate that is passed where there are no faults."""
        return cls(name, not faults, found, bound, "; ".join(faults))

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return dict(vars(self))


def require_passed(gates: Sequence[Gate], *, candidate: Path | str) -> None:
    """Refuse a version that did not pass.

    Args:
        gates: what they found.
        candidate: folder in which the version is kept aside.

    Raises:
        GateError: one of them was not passed.
    """
    failed = [gate for gate in gates if not gate.passed]
    if failed:
        raise GateError(
            "the new version is not published: "
            + "; ".join(f"gate {gate.name}: {gate.why}" for gate in failed)
            + f". It is kept in {candidate}; mend the cause, or move the bound, and run it again",
            gates=[gate.to_json() for gate in gates],
            candidate=str(candidate),
        )
