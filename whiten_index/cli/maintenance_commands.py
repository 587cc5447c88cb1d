"""Commands that list, roll back, prune, clean, compact and verify."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import json_option
from whiten_index.errors import ArtifactError, StorageError

if TYPE_CHECKING:
    from whiten_index.versions.retention import VersionFacts
    from whiten_index.versions.verify_store import VerifyReport

index_argument = click.argument("index", type=click.Path(readable=False))


@click.command()
@index_argument
@click.option(
    "--verify",
    type=click.Choice(["full", "manifest"]),
    default="manifest",
    show_default=True,
    help="Check every file's checksum, or sizes and the manifests only.",
)
@json_option
def versions(index: str, verify: str, as_json: bool) -> None:
    """List the versions of INDEX: the published one, those to go back to, a candidate."""
    from whiten_index.versions.retention import list_versions

    found = list_versions(index, verify=verify)
    if as_json:
        terminal.print_json({"versions": [facts.to_json() for facts in found]})
        return
    header = ("version", "rows", "bytes", "whitening", "created", "")
    click.echo(terminal.table([header, *map(_row, found)]))
    for facts in found:
        if told := facts.sound or facts.unread:
            click.echo(f"  {facts.name}: {told}")
    if not any(facts.published for facts in found):
        click.echo(
            "note: none of them is published; to publish one: whiten-index rollback "
            f"{index} --to VERSION",
            err=True,
        )


@click.command()
@index_argument
@click.option("--to", help="The version. [default: the newest sound one before the published]")
@click.option(
    "--without-store",
    is_flag=True,
    help="Take a version though the store lacks embeddings of it, as ranking again needs them.",
)
@json_option
def rollback(index: str, to: str | None, without_store: bool, as_json: bool) -> None:
    """Publish an earlier version of INDEX again; the one left is kept, as withdrawn."""
    from whiten_index.versions.retention import rollback as roll

    rolled = roll(index, to=to, without_store=without_store)
    if as_json:
        terminal.print_json(asdict(rolled))
        return
    click.echo(f"{index}: version {rolled.to} published, instead of {rolled.left or 'none'}")
    for name, why in rolled.skipped.items():
        click.echo(f"note: {name} was skipped: {why}", err=True)
    if rolled.note:
        click.echo(f"note: {rolled.note}", err=True)


@click.command()
@index_argument
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    required=True,
    help="Versions to keep, the published one among them.",
)
@click.option(
    "--verify",
    type=click.Choice(["full", "manifest"]),
    default="full",
    show_default=True,
    help="How to check those that are kept, as damaged ones do not count.",
)
@json_option
def prune(index: str, keep: int, verify: str, as_json: bool) -> None:
    """Remove versions of INDEX but the published one and the newest sound ones before it."""
    from whiten_index.versions.retention import prune as remove

    pruned = remove(index, keep=keep, verify=verify)
    if as_json:
        terminal.print_json(asdict(pruned))
        return
    freed = terminal.in_words(pruned.bytes)
    click.echo(
        f"{index}: {terminal.counted(len(pruned.removed), 'version')} removed, {freed}; kept "
        f"{', '.join(pruned.kept)}"
    )
    for name in pruned.removed:
        click.echo(f"  {name} removed")
    for path in pruned.strange:
        click.echo(
            f"note: {path} is a link, no folder, or has the name of no version, and was left alone",
            err=True,
        )


def _row(facts: VersionFacts) -> tuple[str, ...]:
    states = {
        "published": facts.published,
        "withdrawn": facts.withdrawn,
        "candidate": facts.candidate,
        "damaged": bool(facts.sound),
        "cannot be read": bool(facts.unread),
    }
    return (
        facts.name,
        "-" if facts.rows is None else f"{facts.rows:,}",
        terminal.in_words(facts.bytes),
        facts.decision or "-",
        facts.created or "-",
        ", ".join(state for state, holds in states.items() if holds),
    )


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
    from whiten_index.versions.compaction import WORTH_WRITING

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
