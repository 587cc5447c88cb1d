"""Push of the published version of an index to a database or a file."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from whiten_index.artifacts.cached_storage import place_of
from whiten_index.corpus.arrow_types import times_as_numbers
from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, DatabaseError, GateError, require_config
from whiten_index.index.exact import Rows, Vectors, exact_neighbours, rounding
from whiten_index.paths import cut
from whiten_index.progress import Progress, Stages
from whiten_index.vectordb.database_writer import DatabaseWriter
from whiten_index.vectordb.engine_options import number_bytes
from whiten_index.vectordb.push_config import PushConfig
from whiten_index.vectordb.push_source import Delta, PushSource, delta_since
from whiten_index.vectordb.pushed_table import VECTOR, Layout, PushedTable, RowsError, vectors_of
from whiten_index.vectordb.registry import open_writer, require_database
from whiten_index.vectordb.vector_files import (
    ending,
    require_file,
    target_of,
    write_rows,
    written_files,
    written_version,
)
from whiten_index.versions.published import read_current

_IF_SO = "is it the right index, and the right table? If so, push with"
TOP_K, QUERIES = 10, 20
# Rounding of a coordinate, as a share of the greatest; of a unit vector, at most.
_LOST = {"float32": 1e-6, "float16": 5e-4}
# Rounding of a score, a sum of k products, as a share of the greatest.
_TIED = {"float32": 1e-5, "float16": 2e-3}
# Characters of a value in a fault.
_SHOWN = 120


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """Result of a push."""

    engine: str  # database and release, or the format of a file
    target: str  # address and name that users query, without credentials
    version: str  # of the index in the database now
    was: str | None = None  # version before, None if there was none
    rows_before: int | None = None
    mode: str  # all rows into a new table, changes into the existing one, or nothing
    why: str  # reason for the mode
    rows: int  # in the database now
    pushed: int = 0  # rows sent
    deleted: int = 0  # documents
    resumed: int = 0  # rows that an interrupted push had sent before
    k: int  # width of the vectors
    dtype: str  # precision of the vectors
    query_digest: str  # of encoder and transform; a `QueryTransform` that fits has the same
    columns: tuple[str, ...]  # of the rows, in order
    # Number of rows compared, exact and approximate recall@10; empty if nothing was.
    check: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # such as that queries must be reduced by another transform
    seconds: Mapping[str, float] = field(default_factory=dict)  # stage -> wall seconds
    stage_rows: Mapping[str, int] = field(default_factory=dict)  # stage -> rows handled

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "notes": list(self.notes), "columns": list(self.columns)}


def push_index(config: PushConfig, *, progress: Progress | None = None) -> PushReport:
    """Bring a database or a file to the published version of an index.

    If the table has an earlier version by the same transform, only the documents that changed since
    are changed there. Otherwise all rows go into a new table, which is indexed, checked against
    brute force on a sample, and published under the name in one step. An interrupted push is
    resumed by the same call.

    Args:
        config: what to push, and where to.
        progress: receives the stages.

    Raises:
        ConfigError: an option or the address cannot be used, or the database's client is missing.
        ArtifactError: the index or its store is missing or damaged.
        DatabaseError: the database cannot be reached, or refuses.
        GateError: the database does not give back what was pushed, or the push would break
            programs that query it: far fewer rows, another width or type, a missing column. Users
            see the table as it was.

    Examples:
        >>> push_index(PushConfig(index="index", to="vectors.parquet")).rows
        60
    """
    require_config(config, PushConfig)
    stages = Stages(progress or Progress())
    if config.to_file:
        return _write_file(config, stages)
    assert config.table is not None
    # Before a new file is made at the address.
    read_current(*place_of(config.index))
    # Before the checksums, which take long: the address may be wrong.
    with open_writer(config.to, config.table, options=config.options) as writer:
        return _TablePush(config, PushSource.open(config), writer, stages).run()


def plan_push(config: PushConfig) -> dict[str, Any]:
    """Plan the push of all rows to a database, which is not asked; its client need not be there.

    Returns:
        JSON values. Bytes of table and index are what the rows need, None where not known; pages,
        logs and old versions of rows come on top. ``code_bytes`` are of a vector in the form that
        searches read first, ``settings`` the options that the push should be given, ``query`` the
        SQL or the call of the client that searches the table.

    Raises:
        ConfigError: an option or the address cannot be used, or rows go to a file.
        ArtifactError: the index or its store is missing or damaged.

    Examples:
        >>> config = PushConfig(index="index", to="postgresql://db/news", table="docs")
        >>> plan_push(config)["index_bytes"]
        57344
    """
    require_config(config, PushConfig)
    if config.to_file:
        raise ConfigError(f"{config.to} is a file, which takes no --plan; leave it out")
    options, source = require_database(config.to, config.options), PushSource.open(config)
    made, of_vectors = source.pushed(), (source.whitening.k, source.layout.dtype)
    rows, columns = len(source), source.documents.nbytes
    return {
        "rows": rows,
        "k": made.k,
        "dtype": made.dtype,
        "code_bytes": options.code_bytes(rows, *of_vectors),
        "table_bytes": rows * made.k * number_bytes(made.dtype) + columns,
        "index_bytes": options.index_bytes(rows, *of_vectors),
        "build_memory_bytes": options.build_bytes(rows, *of_vectors),
        "settings": options.settings_for(rows, *of_vectors),
        "query": options.query(str(config.table), made),
    }


def pushed_version(
    to: str, table: str | None = None, *, options: Mapping[str, str] | None = None
) -> PushedTable | None:
    """Return the version of an index in a table, collection or file, without writing anything.

    A ``QueryTransform`` with the same ``query_digest`` fits.

    Args:
        to: URL of the database, or the file.
        table: name that users query; None for a file.
        options: those of the push, such as PostgreSQL's schema.

    Returns:
        None if nothing has the name.

    Raises:
        ConfigError: the address, name or an option cannot be used, the client is missing, or no
            push wrote the file.
        DatabaseError: the database cannot be reached, or no push made what has the name.

    Examples:
        >>> pushed_version("pushed.parquet").k
        16
    """
    config = PushConfig(index=".", to=to, table=table, options=dict(options or {}))
    if config.to_file:
        return written_version(target_of(to))
    assert table is not None
    with open_writer(to, table, options=config.options, make=False) as writer:
        return writer.published()


def _write_file(config: PushConfig, stages: Stages) -> PushReport:
    path = require_file(config.to)
    before, source = written_version(path), PushSource.open(config)
    after, found = source.pushed(), dict[str, Any]()
    if before is not None:
        _require_rows(config, str(path), source, before, there=before.rows, ours=before.rows)
        found = {"was": before.version, "rows_before": before.rows}
    with stages.stage("write", len(source)) as watcher:
        batches = source.batches(range(len(source)), watcher)
        write_rows(path, source.layout, after, batches, before=before)
    notes = _note_new_queries(stages, before, after)
    target, why = " and ".join(map(str, written_files(path))), "a file is written as a whole"
    names = {"engine": ending(path), "target": target, "mode": "all", "why": why}
    return _report(after, stages, **names, pushed=len(source), notes=notes, **found)


def _report(after: PushedTable, stages: Stages, **found: Any) -> PushReport:
    names = ("version", "rows", "k", "dtype", "query_digest", "columns")
    found |= {name: getattr(after, name) for name in names}
    return PushReport(seconds=dict(stages.seconds), stage_rows=dict(stages.rows), **found)


class _TablePush:
    def __init__(
        self, config: PushConfig, source: PushSource, writer: DatabaseWriter, stages: Stages
    ) -> None:
        self.config, self.source, self.writer, self.stages = config, source, writer, stages
        self.after = source.pushed()
        self.notes: tuple[str, ...] = ()
        # Version and rows before, as in the report.
        self.was: dict[str, Any] = {}
        self.completed = 0  # rows of an interrupted change that was made again

    def run(self) -> PushReport:
        """Change the rows that changed, fill a new table, or do nothing."""
        after, target = self.after, self.writer.target
        before, there = self._published()
        if before is None:
            return self._fill("there was nothing of that name")
        self.was.update({"was": before.version, "rows_before": there})
        self.notes = _note_new_queries(self.stages, before, after)
        if self.config.full:
            return self._fill("--full")
        same = (after.transform, after.k, after.dtype)
        if (before.transform, before.k, before.dtype) != same:
            return self._fill(_difference(target, before, after))
        if not before.changing and there != before.rows:
            return self._fill(f"it counts {there:,} rows and should have {before.rows:,}")
        if before.version == after.version and not before.changing:
            if before.query_digest != after.query_digest:
                return self._fill("its description does not fit its version")
            self.writer.discard()
            return self._report("nothing", "it has this version already")
        delta, why = delta_since(self.source, before, after)
        if delta is None:
            return self._fill(why)
        try:
            return self._change(delta, why)
        except GateError as error:
            if not before.changing:
                raise
            # Repeating the interrupted change would end the same way every night.
            self.completed = after.rows
            return self._fill(str(error))

    def _published(self, *, dropped: bool = False) -> tuple[PushedTable | None, int]:
        """Return the published table and its rows; refuse to lose what no push sent."""
        while (before := self.writer.published()) is not None:
            there = self.writer.count()
            # Another push may have ended in between.
            if there == before.rows or self.writer.published() == before:
                # An interrupted change may have added some, which it says when it is made again.
                ours = self.completed or before.rows
                ours = ours if dropped or not before.changing else there
                _require_rows(
                    self.config, self.writer.target, self.source, before, there=there, ours=ours
                )
                return before, there
        return None, 0

    def _fill(self, why: str) -> PushReport:
        self._published(dropped=True)
        resumed = self._begin()
        try:
            rows = range(resumed, len(self.source))
            with self.stages.stage("push", len(rows)) as watcher:
                for batch in self.source.batches(rows, watcher):
                    self.writer.append(batch)
            with self.stages.stage("index", len(self.source)):
                self.writer.finish()
        except RowsError:
            # To resume with these rows would fail again.
            self._drop()
            raise
        check = self._checked(pending=True)
        # Rows may have come while this took hours.
        self._published(dropped=True)
        self.writer.swap()
        return self._report("all", why, pushed=len(rows), resumed=resumed, check=check)

    def _begin(self) -> int:
        """Begin or resume the pending table; return the number of rows that it has."""
        pending, after = self.writer.pending(), self.after
        own = ("done", "name", "lease")
        same = pending and replace(after, **{name: getattr(pending, name) for name in own})
        if pending is None or pending != same or pending.done > after.rows:
            self.writer.begin(after, self.source.layout)
            return 0
        self.writer.resume(self.source.layout)
        # Until then the connection that filled it may have added rows.
        pending = self.writer.pending() or pending
        self.stages.watcher.note(f"an interrupted push had sent {pending.done:,} rows; resuming")
        return pending.done

    def _change(self, delta: Delta, why: str) -> PushReport:
        self.writer.discard()
        layout = self.source.layout
        with self.writer.changing(self.after, layout) as changes:
            total = len(delta.rows) + len(delta.gone)
            with self.stages.stage("push changes", total) as watcher:
                ids = delta.gone.to_pylist()
                changes.delete(ids)
                watcher.advance(len(ids))
                for batch in self.source.batches(delta.rows, watcher):
                    changes.upsert(batch)
            check = self._checked(pending=False, among=delta.rows)
        return self._report(
            "changes", why, pushed=len(delta.rows), deleted=delta.deleted, check=check
        )

    def _checked(self, *, pending: bool, among: Rows | None = None) -> dict[str, Any]:
        """Compare the rows in the database with those sent; drop a pending table that differs."""
        with self.stages.stage("check", self.config.check):
            found, faults = check_rows(
                self.source, self.writer, self.config, pending=pending, among=among
            )
        if not faults:
            return found
        advice = "push all rows with --full"
        if pending:
            self._drop()
            advice = "users see the table as it was, and the new rows were dropped: push again"
        raise GateError(
            f"{self.writer.target} does not give back what was pushed: {'; '.join(faults)}; "
            f"{advice}"
        )

    def _drop(self) -> None:
        # The error that is being raised says more than that this failed.
        with suppress(DatabaseError):
            self.writer.discard()

    def _report(self, mode: str, why: str, **found: Any) -> PushReport:
        names = {"engine": self.writer.engine, "target": self.writer.target, "mode": mode}
        found |= {**self.was, "why": why, "notes": self.notes}
        return _report(self.after, self.stages, **names, **found)


def _require_rows(
    config: PushConfig,
    target: str,
    source: PushSource,
    before: PushedTable,
    *,
    there: int,
    ours: int,
) -> None:
    """Refuse to delete many rows that users search, or rows that no push sent."""
    if there > ours and not config.full:
        interrupted = " or by one that was interrupted" if before.changing else ""
        raise GateError(
            f"{target} has {there:,} rows, and {there - ours:,} of them were put there by "
            f"something else than a push{interrupted}, and would be lost; move them to a table of "
            "their own, or push with --full to have them replaced"
        )
    rows = len(source)
    if rows < before.rows * (1 - config.max_shrink):
        raise GateError(
            f"{target} has {before.rows:,} rows and version {source.version.name} of "
            f"{source.version.place} has {rows:,}, and --max-shrink is {config.max_shrink:g}: "
            f"{_IF_SO} --max-shrink 1"
        )


def _difference(target: str, before: PushedTable, after: PushedTable) -> str:
    """Return why one table cannot be changed into the other; refuse what breaks programs."""
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in ("k", "dtype")}
    broken = [
        f"--{name} is {one} and would be {two} (--{name} {one} keeps it)"
        for name, (one, two) in pairs.items()
        if one != two
    ]
    broken += [
        f"column {name} would be gone (build the index with --keep {name})"
        for name in before.columns
        if name not in after.columns
    ]
    if broken:
        raise GateError(
            f"{target} is in use, and programs that query it would break: {'; '.join(broken)}: "
            f"{_IF_SO} --full"
        )
    if new := [name for name in after.columns if name not in before.columns]:
        return f"with column {', '.join(new)}"
    if before.query_digest != after.query_digest:
        return "the transform or the encoder is another one"
    return "the metric, or the type of a column, is another one"


def _note_new_queries(
    stages: Stages, before: PushedTable | None, after: PushedTable
) -> tuple[str, ...]:
    """Note that queries must be reduced by another transform than before."""
    if before is None or before.query_digest == after.query_digest:
        return ()
    note = (
        f"queries must be reduced again: the query digest was {before.query_digest}; open "
        "QueryTransform again, and export again what was exported (folders, models, SQL functions)"
    )
    stages.watcher.note(note)
    return (note,)


def check_rows(
    source: PushSource,
    writer: DatabaseWriter,
    config: PushConfig,
    *,
    pending: bool,
    among: Rows | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Compare a sample of rows, and search a pending table against brute force.

    Return counts and recalls for the report, and the faults, one sentence each.
    """
    found: dict[str, Any] = {"rows": writer.count(pending=pending)}
    faults = []
    if found["rows"] != len(source):
        faults.append(f"it counts {found['rows']:,} rows and should have {len(source):,}")
    total: Rows | int = len(source) if among is None else among
    size = min(config.check, len(source) if among is None else len(among))
    rng = np.random.default_rng(0)
    rows = np.sort(rng.choice(total, size, replace=False)) if size else np.empty(0, np.int64)
    if not len(rows):
        return found, faults
    sent = pa.Table.from_batches(source.batches(rows, Progress()))
    ids = list(dict.fromkeys(sent[ID].to_pylist()))
    there = writer.fetch(ids, source.layout, pending=pending)
    found["compared"] = len(rows)
    faults += differences(sent, there, source.layout)
    if pending:
        vectors = np.concatenate([vectors_of(batch) for batch in sent.to_batches()])
        # Vectors of zeros have no neighbours.
        queries = vectors[rng.permutation(np.flatnonzero(vectors.any(axis=1)))[:QUERIES]]
        found |= _searched(source, writer, queries)
        if found.get("exact_recall", 1) < 1:
            faults.append(
                f"exact search finds {found['exact_recall']:.0%} of the nearest rows of brute force"
            )
    return found, faults


