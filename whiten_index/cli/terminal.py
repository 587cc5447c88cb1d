"""Output on a terminal: progress bars, tables, and reports as JSON or for people."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from whiten_index.artifacts.limits import json_value
from whiten_index.cli.signals import raise_if_interrupted
from whiten_index.paths import cell, plain_json
from whiten_index.progress import Progress

# Only JSON shows these.
FOR_MACHINES = frozenset({
    "canary", "done", "error", "expected_bytes", "kept_files", "leads", "lease", "memory_budget",
    "normalize_input", "padded_tokens", "sha256", "stage_rows", "tokens",
})  # fmt: skip
EVERY_SECONDS = 10.0
# Set by the options -q, -v and --json of the command that runs.
CHOSEN = {"quiet": False, "verbose": False, "as_json": False}


def choose(_: click.Context, option: click.Parameter, given: bool) -> None:
    """Keep the value of an option of every command."""
    CHOSEN[str(option.name)] = given


class Bars(Progress):
    """A bar on a terminal or in a notebook, else lines on standard error."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._ended = threading.Event()

    def start(self, stage: str, total: int) -> None:
        """Open a bar, or start to print the time, in place of what is shown of another stage."""
        self._end()
        self._done, self._started = 0, time.monotonic()
        self._ended = threading.Event()
        if CHOSEN["quiet"]:
            return
        if total and (sys.stderr.isatty() or "ipykernel" in sys.modules):
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=stage, unit="", unit_scale=True, leave=False)
            return
        told = stage, total, self._ended
        threading.Thread(target=self._tell, args=told, daemon=True).start()

    def _tell(self, stage: str, total: int, ended: threading.Event) -> None:
        while not ended.wait(EVERY_SECONDS):
            spent, done = time.monotonic() - self._started, self._done
            # Some stages, such as the index of a database, report nothing until they end.
            rows = f"{done:,} of {total:,} in " if total and done else ""
            left = f", {duration(spent * (total - done) / done)} left" if 0 < done < total else ""
            click.echo(f"{stage}: {rows}{duration(spent)}{left}", err=True)

    def advance(self, rows: int) -> None:
        """Move the bar."""
        self._done += rows
        if self._bar is not None:
            self._bar.update(rows)
        raise_if_interrupted()

    def finish(self, stage: str, seconds: float) -> None:
        """Remove the bar."""
        self._end()
        if CHOSEN["verbose"]:
            click.echo(f"{stage}: done in {duration(seconds)}", err=True)

    def _end(self) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def note(self, message: str) -> None:
        """Print a note next to the bars."""
        if message.startswith("note:") or not CHOSEN["quiet"]:
            click.echo(cell(message), err=True)


def show(
    report: Mapping[str, Any], lines: Iterable[str] | None = None, *, notes: Iterable[str] = ()
) -> None:
    """Print a report as one JSON object, or as lines for people, with notes on standard error.

    The lines are by default those of ``describe``.
    """
    if CHOSEN["as_json"]:
        print_json(report)
        return
    for line in describe(report) if lines is None else lines:
        click.echo(line)
    for note in notes:
        click.echo(f"note: {note}", err=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on standard output; see ``json_value``."""
    import json

    # Made as a whole first: half an object would be worse than none.
    text = json.dumps(json_value(value), ensure_ascii=False, default=str, allow_nan=False)
    sys.stdout.write(plain_json(text).encode(errors="replace").decode() + "\n")


def describe(report: Mapping[str, Any], *names: str) -> Iterator[str]:
    """Yield the fields of a report as lines, nested ones under headings and in tables.

    All fields are shown, or those named; fields without a value and counts of zero are left out.
    Units come from the names: ``bytes`` and ``seconds``.
    """
    shown = (*names, "stage_rows") if names else report
    return _described({name: report.get(name) for name in shown})


def _described(values: Mapping[str, Any], indent: str = "", above: str = "") -> Iterator[str]:
    shown = {
        name: value
        for name, value in values.items()
        if name not in FOR_MACHINES and value not in (None, "", [], (), {})
        if value != 0 or type(value) is not int
    }
    nested = {name: value for name, value in shown.items() if _is_nested(value)}
    plain = {name: value for name, value in shown.items() if name not in nested}
    if plain:
        rows = [(_words(name), _text(value, f"{above} {name}")) for name, value in plain.items()]
        numbers = all(isinstance(value, int | float) for value in plain.values())
        yield table(rows, indent=indent or "  ", numbers=numbers)
    for name, value in nested.items():
        inner = f"{indent}  "
        if name == "seconds":
            lines = [table(stage_rows(value, values.get("stage_rows") or {}), indent=inner)]
        elif not isinstance(value, Mapping):
            lines = [_records(value, inner)]
        elif all(isinstance(each, Mapping) for each in value.values()) and len(value) > 1:
            lines = [_records([{"": _words(key), **each} for key, each in value.items()], inner)]
        else:
            lines = list(_described(value, inner, f"{above} {name}"))
        if lines:
            yield f"{indent}{_words(name)}"
            yield from lines


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)
    )


def _records(rows: Sequence[Mapping[str, Any]], indent: str) -> str:
    shown = {name: value for name, value in rows[0].items() if name not in FOR_MACHINES}
    names = [name for name, value in shown.items() if not _is_nested(value)]
    texts = [[_text(row.get(name), name) for name in names] for row in rows]
    return table([list(map(_words, names)), *texts], indent=indent)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _text(value: Any, names: str) -> str:
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(f"{each:.4g}" if isinstance(each, float) else str(each) for each in value)
    if isinstance(value, str):
        return one_line(value, 500)
    if "bytes" in names:
        return in_words(value)
    if "seconds" in names:
        return duration(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def in_words(size: float) -> str:
    """Return bytes as a short text, such as 1.5 MB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def duration(seconds: float) -> str:
    """Return seconds as a short text, such as 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def one_line(text: str, width: int = 100) -> str:
    """Return a text without line breaks and control characters, cut to ``width`` letters."""
    joined = cell(" ".join(text.split()))
    return joined if len(joined) <= width else joined[: width - 1] + "…"


def table(rows: Iterable[Sequence[object]], *, indent: str = "  ", numbers: bool = True) -> str:
    """Return rows as aligned columns: the first to the left, ``numbers`` after it to the right."""
    cells = [[cell(each) for each in row] for row in rows]
    first, *others = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = str.rjust if numbers else str.ljust
    return "\n".join(
        "  ".join([
            indent + row[0].ljust(first),
            *(align(each, width) for each, width in zip(row[1:], others, strict=True)),
        ]).rstrip()
        for row in cells
    )  # fmt: skip


def stage_rows(seconds: Mapping[str, float], rows: Mapping[str, int]) -> list[tuple[str, str, str]]:
    """Return seconds and rows/s by stage as table rows; parts of a stage are indented below it.

    The parts run side by side, so that they sum up to more than their stage.
    """
    stages = list(dict.fromkeys(name.partition("/")[0] for name in seconds))
    order = sorted(seconds, key=lambda name: (stages.index(name.partition("/")[0]), "/" in name))
    shown = []
    for name in order:
        spent, (stage, _, part) = seconds[name], name.partition("/")
        rate = f"{rows[name] / spent:,.0f} rows/s" if rows.get(name) and spent else ""
        shown.append((f"  {part}" if part else stage, duration(spent), rate))
    return shown
