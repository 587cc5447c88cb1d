"""The commands ``versions``, ``rollback`` and ``prune``: parse, call one function, print."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import json_option

if TYPE_CHECKING:
    from whiten_index.versions.retention import VersionFacts

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