def differences(sent: pa.Table, there: pa.Table, layout: Layout) -> list[str]:
    """Return the faults of rows that came back, one sentence a column."""
    mine, theirs = (
        {key: row for row, key in enumerate(_keys(each, layout))} for each in (sent, there)
    )
    lacking = [key for key in mine if key not in theirs]
    if lacking:
        return [f"{len(lacking):,} of {len(mine):,} rows are not there, such as {lacking[0]!r}"]
    there = there.take(pa.array([theirs[key] for key in mine], pa.int64()))
    faults = []
    for name in layout.kept:
        # Python knows fewer dates and times than Arrow.
        ours, came = (
            times_as_numbers(each[name].combine_chunks()).to_pylist() for each in (sent, there)
        )
        pairs = [pair for pair in zip(ours, came, strict=True) if not _same(*pair)]
        if pairs:
            was, now = (cut(repr(each), most=_SHOWN) for each in pairs[0])
            faults.append(
                f"column {name!r} of {len(pairs):,} rows came back changed: {now} for {was}"
            )
    one, two = (np.asarray(each[VECTOR].combine_chunks().flatten()) for each in (sent, there))
    lost = np.abs(one.astype(np.float64) - two).reshape(len(sent), -1).max(axis=1, initial=0)
    # Databases may make vectors of unit length again, for cosines.
    greatest = max(float(layout.metric != "ip"), float(np.abs(one).max(initial=0)))
    if off := np.count_nonzero(~(lost <= _LOST[layout.dtype] * greatest)):
        faults.append(
            f"the vectors of {off:,} rows came back changed, by up to {np.nanmax(lost):.1e}"
        )
    return faults


