"""From the published version of an index to the rows of a database."""

from __future__ import annotations

from collections.abc import Mapping

from whiten_index.artifacts.files import resolved
from whiten_index.artifacts.prefetch import ahead
from whiten_index.progress import Progress, Silent, Stages
from whiten_index.vectordb.database_writer import PushedTable
from whiten_index.vectordb.push_config import PushConfig
from whiten_index.vectordb.push_replacing import of_query_halves, require_rows
from whiten_index.vectordb.push_report import PushReport
from whiten_index.vectordb.push_source import PushSource
from whiten_index.vectordb.push_table import TablePush
from whiten_index.vectordb.registry import open_writer
from whiten_index.vectordb.vector_files import (
    ending,
    is_file,
    require_file,
    write_rows,
    written_files,
    written_version,
)


def push_index(config: PushConfig, *, progress: Progress | None = None) -> PushReport:
    """Bring a database to the published version of an index.

    Where it has an earlier version by the same transform, the documents that changed since are
    changed there. Else all rows go into a new table beside the one there is, which is indexed,
    checked against brute force on a sample, and swapped in under the name in one step; a push that
    was cut off goes on where it was.

    Args:
        config: what to push, and where to.
        progress: told of the stages.

    Raises:
        ConfigError: an option or the address cannot be used, or the database's client is missing.
        ArtifactError: the index or its store is missing or damaged.
        DatabaseError: the database cannot be reached, or refuses.
        GateError: what the database gives back is not what was pushed, or programs that query it
            would trip over it: far fewer rows, another width or type, a column gone. What its
            users see stays.
    """
    stages = Stages(progress or Silent())
    config.require_usable()
    if is_file(config.to):
        return _write(config, stages)
    assert config.table is not None
    # Before the checksums, which take long: an address may be wrong.
    with open_writer(config.to, config.table, options=config.options) as writer:
        return TablePush(config, PushSource.open(config), writer, stages).run()


def pushed_version(
    to: str, table: str | None = None, *, options: Mapping[str, str] | None = None
) -> PushedTable | None:
    """Return what a table, collection or file holds: a version of an index, by which transform.

    A client tells by ``query_digest`` whether a ``QueryTransform`` fits, which has the same one.
    Nothing is written or made.

    Args:
        to: URL of the database, or the file.
        table: what its users query; None for a file.
        options: as it was pushed with; of PostgreSQL the schema, of a store its keys.

    Returns:
        None where there is nothing of that name.

    Raises:
        ConfigError: the address, name or an option cannot be used, the client is missing, or no
            push wrote the file.
        DatabaseError: the database cannot be reached, or something that no push made has the name.
    """
    config = PushConfig(index="", to=to, table=table, options=dict(options or {}))
    config.require_usable()
    if is_file(to):
        return written_version(resolved(to))
    assert table is not None
    with open_writer(to, table, options=options, make=False) as writer:
        return writer.published()


def _write(config: PushConfig, stages: Stages) -> PushReport:
    """Write all rows to a file."""
    path = require_file(config.to)
    before, source = written_version(path), PushSource.open(config)
    if before is not None:
        require_rows(config, str(path), source, before, there=before.rows)
    with (
        write_rows(path, source.layout, source.pushed()) as write,
        stages.stage("write", len(source)) as watcher,
    ):
        for batches in ahead(source.blocks(), source.at):
            for batch in batches:
                write(batch)
                watcher.advance(batch.num_rows)
    return PushReport.of(
        source,
        stages,
        engine=ending(path),
        target=" and ".join(map(str, written_files(path))),
        was=None if before is None else before.version,
        rows_before=None if before is None else before.rows,
        mode="all",
        why="a file is written as a whole",
        pushed=len(source),
        notes=tuple(of_query_halves(before, source.pushed())),
    )
