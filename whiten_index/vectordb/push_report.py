"""What a push did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whiten_index.progress import Stages
    from whiten_index.vectordb.push_source import PushSource


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """What a push did.

    Attributes:
        engine: the database and its release, or the format of a file.
        target: where it is and the name that users query, without credentials.
        version: of the index that the database has now.
        was: the version it had before, None where it had none.
        rows_before: what it had of rows then.
        mode: ``all`` rows into a new table, ``changes`` into the one there was, or ``nothing``.
        why: the mode is what it is.
        rows: the database has now.
        pushed: rows sent.
        deleted: documents taken away.
        resumed: rows that an interrupted push had sent before.
        k: width of the vectors.
        dtype: in which they are kept.
        query_digest: of encoder and transform, that of a ``QueryTransform`` that fits.
        columns: of the rows, in order.
        check: what was looked at: rows, exact and approximate recall@10; empty where nothing was.
        notes: what was asked and had no effect, and what is odd there.
        seconds: stage -> wall seconds.
        stage_rows: stage -> rows handled.
    """

    engine: str
    target: str
    version: str
    was: str | None = None
    rows_before: int | None = None
    mode: str
    why: str
    rows: int
    pushed: int = 0
    deleted: int = 0
    resumed: int = 0
    k: int
    dtype: str
    query_digest: str
    columns: tuple[str, ...]
    check: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    stage_rows: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, source: PushSource, stages: Stages, **found: Any) -> PushReport:
        """Return the report of what was pushed from a source."""
        after = source.pushed()
        return cls(
            version=after.version,
            rows=after.rows,
            k=after.k,
            dtype=after.dtype,
            query_digest=after.query_digest,
            columns=after.columns,
            seconds=dict(stages.seconds),
            stage_rows=dict(stages.rows),
            **found,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        found = dict(vars(self))
        for name, value in found.items():
            if isinstance(value, Mapping):
                found[name] = dict(value)
        return found | {"notes": list(self.notes), "columns": list(self.columns)}