def _same(one: Any, two: Any) -> bool:
    """Return whether a value came back; NaN may do so as null, at any depth."""
    if isinstance(one, float) and one != one:
        return two is None or two != two
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[name], two[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(_same, one, two))
    return bool(one == two)


def _keys(rows: pa.Table, layout: Layout) -> Iterator[Any]:
    columns = [rows[name].to_pylist() for name in layout.key]
    return iter(columns[0]) if len(columns) == 1 else zip(*columns, strict=True)


def _searched(source: PushSource, writer: DatabaseWriter, queries: Vectors) -> dict[str, Any]:
    """Compare exact and approximate search with brute force over all vectors."""
    zeros = 0

    def vectors() -> Iterator[Vectors]:
        nonlocal zeros
        for block in source.vectors():
            live = block.any(axis=1)
            zeros += int(np.count_nonzero(~live))
            # Engines differ in how they rank zeros.
            if live.any():
                yield block if live.all() else block[live]

    found: dict[str, Any] = {"queries": len(queries)}
    best, _ = exact_neighbours(vectors(), queries, TOP_K)
    if zeros:
        found["zero_vectors"] = zeros
    if not len(queries):
        return found
    top_k = min(TOP_K, len(source) - zeros)
    least, tied = best[:, top_k - 1 : top_k], rounding(best, _TIED[source.layout.dtype])

    def recall(*, exact: bool) -> float:
        scores = -np.sort(-writer.search(queries, top_k, exact=exact, pending=True))
        # An exact score is that of its rank; a row of zeros may have any.
        most = best[:, :top_k] if exact and not zeros else np.inf
        return float(np.mean((scores >= least - tied) & (scores <= most + tied)))

    return found | {"exact_recall": recall(exact=True), "recall": recall(exact=False)}
