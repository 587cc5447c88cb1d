"""One table or collection of a database, brought to the published version of an index."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.artifacts.prefetch import ahead
from whiten_index.errors import DatabaseError, GateError
from whiten_index.progress import Stages
from whiten_index.vectordb.database_writer import DatabaseWriter, PushedTable
from whiten_index.vectordb.push_check import check_rows
from whiten_index.vectordb.push_config import PushConfig
from whiten_index.vectordb.push_delta import Delta, delta_since
from whiten_index.vectordb.push_replacing import (
    of_query_halves,
    other_options,
    require_form,
    require_rows,
    what_differs,
)
from whiten_index.vectordb.push_report import PushReport
from whiten_index.vectordb.push_source import PushSource
from whiten_index.vectordb.row_checks import RowsError

# Ids of deleted documents that are handed over at once.
_GONE_AT_ONCE = 10_000


@dataclass(frozen=True, eq=False)
class TablePush:
    """Brings one table or collection to the published version of an index.

    Attributes:
        config: what was asked.
        source: the rows it is to have.
        writer: the table.
        stages: told of what is done.
        notes: what is to be told at the end.
        was: what was there before, as the report has it.
    """

    config: PushConfig
    source: PushSource
    writer: DatabaseWriter
    stages: Stages
    notes: list[str] = field(default_factory=list)
    was: dict[str, Any] = field(default_factory=dict)

    def run(self) -> PushReport:
        """Change the rows that changed, fill a new table, or find nothing to do.

        Raises:
            DatabaseError: the database cannot be reached, or refuses.
            GateError: see ``push_index``.
        """
        after = replace(self.source.pushed(), options=self.config.shaping)
        before, there = self._there()
        if before is None:
            return self._fill(None, after, "there was nothing of that name")
        target = self.writer.target
        require_rows(self.config, target, self.source, before, there=there)
        self.was.update({"was": before.version, "rows_before": there})
        if self.config.full:
            return self._fill(before, after, "--full")
        if not before.same_vectors(after):
            require_form(target, before, after)
            return self._fill(before, after, what_differs(self.source, before, after))
        if not before.changing and there != before.rows:
            why = f"it counts {there:,} rows and should have {before.rows:,}"
            return self._fill(before, after, why)
        if before.version == after.version and not before.changing:
            return self._nothing(before, after)
        delta, why = delta_since(self.source, before, after)
        if delta is None:
            return self._fill(before, after, why)
        try:
            return self._change(before, after, delta, why)
        except GateError as error:
            if not before.changing:
                raise
            # Rows of a change that was cut off: done again, it would end like this every night.
            return self._fill(before, after, str(error))

    def _there(self) -> tuple[PushedTable | None, int]:
        """Return what the name stands for, and how many rows that has."""
        before = self.writer.published()
        there = 0 if before is None else self.writer.count()
        if (
            before is not None
            and there != before.rows
            and (now := self.writer.published()) != before
        ):
            # Another push ended in between.
            before, there = now, 0 if now is None else self.writer.count()
        return before, there

    def _nothing(self, before: PushedTable, after: PushedTable) -> PushReport:
        self.writer.discard()
        self._tell_options(before, after)
        return self._report(before, "nothing", "it has this version already")

    def _fill(self, before: PushedTable | None, after: PushedTable, why: str) -> PushReport:
        layout, resumed = self.source.layout, self._begin(after)
        blocks = self.source.blocks(resumed)
        try:
            with self.stages.stage("push", len(self.source) - resumed) as watcher:
                for batches in ahead(blocks, self.source.at):
                    for batch in batches:
                        self.writer.append(batch)
                        watcher.advance(batch.num_rows)
            with self.stages.stage("index", len(self.source)):
                self.writer.finish(layout)
        except RowsError:
            # Going on with them would end alike for ever.
            self._drop()
            raise
        check = self._checked(pending=True)
        self.writer.swap()
        return self._report(
            before, "all", why, pushed=len(self.source) - resumed, resumed=resumed, check=check
        )

    def _begin(self, after: PushedTable) -> int:
        """Begin a pushed or take up the one that waits; return how many rows it has."""
        pending = self.writer.pending()
        if (
            pending is None
            or (pending.version, pending.rows) != (after.version, after.rows)
            or not pending.same_vectors(after)
            or pending.query_digest != after.query_digest
            or pending.done > after.rows
        ):
            self.writer.begin(after, self.source.layout)
            return 0
        self.writer.resume(self.source.layout)
        # Until then whoever had it before may have gone on.
        pending = self.writer.pending() or pending
        self.stages.watcher.note(f"an interrupted push had sent {pending.done:,} rows; going on")
        if pending.options != after.options:
            self._note(
                f"the table was begun with other options ({other_options(pending, after)}), and "
                "may keep them; push with --full when this has ended to have it made anew"
            )
        return pending.done

    def _change(
        self, before: PushedTable, after: PushedTable, delta: Delta, why: str
    ) -> PushReport:
        self._tell_options(before, after)
        self.writer.discard()
        after = replace(after, options=before.options)
        with self.writer.changing(after, self.source.layout) as changing:
            total = len(delta.rows) + len(delta.gone)
            with self.stages.stage("push changes", total) as watcher:
                for first in range(0, len(delta.gone), _GONE_AT_ONCE):
                    some = delta.gone.slice(first, _GONE_AT_ONCE)
                    changing.delete([self._as_id(each) for each in some.to_pylist()])
                    watcher.advance(len(some))
                for batch in self.source.batches_of(delta.rows):
                    changing.upsert(batch)
                    watcher.advance(batch.num_rows)
            check = self._checked(pending=False, among=delta.rows)
        return self._report(
            before, "changes", why, pushed=len(delta.rows), deleted=delta.deleted, check=check
        )

    def _as_id(self, text: str) -> str | int:
        return int(text) if pa.types.is_integer(self.source.layout.schema.types[0]) else text

    def _checked(self, *, pending: bool, among: NDArray[np.int64] | None = None) -> dict[str, Any]:
        """Return what the database gives back.

        Raises:
            GateError: it is not what was pushed; what waits is dropped, since going on with it
                would end alike for ever.
        """
        with self.stages.stage("check", self.config.checked):
            found, faults = check_rows(
                self.source, self.writer, self.config, pending=pending, among=among
            )
        if not faults:
            return found
        stays = "push all rows with --full"
        if pending:
            self._drop()
            stays = "what users see there is as it was, and the new rows were dropped: push again"
        raise GateError(
            f"{self.writer.target} does not give back what was pushed: {'; '.join(faults)}; {stays}"
        )

    def _drop(self) -> None:
        # The error on its way says more than that this failed.
        with suppress(DatabaseError):
            self.writer.discard()

    def _tell_options(self, before: PushedTable, after: PushedTable) -> None:
        if before.options != after.options:
            self._note(
                f"the table was made with other options ({other_options(before, after)}), and "
                "keeps them; push with --full to have it made anew"
            )

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.stages.watcher.note(text)

    def _report(self, before: PushedTable | None, mode: str, why: str, **found: Any) -> PushReport:
        after = self.source.pushed()
        for note in of_query_halves(before, after):
            self._note(note)
        # What was pushed is there, whatever this says.
        with suppress(DatabaseError):
            for note in self.writer.notes():
                self._note(note)
        return PushReport.of(
            self.source,
            self.stages,
            engine=self.writer.engine,
            target=self.writer.target,
            **self.was,
            mode=mode,
            why=why,
            notes=tuple(self.notes),
            **found,
        )
