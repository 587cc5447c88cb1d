"""The commands ``gc``, ``compact`` and ``verify``: parse, call one function, print."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import json_option
from whiten_index.errors import ArtifactError, StorageError

if TYPE_CHECKING:
    from whiten_index.versions.verify_report import VerifyReport

# What a verification looks at, how one of it is called, and several.
_CHECKED = {
    "CURRENT": ("CURRENT", "CURRENT"),
    "versions": ("version", "versions"),
    "candidates": ("candidate", "candidates"),
    "manifests": ("manifest", "manifests"),
    "corpora": ("corpus", "corpora"),
    "registered indexes": ("registered index", "registered indexes"),
    "shards": ("shard", "shards"),
    "packs": ("pack", "packs"),
    "row_files": ("file of ids and columns", "files of ids and columns"),
    "choices": ("choice", "choices"),
    "samples": ("sample", "samples"),
    "runtimes": ("runtime", "runtimes"),
}

store_argument = click.argument("store", type=click.Path(readable=False))


@click.command()
@store_argument
@click.option("--dry-run", is_flag=True, help="Only say what would be removed; nothing is locked.")
@click.option(
    "--forget",
    multiple=True,
    type=click.Path(readable=False),
    metavar="INDEX",
    help="An index built from STORE that is gone for good; may be repeated.",
)
@click.option(
    "--index",
    "indexes",
    multiple=True,
    type=click.Path(readable=False),
    metavar="DIR",
    help="An index built from STORE that was moved: what it needs is kept from now on.",
)
@click.option(
    "--keep-days",
    type=click.FloatRange(min=0),
    default=7.0,
    show_default=True,
    help="What nothing needs is kept for so long, as it may be of an encode that was interrupted.",
)
@json_option
def gc(
    store: str,
    dry_run: bool,
    forget: tuple[str, ...],
    indexes: tuple[str, ...],
    keep_days: float,
    as_json: bool,
) -> None:
    """Remove from STORE what no corpus, and no version of an index built from it, needs."""
    from whiten_index.versions.gc import gc_store

    report = gc_store(
        store, dry_run=dry_run, forget=forget, indexes=indexes, keep_days=keep_days
    ).to_json()
    if as_json:
        terminal.print_json(report)
        return
    freed = terminal.in_words(report["bytes"])
    click.echo(f"{store}: {freed} {'would be freed' if dry_run else 'freed'}")
    kept = report["kept"]
    names = {"shards": "shards", "packs": "packs", "rows": "files of ids and columns"}
    rows = [(shown, f"{report[key]:,}", f"{kept[key]:,}") for key, shown in names.items()]
    click.echo(terminal.table([("", "removed", "kept"), *rows]))
    if kept["recent"]:
        click.echo(
            f"  {kept['recent']:,} of these {'is' if kept['recent'] == 1 else 'are'} needed by "
            "nothing, and younger than "
            f"{keep_days:g} days; --keep-days 0 removes them too"
        )


@click.command()
@store_argument
@json_option
def compact(store: str, as_json: bool) -> None:
    """Join the small and the scattered shards of STORE, without changing what is in them."""
    from whiten_index.versions.compaction import compact_store

    report = compact_store(store).to_json()
    if as_json:
        terminal.print_json(report)
        return
    click.echo(
        f"{store}: {terminal.counted(report['packed'], 'shard')} joined in "
        f"{terminal.counted(report['packs'], 'pack')}, {terminal.counted(report['rows'], 'row')}"
    )
    rooms = [
        (name, f"{room['shards']:,}", f"{room['packs']:,}", terminal.in_words(room["bytes"]))
        for name, room in (("before", report["before"]), ("after", report["after"]))
    ]
    click.echo(terminal.table([("", "shard folders", "packs", "bytes"), *rooms]))
    if report["derived"] or report["alone"]:
        click.echo(_left(report["derived"], report["alone"]))
    if report["damaged"]:
        click.echo(
            f"note: {_shards_are(report['damaged'])} damaged or missing; whiten-index verify "
            f"{store} says more",
            err=True,
        )


@click.command()
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(readable=False), metavar="PATH..."
)
@click.option("--no-store", is_flag=True, help="Of an index, leave out the store it is built from.")
@json_option
def verify(paths: tuple[str, ...], no_store: bool, as_json: bool) -> None:
    """Check every checksum of indexes and stores, and say how to mend what is damaged."""
    from whiten_index.versions.verify import verify_paths

    reports = verify_paths(paths, with_stores=not no_store)
    damages, unread = (
        sum(len(getattr(report, name)) for report in reports) for name in ("damages", "unread")
    )
    if as_json:
        sound = all(report.sound for report in reports)
        terminal.print_json({"sound": sound, "reports": [report.to_json() for report in reports]})
    else:
        for report in reports:
            _print_report(report)
    where = " and ".join(report.path for report in reports if not report.sound)
    if damages:
        raise ArtifactError(
            f"{damages:,} {'thing is' if damages == 1 else 'things are'} damaged in {where}; "
            "each is named above with what mends it"
        )
    if unread:
        raise StorageError(
            f"{unread:,} {'thing' if unread == 1 else 'things'} could not be read in {where}, and "
            "may be sound; each is named above: mend the disk or the permissions, and verify again"
        )


def _left(derived: int, alone: int) -> str:
    """Return which small shards a compaction left as they are, and why."""
    from whiten_index.versions.compaction_plan import WORTH_WRITING

    reasons, total = [], derived + alone
    if derived:
        one = derived == 1
        pick, them = ("picks most of its", "it") if one else ("pick most of their", "these")
        reasons.append(
            f"{derived:,} {pick} rows from others, and to write {them} whole would cost more than "
            f"{1 / WORTH_WRITING:g} times what it frees"
        )
    if alone:
        reasons.append(f"{alone:,} {'has' if alone == 1 else 'have'} nothing to be joined with yet")
    which = "shard was left as it is" if total == 1 else "shards were left as they are"
    return f"{total:,} small {which}: {'; '.join(reasons)}"


def _shards_are(number: int) -> str:
    return f"{terminal.counted(number, 'shard')} {'is' if number == 1 else 'are'}"


def _print_report(report: VerifyReport) -> None:
    looked = ", ".join(
        terminal.counted(n, *_CHECKED[kind]) for kind, n in report.checked.items() if n
    )
    size = terminal.in_words(report.bytes)
    counts = (("damaged", report.damages), ("not read", report.unread))
    found = ", ".join(f"{len(each):,} {how}" for how, each in counts if each) or "sound"
    click.echo(f"{report.kind} {report.path}: {found} ({looked}; {size})")
    for note in report.notes:
        click.echo(f"  note: {note}")
    for damage in (*report.damages, *report.unread):
        click.echo(f"  {damage.path}\n    {damage.why}")
        if damage.touches:
            click.echo(f"    needed by {'; '.join(damage.touches)}")
        click.echo(f"    {damage.remedy}")
