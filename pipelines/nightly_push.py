"""Pushes of the nightly job: each told in the log from its start on, and none undoing anything."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from pipelines.nightly_job import PLACES
from whiten_index.errors import ConfigError, DatabaseError, WhitenIndexError
from whiten_index.log_lines import LogForm, LogLines, failure

if TYPE_CHECKING:
    from whiten_index.vectordb.push_config import PushConfig

# Whatever a push failed of: a gate of it, say, is none of the update's.
FAILED = DatabaseError.exit_code
# What people can do without there: the lines of the stages had it.
_FOR_MACHINES = ("seconds", "stage_rows")


def push(config: PushConfig, lines: LogLines) -> bool:
    """Bring a database or file to the published version; tell whether that went well.

    Args:
        config: what to push, and where to.
        lines: where it is logged, each line with its target: ``push_started``, stages, notes, then
            ``push_finished`` or ``push_failed``.
    """
    from whiten_index.vectordb.push import push_index

    log = _Lines(config, lines.form)
    log.log("push_started")
    try:
        report = push_index(config, progress=log).to_json()
    except Exception as error:
        # An unforeseen one too: the version is published, and the last line must say so.
        log.log("push_failed", **failure(error), exit_code=FAILED)
        if not isinstance(error, WhitenIndexError):
            traceback.print_exc()
        return False
    for note in report.pop("notes"):
        log.note(note)
    left_out = _FOR_MACHINES if lines.form is LogForm.TEXT else ()
    told = {name: value for name, value in report.items() if name not in left_out}
    log.log("push_finished", **told)
    return True


def can_push(config: PushConfig, lines: LogLines) -> bool:
    """Tell whether a push could begin, and log why not: no client, or a file of somebody else."""
    from whiten_index.vectordb.registry import require_client
    from whiten_index.vectordb.vector_files import is_file, require_file

    try:
        if is_file(config.to):
            require_file(config.to)
        else:
            require_client(config.to)
    except ConfigError as error:
        _Lines(config, lines.form).log("push_failed", **failure(error), exit_code=FAILED)
        return False
    return True


def target(config: PushConfig) -> str:
    """Return the file, or the database and table, that a push of a job is to."""
    where = _where(config)
    if config.table is None:
        return where["to"]
    inside = (config.options[name] for name in PLACES if name in config.options)
    return f"{where['to']} {'.'.join((*inside, config.table))}"


def _where(config: PushConfig) -> dict[str, str]:
    to = config.to.partition("?")[0]
    # Servers of one machine differ in nothing else.
    host = parse_qs(config.to.partition("?")[2]).get("host", [""])[0]
    if re.fullmatch(r"/[\w./-]*", host):
        to += f"?host={host}"
    return {"to": to} if config.table is None else {"to": to, "table": config.table}


class _Lines(LogLines):
    """Log lines that tell the target of a push, and every note once."""

    def __init__(self, config: PushConfig, form: LogForm) -> None:
        super().__init__(form)
        self._where = _where(config)
        self._noted = set[str]()

    def note(self, message: str) -> None:
        """Log a sentence, unless it was."""
        if message not in self._noted:
            self._noted.add(message)
            super().note(message)

    def log(self, event: str, /, **fields: Any) -> None:
        """Print one line."""
        super().log(event, **self._where, **fields)
